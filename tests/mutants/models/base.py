"""What the models are written with: their inputs, with how these are drawn, and layers whose parameters are not small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fluidx as fx

L = fx.layers
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass
class Model:
    """Main and startup, how to draw a feed of some rows, and the relative error that its values may have."""

    name: str
    main: fx.Program
    startup: fx.Program
    inputs: dict[str, Draw]
    tolerance: float = 1e-7
    feeds: dict[tuple[int, int], dict[str, np.ndarray]] = field(default_factory=dict)

    def feed(self, rows: int, step: int) -> dict[str, np.ndarray]:
        if (rows, step) not in self.feeds:
            rng = np.random.default_rng((rows, step))
            self.feeds[rows, step] = feed = {name: draw(rng, rows) for name, draw in self.inputs.items()}
            flags = [name for name, a in feed.items() if a.dtype == bool]
            for k, name in enumerate(flags):  # four steps take every combination of two
                feed[name] = np.array([bool(step + 1 >> k & 1)])
        return self.feeds[rows, step]


MODELS: dict[str, Callable[[], Any]] = {}
_inputs: dict[str, Draw] = {}
_options: dict[str, Any] = {}


def model(write: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[write.__name__] = write
    return write


def build(name: str, write: Callable[[], Any] | None = None) -> Model:
    """The model of that name (or what `write` writes), with names counted from 0."""
    main, startup = fx.Program(name), fx.Program(f"{name}_startup")
    main.random_seed = 7
    _inputs.clear()
    _options.clear()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        (write or MODELS[name])()
    return Model(name, main, startup, dict(_inputs), **_options)


# -- inputs ---------------------------------------------------------------------------------------------------------------------


def feed(name: str, draw: Draw, shape: list[int], dtype: str = "float64") -> Any:
    _inputs[name] = draw
    return fx.data(name, shape, dtype)


def real(name: str, *shape: int, dtype: str = "float64") -> Any:
    return feed(name, lambda rng, rows: rng.standard_normal((rows, *shape)).astype(dtype), [-1, *shape], dtype)


def whole(name: str, *shape: int) -> Any:
    """A feed without a batch axis: the same on every rank."""
    return feed(name, lambda rng, rows: rng.uniform(0.5, 1.5, shape), list(shape))


def integers(name: str, top: int, *shape: int) -> Any:
    return feed(name, lambda rng, rows: rng.integers(0, top, (rows, *shape)), [-1, *shape], "int64")


def mask(name: str, *shape: int) -> Any:
    def draw(rng: np.random.Generator, rows: int) -> np.ndarray:
        values = (rng.random((rows, *shape)) < 0.6).astype("float64")
        values.flat[0] = 1.0  # some token counts
        return values

    return feed(name, draw, [-1, *shape])


def flag(name: str) -> Any:
    return feed(name, lambda rng, rows: np.array([False]), [1], "bool")


# -- parts of a model ---------------------------------------------------------------------------------------------------------------


def tolerance(relative: float) -> None:
    """The values of the model that is being written may be so far off."""
    _options["tolerance"] = relative


def attr(name: str | None = None, **more: Any) -> Any:
    return fx.ParamAttr(name=name, initializer=fx.initializer.Normal(0.1, 0.6), **more)


def fc(x: Any, size: int, act: str | None = None, **more: Any) -> Any:
    more.setdefault("param_attr", attr())
    more.setdefault("bias_attr", attr())
    return L.fc(x, size, act=act, **more)


def mlp(optimizer: Any) -> None:
    x, label = real("x", 5), integers("label", 3, 1)
    logits = fc(fc(x, 4, "tanh"), 3)
    optimizer.minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))
