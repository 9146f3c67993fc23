"""Softmax and the cross entropy of its result as one operator, forward and backward: the loss then never takes the logarithm of 0."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import flow
from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.program import Program
from .base import Request, Rewrite, with_ops


@dataclass(frozen=True, repr=False)
class JoinCrossEntropy(Rewrite):
    """softmax, then cross_entropy, as softmax_with_cross_entropy, with their gradients.

    Values change: where a probability rounds to 0 the loss of both is 1e20, that of one is right, and a gradient of 0 or NaN is what it
    should be; elsewhere they differ by rounding. The probabilities keep their name. Left alone are values that parts of ranks hold, a
    softmax along another axis, and one that has gradients from elsewhere too.
    """

    def run(self, program: Program, request: Request) -> Program:
        joiner = _Joiner(program, request)
        for op in program.global_block().oplist:
            if op.type == "cross_entropy" and (reason := joiner.join(op)):
                request.log.append(f"{type(self).__name__} kept {op.to_string()}: {reason}")
        if not joiner.instead:
            return program
        return with_ops(program, [new for op in program.global_block().oplist for new in joiner.instead.get(id(op), (op,))])


class _Joiner:
    def __init__(self, program: Program, request: Request):
        self.ops = program.global_block().oplist
        self.descs = program.global_block().descs
        self.given = request.fed
        self.makers, self.uses = flow.definitions(program), flow.uses(program)
        self.instead: dict[int, tuple[Operator, ...]] = {}  # by id of an operator

    def join(self, loss: Operator) -> str:
        """Join one loss with the softmax that it reads, and their gradients; returns why not."""
        (p,), (label,), (y,) = loss.inputs["X"], loss.inputs["Label"], loss.outputs["Y"]
        softmax = self._maker(p)
        if softmax is None or softmax.type != "softmax" or id(softmax) in self.instead:
            return f"%{p} is not made by a softmax that it has for itself"
        (x,), (out,) = softmax.inputs["X"], loss.outputs["Y"]
        if softmax.attrs["axis"] not in (-1, self.descs[x].type.ndim - 1):
            return f"the softmax is along axis {softmax.attrs['axis']}, cross entropy along the last one"
        at = self.makers[p][0]
        if any(len(self.makers.get(n, ())) > 1 for n in (x, label, out)) or any(k > at for k in self.makers.get(label, ())):
            return f"%{x}, %{label} or %{out} has another value at the softmax"
        if any((d := self.descs.get(n)) is not None and d.placement for n in (x, p, label, out)):
            return "ranks hold parts of the values"
        backward = [k for k in self.uses.get(p, ()) if self.ops[k].type in ("cross_entropy_grad", "softmax_grad")]
        pair = self._gradients(p, y, [self.ops[k] for k in backward]) if backward else ()
        if pair is None:
            return f"%{p} has gradients from elsewhere too"
        attrs = opdef("softmax_with_cross_entropy").complete_attrs(loss.attrs)
        self.instead[id(softmax)] = (
            loss.replace(
                type="softmax_with_cross_entropy",
                inputs={"Logits": (x,), "Label": (label,)},
                outputs={"Softmax": (p,), "Loss": (y,)},
                attrs=attrs,
            ),
        )
        self.instead[id(loss)] = ()
        if pair:
            self._join_gradients(p, *pair)
        return ""

    def _gradients(self, p: str, y: str, found: list[Operator]) -> tuple[Operator, Operator] | None:
        """The two gradient operators, of which the second reads the first's result and nothing else does."""
        if [op.type for op in found] != ["cross_entropy_grad", "softmax_grad"]:
            return None
        first, second = found
        (g,), ys = first.outputs["X@GRAD"], first.inputs
        alone = self._maker(g) is first and self.uses.get(g) is not None and [self.ops[k] for k in self.uses[g]] == [second]
        same = ys["X"] == second.inputs["Out"] == (p,) and second.inputs["Out@GRAD"] == (g,)
        unchanged = all(len(self.makers.get(n, ())) <= 1 for n in (*ys["Label"], *ys["Y@GRAD"]))
        return (first, second) if alone and same and unchanged and g not in self.given else None

    def _join_gradients(self, p: str, first: Operator, second: Operator) -> None:
        ins = {"Softmax": (p,), "Label": first.inputs["Label"], "Loss@GRAD": first.inputs["Y@GRAD"]}
        attrs = opdef("softmax_with_cross_entropy_grad").complete_attrs(first.attrs)
        outs = {"Logits@GRAD": second.outputs["X@GRAD"]}
        self.instead[id(first)] = ()
        self.instead[id(second)] = (second.replace(type="softmax_with_cross_entropy_grad", inputs=ins, outputs=outs, attrs=attrs),)

    def _maker(self, name: str) -> Operator | None:
        """The only operator that makes a value; None for a fed one."""
        made = self.makers.get(name, [])
        return self.ops[made[0]] if len(made) == 1 and name not in self.given else None
