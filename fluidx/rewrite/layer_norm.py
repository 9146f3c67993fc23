"""JoinLayerNorm: replace layer normalization written as means, differences and roots by one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.builder import Builder
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program
from ..ops.expr.nodes import sqrt
from ..ops.math.reduction import kept_shape, reduced_axes
from .formula import Form
from .join import Joiner
from .region import Region, Use
from .values import OPEN, Chain, ChainValues

_MEAN = "reduce_mean"
_SQUARES = Form(lambda x, mean: (x - mean) ** 2, given=("x", "mean"))
_NORMALIZED = Form(
    lambda x, mean, variance, scale, shift, *, epsilon: (x - mean) / sqrt(variance + epsilon) * scale + shift,
    given=("x", "mean", "variance"),
    neutral={"scale": 1.0, "shift": 0.0},
)


@named
@dataclass(frozen=True, repr=False)
class JoinLayerNorm(Pass):
    """Replace the mean over the last axes, the difference from it, the mean of the squares, and the division by its root by layer_norm.

    All spellings are found: squares, products or powers; division by roots or multiplication by reciprocal roots; factors in any order;
    means that keep their axes or drop them. A factor and a term that follow and have the size of the normalized axes become Scale and Bias.
    The chain's gradient operators become the gradient of layer_norm. Results differ by rounding.

    The pass leaves a chain as it is if another operator, a fetch or a feed uses a value inside it, if ranks hold parts of its values, if
    the axes are not the last ones, or if a value inside it has gradients from other operators.
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        joiner = Joiner(program, job)
        for k, op in enumerate(joiner.ops):
            if op.type == _MEAN and not joiner.taken(k) and (reason := _joined(joiner, op)):
                job.log.append(f"{type(self).__name__} kept {op.to_string()}: {reason}")
        return joiner.program()


@dataclass(frozen=True)
class _Norm:
    """The parameters of a normalization: the names of Scale and Bias, and epsilon."""

    axis: int
    epsilon: float
    scale: str | None
    shift: str | None


def _joined(joiner: Joiner, mean: Operator) -> str:
    """Join the longest possible chain that starts at one mean; returns the reason if it cannot. The reason is empty if no variance
    follows."""
    (x,), (m,), values = mean.inputs["X"], mean.outputs["Out"], joiner.values
    axes = _axes(values, mean)
    row = kept_shape(values.shape(x), axes)
    squares = [n for n, known in Chain(values, x, {m: row}).known.items() if _SQUARES.match(known.formula, {"x": x, "mean": m}) is not None]
    variances = [
        j for n in squares for j in values.uses.get(n, ()) if values.ops[j].type == _MEAN and _axes(values, values.ops[j]) == axes
    ]  # fmt: skip
    if not variances:
        return ""
    (v,) = values.ops[variances[0]].outputs["Out"]
    ndim = len(values.shape(x))
    if not axes[0] or axes != tuple(range(axes[0], ndim)):
        return f"the axes {list(axes)} of %{x} are not its last ones, after at least one other"
    chain = Chain(values, x, {m: row, v: row})
    given, reason = {"x": x, "mean": m, "variance": v}, f"%{v} does not become the root by which %{x} - %{m} is divided"
    reasons = []
    for n in reversed(chain.known):
        for found in _NORMALIZED.matches(chain.known[n].formula, given):
            norm = _Norm(axes[0], found["epsilon"], found.get("scale"), found.get("shift"))  # type: ignore[arg-type]
            why = _why_not(chain, n, norm) or _join(joiner, chain, n, x, norm)
            if not why:
                return ""
            reasons.append(why)
    return reasons[0] if reasons else reason


def _axes(values: ChainValues, op: Operator) -> tuple[int, ...]:
    return reduced_axes(op.type, op.attrs["dim"], len(values.shape(op.inputs["X"][0])))


def _why_not(chain: Chain, out: str, norm: _Norm) -> str:
    if chain.known[out].shape != chain.like:
        return f"%{out} does not have the shape of the normalized value"
    rest = (*(1,) * norm.axis, *chain.like[norm.axis :])
    for n in (norm.scale, norm.shift):
        if n is not None and (chain.others[n] != rest or OPEN in rest):
            return f"%{n} does not have the size of the normalized axes"
    return "" if norm.epsilon > 0 else f"epsilon is {norm.epsilon}"


def _join(joiner: Joiner, chain: Chain, out: str, x: str, norm: _Norm) -> str:
    ops, inputs = tuple(chain.operators(out)), tuple(n for n in (x, norm.scale, norm.shift) if n is not None)
    mean, variance = joiner.fresh(f"{out}.mean"), joiner.fresh(f"{out}.variance")

    def write(b: Builder, use: Use) -> Any:
        def flat(name: str | None) -> Any:
            if name is None:
                return None
            w = b.block.var(use(name))
            return w if w.ndim == 1 else b.reshape(w, shape=(-1,), name=joiner.fresh(f"{name}.flat"))

        weights = flat(norm.scale), flat(norm.shift)
        to = {"Y": out, "Mean": mean, "Variance": variance}
        b.layer_norm(b.block.var(use(x)), *weights, out=to, begin_norm_axis=norm.axis, epsilon=norm.epsilon)

    return joiner.join(Region(ops, out, inputs), write)
