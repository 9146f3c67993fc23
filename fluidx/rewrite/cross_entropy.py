"""Softmax and the cross entropy of its result as one operator, forward and backward: the loss then never takes the logarithm of 0."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.builder import Builder
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program
from .join import Joiner
from .region import Region, Use


@named
@dataclass(frozen=True, repr=False)
class JoinCrossEntropy(Pass):
    """softmax, then cross_entropy, as softmax_with_cross_entropy, with their gradients.

    Values change: where a probability rounds to 0 the loss of both is 1e20, that of one is right, and a gradient of 0 or NaN is what it
    should be; elsewhere they differ by rounding. The probabilities keep their name. Left alone are values that parts of ranks hold, a
    softmax along another axis, and one that has gradients from elsewhere too.
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        joiner = Joiner(program, job)
        for k, op in enumerate(joiner.ops):
            if op.type == "cross_entropy" and (reason := _joined(joiner, k, op)):
                job.log.append(f"{type(self).__name__} kept {op.to_string()}: {reason}")
        return joiner.program()


def _joined(joiner: Joiner, k: int, loss: Operator) -> str:
    """Join one loss with the softmax that it reads; returns why not."""
    (p,), (label,), (y,), values = loss.inputs["X"], loss.inputs["Label"], loss.outputs["Y"], joiner.values
    at = values.maker(p)
    if at is None or values.ops[at].type != "softmax" or joiner.taken(at):
        return f"%{p} is not made by a softmax that it has for itself"
    (x,), axis = values.ops[at].inputs["X"], values.ops[at].attrs["axis"]
    if axis not in (-1, len(values.shape(x)) - 1):
        return f"the softmax is along axis {axis}, cross entropy along the last one"
    if any(len(values.makers.get(n, ())) > 1 for n in (x, label, y)) or any(j > at for j in values.makers.get(label, ())):
        return f"%{x}, %{label} or %{y} has another value at the softmax"

    def write(b: Builder, use: Use) -> None:
        logits, labels = (b.block.var(use(n)) for n in (x, label))
        b.softmax_with_cross_entropy(logits, labels, out={"Softmax": p, "Loss": y}, **loss.attrs)

    return joiner.join(Region((at, k), y, (x, label), kept=(p,)), write)
