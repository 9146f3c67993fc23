"""Learning rates that change with the step, written as operators with role LR_SCHED over one counter, `@LR_DECAY_COUNTER@`.

The counter starts at 0 in the first run and grows by one per run. Every schedule returns a float32 variable of shape [1], to be given to
an optimizer as `learning_rate`. Formulas are fluid 1.8's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from ._checks import number, whole, wrong
from .ir import (
    REPLICATE,
    Block,
    Builder,
    Operator,
    Program,
    Role,
    TensorType,
    Var,
    Variable,
    default_main_program,
    default_startup_program,
    unique_name,
)

COUNTER = "@LR_DECAY_COUNTER@"


def _schedule(write: Callable[..., Variable]) -> Callable[..., Variable]:
    """Run a schedule's body with everything it appends marked as LR_SCHED."""

    @wraps(write)
    def schedule(*args: Any, **kwargs: Any) -> Variable:
        with default_main_program().role_guard(Role.LR_SCHED):
            return write(*args, **kwargs)

    return schedule


@_schedule
def noam_decay(d_model: int, warmup_steps: int, learning_rate: float | Variable = 1.0) -> Variable:
    """learning_rate * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), steps counted from 1 (Vaswani et al., 2017)."""
    d_model, warmup_steps = whole("noam_decay", "d_model", d_model, 1), whole("noam_decay", "warmup_steps", warmup_steps, 1)
    b, step = _step(begin=1)
    lowest = b.elementwise_min(b.pow(step, factor=-0.5), b.scale(step, scale=warmup_steps**-1.5))
    return _times(b, b.scale(lowest, scale=d_model**-0.5), "noam_decay", learning_rate)


@_schedule
def exponential_decay(learning_rate: float | Variable, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate * decay_rate^(step / decay_steps); with `staircase` the exponent is rounded down."""
    rate = number("exponential_decay", "decay_rate", decay_rate)
    b, ratio = _ratio("exponential_decay", decay_steps, staircase)
    base = b.fill_constant(shape=(1,), dtype="float32", value=rate)
    return _times(b, b.elementwise_pow(base, ratio), "exponential_decay", learning_rate)


@_schedule
def natural_exp_decay(learning_rate: float | Variable, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate * exp(-decay_rate * step / decay_steps); with `staircase` step / decay_steps is rounded down."""
    rate = number("natural_exp_decay", "decay_rate", decay_rate)
    b, ratio = _ratio("natural_exp_decay", decay_steps, staircase)
    return _times(b, b.exp(b.scale(ratio, scale=-rate)), "natural_exp_decay", learning_rate)


@_schedule
def inverse_time_decay(learning_rate: float | Variable, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate / (1 + decay_rate * step / decay_steps); with `staircase` step / decay_steps is rounded down."""
    rate = number("inverse_time_decay", "decay_rate", decay_rate)
    b, ratio = _ratio("inverse_time_decay", decay_steps, staircase)
    return b.elementwise_div(_rate(b, "inverse_time_decay", learning_rate), b.scale(ratio, scale=rate, bias=1.0))


@_schedule
def polynomial_decay(
    learning_rate: float | Variable, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Variable:
    """(learning_rate - end_learning_rate) * (1 - step / decay_steps)^power + end_learning_rate.

    The rate stays at its end after `decay_steps`; with `cycle` the period is lengthened to the next multiple of `decay_steps` instead.
    """
    steps = whole("polynomial_decay", "decay_steps", decay_steps, 1)
    end, power = number("polynomial_decay", "end_learning_rate", end_learning_rate), number("polynomial_decay", "power", power)
    b, step = _step()
    if cycle:
        one = b.fill_constant(shape=(1,), dtype="float32", value=1.0)
        ratio = b.elementwise_div(step, b.fill_constant(shape=(1,), dtype="float32", value=float(steps)))
        periods = b.elementwise_max(b.ceil(ratio), one)  # step 0 belongs to the first period
        done = b.elementwise_div(step, b.scale(periods, scale=float(steps)))
    else:
        last = b.fill_constant(shape=(1,), dtype="float32", value=float(steps))
        done = b.scale(b.elementwise_min(step, last), scale=1.0 / steps)
    left = b.pow(b.scale(done, scale=-1.0, bias=1.0), factor=power)
    if isinstance(learning_rate, Variable):
        return b.scale(b.elementwise_mul(b.scale(learning_rate, bias=-end), left), bias=end)
    return b.scale(left, scale=number("polynomial_decay", "learning_rate", learning_rate) - end, bias=end)


@_schedule
def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Variable:
    """values[i] while step < boundaries[i], the last value afterwards; there is one value more than boundaries."""
    limits = [whole("piecewise_decay", f"boundaries[{i}]", v) for i, v in enumerate(boundaries)]
    rates = [number("piecewise_decay", f"values[{i}]", v) for i, v in enumerate(values)]
    if len(rates) != len(limits) + 1:
        raise wrong(f"piecewise_decay: {len(limits)} boundaries need {len(limits) + 1} values, got {len(rates)}")
    if limits != sorted(set(limits)):
        raise wrong(f"piecewise_decay: boundaries must grow, got {limits}")
    b, step = _step()
    # no branch: how many boundaries were passed is the index of the value
    if not limits:
        return b.fill_constant(shape=(1,), dtype="float32", value=rates[0])
    bounds = b.assign_value(shape=(len(limits),), dtype="float32", values=limits)
    passed = b.cast(b.less_equal(bounds, step), dtype="int64")
    index = b.reduce_sum(passed, dim=(0,), keep_dim=True)
    return b.gather(b.assign_value(shape=(len(rates),), dtype="float32", values=rates), index)


@_schedule
def cosine_decay(learning_rate: float | Variable, step_each_epoch: int, epochs: int) -> Variable:
    """learning_rate * (cos(epoch * pi / epochs) + 1) / 2, epoch being step / step_each_epoch rounded down (Loshchilov & Hutter, 2017)."""
    epochs = whole("cosine_decay", "epochs", epochs, 1)
    b, epoch = _ratio("cosine_decay", step_each_epoch, True, "step_each_epoch")
    wave = b.cos(b.scale(epoch, scale=math.pi / epochs))
    return _times(b, b.scale(wave, scale=0.5, bias=0.5), "cosine_decay", learning_rate)


@_schedule
def linear_lr_warmup(learning_rate: float | Variable, warmup_steps: int, start_lr: float, end_lr: float) -> Variable:
    """From start_lr to end_lr in a straight line over `warmup_steps` steps, then `learning_rate`, which may be another schedule."""
    steps = whole("linear_lr_warmup", "warmup_steps", warmup_steps, 1)
    start, end = number("linear_lr_warmup", "start_lr", start_lr), number("linear_lr_warmup", "end_lr", end_lr)
    b, step = _step()
    limit = b.fill_constant(shape=(1,), dtype="float32", value=float(steps))
    warm = b.scale(step, scale=(end - start) / steps, bias=start)
    return b.where(b.less_than(step, limit), warm, _rate(b, "linear_lr_warmup", learning_rate))


def autoincreased_step_counter(counter_name: str | None = None, begin: int = 1, step: int = 1) -> Variable:
    """An int64 variable of shape [1] that is `begin` in the first run and grows by `step` per run; made once per program and name."""
    name = counter_name or "@STEP_COUNTER@"
    begin, step = whole("autoincreased_step_counter", "begin", begin), whole("autoincreased_step_counter", "step", step)
    return _counter(default_main_program(), default_startup_program(), name, begin, step)


def _counter(main: Program, startup: Program, name: str, begin: int, step: int) -> Variable:
    block = main.global_block()
    if block.has_var(name):
        return block.var(name)
    counter = persistable(block, startup, name, (1,), "int64", begin - step)
    Builder(block).increment(counter, step=float(step), out={"Out": counter})
    return counter


def unused_name(block: Block, startup: Program, key: str) -> str:
    """The next name for `key` that neither program declares, whatever `unique_name.guard` they were written under."""
    return unique_name.generate(key, lambda name: block.has_var(name) or startup.global_block().has_var(name))


Fills = dict[tuple[tuple[int, ...], str, float], Operator]


def persistable(
    block: Block, startup: Program, name: str, shape: Sequence[int], dtype: str, value: float, fills: Fills | None = None, **attrs: Any
) -> Variable:
    """A persistable variable of `block` without a gradient, and the operator in `startup` that gives it its first value.

    `fills` caches these operators, so that equal ones are made once.
    """
    shape, begin = tuple(shape), startup.global_block()
    record = Var(name, block.program.shared(TensorType(dtype, shape)), REPLICATE, True, True, False, False, attrs)
    for b in (block, begin):
        if name in b.descs:
            b.create_var(name, shape, dtype)  # refuses another type
        else:
            b.declare(record)
    outputs: dict[str, tuple[str, ...]] = {"Out": (name,)}
    fill = None if fills is None else fills.get((shape, dtype, value))
    if fill is not None:
        begin.repeat(fill, {}, outputs)
    else:
        fill = begin.write("fill_constant", {}, outputs, {"shape": shape, "dtype": dtype, "value": value})
        if fills is not None:
            fills[shape, dtype, value] = fill
    return block.var(name)


def _step(begin: int = 0) -> tuple[Builder, Variable]:
    """A builder, and the step as float32, `begin` in the first run."""
    main = default_main_program()
    counter = _counter(main, default_startup_program(), COUNTER, 0, 1)
    b = Builder(main.current_block())
    step = b.cast(counter, dtype="float32")
    return b, b.scale(step, bias=float(begin)) if begin else step


def _ratio(owner: str, steps: int, floor: bool, what: str = "decay_steps") -> tuple[Builder, Variable]:
    """A builder, and step / steps, rounded down if asked."""
    steps = whole(owner, what, steps, 1)
    b, step = _step()
    # a true division: step * (1 / steps) may fall just short of a whole number, which `floor` would turn into the one below
    ratio = b.elementwise_div(step, b.fill_constant(shape=(1,), dtype="float32", value=float(steps)))
    return b, b.floor(ratio) if floor else ratio


def _rate(b: Builder, owner: str, learning_rate: float | Variable) -> Variable:
    """A learning rate given as a number or as a variable, as a variable."""
    if isinstance(learning_rate, Variable):
        return learning_rate
    return b.fill_constant(shape=(1,), dtype="float32", value=number(owner, "learning_rate", learning_rate))


def _times(b: Builder, factor: Variable, owner: str, learning_rate: float | Variable) -> Variable:
    if isinstance(learning_rate, Variable):
        return b.elementwise_mul(factor, learning_rate)
    return b.scale(factor, scale=number(owner, "learning_rate", learning_rate))
