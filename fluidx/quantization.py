"""`quantize` prepares a program for 8-bit integers: weights and inputs of products are rounded, for inference or for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from .executor import Executor
from .executor.places import CPUPlace
from .executor.scope import Scope, global_scope
from .ir import Block, Builder, Operator, Program, ProgramError, Role, Variable
from .ir.errors import explains_arguments, nearest
from .ir.pass_base import ONE_DEVICE, Job, Pass

_WEIGHTS = {"conv2d": "Filter", "depthwise_conv2d": "Filter", "mul": "Y", "matmul": "Y"}  # operators -> the slot of the weight
_INPUTS = {"conv2d": "Input", "depthwise_conv2d": "Input", "mul": "X", "matmul": "X"}
_OBSERVERS = ("min_max", "moving_average", "percentile")
_BETWEEN = ("elementwise_add", "pool2d")
_KEPT = 0.9  # of a moving average, in each batch
_OUTSIDE = 0.005  # percent of the values of a batch that are below the range of "percentile", and as many above


class Rounding(NamedTuple):
    """How a value is rounded: to numbers (q - zero) * scale, for integers q between the bounds. The scales have a shape that broadcasts to
    the value."""

    scales: tuple[float, ...]
    shape: tuple[int, ...]
    zero: float
    lowest: float
    highest: float


@explains_arguments
def quantize(
    program: Any,
    feeds: Iterable[Mapping[str, Any]],
    startup: Program | None = None,
    scope: Any = None,
    skip: str | Sequence[str] = (),
    observer: str = "min_max",
    between: bool = False,
) -> None:
    """Round the weights and the inputs of products and convolutions in a program, in place, as 8-bit integers would.

    `program` is a Program, or an OnnxModel of `fx.onnx.load`; call this before `minimize`. The program is run on `feeds`, a few batches of
    calibration data, to observe the range of each input: the smallest and largest value of all batches ("min_max"), a moving average of
    those of each batch ("moving_average"), which outliers move less, or what holds 99.99 % of the values of each batch ("percentile"). With
    `between` the operands of sums of two values of one shape and of pooling are rounded too, so that residual networks are integers
    throughout. Inputs get 256 steps over that range (uint8), and weights 255 steps about 0 for each output channel (int8), or for all of
    a product's weight of more than two axes. Weights have their values in `scope`, by default the global one, or those that `startup`
    gives them, as that of an OnnxModel does by default. Weights or inputs that match one of the patterns in `skip` stay as they are; a
    pattern without a match is an error.

    `fx.onnx.save` writes QuantizeLinear and DequantizeLinear, and integer weights: the file is quantized after training, and a session
    computes it in 8 bits. Training before that moves weights so that the rounded network is right.

    >>> import fluidx as fx, numpy as np
    >>> main, startup = fx.Program("net"), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3)
    >>> fx.quantize(main, [{"x": np.ones((2, 4), "float32")}], startup)
    >>> [op.type for op in main.ops if op.type not in ("fill_constant", "assign_value")]
    ['fake_quantize', 'fake_quantize', 'mul', 'elementwise_add']
    """
    if startup is not None and scope is not None:
        raise ProgramError("quantize: weights have their values in scope, or those that startup gives them; give one of the two")
    if not isinstance(startup, (Program, type(None))):
        raise ProgramError(f"quantize: startup must be a Program or None, got {type(startup).__name__}; feeds come before it")
    startup = getattr(program, "startup", None) if startup is None and scope is None else startup
    program = getattr(program, "program", program)
    if not isinstance(program, Program):
        way = f"; give fx.onnx.load({program!r})" if isinstance(program, (str, PathLike)) else ""
        raise ProgramError(f"quantize: expected a Program or an OnnxModel, got {type(program).__name__}{way}")
    if observer not in _OBSERVERS:
        raise ProgramError(f"quantize: there is no observer {observer!r}; {nearest(str(observer), _OBSERVERS, 'there are')}")
    if any(op.role in (Role.BACKWARD, Role.OPTIMIZE) for op in program.ops):
        raise ProgramError(f"quantize: {program.label()} already computes gradients; call quantize before minimize")
    patterns = _patterns(skip)
    others = _between(program, patterns) if between else []
    _expect_matches(program, patterns, [n for op in others for n in op.input_arg_names])
    found = _products(program, patterns)
    if not found:
        raise ProgramError(f"quantize: {program.label()} {_nothing_left(program)}")
    if startup is not None:
        scope = Scope()
        Executor(CPUPlace()).run(startup, scope=scope)
    scope = global_scope() if scope is None else scope
    block = program.global_block()
    inputs = list(dict.fromkeys([*(op.inputs[_INPUTS[op.type]][0] for op in found), *(n for op in others for n in op.input_arg_names)]))
    inputs = [n for n in inputs if not any(fnmatchcase(n, p) for p in patterns)]
    rounding = _observed(program, inputs, feeds, scope, observer)
    for op in found:
        name = op.inputs[_WEIGHTS[op.type]][0]
        rounding[name] = _of_weight(np.asarray(scope.get(name)), _channel(op, block))
    program.become(FakeQuantize(tuple(rounding.items()), between).run(program))


def _patterns(skip: Any) -> tuple[str, ...]:
    patterns = (skip,) if isinstance(skip, str) or not isinstance(skip, Iterable) else tuple(skip)
    if not all(isinstance(p, str) for p in patterns):
        raise ProgramError(f"quantize: skip must be a pattern of names or a list of them, got {skip!r}")
    return patterns


def _nothing_left(program: Program) -> str:
    if not _products(program, ()) and any(op.type == "fake_quantize" for op in program.ops):
        return "is quantized already, all weights of its products and convolutions are rounded; give the model in float32"
    return "has no product or convolution with a float32 weight that is left to quantize"


def _products(program: Program, skip: Iterable[str]) -> list[Operator]:
    """The products and convolutions with a weight that is not skipped."""
    block, found = program.global_block(), []
    for op in program.ops:
        if op.type not in _WEIGHTS:
            continue
        weight, x = block.desc(op.inputs[_WEIGHTS[op.type]][0]), block.desc(op.inputs[_INPUTS[op.type]][0])
        known = weight.is_parameter and not x.persistable and weight.type.dtype == x.type.dtype == "float32" and weight.type.ndim > 1
        if known and not any(fnmatchcase(weight.name, p) for p in skip):
            found.append(op)
    return found


def _between(program: Program, skip: Iterable[str]) -> list[Operator]:
    """The sums of two computed values of one shape and the pooling, in float32, of which no operand is skipped."""
    block = program.global_block()

    def fits(op: Operator) -> bool:
        read = [block.desc(n) for n in op.input_arg_names]
        alike = len({d.type for d in read}) == 1 and read[0].type.dtype == "float32" and read[0].type.ndim > 1
        return alike and not any(d.persistable or any(fnmatchcase(d.name, p) for p in skip) for d in read)

    return [op for op in program.ops if op.type in _BETWEEN and fits(op)]


def _expect_matches(program: Program, skip: Iterable[str], more: Iterable[str]) -> None:
    """Raise ProgramError for a pattern that no weight or input has."""
    names = set(more) | {op.inputs[slots[op.type]][0] for op in _products(program, ()) for slots in (_WEIGHTS, _INPUTS)}
    for pattern in skip:
        if not any(fnmatchcase(n, pattern) for n in names):
            near = nearest(pattern, names, "they are")
            raise ProgramError(f"quantize: skip names {pattern!r}, which no weight or input to quantize is called; {near}")


def _channel(op: Operator, block: Block) -> int | None:
    """The axis of a weight that becomes channels of the output; None for a weight that gets one scale, as integer products of runtimes
    know scales of channels for matrices alone."""
    if op.type in ("conv2d", "depthwise_conv2d"):
        return 0
    if block.desc(op.inputs["Y"][0]).type.ndim > 2:
        return None
    return 0 if op.attrs.get("transpose_y") else 1


def _of_weight(w: np.ndarray, axis: int | None) -> Rounding:
    others = None if axis is None else tuple(k for k in range(w.ndim) if k != axis)
    largest = np.abs(w).max(axis=others, keepdims=axis is not None)
    scale = np.asarray(np.where(largest > 0, largest / 127, 1), np.float32)
    return Rounding(tuple(scale.ravel().tolist()), scale.shape, 0.0, -128.0, 127.0)


def _batches(feeds: Any) -> Iterator[Mapping[str, Any]]:
    """The batches of calibration data. Raises ProgramError for anything but dicts."""
    wanted = "quantize: feeds must be a list of batches, dicts of arrays by name"
    if isinstance(feeds, (Mapping, str)) or not isinstance(feeds, Iterable):
        way = "; a list of one batch is [feed]" if isinstance(feeds, Mapping) else ""
        raise ProgramError(f"{wanted}, got {type(feeds).__name__}{way}")
    for k, feed in enumerate(feeds):
        if not isinstance(feed, Mapping):
            raise ProgramError(f"{wanted}; batch {k + 1} is {type(feed).__name__}")
        yield feed


def _observed(program: Program, names: list[str], feeds: Iterable[Mapping[str, Any]], scope: Any, observer: str) -> dict[str, Rounding]:
    """The rounding of each value, from its range in some batches. The range contains 0, which padding needs exactly."""
    exe, test, ranges = Executor(CPUPlace()), program.clone(for_test=True), dict[str, np.ndarray]()
    for feed in _batches(feeds):
        values = exe.run(test, feed=dict(feed), fetch_list=names, scope=scope) if names else []
        if not any(value.size for value in values):
            continue
        for name, value in zip(names, values, strict=True):
            new = _range(value, observer)
            if not np.isfinite(new).all():
                raise ProgramError(f"quantize: %{name} is not finite in a batch of feeds, so it has no range")
            old = ranges.get(name, new)
            wider = np.array([min(old[0], new[0]), max(old[1], new[1])])
            ranges[name] = wider if observer == "min_max" else _KEPT * old + (1 - _KEPT) * new
    if len(ranges) < len(names):
        raise ProgramError("quantize: feeds has no batch with rows, so nothing was observed; give one or more")
    found = {}
    for name, (low, high) in ranges.items():
        scale = float(np.float32((high - low) / 255 or 1.0))
        found[name] = Rounding((scale,), (), float(np.rint(-low / scale)), 0.0, 255.0)
    return found


def _range(value: np.ndarray, observer: str) -> np.ndarray:
    """The least and the largest value that count, with 0."""
    if observer == "percentile" and value.size:
        low, high = np.percentile(value, (_OUTSIDE, 100 - _OUTSIDE))
    else:
        low, high = value.min(initial=0), value.max(initial=0)
    return np.array([min(low, 0), max(high, 0)], np.float64)


@dataclass(frozen=True)
class FakeQuantize(Pass):
    """Products and convolutions read their operands rounded, and with `between` sums and pooling too. `roundings` are pairs (variable,
    Rounding)."""

    roundings: tuple[tuple[str, Rounding], ...]
    between: bool = False
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new, known, made = program.copy(), dict(self.roundings), dict[str, str]()
        block = new.global_block()
        block.oplist, ops = [], block.oplist
        for op in ops:
            if read := self._rounded_operands(op, known):
                for name in read:
                    if name not in made:
                        made[name] = self._rounded(block, op, name, known[name]).name
                op = op.renamed({n: made[n] for n in read})
            block.oplist.append(op)
        return new

    def _rounded_operands(self, op: Operator, known: Mapping[str, Rounding]) -> list[str]:
        if self.between and op.type in _BETWEEN and all(n in known for n in op.input_arg_names):
            return list(dict.fromkeys(op.input_arg_names))
        if op.type not in _WEIGHTS or op.inputs[_WEIGHTS[op.type]][0] not in known:
            return []
        return [n for slot in (_INPUTS[op.type], _WEIGHTS[op.type]) if (n := op.inputs[slot][0]) in known]

    def _rounded(self, block: Block, near: Operator, name: str, how: Rounding) -> Variable:
        b = Builder(block, role=near.role)
        b.site, b.device = near.site, near.device
        zero = b.fill_constant(shape=(), dtype="float32", value=how.zero)
        if how.shape:
            scale = b.assign_value(shape=how.shape, dtype="float32", values=how.scales)
        else:
            scale = b.fill_constant(shape=(), dtype="float32", value=how.scales[0])
        found: Variable = b.fake_quantize(block.var(name), scale, zero, lowest=how.lowest, highest=how.highest, name=f"{name}.rounded")
        return found
