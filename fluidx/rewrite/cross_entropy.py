"""JoinCrossEntropy: replace softmax and cross_entropy by one operator, forward and backward, which never takes the logarithm of 0."""

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
    """Replace softmax followed by cross_entropy, with their gradients, by softmax_with_cross_entropy. Values change: if a probability
    rounds to 0, the two operators give the loss 1e20 and a gradient of 0 or NaN, and the one operator gives the correct loss and gradient;
    elsewhere they differ by rounding. The probabilities keep their name. The pass leaves values of which ranks hold parts, a softmax along
    another axis, and a softmax that has gradients from other operators.
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        joiner = Joiner(program, job)
        for k, op in enumerate(joiner.ops):
            if op.type == "cross_entropy" and (reason := _joined(joiner, k, op)):
                job.log.append(f"{type(self).__name__} kept {op.to_string()}: {reason}")
        return joiner.program()


def _joined(joiner: Joiner, k: int, loss: Operator) -> str:
    """Join one loss with the softmax that it reads; returns the reason if it cannot."""
    (p,), (label,), (y,), values = loss.inputs["X"], loss.inputs["Label"], loss.outputs["Y"], joiner.values
    at = values.maker(p)
    if at is None or values.ops[at].type != "softmax" or joiner.taken(at):
        return f"%{p} is not the result of a softmax that only this operator reads"
    (x,), axis = values.ops[at].inputs["X"], values.ops[at].attrs["axis"]
    if axis not in (-1, len(values.shape(x)) - 1):
        return f"the softmax is along axis {axis}, cross entropy along the last one"
    if any(len(values.makers.get(n, ())) > 1 for n in (x, label, y)) or any(j > at for j in values.makers.get(label, ())):
        return f"%{x}, %{label} or %{y} is written more than once, or after the softmax"

    def write(b: Builder, use: Use) -> None:
        logits, labels = (b.block.var(use(n)) for n in (x, label))
        b.softmax_with_cross_entropy(logits, labels, out={"Softmax": p, "Loss": y}, **loss.attrs)

    return joiner.join(Region((at, k), y, (x, label), kept=(p,)), write)
