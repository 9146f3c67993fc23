"""The command `fluidx onnx train`: it trains a model file on arrays and writes a trained model file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import layers, optimizer
from .config import show_progress
from .executor import Executor, ParallelExecutor
from .executor.places import CPUPlace, cpu_places, process_places
from .executor.scope import Scope
from .ir import ANY, Variable, program_guard, unique_name
from .ir.data_dependent_ops import cutting
from .ir.dtypes import kept, np_dtype
from .ir.errors import nearest
from .onnx.adapter_files import save_adapters
from .onnx.adapters import adapters_of
from .onnx.arrays import read_arrays
from .onnx.errors import OnnxError
from .onnx.export import save
from .onnx.lora import ALL_LINEAR, Lora, listed
from .onnx.model import OnnxModel, load
from .onnx.normalize import initialized
from .onnx.roles import sharing
from .onnx.training import set_training
from .regularizer import L2Decay
from .transpiler import DistributeTranspiler, strategies

RATES = {"adam": 3e-3, "momentum": 1e-2, "sgd": 1e-2}  # optimizer -> its default learning rate
SCHEDULES = ("cosine", "linear", "constant")
_PRODUCTS = ("matmul", "mul")
_CROSS_ENTROPY = "softmax_with_cross_entropy"


@dataclass(frozen=True)
class Training:
    """The options of the command."""

    loss: str = _CROSS_ENTROPY
    optimizer: str = "adam"
    lr: float | None = None  # default: RATES
    schedule: str = "cosine"
    warmup: int = 0
    weight_decay: float = 0.0
    ranks: Any = 1
    backend: str = "threads"
    strategy: str = "data_parallel"
    epochs: int = 10
    batch: int = 32
    freeze: Sequence[str] = ()
    also_train: Sequence[str] = ()
    untie: Sequence[str] = ()
    lora: int | None = None
    target: Sequence[str] = ()
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    head: int | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seed: int = 0
    val: Path | None = None
    val_split: float = 0.0

    @property
    def rate(self) -> float:
        return RATES[self.optimizer] if self.lr is None else self.lr


class Built(NamedTuple):
    """A model that is ready for training: its loss, and its accuracy if labels are classes."""

    model: OnnxModel
    loss: Variable
    accuracy: Variable | None

    @property
    def measures(self) -> list[Variable]:
        return [v for v in (self.loss, self.accuracy) if v is not None]


class Epoch(NamedTuple):
    """Means over an epoch: loss and accuracy on the training and the validation examples."""

    loss: float
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None

    def __str__(self) -> str:
        held = "" if self.val_loss is None else f"; validation: {_measured(self.val_loss, self.val_accuracy)}"
        return _measured(self.loss, self.accuracy) + held


def _measured(loss: float, accuracy: float | None) -> str:
    return f"loss {loss:.4g}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")


def train(path: str, data: Path, how: Training, output: Path, say: Callable[[str], None] = print) -> list[float]:
    """Train the model in `path` on the arrays of an .npz file and write it to `output`. Returns the mean loss of each epoch.

    The file has an array for each input of the model, by name, and one called `label`; rows are examples. Raises OnnxError if arrays do not
    fit the model or each other, and the errors of loading, transpiling and proving.
    """
    built = _built(path, how)
    model = built.model
    feeds, held = _split_data(model, data, how)
    trained = [p for p in model.parameters if p.trainable]
    if not trained:
        many = len(model.parameters)
        raise OnnxError(f"none of the {many} parameters of {path} is trained; leave some out of --freeze, or give it a --head")
    rows = _rows(feeds)
    _append_training(built, how, -(-rows // how.batch))
    exe, proof, where = _executor(model, how)
    elements = sum(int(np.prod(p.shape)) for p in trained)
    say(f"{path}: {len(model.parameters)} parameters, {len(trained)} of them with {elements} elements are trained")
    if adapters := adapters_of(model.program):
        say(f"adapters of rank {how.lora} for {len(adapters)} weights: {listed([a.module for a in adapters])}")
    names = [n for n, own in model.trained_names.items() if own in {p.name for p in trained}]
    if shared := sharing(model.proto.graph, names):
        say(shared)
    say(proof)
    rest = f", {_rows(held)} for validation" if held else ""
    steps = f"{rows} examples{rest}, {-(-rows // how.batch)} batches an epoch"
    say(f"{steps}, {how.optimizer} at {how.rate:g}, {how.schedule}; {where}")
    with exe:
        exe.run_startup()
        epochs = _run(exe, built, feeds, held, how, say)
        if gone := next((p.name for p in model.parameters if not np.isfinite(exe.state(p.name)).all()), None):
            raise OnnxError(f"{gone!r} is not finite after the last step, so nothing was written; a smaller --lr may help")
        of = {"scope": exe.scope} if isinstance(exe, _OneDevice) else {"executor": exe}
        if how.lora is None or output.suffix == ".onnx":
            save(model.program, output, fetches=model.fetches, merge=how.lora is not None, **of)
        else:
            save_adapters(model.program, output, base=path, **of)
    say(f"wrote {output}; {_summary(epochs)}")
    return [e.loss for e in epochs]


def _executor(model: OnnxModel, how: Training) -> tuple[Any, str, str]:
    """What runs the steps, the proof of its programs, and where they run."""
    cut = next(cutting(model.program), None)
    if cut is not None:
        op, why = cut
        if how.ranks != 1:
            raise OnnxError(f"op {op.type} {why.does}, so the model trains on one device alone: leave --ranks away")
        return _OneDevice(model), f"op {op.type} {why.does}: no ranks, and nothing to prove", "one device"
    t = DistributeTranspiler(strategies.get(how.strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=how.ranks)
    places = process_places if how.backend == "processes" else cpu_places
    ranks = f"{t.world_size} rank{'s' * (t.world_size > 1)}"
    return ParallelExecutor(t, places=places(t.world_size)), str(t.verify()), f"{how.strategy} on {ranks}"


class _OneDevice:
    """What `train` uses of a ParallelExecutor, on one device: for models with sizes that depend on values, which ranks do not run."""

    def __init__(self, model: OnnxModel):
        self.model, self.scope, self._executor = model, Scope(), Executor(CPUPlace())

    def __enter__(self) -> _OneDevice:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run_startup(self) -> None:
        self._executor.run(self.model.startup, scope=self.scope)

    def run(self, feed: Mapping[str, np.ndarray], fetch_list: list[Variable]) -> list[np.ndarray]:
        found: list[np.ndarray] = self._executor.run(self.model.program, feed=feed, fetch_list=fetch_list, scope=self.scope)
        return found

    def state(self, name: str) -> np.ndarray:
        return np.asarray(self.scope.get(name))


def _summary(epochs: Sequence[Epoch]) -> str:
    """The change of the loss in words, and the final accuracy."""
    first, last = epochs[0], epochs[-1]
    said = f"the loss of its one epoch was {last.loss:.4g}"
    if len(epochs) > 1:
        said = f"the loss went from {first.loss:.4g} in the first epoch to {last.loss:.4g} in the last"
    right = last.accuracy if last.val_accuracy is None else last.val_accuracy
    whose = "training" if last.val_accuracy is None else "validation"
    return said if right is None else f"{said}; {right:.1%} of the {whose} examples are right"


def _built(path: str, how: Training) -> Built:
    """The model with its loss, and its accuracy if labels are classes."""
    model = load(path, how.shapes, how.also_train, how.untie)
    classes = how.head
    head = None if classes is None else lambda m: _head(m, classes)
    with unique_name.guard("train_"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shared weights, which `train` says
            loss = set_training(model, freeze=how.freeze, head=head, loss=how.loss, lora=_lora(model, how))
        assert loss is not None
        (scores,) = model.fetches
        if how.loss != _CROSS_ENTROPY or scores.ndim != 2:
            return Built(model, loss, None)
        with program_guard(model.program, model.startup):
            return Built(model, loss, layers.accuracy(scores, model.program.global_block().var("label")))


def _lora(model: OnnxModel, how: Training) -> Lora | None:
    """The options of adapters. What --also-train names is trained beside them."""
    if how.lora is None:
        return None
    rest = [own for name, own in model.trained_names.items() if any(fnmatchcase(name, p) for p in how.also_train)]
    return Lora(how.lora, how.lora_alpha, how.target or ALL_LINEAR, how.lora_dropout, rest)


def _append_training(built: Built, how: Training, steps: int) -> None:
    """Append gradients and updates. The learning rate follows the schedule with `steps` steps in each epoch."""
    total = steps * how.epochs
    with unique_name.guard("train_"), program_guard(built.model.program, built.model.startup):
        rate: Any = how.rate
        if how.schedule == "cosine":
            rate = layers.cosine_decay(rate, 1, total)
        elif how.schedule == "linear":
            rate = layers.polynomial_decay(rate, total, 0.0, 1.0)
        if how.warmup:
            rate = layers.linear_lr_warmup(rate, how.warmup, how.rate / (how.warmup + 1), how.rate)
        _optimizer(built.model, how, rate).minimize(built.loss)


def _optimizer(model: OnnxModel, how: Training, rate: Any) -> Any:
    """The optimizer. Weight decay applies to weights with two or more axes, not to biases and scales."""
    decaying = {p.name for p in model.parameters if p.ndim > 1}
    if how.optimizer == "adam":
        if not how.weight_decay:
            return optimizer.Adam(rate)
        return optimizer.AdamW(rate, weight_decay=how.weight_decay, apply_decay_param_fun=decaying.__contains__)
    decay = L2Decay(how.weight_decay) if how.weight_decay else None
    if how.optimizer == "sgd":
        return optimizer.SGD(rate, regularization=decay)
    return optimizer.Momentum(rate, 0.9, regularization=decay)


def _head(model: OnnxModel, classes: int) -> Variable:
    """A new last layer for `classes` classes, with the input of the model's last layer."""
    block = model.program.global_block()
    for op in reversed(model.program.ops):
        if op.type in _PRODUCTS and block.desc(op.inputs["Y"][0]).is_parameter:
            x = block.var(op.inputs["X"][0])
            taken = {p.name.rpartition(".")[0] for p in model.parameters}
            name = unique_name.unused("head", taken, "_{}".format)
            return layers.fc(x, classes, num_flatten_dims=x.ndim - 1, param_attr=f"{name}.weight", bias_attr=f"{name}.bias")
    raise OnnxError("the model has no product with a parameter that a head could replace; write it: fx.onnx.set_training(head=...)")


def _split_data(model: OnnxModel, data: Path, how: Training) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The training examples and the validation examples, which may be none."""
    feeds = _feeds(model, read_arrays(data), data, how)
    if how.val is not None:
        return feeds, _feeds(model, read_arrays(how.val), how.val, how)
    rows, held = _rows(feeds), round(_rows(feeds) * how.val_split)
    if not how.val_split:
        return feeds, {}
    if not 0 < held < rows:
        raise OnnxError(f"--val-split {how.val_split:g} of {rows} examples leaves {rows - held} to train on and {held} to validate")
    order = np.random.default_rng(how.seed).permutation(rows)
    return {n: a[order[held:]] for n, a in feeds.items()}, {n: a[order[:held]] for n, a in feeds.items()}


def _rows(feeds: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(feeds.values())))


def _feeds(model: OnnxModel, arrays: dict[str, np.ndarray], data: Path, how: Training) -> dict[str, np.ndarray]:
    """The feeds by names of the program. Raises OnnxError if the arrays do not fit the model."""
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
            others = [n for n in arrays if n not in wanted]
            close = nearest(name, others) if others else ""
            names = ", ".join(f"{n}=..." for n in wanted)
            hint = f"np.savez(path, {names}) writes such a file"
            if close.startswith("did you mean"):
                hint = f"{close.replace('did you mean', 'is it')} then save it as {name!r}"
            raise OnnxError(f"{data} has no array {name!r}, which is {_type(v)}; it has {has}; {hint}")
        rest.discard(key)
        fed[v.name] = _as_feed(name, arrays[key], v)
    if rest:
        name = min(rest)
        raise OnnxError(f"{data} has an array {name!r}, but nothing in the model has that name; {nearest(name, wanted, 'wanted are')}")
    rows = {n: len(a) for n, a in fed.items() if a.ndim}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        raise OnnxError(f"the arrays of {data} must have equally many rows (not 0): {', '.join(f'{n} has {r}' for n, r in rows.items())}")
    if how.loss == _CROSS_ENTROPY:
        classes, label = model.fetches[0].shape[-1], fed["label"]
        if label.min() < 0 or label.max() >= classes > 0:
            way_out = f"; --head {label.max() + 1} gives it a last layer for all classes" if label.min() >= 0 else ""
            if 0 < label.min() and label.max() - label.min() < classes:
                way_out = f"; labels count from 0: save label - {label.min()}" + way_out.replace("; ", ", or ")
            has = f"the model has {classes} classes: 0 to {classes - 1}"
            raise OnnxError(f"labels go from {label.min()} to {label.max()}, but {has}{way_out}")
    return fed


def _check_open(inputs: Mapping[str, Variable]) -> None:
    """Refuse a model without an input that takes batches of any size."""
    fixed = next(((name, v) for name, v in inputs.items() if v.ndim and v.shape[0] != ANY), None)
    if fixed is None or any(v.ndim and v.shape[0] == ANY for v in inputs.values()):
        return
    name, v = fixed
    opened = "x".join(["?", *("?" if d == ANY else str(d) for d in v.shape[1:])])
    raise OnnxError(f"the model fixes the batch: input {name!r} is {_type(v)}; --shapes {name}={opened} opens it")


def _as_feed(name: str, a: np.ndarray, v: Variable) -> np.ndarray:
    """An array in the dtype of the variable that it feeds."""
    if name == "label" and a.ndim == v.ndim - 1 and v.shape[-1] == 1:
        a = a[..., None]
    try:
        a = kept(a, np_dtype(v.dtype))
    except ValueError as e:
        raise OnnxError(f"array {name!r} is {a.dtype}{list(a.shape)}, and {_type(v)} is expected: it {e}{_hint(name, a, v)}") from None
    if not _fits(a.shape, v):
        raise OnnxError(f"array {name!r} has shape {list(a.shape)}, and {_type(v)} is expected, one row an example{_hint(name, a, v)}")
    return a


def _fits(shape: Sequence[int], v: Variable) -> bool:
    return len(shape) == v.ndim and all(d in (have, ANY) for d, have in zip(v.shape[1:], shape[1:], strict=True))


def _hint(name: str, a: np.ndarray, v: Variable) -> str:
    """A hint how to make an array fit, or "" if there is none."""
    if name == "label" and v.shape[-1] == 1 and a.ndim == v.ndim and a.shape[-1] > 1:
        return "; of one-hot labels save label.argmax(axis=-1)"
    if _fits(a.shape, v):
        return f"; save {name}.astype({v.dtype!r})" if a.dtype.kind == "f" and v.dtype.startswith("int") else ""
    if a.ndim == v.ndim > 2 and _fits(np.moveaxis(a, -1, 1).shape, v):
        return f"; its channels stand last: save np.moveaxis({name}, -1, 1)"
    if a.ndim and ANY not in v.shape[1:] and a.size and a[0].size == np.prod(v.shape[1:], dtype=np.int64):
        return f"; save {name}.reshape({[-1, *v.shape[1:]]})"
    return ""


def _type(v: Variable) -> str:
    return f"{v.dtype}[{','.join('?' if d == ANY else str(d) for d in v.shape)}]"


def _batches(feeds: dict[str, np.ndarray], how: Training, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    rows = _rows(feeds)
    order = np.random.default_rng((how.seed, epoch)).permutation(rows)
    for k in range(0, rows, how.batch):
        yield {n: a[order[k : k + how.batch]] for n, a in feeds.items()}


def _run(
    exe: Any, built: Built, feeds: dict[str, np.ndarray], held: dict[str, np.ndarray], how: Training, say: Callable[[str], None]
) -> list[Epoch]:
    """Train. A terminal shows a progress bar with loss, speed and time left; each epoch prints a line."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rows = _rows(feeds)
    now = TextColumn("{task.fields[now]}")
    columns = (TextColumn("{task.description}"), BarColumn(), now, TimeRemainingColumn())
    epochs = []
    bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show_progress())
    with bars:
        task = bars.add_task("", total=rows * how.epochs, now="")
        for epoch in range(how.epochs):
            totals = np.zeros(len(built.measures))
            for fed in _batches(feeds, how, epoch):
                found = [v.item() for v in exe.run(feed=fed, fetch_list=built.measures)]
                totals += np.multiply(found, _rows(fed))
                now_is = f"loss {found[0]:.4g}, {bars.tasks[0].speed or 0.0:.0f} examples/s"
                bars.update(task, advance=_rows(fed), description=f"epoch {epoch + 1} of {how.epochs}", now=now_is)
            means = [float(v) for v in totals / rows]
            if not np.isfinite(means[0]):
                gone = next((n for n, a in feeds.items() if a.dtype.kind == "f" and np.isnan(a).any()), None)
                hint = f"array {gone!r} of the data holds NaN" if gone else "a smaller --lr may help"
                raise OnnxError(f"the loss is {means[0]} in epoch {epoch + 1}, so nothing was written; {hint}")
            done = Epoch(*means, *[None] * (2 - len(means)), *_validated(exe, built, held, how))
            say(f"epoch {epoch + 1} of {how.epochs}: {done}")
            epochs.append(done)
    return epochs


def _validated(exe: Any, built: Built, held: dict[str, np.ndarray], how: Training) -> list[float]:
    """The measures on the validation examples, computed by the inference form of the program with the ranks' current parameters."""
    if not held:
        return []
    program, scope, alone = built.model.program.clone(for_test=True), Scope(), Executor(CPUPlace())
    for v in program.list_vars():
        if v.persistable and built.model.program.global_block().has_var(v.name):
            scope.set(v.name, exe.state(v.name))
    totals = np.zeros(len(built.measures))
    for k in range(0, _rows(held), how.batch):
        fed = {n: a[k : k + how.batch] for n, a in held.items()}
        totals += np.multiply([v.item() for v in alone.run(program, feed=fed, fetch_list=built.measures, scope=scope)], _rows(fed))
    return [float(v) for v in totals / _rows(held)]
