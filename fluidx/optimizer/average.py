"""Averages of parameters over the steps of a training, to evaluate with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._checks import wrong
from ..ir import Builder, Parameter, Program, Role, Variable, default_main_program, default_startup_program
from ..lr_scheduler import persistable, unused_name
from .base import fraction


class ExponentialMovingAverage:
    """Decaying averages of the parameters, to evaluate with: `update()` after `minimize`, then `with ema.apply(executor): ...`.

    average = decay * average + (1 - decay) * parameter, divided by 1 - decay^steps when applied, since it starts at 0 (Kingma & Ba, 2015).
    With `thres_steps`, a [1] variable that counts steps, the decay is min(decay, (1 + thres_steps) / (10 + thres_steps)).

    Ranks keep the averages where parameters are updated. To apply them, take what they hold to one device:
    `scope.set(name, parallel_executor.state(name))` for each persistable variable.
    """

    def __init__(self, decay: float = 0.999, thres_steps: Variable | None = None, name: str | None = None):
        self.decay = fraction("optimizer.ExponentialMovingAverage", "decay", decay)
        self.thres_steps = thres_steps
        self.name = name or ""
        self.apply_program = Program("ema_apply")
        self.restore_program = Program("ema_restore")
        self._averages: dict[str, Variable] = {}

    def update(self) -> None:
        """Append the averages' update to the default main program, for each of its trainable parameters."""
        main, startup = default_main_program(), default_startup_program()
        block = main.global_block()
        parameters = [p for p in main.all_parameters() if p.trainable]
        if not parameters:
            raise wrong(f"optimizer.ExponentialMovingAverage: {main.label()} has no trainable parameters to average")
        if self._averages:
            raise wrong("optimizer.ExponentialMovingAverage: update() was called before; make another average for another program")
        b = Builder(block, role=Role.OPTIMIZE)
        decay = b.fill_constant(shape=(1,), dtype="float32", value=self.decay)
        if self.thres_steps is not None:
            t = self.thres_steps if self.thres_steps.dtype == "float32" else b.cast(self.thres_steps, dtype="float32")
            decay = b.elementwise_min(decay, b.elementwise_div(b.scale(t, bias=1.0), b.scale(t, bias=10.0)))
        # the product of all decays so far: 1 minus it is the weight that the averages hold
        left = persistable(block, startup, unused_name(block, startup, f"{self.name}ema_decay_pow"), (1,), "float32", 1.0)
        b.elementwise_mul(left, decay, out={"Out": left})
        for p in parameters:
            dtype = "float64" if p.dtype == "float64" else "float32"
            name = unused_name(block, startup, f"{p.name}_{self.name}ema")
            e = persistable(block, startup, name, p.shape, dtype, 0.0, state_of=p.name)
            b.ema_update(p, e, decay, out={"EmaOut": e})
            self._averages[p.name] = e
        self._write_programs(parameters, left)

    def _write_programs(self, parameters: Sequence[Parameter], left: Variable) -> None:
        a, r = Builder(self.apply_program.global_block()), Builder(self.restore_program.global_block())
        _same(a, left)
        none_yet = a.cast(a.greater_equal(left, a.fill_constant(shape=(1,), dtype="float32", value=1.0)), dtype="float32")
        # before the first update the weight is 0: divide by 1 instead, and keep the parameters
        weight = a.elementwise_add(a.scale(left, scale=-1.0, bias=1.0), none_yet)
        for p in parameters:
            e = self._averages[p.name]
            for b in (a, r):
                _same(b, p)
                b.block.create_var(f"{e.name}.saved", p.shape, p.dtype, persistable=True, stop_gradient=True)
            _same(a, e)
            a.assign(p, out={"Out": f"{e.name}.saved"})
            narrow, keep = (v if e.dtype == "float32" else a.cast(v, dtype=e.dtype) for v in (weight, none_yet))
            wide = p if p.dtype == e.dtype else a.cast(p, dtype=e.dtype)
            mean = a.elementwise_add(a.elementwise_div(e, narrow), a.elementwise_mul(wide, keep))
            if p.dtype == e.dtype:
                a.assign(mean, out={"Out": p.name})
            else:
                a.cast(mean, dtype=p.dtype, out={"Out": p.name})
            r.assign(f"{e.name}.saved", out={"Out": p.name})

    @contextmanager
    def apply(self, executor: Any, need_restore: bool = True) -> Iterator[None]:
        """Inside the block the parameters hold their averages; afterwards, unless `need_restore` is false, their own values."""
        if not self._averages:
            raise wrong("optimizer.ExponentialMovingAverage: call update() once, after minimize, before apply()")
        executor.run(self.apply_program)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: Any) -> None:
        """Give the parameters back the values they had before `apply`."""
        executor.run(self.restore_program)


def _same(b: Builder, v: Variable) -> None:
    """Declare `v` in another program, as the same persistable."""
    b.block.create_var(v.name, v.shape, v.dtype, persistable=True, stop_gradient=True)
