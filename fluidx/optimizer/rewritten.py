"""Base of optimizers that rewrite gradients between the backward pass and the updates, with state of their own."""

from __future__ import annotations

from collections.abc import Sequence

from .._checks import wrong
from ..initializer import Normal
from ..ir import Block, Builder, Operator, Parameter, Program, Role, Variable
from ..ir.source_location import call_site
from ..lr_scheduler import persistable, unused_name
from .base import ParamsGrads
from .wrapped import WrappedOptimizer


class RewritingOptimizer(WrappedOptimizer):
    """Base of optimizers that replace the gradients of the backward pass. A subclass defines `rewrite`."""

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        pairs = [(p, g) for p, g in params_grads if g is not None]
        if not pairs:
            raise wrong(f"{self.label}: there are no gradients to apply")
        block = pairs[0][1].block
        start = len(block.oplist)
        self.rewrite(Rewriting(self, block, startup), pairs)
        return block.oplist[start:]

    def rewrite(self, step: Rewriting, pairs: ParamsGrads) -> None:
        """Append the operators that compute new gradients, and with `step.update` the inner optimizer's updates."""
        raise NotImplementedError(f"{type(self).__name__} does not define how it rewrites gradients")


class Rewriting:
    """The argument of `RewritingOptimizer.rewrite`: a builder, state, and marks of the operators that finish a gradient."""

    def __init__(self, optimizer: RewritingOptimizer, block: Block, startup: Program):
        self.optimizer, self.block, self.startup = optimizer, block, startup
        self.first = block.program.global_block()
        self.site = call_site()
        self.b = self.builder(block)
        self._devices: dict[str, str] = {}

    def builder(self, block: Block, *finished: str) -> Builder:
        """A builder of operators that finish the gradients in `finished`, [param, grad]."""
        b = Builder(block, Role.OPTIMIZE, finished)
        b.site = self.site
        return b

    def state(self, p: Parameter, key: str, shape: Sequence[int] | None = None) -> Variable:
        """A state variable `<p>_<key>_0` with the shape of the parameter, initialized to 0; float32 for 16-bit parameters."""
        name = unused_name(self.first, self.startup, f"{p.name}_{key}")
        return persistable(self.first, self.startup, name, p.shape if shape is None else shape, state_dtype(p), 0.0, state_of=p.name)

    def copied_state(self, p: Parameter, key: str) -> Variable:
        """A state variable that the startup program initializes with the parameter's value."""
        name = unused_name(self.first, self.startup, f"{p.name}_{key}")
        begin = self.startup.global_block()
        for block in (self.first, begin):
            block.create_var(name, p.shape, state_dtype(p), persistable=True, stop_gradient=True, state_of=p.name)
        b = Builder(begin)
        if state_dtype(p) == p.dtype:
            b.assign(begin.var(p.name), out={"Out": name})
        else:
            b.cast(begin.var(p.name), dtype=state_dtype(p), out={"Out": name})
        return self.first.var(name)

    def random_state(self, p: Parameter, key: str, shape: Sequence[int]) -> Variable:
        """A state variable of the given shape, initialized from the standard normal distribution."""
        begin = self.startup.global_block()
        name = unused_name(self.first, self.startup, f"{p.name}_{key}")
        for block in (self.first, begin):
            block.create_var(name, shape, state_dtype(p), persistable=True, stop_gradient=True, state_of=p.name)
        Normal()(self.first.var(name), begin)
        return self.first.var(name)

    def every(self, k: int, key: str) -> Variable:
        """Is this run a k-th one? A state variable of that name counts the runs."""
        runs = persistable(self.first, self.startup, unused_name(self.first, self.startup, key), (1,), "int64", 0)
        self.b.increment(runs, step=1.0, out={"Out": runs})
        each, none = (self.b.fill_constant(shape=(1,), dtype="int64", value=float(v)) for v in (k, 0))
        return self.b.equal(self.b.elementwise_mod(runs, each), none)

    def unmark_finished(self, pairs: ParamsGrads) -> None:
        """Remove the marks of the operators that finished these gradients: parameters are updated with other gradients."""
        taken = {(p.name, g.name) for p, g in pairs}
        self.block.program._touch()
        for k, op in enumerate(self.block.oplist):
            marks = [*zip(op.role_var[::2], op.role_var[1::2], strict=True)]
            kept = [mark for mark in marks if mark not in taken]
            if len(kept) < len(marks):
                self.block.oplist[k] = op.replace(role_var=tuple(n for mark in kept for n in mark))
                self._devices.update({p: op.device for p, _ in marks if op.device})

    def finisher(self, block: Block, p: Parameter, name: str) -> Builder:
        """A builder whose operator writes `name`, the finished gradient of parameter p."""
        b = self.builder(block, p.name, name)
        b.device = self._devices.get(p.name)
        return b

    def update(self, pairs: ParamsGrads) -> None:
        """Append the inner optimizer's updates."""
        self.optimizer._optimizer._apply(pairs, self.startup)


def state_dtype(p: Variable) -> str:
    """The dtype of a parameter's state."""
    return "float64" if p.dtype == "float64" else "float32"
