"""What the command `fluidx onnx train` does: a model file and arrays go in, a trained model file comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import layers, optimizer
from .config import show_progress
from .executor import ParallelExecutor
from .executor.place import cpu_places, process_places
from .ir import ANY, Variable, program_guard, unique_name
from .ir.dtypes import np_dtype
from .ir.errors import nearest
from .onnx.arrays import read_arrays
from .onnx.errors import OnnxError
from .onnx.export import save
from .onnx.form import initialized
from .onnx.model import OnnxModel, load
from .onnx.roles import sharing
from .onnx.training import set_training
from .transpiler import DistributeTranspiler, strategies

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "sgd": optimizer.SGD,
    "momentum": lambda lr: optimizer.Momentum(lr, 0.9),
    "adam": optimizer.Adam,
}
_PRODUCTS = ("matmul", "mul")


@dataclass(frozen=True)
class Training:
    """How a model is trained: the options of the command."""

    loss: str = "softmax_with_cross_entropy"
    optimizer: str = "adam"
    lr: float = 1e-3
    ranks: Any = 1
    backend: str = "threads"
    strategy: str = "data_parallel"
    epochs: int = 1
    batch: int = 32
    freeze: Sequence[str] = ()
    also_train: Sequence[str] = ()
    head: int | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seed: int = 0


def train(path: str, data: Path, how: Training, output: Path, say: Callable[[str], None] = print) -> list[float]:
    """Train the model in `path` on the arrays of an .npz file and write it to `output`; returns the mean loss of each epoch.

    The file has an array for each input of the model, by name, and one called `label`; rows are examples. Raises OnnxError where arrays do
    not fit the model or each other, and what loading, transpiling and proving raise.
    """
    model, loss = _prepared(path, how)
    feeds = _checked(model, read_arrays(data), data, how)
    t = DistributeTranspiler(strategies.get(how.strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=how.ranks)
    rows = len(next(iter(feeds.values())))
    trained = [p for p in model.parameters if p.trainable]
    elements = sum(int(np.prod(p.shape)) for p in trained)
    say(f"{path}: {len(model.parameters)} parameters, {len(trained)} of them with {elements} elements are trained")
    names = [n for n, own in model.trained_names.items() if own in {p.name for p in trained}]
    if shared := sharing(model.proto.graph, names):
        say(shared)
    say(str(t.verify()))
    ranks = f"{t.world_size} rank{'s' * (t.world_size > 1)}"
    say(f"{rows} examples, {-(-rows // how.batch)} batches an epoch, {how.optimizer} at {how.lr:g}; {how.strategy} on {ranks}")
    places = process_places if how.backend == "processes" else cpu_places
    with ParallelExecutor(t, places=places(t.world_size)) as exe:
        exe.run_startup()
        means = _run(exe, loss, feeds, how, say)
        if gone := next((p.name for p in model.parameters if not np.isfinite(exe.state(p.name)).all()), None):
            raise OnnxError(f"{gone!r} is not finite after the last step, and nothing was written; a smaller --lr may help")
        save(model.program, output, fetches=model.fetches, executor=exe)
    say(f"wrote {output}; the loss went from {means[0]:.4g} in the first epoch to {means[-1]:.4g} in the last")
    return means


def _prepared(path: str, how: Training) -> tuple[OnnxModel, Variable]:
    model = load(path, how.shapes, how.also_train)
    classes = how.head
    head = None if classes is None else lambda m: _head(m, classes)
    with unique_name.guard("train_"):
        loss = set_training(model, freeze=how.freeze, head=head, loss=how.loss)
        assert loss is not None
        with program_guard(model.program, model.startup):
            OPTIMIZERS[how.optimizer](how.lr).minimize(loss)
    return model, loss


def _head(model: OnnxModel, classes: int) -> Variable:
    """A layer to so many classes, of what the model's last layer reads."""
    block = model.program.global_block()
    for op in reversed(model.program.ops):
        if op.type in _PRODUCTS and block.desc(op.inputs["Y"][0]).is_parameter:
            x = block.var(op.inputs["X"][0])
            return layers.fc(x, classes, num_flatten_dims=x.ndim - 1)
    raise OnnxError("the model has no product with a parameter whose place a new head could take; write it: fx.onnx.set_training(head=...)")


def _checked(model: OnnxModel, arrays: dict[str, np.ndarray], data: Path, how: Training) -> dict[str, np.ndarray]:
    """What is fed, by the program's names. Raises OnnxError."""
    held = initialized(model.proto.graph)
    given = [i.name for i in model.proto.graph.input if i.name not in held]
    wanted = dict(zip(given, model.feeds, strict=True)) | {"label": model.program.global_block().var("label")}
    wanted = {n: v for n, v in wanted.items() if n == "label" or any(v.name in op.input_arg_names for op in model.program.ops)}
    _check_open({name: v for name, v in wanted.items() if name != "label"})
    rest = set(arrays).difference(given, (v.name for v in model.feeds))
    fed = {}
    for name, v in wanted.items():
        key = name if name in arrays else v.name
        if key not in arrays:
            has = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in arrays.items()) or "none"
            raise OnnxError(f"{data} has no array {name!r}, which is {_type(v)}; it has {has}")
        rest.discard(key)
        fed[v.name] = _fitting(name, arrays[key], v)
    if rest:
        name = min(rest)
        raise OnnxError(f"{data} has an array {name!r}, which nothing in the model is called; {nearest(name, wanted, 'wanted are')}")
    rows = {n: len(a) for n, a in fed.items() if a.ndim}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        raise OnnxError(f"the arrays of {data} must have one number of rows, above 0: {', '.join(f'{n} has {r}' for n, r in rows.items())}")
    if how.loss == "softmax_with_cross_entropy":
        classes, label = model.fetches[0].shape[-1], fed["label"]
        if label.min() < 0 or label.max() >= classes > 0:
            way_out = f"; --head {label.max() + 1} gives it a last layer for as many as there are" if label.min() >= 0 else ""
            has = f"the model has {classes} classes: 0 to {classes - 1}"
            raise OnnxError(f"labels go from {label.min()} to {label.max()}, and {has}{way_out}")
    return fed


def _check_open(inputs: Mapping[str, Variable]) -> None:
    """Refuse a model of which no input takes batches of any size."""
    fixed = next(((name, v) for name, v in inputs.items() if v.ndim and v.shape[0] != ANY), None)
    if fixed is None or any(v.ndim and v.shape[0] == ANY for v in inputs.values()):
        return
    name, v = fixed
    opened = "x".join(["?", *("?" if d == ANY else str(d) for d in v.shape[1:])])
    raise OnnxError(f"the model fixes the batch: input {name!r} is {_type(v)}; --shapes {name}={opened} opens it")


def _fitting(name: str, a: np.ndarray, v: Variable) -> np.ndarray:
    """An array in the type of the variable that it is for."""
    if name == "label" and a.ndim == v.ndim - 1 and v.shape[-1] == 1:
        a = a[..., None]
    if not np.can_cast(a.dtype, np_dtype(v.dtype), "same_kind"):
        raise OnnxError(f"array {name!r} is {a.dtype}{list(a.shape)}, and {_type(v)} is expected")
    if a.ndim != v.ndim or any(d not in (have, ANY) for d, have in zip(v.shape[1:], a.shape[1:], strict=True)):
        raise OnnxError(f"array {name!r} has shape {list(a.shape)}, and {_type(v)} is expected, one row an example")
    return a.astype(np_dtype(v.dtype))


def _type(v: Variable) -> str:
    return f"{v.dtype}[{','.join('?' if d == ANY else str(d) for d in v.shape)}]"


def _batches(feeds: dict[str, np.ndarray], how: Training, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    rows = len(next(iter(feeds.values())))
    order = np.random.default_rng((how.seed, epoch)).permutation(rows)
    for k in range(0, rows, how.batch):
        yield {n: a[order[k : k + how.batch]] for n, a in feeds.items()}


def _run(exe: Any, loss: Variable, feeds: dict[str, np.ndarray], how: Training, say: Callable[[str], None]) -> list[float]:
    """Train; a bar with loss, rate and time left where there is a terminal, a line for each epoch anyway."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rows = len(next(iter(feeds.values())))
    now = TextColumn("{task.fields[now]}")
    columns = (TextColumn("{task.description}"), BarColumn(), now, TimeRemainingColumn())
    means = []
    bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show_progress())
    with bars:
        task = bars.add_task("", total=rows * how.epochs, now="")
        for epoch in range(how.epochs):
            total = 0.0
            for fed in _batches(feeds, how, epoch):
                (value,) = exe.run(feed=fed, fetch_list=[loss])
                count = len(next(iter(fed.values())))
                total += value.item() * count
                now_is = f"loss {value.item():.4g}, {bars.tasks[0].speed or 0.0:.0f} examples/s"
                bars.update(task, advance=count, description=f"epoch {epoch + 1} of {how.epochs}", now=now_is)
            means.append(total / rows)
            if not np.isfinite(means[-1]):
                raise OnnxError(f"the loss is {means[-1]} in epoch {epoch + 1}, and nothing was written; a smaller --lr may help")
            say(f"epoch {epoch + 1} of {how.epochs}: loss {means[-1]:.4g}")
    return means
