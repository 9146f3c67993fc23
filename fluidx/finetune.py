"""The commands `fluidx onnx train`, which trains a model file on examples and writes a trained model file, and `fluidx onnx quantize`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from . import layers, optimizer
from .executor import Executor, ParallelExecutor, Scope
from .executor.launched_alone import launched_as
from .executor.places import CPUPlace, cpu_places, process_places
from .inference import InferenceTranspiler
from .ir import FeedError, Program, ProgramError, Variable, program_guard, unique_name
from .ir.data_dependent_ops import cutting
from .ir.errors import nearest
from .launch.command import open_log
from .onnx.adapter_files import save_adapters
from .onnx.adapters import adapters_of, has_integer_weights
from .onnx.errors import OnnxError
from .onnx.export import save
from .onnx.half_precision import in_precision
from .onnx.lora import ALL_LINEAR, Lora, listed
from .onnx.losses import Loss, scores_of
from .onnx.model import OnnxModel, load
from .onnx.normalize import fed_names
from .onnx.roles import sharing
from .onnx.training import set_training
from .onnx.training_passes import DropUnneeded
from .quantization import quantize
from .regularizer import L2Decay
from .training.curve import draw_curve, need_matplotlib
from .training.data_files import read_named_arrays
from .training.examples import Arrays, ExampleReader, Examples, Padding, equal_rows
from .training.loop import Epoch, LoopOptions, OneDeviceTrainer, Trainee, TrainingLoop
from .training.scores import PERPLEXITY, Score, has_perplexity, shown
from .training.standardize import standardizing
from .transpiler import DistributeTranspiler, strategies

RATES = {"adam": 3e-3, "momentum": 1e-2, "sgd": 1e-2}  # optimizer -> its default learning rate
SCHEDULES = ("cosine", "linear", "constant")
_PRODUCTS = ("matmul", "mul")
_DECIDING = (
    "loss", "optimizer", "schedule", "warmup", "weight_decay", "batch", "epochs", "seed", "accumulate", "precision", "label_smoothing",
    "val_split", "quantize", "class_weight", "freeze", "also_train", "untie", "lora", "target", "lora_alpha", "lora_dropout", "lora_base",
    "head", "scores", "label", "columns", "steps", "val", "pad", "pad_to_multiple_of",
    "pos_weight", "standardize",
)  # fmt: skip  # options that decide the results of a training
_OBSERVED = 10  # batches in which quantize observes ranges


@dataclass(frozen=True)
class Training:
    """The options of the command."""

    loss: str = "softmax_with_cross_entropy"
    class_weight: Sequence[float] | Literal["balanced"] | None = None
    pos_weight: Sequence[float] | Literal["balanced"] | None = None
    standardize: bool = False
    label_smoothing: float = 0.0
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
    steps: int | None = None  # batches in an epoch, where the data gives batches
    accumulate: int = 1
    precision: str | None = None  # default: that of the file's weights
    metric: str | None = None
    patience: int | None = None
    checkpoints: Path | None = None
    resume: bool = False
    curve: Path | None = None
    metrics: Path | None = None
    tensorboard: Path | None = None
    scores: str | None = None
    label: str = "label"
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pad: Mapping[str, float] = field(default_factory=dict)  # of shorter examples, by input
    pad_to_multiple_of: int = 1
    freeze: Sequence[str] = ()
    also_train: Sequence[str] = ()
    untie: Sequence[str] = ()
    lora: int | None = None
    target: Sequence[str] = ()
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_base: str | None = None
    quantize: bool = False
    head: int | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seed: int = 0
    val: str | None = None
    val_split: float = 0.0

    @property
    def rate(self) -> float:
        return RATES[self.optimizer] if self.lr is None else self.lr

    def loop(self, output: Path, data: str) -> LoopOptions:
        deciding = json.loads(json.dumps({"data": data, **{n: getattr(self, n) for n in _DECIDING}, "lr": self.rate}))  # as restored
        of_loop = {f.name: getattr(self, f.name) for f in fields(LoopOptions) if hasattr(self, f.name)}
        return LoopOptions(output=output, options=deciding, **of_loop)


class Built(NamedTuple):
    """A model that is ready for training: its loss, its accuracy if labels are classes, and its inference form with the loss."""

    model: OnnxModel
    loss: Variable
    accuracy: Variable | None
    plain: Program
    kind: Loss
    scores: Variable  # which the loss takes
    label: Variable

    @property
    def measures(self) -> list[Variable]:
        return [v for v in (self.loss, self.accuracy) if v is not None]


def train(path: str, data: str | Path, how: Training, output: Path, say: Callable[[str], None] = print) -> list[float]:
    """Train the model in `path` on examples and write it to `output`. Returns the mean loss of each epoch.

    `data` is an .npz file with an array for each input of the model, by name, and one called `label`; a folder of .npy files of these
    names; a table, CSV or Parquet; or `module:function`, which returns batches. Raises OnnxError if examples do not fit the model, and the
    errors of loading, transpiling and proving.
    """
    if (launched := launched_as()) is not None and launched.rank != 0:
        how, say = replace(how, curve=None, metrics=None, tensorboard=None), lambda text: None
    if how.curve is not None:
        need_matplotlib()
    by_data: dict[str, Any] = {n: None for n in ("class_weight", "pos_weight") if getattr(how, n) == "balanced"}
    built = _built(path, replace(how, **by_data))
    padding = Padding(how.pad, how.pad_to_multiple_of)
    reader = ExampleReader(built.model, built.kind, built.scores, built.label, how.label, how.columns, padding)
    examples, held = _read(reader, str(data), how)
    if by_data:
        by_data = {n: _balanced(examples, built, n) for n in by_data}
        built = _built(path, replace(how, **by_data))
    if how.standardize:
        _standardize(built, examples, _writes_adapters(how, output), say)
    model, scores = built.model, _scores(built, how)
    how = replace(how, precision=how.precision or model.half or "float32")
    trained = [p for p in model.parameters if p.trainable]
    if not trained:
        many = len(model.parameters)
        raise OnnxError(f"none of the {many} parameters of {path} is trained; leave some out of --freeze, or give it a --head")
    steps = examples.steps(how.batch)
    if how.quantize:
        built = _quantized(built, examples, how, say)
    _append_training(built, how, steps)
    exe, proof, where = _executor(model, how)
    elements = sum(int(np.prod(p.shape)) for p in trained)
    say(f"{path}: {len(model.parameters)} parameters, {len(trained)} of them with {elements} elements are trained")
    if model.precision and how.precision == model.half:
        say(model.precision)
    if adapters := adapters_of(model.program):
        say(f"adapters of rank {how.lora} for {len(adapters)} weights: {listed([a.module for a in adapters])}")
    names = [n for n, own in model.trained_names.items() if own in {p.name for p in trained}]
    if shared := sharing(model.proto.graph, names):
        say(shared)
    if reader.classes:
        say(f"classes: {', '.join(f'{k} {name}' for k, name in enumerate(reader.classes))}")
    say(proof)
    rest = f", {held.describe(how.batch).removesuffix(' examples')} for validation" if held else ""
    say(f"{examples.describe(how.batch)}{rest}, {steps} batches an epoch, {how.optimizer} at {how.rate:g}, {how.schedule}; {where}")
    trainee = Trainee(model.program, built.plain, built.loss, built.accuracy, built.scores, built.label, built.kind)
    write = partial(_write, path, exe, built, how, output, reader.classes)
    with exe, open_log(how.metrics, how.tensorboard, restart=int(how.resume), line=False) as log:
        exe.run_startup()
        with _judge(exe, built, how) if held is not None else nullcontext() as judge:
            loop = TrainingLoop(exe, trainee, examples, held, scores, how.loop(output, str(data)), write, say, log, judge)
            epochs = loop.run()
    if how.curve is not None:
        draw_curve(epochs, how.curve)
    of = f" of epoch {loop.best + 1}" if held is not None and loop.best != len(epochs) - 1 else ""
    say(f"wrote {output}{of}; {_summary(epochs, loop.best)}")
    return [e.loss for e in epochs]


def _read(reader: ExampleReader, data: str, how: Training) -> tuple[Examples, Examples | None]:
    """The training examples and the validation examples, if there are any."""
    examples = reader.read(data, how.steps)
    if how.val is not None:
        held = reader.read(how.val)
        return examples, held
    return examples.split(how.val_split, how.seed) if how.val_split else (examples, None)


def _scores(built: Built, how: Training) -> list[Score]:
    """The scores on the validation examples: the chosen one, or the accuracy of classes and the perplexity of a language model."""
    if how.metric is not None:
        return [Score(how.metric, built.kind)]
    kind = built.kind
    names = ["accuracy"] * (kind.head.class_axis is not None) + [PERPLEXITY] * (kind.head.predicts_next and has_perplexity(kind))
    return [Score(name, kind) for name in names]


def _writes_adapters(how: Training, output: Path) -> bool:
    """Is the output a folder of adapters, not a model?"""
    return how.lora is not None and output.suffix != ".onnx"


def _standardize(built: Built, examples: Examples, adapters_alone: bool, say: Callable[[str], None]) -> None:
    """Let the model standardize its columns: subtract their means and divide by their standard deviations."""
    if adapters_alone:
        raise OnnxError("--standardize changes the model, and -o is a folder of adapters; write -o FILE.onnx, or leave out --standardize")
    way = standardizing(built.model, examples)
    for program in (built.model.program, built.plain):
        program.become(way.run(program))
    many = ", ".join(f"{len(of.means)} of {name}" for name, of in way.inputs)
    say(f"columns are standardized in the model, by the training examples: {many}")


def _balanced(examples: Examples, built: Built, option: str) -> Sequence[float]:
    """Weights with which all classes of the examples weigh the same, as scikit-learn's "balanced"; for `pos_weight` the classes are the
    labels 0 and 1 of each output."""
    axis = built.kind.head.class_axis
    if option == "pos_weight":
        return _balanced_answers(examples, built)
    if not isinstance(examples, Arrays) or axis is None:
        raise OnnxError("--class-weight balanced counts the classes of arrays; give a number for each class: 1,2,5")
    label = examples.feeds[built.label.name][examples.at]
    counts = np.bincount(label[label >= 0].ravel(), minlength=built.scores.shape[axis])
    return [float(counts.sum() / (np.count_nonzero(counts) * c)) if c else 1.0 for c in counts]


def _balanced_answers(examples: Examples, built: Built) -> Sequence[float]:
    if not isinstance(examples, Arrays) or not built.kind.head.yes_or_no:
        raise OnnxError("--pos-weight balanced counts the labels 1 of arrays, for --loss sigmoid_cross_entropy_with_logits")
    label = np.asarray(examples.feeds[built.label.name][examples.at]).reshape(-1, built.label.shape[-1])
    yes = np.where(label >= 0, label, 0).sum(axis=0, dtype=np.float64)
    no = (label >= 0).sum(axis=0) - yes
    return [float(n / y) if y > 0 and n > 0 else 1.0 for y, n in zip(yes, no)]


def _write(path: str, exe: Any, built: Built, how: Training, output: Path, classes: list[str] | None) -> None:
    """Write the model with the values that the ranks have now. What mixed precision has rewritten is written as it was before."""
    if gone := next((p.name for p in built.model.parameters if not np.isfinite(exe.state(p.name)).all()), None):
        raise OnnxError(f"{gone!r} is not finite after the last step, so nothing was written; a smaller --lr may help")
    of = {"scope": exe.scope} if isinstance(exe, OneDeviceTrainer) else {"executor": exe}
    if not _writes_adapters(how, output):
        metadata = {p.key: p.value for p in built.model.proto.metadata_props}
        if classes is not None:
            metadata["classes"] = json.dumps(classes)
        merge = how.lora is not None and not has_integer_weights(built.plain)  # those of the file, which have the adapters beside them
        save(built.plain, output, fetches=built.model.outputs, merge=merge, metadata=metadata, **of)
    else:
        save_adapters(built.plain, output, base=path, **of)


def _executor(model: OnnxModel, how: Training) -> tuple[Any, str, str]:
    """What runs the steps, the proof of its programs, and where they run."""
    cut = next(cutting(model.program), None)
    if cut is not None:
        op, why = cut
        if how.ranks != 1:
            raise OnnxError(f"op {op.type} {why.does}, so the model trains on one device alone: leave --ranks out")
        if how.accumulate != 1:
            raise OnnxError(f"op {op.type} {why.does}, so its batch cannot be cut into parts: leave --accumulate out")
        return OneDeviceTrainer(model), f"op {op.type} {why.does}: no ranks, and nothing to prove", "one device"
    strategy = strategies.get(how.strategy)
    t = DistributeTranspiler(strategies.micro_batches(how.accumulate, of=strategy) if how.accumulate > 1 else strategy)
    t.transpile(program=model.program, startup_program=model.startup, trainers=how.ranks)
    ranks = f"{t.world_size} rank{'s' * (t.world_size > 1)}"
    parts = f", {how.accumulate} parts of each batch" if how.accumulate > 1 else ""
    return ParallelExecutor(t, places=_places(t, how)), str(t.verify()), f"{how.strategy} on {ranks}{parts}"


def _places(t: DistributeTranspiler, how: Training) -> Any:
    places = process_places if how.backend == "processes" else cpu_places
    return None if launched_as() is not None else places(t.world_size)


def _judge(exe: Any, built: Built, how: Training) -> Any:
    """A context with the executor that validates on the ranks that train, with their own variables. It is None if one device has to
    validate: there is one rank, or the strategy places variables in another way if nothing is trained."""
    if isinstance(exe, OneDeviceTrainer) or exe.world_size == 1:
        return nullcontext()
    t = DistributeTranspiler(strategies.get(how.strategy))
    t.transpile(program=built.plain, startup_program=built.model.startup, trainers=how.ranks)
    judge = ParallelExecutor(t, places=_places(t, how), scopes=exe.scopes)
    mine, theirs = (one.layout().global_block().descs for one in (judge, exe))
    if all(n in theirs and (theirs[n].type, theirs[n].placement) == (d.type, d.placement) for n, d in mine.items()):
        return judge
    judge.close()
    return nullcontext()


def _summary(epochs: Sequence[Epoch], best: int) -> str:
    """The change of the loss in words, and what the scores of the best epoch are."""
    first, last, chosen = epochs[0], epochs[-1], epochs[best]
    said = f"the loss of its one epoch was {last.loss:.4g}"
    if len(epochs) > 1:
        said = f"the loss went from {first.loss:.4g} in the first epoch to {last.loss:.4g} in the last"
    if chosen.val_loss is None:
        return said if chosen.accuracy is None else f"{said}; {chosen.accuracy:.1%} of the training examples are right"
    if "accuracy" in chosen.val_scores:
        return f"{said}; {chosen.val_scores['accuracy']:.1%} of the validation examples are right"
    scores = [f"loss {chosen.val_loss:.4g}", *(shown(n, v) for n, v in chosen.val_scores.items())]
    return f"{said}; validation: {', '.join(scores)}"


def _built(path: str, how: Training) -> Built:
    """The model with its loss, and its accuracy if labels are classes."""
    model = load(path, how.shapes, how.also_train, how.untie)
    assert how.class_weight != "balanced" and how.pos_weight != "balanced"
    kind = Loss(how.loss, how.class_weight, how.label_smoothing, pos_weight=how.pos_weight)
    classes = how.head
    head = None if classes is None else lambda m: _head(m, classes)
    with unique_name.guard("train_"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shared weights, which `train` says
            loss = set_training(model, freeze=how.freeze, head=head, loss=kind, lora=_lora(model, how), scores=how.scores)
        assert loss is not None
        plain = model.program.clone(for_test=True)
        scores = plain.global_block().var(scores_of(model, how.scores).name)
        fed = {v.name for v in model.feeds}
        label = next(v for v in model.program.list_vars() if v.is_data and v.name not in fed)
        built = Built(model, loss, None, plain, kind, scores, label)
        if kind.name == "softmax_with_cross_entropy" and scores.ndim == 2 and how.metric in (None, "accuracy"):
            with program_guard(model.program, model.startup):
                built = built._replace(accuracy=layers.accuracy(model.program.global_block().var(scores.name), label))
    return built


def _lora(model: OnnxModel, how: Training) -> Lora | None:
    """The options of adapters. What --also-train names is trained beside them."""
    if how.lora is None:
        return None
    rest = [own for name, own in model.trained_names.items() if any(fnmatchcase(name, p) for p in how.also_train)]
    return Lora(how.lora, how.lora_alpha, how.target or ALL_LINEAR, how.lora_dropout, rest, how.lora_base)


def _quantized(built: Built, examples: Examples, how: Training, say: Callable[[str], None]) -> Built:
    """The model with its weights and inputs rounded, in the ranges of the first batches."""
    program, first = built.model.program, [fed for _, fed in zip(range(_OBSERVED), examples.batches(how.batch, how.seed), strict=False)]
    quantize(built.model, first)
    count = sum(op.type == "fake_quantize" for op in program.ops)
    say(f"{count} weights and inputs are rounded to 8 bits, in the ranges of {len(first)} batches")
    return built._replace(plain=program.clone(for_test=True))


def _append_training(built: Built, how: Training, steps: int) -> None:
    """Append gradients and updates. The learning rate follows the schedule with `steps` steps in each epoch."""
    total = steps * how.epochs
    built.model.program.become(DropUnneeded(tuple(v.name for v in built.measures)).run(built.model.program))
    with unique_name.guard("train_"), program_guard(built.model.program, built.model.startup):
        rate: Any = how.rate
        if how.schedule == "cosine":
            rate = layers.cosine_decay(rate, 1, total)
        elif how.schedule == "linear":
            rate = layers.polynomial_decay(rate, total, 0.0, 1.0)
        if how.warmup:
            rate = layers.linear_lr_warmup(rate, how.warmup, how.rate / (how.warmup + 1), how.rate)
        in_precision(_optimizer(built.model, how, rate), how.precision or "float32").minimize(built.loss)


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


def quantize_file(
    file: Any,
    data: Path,
    output: Path,
    batch: int = 8,
    batches: int = 10,
    skip: Sequence[str] = (),
    observer: str = "min_max",
) -> tuple[int, int]:
    """Quantize an ONNX file after training, and write it with integers; returns how many values are rounded, and in how many batches their
    ranges were observed. `data` is an .npz file, or a folder of .npy files, with an array for each input. Batch normalization is folded
    first. The command `fluidx onnx quantize` calls it."""
    model, arrays, scope = load(file), read_named_arrays(data), Scope()
    names = fed_names(model.proto.graph)
    if missing := [n for n in names if n not in arrays]:
        raise ProgramError(f"quantize: {data} has no array {missing[0]!r}; {nearest(missing[0], arrays, 'it has')}")
    rows = equal_rows({n: len(arrays[n]) if arrays[n].ndim else 0 for n in names}, str(data))
    fed = [(v.name, arrays[n]) for n, v in zip(names, model.feeds, strict=True)]
    feeds = [{n: np.asarray(a[k : k + batch]) for n, a in fed} for k in range(0, rows, batch)][:batches]
    Executor(CPUPlace()).run(model.startup, scope=scope)
    InferenceTranspiler().transpile(model.program, scope=scope)
    try:
        quantize(model.program, feeds, scope=scope, skip=skip, observer=observer, between=True)
    except FeedError as e:
        raise FeedError(f"{data}: {e}") from None
    save(model.program, output, fetches=model.fetches, scope=scope)
    return sum(op.type == "fake_quantize" for op in model.program.ops), len(feeds)
