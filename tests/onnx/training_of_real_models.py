"""Real models trained: `python -m tests.onnx.training_of_real_models [--only TEXT]` loads each, puts a loss on it and prints a table.

Of each model it asks four things, and ends with 1 where one of them is not so:

- gradients: those of float32 equal central differences of the loss that ONNX Runtime's outputs give for the model with moved weights, along
  a random direction and along the gradient; and those of the model in float64 equal its own central differences;
- the loss falls on data that stay the same;
- on 2 and 4 ranks, under four strategies that `verify()` proves, losses and parameters are those of one device;
- what is written afterwards gives in ONNX Runtime what the program computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import fluidx as fx
from fluidx.testing.models import TestModel, train_ranks, train_single

from .moved import cut, in_float64, moved
from .wheels import FOLDER, MODELS, runtime

# Outputs of float32 carry some 1e-6 of rounding, in which short steps drown, and on long ones ReLUs and max pools bend: the best of three
# lengths is off by two percent at most. A wrong gradient is off at each of them.
NEAR_RUNTIME, CHANGES = 0.03, (1e-2, 1e-3, 1e-4)
# In float64 nothing but the bends is left, and steps that move the loss by 1e-7 of itself meet few.
NEAR_DOUBLE = 1e-3
# Sums of float32 in another order, through a hundred layers and three steps: relative to what training changed in a parameter.
NEAR_ONE_DEVICE = 2e-2
NEAR_LOSS = 1e-4
NEAR_EXPORT = 1e-3
RUNS = (("data_parallel", 2), ("ring_optimizer", 4), ("zero2", 2), ("fsdp", 4))
STEPS = 3


class Case(NamedTuple):
    """How a model of wheels.py is trained: the shapes it is loaded with, one of its values, the loss on it, and the rate of momentum."""

    name: str
    kind: str
    shapes: dict[str, list[int]]
    loss: str
    output: str | None = None
    lr: float = 1e-3
    rows: int = 4
    steps: int = 8
    freeze: tuple[str, ...] = ()
    ranks: bool = True


def _rows(case: Case, shape: list[int]) -> list[int]:
    return [case.rows if d == -1 else d for d in shape]


# The spectra of basic_pitch stay: the log of powers near 0 has gradients that drown all others. The states of silero have their batch on
# axis 1, and the cut of a feed is that of axis 0.
CASES = [
    Case("ppocr_cls", "image classification, depthwise", {"x": [-1, 3, 48, 96]}, "softmax_with_cross_entropy"),
    Case("ppocr_rec", "text recognition, attention", {"x": [-1, 3, 48, 64]}, "softmax_with_cross_entropy"),
    Case("ppocr_det", "text detection, convolutional", {"x": [-1, 3, 96, 96]}, "square_error_cost", "p2o.Add.281", lr=1e-6),
    Case("captcha", "text recognition, LSTM over columns", {"input1": [-1, 1, 64, 64]}, "softmax_with_cross_entropy"),
    Case("silero_16k", "speech detection, LSTM", {"input": [4, 576], "state": [2, 4, 128]}, "square_error_cost", "output", ranks=False),
    Case("silero_sequence", "speech detection, LSTM over a sequence", {"input": [8, 576]}, "square_error_cost",
         "speech_probs", rows=8, ranks=False),
    Case("basic_pitch", "music to notes, spectra", {"serving_default_input_2:0": [-1, 43844, 1]}, "square_error_cost",
         "StatefulPartitionedCall:1", steps=4, freeze=("const_fold_opt__655", "const_fold_opt__664", "*_734", "*cq_t2010v2*")),
    Case("magika", "kinds of files, bytes", {"bytes": [-1, 2048]}, "softmax_with_cross_entropy",
         "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1/AddV2:0"),
    Case("open_nsfw", "image classification (ResNet-50), NHWC", {"input:0": [-1, 224, 224, 3]}, "softmax_with_cross_entropy", steps=3),
    Case("centerface", "face detection, transposed convolutions", {"input.1": [-1, 3, 64, 64]}, "square_error_cost", "537"),
    Case("mtcnn_onet", "face detection, landmarks", {"input_3": [-1, 48, 48, 3]}, "square_error_cost", "dense_6"),
]  # fmt: skip


class Trained:
    """A case, loaded, with its loss and data."""

    def __init__(self, case: Case, folder: Path):
        real = next(m for m in MODELS if m.name == case.name)
        self.case, self.data = case, real.model(folder)
        rng = np.random.default_rng(7)
        shapes = {n: case.shapes.get(n, list(f.shape)) for n, f in real.inputs.items()}
        self.inputs = {n: f._replace(shape=tuple(_rows(case, shapes[n]))).drawn(rng) for n, f in real.inputs.items()}
        model = fx.onnx.load(self.data, self.case.shapes)
        self.names = {n: v.name for n, v in zip(shapes, model.feeds, strict=True)}
        self.output = self.case.output or runtime(self.data).get_outputs()[0].name
        (expected,) = self.on_runtime(self.data)
        self.label = self._label(rng, expected)

    def _label(self, rng: np.random.Generator, output: np.ndarray) -> np.ndarray:
        if self.case.loss == "softmax_with_cross_entropy":
            return rng.integers(0, output.shape[-1], (*output.shape[:-1], 1))
        return (output + 0.5 + 0.3 * rng.standard_normal(output.shape)).astype("float32")  # no minimum yet

    def on_runtime(self, data: bytes) -> list[np.ndarray]:
        session = runtime(cut(data, self.output))
        return session.run(None, {i.name: self.inputs[i.name] for i in session.get_inputs()})

    def feed(self, dtype: str = "float32") -> dict[str, np.ndarray]:
        fed = {self.names[n]: a for n, a in self.inputs.items()} | {"label": self.label}
        return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in fed.items()}

    def built(self, data: Any = None, optimizer: Any = None, **options: Any) -> tuple[Any, Any, Any]:
        """The model, its loss and the pairs of parameter and gradient: as it is for inference, or with an optimizer for training."""
        model = fx.onnx.load(self.data if data is None else data, self.case.shapes)
        loss = fx.onnx.set_training(model, head=lambda m: m[self.output], loss=self.case.loss, freeze=self.case.freeze, **options)
        with fx.program_guard(model.program, model.startup), fx.unique_name.guard("train_"):
            pairs = optimizer.minimize(loss)[1] if optimizer else fx.append_backward(loss)
        return model, loss, pairs

    def loss_of(self, output: np.ndarray) -> float:
        """The loss in float64, of what another runtime computed."""
        y = output.astype("float64")
        if self.case.loss == "square_error_cost":
            return float(np.square(y - self.label).mean())
        if not (y.min() >= 0 and np.allclose(y.sum(-1), 1, atol=1e-4)):  # scores, not yet a softmax's
            y = np.exp(y - y.max(-1, keepdims=True))
            y /= y.sum(-1, keepdims=True)
        return float(-np.log(np.take_along_axis(y, self.label, -1)).mean())


# -- gradients ----------------------------------------------------------------------------------------------------------------


def gradients(t: Trained, data: Any, dtype: str) -> tuple[dict[str, np.ndarray], Callable[[dict[str, np.ndarray]], float]]:
    """The gradients of all parameters of the inference form, and a function that gives the loss with other parameters."""
    model, loss, pairs = t.built(data, batch_norm=False, dropout=False)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    found = exe.run(model.program, feed=t.feed(dtype), fetch_list=[g for _, g in pairs], scope=scope)
    at = {p.name: np.array(scope.get(p.name)) for p, _ in pairs}

    def loss_at(step: dict[str, np.ndarray]) -> float:
        for name, d in step.items():
            scope.set(name, (at[name] + d).astype(dtype))
        return float(exe.run(model.program, feed=t.feed(dtype), fetch_list=[loss], scope=scope)[0].item())

    return {p.name: np.array(g) for (p, _), g in zip(pairs, found, strict=True)}, loss_at


def directions(grads: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The gradient itself, along which rounding says least; and with signs drawn for parameters, so that none hides behind another."""
    rng = np.random.default_rng(11)
    yield grads
    yield {n: g * rng.choice((-1.0, 1.0)) for n, g in grads.items()}


def off(
    grads: dict[str, np.ndarray], step: dict[str, np.ndarray], change: float, loss_at: Callable[[dict[str, np.ndarray]], float]
) -> float:
    """How far the derivative along a step, by which the loss moves by `change`, is from central differences, relative to what it sums."""
    terms = [float(np.vdot(grads[n].astype("float64"), d)) for n, d in step.items()]
    size = sum(map(abs, terms))
    h = change / size
    one, two = (
        (loss_at({n: k * h * d for n, d in step.items()}) - loss_at({n: -k * h * d for n, d in step.items()})) / (2 * k * h) for k in (1, 2)
    )
    return abs((4 * one - two) / 3 - sum(terms)) / size  # Richardson: what the third derivative adds falls out


def check_gradients(t: Trained) -> tuple[float, float, float]:
    """The largest error beside ONNX Runtime, beside float64's central differences, and of float32's gradients beside float64's."""
    single, _ = gradients(t, None, "float32")
    double, loss_at = gradients(t, in_float64(t.data), "float64")

    def runtime_loss(step: dict[str, np.ndarray]) -> float:
        return t.loss_of(t.on_runtime(moved(t.data, step).model)[0])

    now = loss_at({})
    beside_runtime = max(min(off(single, s, c * now, runtime_loss) for c in CHANGES) for s in directions(double))
    beside_double = max(off(double, s, 1e-7 * now, loss_at) for s in directions(double))
    apart = max(float(np.linalg.norm(single[n] - g)) for n, g in double.items()) / max(float(np.linalg.norm(g)) for g in double.values())
    return beside_runtime, beside_double, apart


# -- training -----------------------------------------------------------------------------------------------------------------


def check_ranks(t: Trained) -> tuple[list[float], float, float]:
    """The losses of one device, and how far those of ranks are from them, and parameters from what training made of them."""
    model, loss, _ = t.built(optimizer=fx.optimizer.Momentum(t.case.lr, 0.9), dropout=False)
    test = TestModel(model.program, model.startup, loss, lambda rows: t.feed(), [])
    feeds = [t.feed()] * STEPS
    (one,), scope = _one(test, feeds, loss)
    first = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=first)
    trained = [p.name for p in model.parameters if p.trainable]
    losses = parameters = 0.0
    for strategy, ranks in RUNS if t.case.ranks else ():
        found, state = train_ranks(test, strategy, ranks, feeds, [loss])
        losses = max(losses, *(abs(a[0].item() - b) / abs(b) for a, b in zip(found, one, strict=True)))
        change = np.sqrt(sum(float(np.square(scope.get(n) - first.get(n)).sum()) for n in trained))
        apart = np.sqrt(sum(float(np.square(scope.get(n) - state[n]).sum()) for n in trained))
        parameters = max(parameters, float(apart / change))
    return one, losses, parameters


def _one(test: TestModel, feeds: list[dict[str, np.ndarray]], loss: Any) -> tuple[tuple[list[float]], Any]:
    values, scope = train_single(test, feeds, [loss])
    return ([v[0].item() for v in values],), scope


def check_export(t: Trained) -> tuple[list[float], float]:
    """The losses of a longer training, and how far ONNX Runtime's outputs of the written model are from the program's."""
    model, loss, _ = t.built(optimizer=fx.optimizer.Adam(1e-3), dropout=False)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    losses = [exe.run(model.program, feed=t.feed(), fetch_list=[loss], scope=scope)[0].item() for _ in range(t.case.steps)]
    (output,) = model.fetches
    fed = {n: a for n, a in t.feed().items() if n != "label"}
    (want,) = exe.run(model.program.clone(for_test=True), feed=t.feed(), fetch_list=[output], scope=scope)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trained.onnx"
        fx.onnx.save(model.program, path, fetches=[output], scope=scope)
        session = runtime(path.read_bytes())
        (got,) = session.run(None, {i.name: fed[i.name] for i in session.get_inputs()})
    return losses, float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-12))


def row(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """The cells of a case, and what is wrong with it."""
    start = time.process_time()
    t = Trained(case, folder)
    wrong = []
    beside_runtime, beside_double, apart = check_gradients(t)
    one, losses, parameters = check_ranks(t)
    trained, exported = check_export(t)
    for what, found, limit in (
        ("gradients beside ONNX Runtime", beside_runtime, NEAR_RUNTIME), ("gradients in float64", beside_double, NEAR_DOUBLE),
        ("losses of ranks", losses, NEAR_LOSS), ("parameters of ranks", parameters, NEAR_ONE_DEVICE),
        ("outputs in ONNX Runtime", exported, NEAR_EXPORT),
    ):  # fmt: skip
        if not found <= limit:
            wrong.append(f"{case.name}: {what} are off by {found:.2g}, {limit:.2g} is allowed")
    if not trained[-1] < trained[0]:
        wrong.append(f"{case.name}: the loss went from {trained[0]:.4g} to {trained[-1]:.4g} in {len(trained)} steps")
    errors = [f"{v:.1e}" for v in (beside_runtime, beside_double, apart)]
    errors += [f"{v:.1e}" if case.ranks else "-" for v in (losses, parameters)] + [f"{exported:.1e}"]
    return [case.name, f"{trained[0]:.4g} -> {trained[-1]:.4g}", *errors, f"{time.process_time() - start:.0f} s"], wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where packages are kept")
    args = parser.parse_args()
    wrong: list[str] = []
    head = ["model", "loss", "ORT", "float64", "32 to 64", "rank loss", "rank state", "export", "CPU"]
    widths = [16, 22, 8, 8, 8, 9, 10, 8, 6]
    print("  ".join(f"{h:{w}s}" for h, w in zip(head, widths, strict=True)), flush=True)
    for case in (c for c in CASES if args.only in c.name):
        try:
            cells, found = row(case, args.into)
        except Exception as e:  # one that fails does not hide the others
            cells, found = [case.name], [f"{case.name}: {type(e).__name__}: {e}"]
        print("  ".join(f"{c:{w}s}" for c, w in zip(cells, widths)), flush=True)
        wrong += found
    print("\n".join(wrong) or "all as they should be")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
