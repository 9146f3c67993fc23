"""Averages of parameters over the steps of a training, for evaluation: ExponentialMovingAverage and ModelAverage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._checks import number, whole, wrong
from ..ir import Builder, Parameter, Program, Role, Variable, default_main_program, default_startup_program
from ..lr_scheduler import persistable, unused_name
from .base import fraction


class AppliedAverage:
    """Base of the averages, with two programs: one writes the averages into the parameters, the other restores the parameters' own values.

    Ranks store the averages where parameters are updated. A CompiledProgram copies them to its scope before these programs run. With a
    ParallelExecutor, copy them to one device first: `scope.set(name, parallel_executor.state(name))` for each persistable variable.
    """

    _kind = ""

    def __init__(self) -> None:
        self.label = f"optimizer.{type(self).__name__}"
        self.apply_program = Program(f"{self._kind}_apply")
        self.restore_program = Program(f"{self._kind}_restore")
        self._averaged = False

    def _write_programs(
        self, parameters: Sequence[tuple[Parameter, str]], mean: Callable[[Builder, Parameter, Variable], Variable]
    ) -> None:
        """`parameters` has each parameter with the name of its saved value. `mean(builder, parameter, its value in float32 or float64)`
        writes the average."""
        a, r = Builder(self.apply_program.global_block()), Builder(self.restore_program.global_block())
        for p, saved in parameters:
            for b in (a, r):
                declare_same(b, p)
                b.block.create_var(saved, p.shape, p.dtype, persistable=True, stop_gradient=True)
            a.assign(p, out={"Out": saved})
            wide = average_dtype(p)
            average = mean(a, p, p if p.dtype == wide else a.cast(p, dtype=wide))
            if p.dtype == wide:
                a.assign(average, out={"Out": p.name})
            else:
                a.cast(average, dtype=p.dtype, out={"Out": p.name})
            r.assign(saved, out={"Out": p.name})
        self._averaged = True

    @contextmanager
    def apply(self, executor: Any, need_restore: bool = True) -> Iterator[None]:
        """In the block the parameters have their averages; afterwards, unless `need_restore` is false, their own values."""
        if not self._averaged:
            raise wrong(f"{self.label}: call update() once, after minimize, before apply()")
        executor.run(self.apply_program)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: Any) -> None:
        """Restore the values that the parameters had before `apply`."""
        executor.run(self.restore_program)


class ExponentialMovingAverage(AppliedAverage):
    """Exponential moving averages of the parameters, for evaluation: `update()` after `minimize`, then `with ema.apply(executor): ...`.

    average = decay * average + (1 - decay) * parameter, divided by 1 - decay^steps when applied, since it starts at 0 (Kingma & Ba, 2015).
    With `thres_steps`, a [1] variable that counts steps, the decay is min(decay, (1 + thres_steps) / (10 + thres_steps)).

    Ranks store the averages where parameters are updated. A CompiledProgram copies them to its scope before they are applied. With a
    ParallelExecutor, copy them to one device: `scope.set(name, parallel_executor.state(name))` for each persistable variable.
    """

    _kind = "ema"

    def __init__(self, decay: float = 0.999, thres_steps: Variable | None = None, name: str | None = None):
        super().__init__()
        self.decay = fraction(self.label, "decay", decay)
        self.thres_steps = thres_steps
        self.name = name or ""

    def update(self) -> None:
        """Append the averages' update to the default main program, for each of its trainable parameters."""
        main, startup = default_main_program(), default_startup_program()
        block = main.global_block()
        parameters = [p for p in main.all_parameters() if p.trainable]
        if not parameters:
            raise wrong(f"{self.label}: {main.label()} has no trainable parameters to average")
        if self._averaged:
            raise wrong(f"{self.label}: update() was called before; make another average for another program")
        b = Builder(block, role=Role.OPTIMIZE)
        decay = b.fill_constant(shape=(1,), dtype="float32", value=self.decay)
        if self.thres_steps is not None:
            t = self.thres_steps if self.thres_steps.dtype == "float32" else b.cast(self.thres_steps, dtype="float32")
            decay = b.elementwise_min(decay, b.elementwise_div(b.scale(t, bias=1.0), b.scale(t, bias=10.0)))
        # the product of all decays so far: 1 minus it is the total weight of the averages
        left = persistable(block, startup, unused_name(block, startup, f"{self.name}ema_decay_pow"), (1,), "float32", 1.0)
        b.elementwise_mul(left, decay, out={"Out": left})
        averages: dict[str, Variable] = {}
        for p in parameters:
            name = unused_name(block, startup, f"{p.name}_{self.name}ema")
            e = averages[p.name] = persistable(block, startup, name, p.shape, average_dtype(p), 0.0, state_of=p.name)
            b.ema_update(p, e, decay, out={"EmaOut": e})
        a = Builder(self.apply_program.global_block())
        declare_same(a, left)
        none_yet = a.cast(a.greater_equal(left, a.fill_constant(shape=(1,), dtype="float32", value=1.0)), dtype="float32")
        # before the first update the weight is 0: divide by 1 instead, and keep the parameters
        weight = a.elementwise_add(a.scale(left, scale=-1.0, bias=1.0), none_yet)

        def mean(a: Builder, p: Parameter, value: Variable) -> Variable:
            e = averages[p.name]
            declare_same(a, e)
            narrow, keep = (v if e.dtype == "float32" else a.cast(v, dtype=e.dtype) for v in (weight, none_yet))
            return a.elementwise_add(a.elementwise_div(e, narrow), a.elementwise_mul(value, keep))

        self._write_programs([(p, f"{averages[p.name].name}.saved") for p in parameters], mean)


class ModelAverage(AppliedAverage):
    """The mean of each parameter over the last runs, for evaluation: create it after `minimize`, then `with average.apply(executor): ...`.

    The window is `average_window_rate` times the number of runs, at least `min_average_window` and at most `max_average_window` runs. A
    full window is kept until the next one is full, so a mean covers one to two windows. Parameters with `ParamAttr(do_model_average=False)`
    are left out.
    """

    _kind = "model_average"

    def __init__(
        self,
        average_window_rate: float,
        min_average_window: int = 10000,
        max_average_window: int = 10000,
        regularization: Any = None,
        name: str | None = None,
    ):
        super().__init__()
        self.average_window = number(self.label, "average_window_rate", average_window_rate)
        self.min_average_window = whole(self.label, "min_average_window", min_average_window, 1)
        self.max_average_window = whole(self.label, "max_average_window", max_average_window, 1)
        main, startup = default_main_program(), default_startup_program()
        block, prefix = main.global_block(), name or "model_average"
        parameters = [p for p in main.all_parameters() if p.trainable and p.desc.attrs.get("do_model_average", True)]
        if not parameters:
            raise wrong(f"{self.label}: {main.label()} has no trainable parameters to average")
        b = Builder(block, role=Role.OPTIMIZE)
        runs, count, before = (
            persistable(block, startup, unused_name(block, startup, f"{prefix}_{k}"), (1,), "float32", 0.0)
            for k in ("num_updates", "num_accumulates", "old_num_accumulates")
        )
        for v in (runs, count):
            b.increment(v, step=1.0, out={"Out": v})
        least, most = (b.fill_constant(shape=(1,), dtype="float32", value=float(v)) for v in (min_average_window, max_average_window))
        window = b.elementwise_max(least, b.elementwise_min(most, b.scale(runs, scale=self.average_window)))
        sums = {p.name: [self._sum(p, prefix, k, startup) for k in ("sum", "old_sum")] for p in parameters}
        for p in parameters:
            now = sums[p.name][0]
            b.elementwise_add(now, p if p.dtype == now.dtype else b.cast(p, dtype=now.dtype), out={"Out": now})
        full = b.greater_equal(count, window)
        for now, old in (*sums.values(), (count, before)):  # selected one by one, because each may be stored at another root
            b.where(full, now, old, out={"Out": old})
            b.where(full, b.fill_zeros_like(now), now, out={"Out": now})

        def mean(a: Builder, p: Parameter, value: Variable) -> Variable:
            both = [*sums[p.name], count, before]
            for v in both:
                declare_same(a, v)
            now, old, *counts = both
            total = a.elementwise_add(*counts)
            return a.elementwise_div(a.elementwise_add(now, old), total if now.dtype == "float32" else a.cast(total, dtype=now.dtype))

        self._write_programs([(p, f"{p.name}_{prefix}.saved") for p in parameters], mean)

    @staticmethod
    def _sum(p: Parameter, prefix: str, key: str, startup: Program) -> Variable:
        block = p.block.program.global_block()
        name = unused_name(block, startup, f"{p.name}_{prefix}_{key}")
        return persistable(block, startup, name, p.shape, average_dtype(p), 0.0, state_of=p.name)


def average_dtype(p: Variable) -> str:
    """The dtype of an average."""
    return "float64" if p.dtype == "float64" else "float32"


def declare_same(b: Builder, v: Variable) -> None:
    """Declare `v` in another program as the same state variable."""
    b.block.create_var(v.name, v.shape, v.dtype, persistable=True, stop_gradient=True)
