"""Small models for tests: main and startup programs with a loss and a function that makes feeds; and runs that train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class TestModel:
    """A model: its programs, its loss, `feed(rows, seed)` for random data, and (parameter, gradient) names."""

    __test__ = False  # pytest would collect a class of this name

    main: Any
    startup: Any
    loss: Any
    feed: Callable[..., dict[str, np.ndarray]]
    gradients: list[tuple[str, str]]


def _program(name: str) -> tuple[Any, Any]:
    import fluidx as fx

    return fx.Program(name), fx.Program(f"{name}_startup")


def integer_mlp(reduce: str = "sum", optimizer: Any = None) -> TestModel:
    """A two-layer perceptron with small integer weights and feeds. The loss is a sum (or mean) of squares.

    One SGD step is exact in float32.
    """
    import fluidx as fx

    main, startup = _program("integer_mlp")
    rng = np.random.default_rng(5)

    def integers(*shape: int) -> Any:
        return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-2, 3, shape).astype("float32")))

    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6], "float32")
        h = fx.layers.fc(x, 5, act="relu", param_attr=integers(6, 5), bias_attr=integers(5))
        y = fx.layers.fc(h, 4, param_attr=integers(5, 4), bias_attr=integers(4))
        loss = (fx.layers.reduce_sum if reduce == "sum" else fx.layers.mean)(fx.layers.square(y))
        _, pairs = (optimizer or fx.optimizer.SGD(0.5)).minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(seed).integers(-3, 4, (rows, 6)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def classifier(optimizer: Any = None, width: int = 16, kind: str = "mlp") -> TestModel:
    """A softmax classifier: `kind` "mlp", "dropout", "norm" (layer_norm), "batch_norm", "sub_batches" (of a batch_norm) or "conv"."""
    import fluidx as fx

    main, startup = _program(f"classifier_{kind}")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        shape = [-1, 1, 6, 6] if kind == "conv" else [-1, 12]
        x = fx.data("x", shape, "float32")
        label = fx.data("label", [-1, 1], "int64")
        h = x
        if kind == "conv":
            h = fx.nets.simple_img_conv_pool(h, num_filters=4, filter_size=3, pool_size=2, pool_stride=2, conv_padding=1, act="relu")
        h = fx.layers.fc(h, width, act="tanh")
        if kind == "dropout":
            h = fx.layers.dropout(h, 0.3, dropout_implementation="upscale_in_train")
        if kind == "norm":
            h = fx.layers.layer_norm(h)
        if kind in ("batch_norm", "sub_batches"):
            h = fx.layers.batch_norm(h, sub_batches=4 if kind == "sub_batches" else 1)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(h, 5), label))
        _, pairs = (optimizer or fx.optimizer.Momentum(0.1, 0.9)).minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, *shape[1:]), "float32"), "label": rng.integers(0, 5, (rows, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def train_single(model: TestModel, feeds: list[dict[str, np.ndarray]], fetch: list[Any]) -> tuple[list[list[np.ndarray]], Any]:
    """Startup, then one run per feed on one device; return the fetched values and the scope."""
    import fluidx as fx

    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    return [exe.run(model.main, feed=f, fetch_list=fetch, scope=scope) for f in feeds], scope


def train_ranks(
    model: TestModel, strategy: Any, trainers: Any, feeds: list[dict[str, np.ndarray]], fetch: list[Any], uneven: str = "weight"
) -> tuple[list[list[np.ndarray]], dict[str, np.ndarray]]:
    """Transpile, verify and train on CPU ranks; return the fetched values, and the global value of each state variable at the end."""
    import fluidx as fx

    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=model.main, startup_program=model.startup, trainers=trainers)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size), uneven=uneven, timeout=20) as exe:
        exe.run_startup()
        values = [exe.run(feed=f, fetch_list=fetch) for f in feeds]
        names = [d.name for d in model.main.global_block().descs.values() if d.persistable]
        return values, {n: exe.state(n) for n in names}
