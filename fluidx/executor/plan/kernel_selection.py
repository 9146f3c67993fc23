"""Which body computes each operator of a plan: the first of its op's table that covers the operands as they lie.

Asking the bodies costs more than the rest of a plan, so what they answered is kept with the program, for its plans of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.opdef import OpDef
from ...ir.operator import Frozen, Operator
from ...ir.parts import Part
from ...ir.program import Program
from ...ir.types import TensorType
from ...ops.kernels import KernelBody, bodies
from ..context import RunContext
from .fusion import covers
from .shadows import LayoutKeys
from .storage import PlanNode, Storage

_MOST = 1 << 14  # answers that one program keeps, and some more for each of its operators
_NEXT = count(1)  # no number is given twice, whoever forgets what it stood for


class _Kept(NamedTuple):
    """The body by its op and how the operands lie; its scratch by the body too, and by sizes."""

    bodies: dict[tuple, KernelBody]
    scratch: dict[tuple, Sequence[TensorType]]


class KernelAnswers:
    """What bodies answered of the operands of a program's operators, on one device and by one choice of kernels.

    Keys are made of numbers, each of which stands for one thing as long as the program lives: an op with attributes and slots, or a way
    to lie. What is numbered by identity is held, so that nothing else gets its id; equal attributes need not be the same.
    """

    def __init__(self) -> None:
        self._ops: dict[int, tuple[Operator, type[OpDef], int, bool]] = {}
        self._heads: dict[tuple, tuple[int, Frozen]] = {}
        self._types: dict[int, tuple[TensorType, LayoutKeys]] = {}
        self._ways: dict[tuple, int] = {}
        self.kept = _Kept({}, {})

    @staticmethod
    def of(program: Program, device: str, natively: bool) -> KernelAnswers:
        key = KernelAnswers, device, natively, native.chosen() if natively else ()
        found, most = program.notes.get(key), _MOST + 8 * len(program.global_block().oplist)
        if found is None or sum(map(len, (found._ops, found._types, found._ways, *found.kept))) > most:
            found = program.notes[key] = KernelAnswers()
        return found

    def head(self, op: Operator, definition: type[OpDef]) -> tuple[int, bool]:
        """The number of an op with these attributes and slots, and whether its kernels cover all sizes above 1 alike."""
        known = self._ops.get(id(op))
        if known is None or known[0] is not op or known[1] is not definition:
            ins, outs = op.inputs, op.outputs
            key = (definition, id(op.attrs), *ins, *outs, *map(len, ins.values()), *map(len, outs.values()))
            number, _ = self._heads.setdefault(key, (next(_NEXT), op.attrs))
            said = definition.native_any_size
            known = self._ops[id(op)] = op, definition, number, said(op.attrs) if callable(said) else said
        return known[2], known[3]

    def plain(self, types: Mapping[str, TensorType]) -> dict[str, LayoutKeys]:
        """How values of these types lie in storage of their own."""
        layouts, found = self._types, {}
        for name, t in types.items():
            known = layouts.get(id(t))
            if known is None or known[0] is not t:
                exact = next(_NEXT)
                # the strides of what has no elements say nothing
                rough = exact if 0 in t.shape else self._way((t.dtype, tuple([d if d < 2 else 2 for d in t.shape])))
                known = layouts[id(t)] = t, LayoutKeys(exact, rough)
            found[name] = known[1]
        return found

    def view(self, a: np.ndarray) -> LayoutKeys:
        """How a view lies, for which every size counts."""
        way = self._way((a.dtype, a.shape, a.strides))
        return LayoutKeys(way, way)

    def _way(self, key: tuple) -> int:
        return self._ways.get(key) or self._ways.setdefault(key, next(_NEXT))


class PartChoice(NamedTuple):
    """The body that was chosen for an operator whose kernel depends on which part of the whole its operands are. Of these there is no more
    than their shape, dtype and strides: a plan that is kept holds no memory."""

    op: Operator
    table: Sequence[KernelBody]
    body: KernelBody
    attrs: Mapping[str, Any]
    ins: Any
    outs: Any

    def holds(self, ctx: RunContext, part: Part | None) -> bool:
        """Is it the choice for another part, too?"""
        ins, outs = _stand_in(self.ins), _stand_in(self.outs)
        return next(body for body in self.table if body.covers(ins, outs, self.attrs, ctx, part)) is self.body


def _layout(a: Any) -> Any:
    return list(map(_layout, a)) if isinstance(a, list) else None if a is None else (a.shape, a.dtype, a.strides)


def _stand_in(layout: Any) -> Any:
    """An array of this layout whose elements nobody may touch."""
    if isinstance(layout, list) or layout is None:
        return layout and list(map(_stand_in, layout))
    shape, dtype, strides = layout
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)


class Chooser:
    """Chooses a body for every operator of a plan."""

    def __init__(self, storage: Storage, device: str, natively: bool, answers: KernelAnswers, layouts: dict[str, LayoutKeys]):
        self.storage, self.device, self.natively = storage, device, natively
        self._answers = answers
        self._of_context = _Kept({}, {})  # answers that hang on the rank and its communicator
        self.of_parts: list[PartChoice] = []
        for n in (*storage.view_of, *storage.strided):
            if (a := storage.shadow[n]) is not storage.shadows.of(storage.types[n]):  # not one that lies as if it were none
                layouts[n] = self._answers.view(a)
        self._exact = {n: lie.exact for n, lie in layouts.items()}
        self._rough = {n: lie.rough for n, lie in layouts.items()}

    def kernel(self, node: PlanNode) -> str:
        """What is done for an operator; where a body of its op runs, the scratch that this body asks for gets a place."""
        definition, here = node.definition, node.here
        if node.made:
            return node.made
        if len(node.ops) > 1:
            self._straighten(node)
            if not definition.native_tail:
                return "fused"
        if definition.bind_control is not None:
            return "control"
        if here is not None and (here.skip or here.fills):
            return "nothing" if here.skip else "fill"
        aside = bool(node.scratch)  # copies that do not follow from the types, as those of `widen` do
        if self.storage.halves:
            self.storage.widen(node, self.device)
        body, scratch = self._choose(node) if aside or node.here is not None else self._known(node)
        for t in scratch:
            self.storage.add_scratch(node, t)
        return body.name if len(node.ops) == 1 else "fused"

    def _straighten(self, node: PlanNode) -> None:
        """Where views make the operands of a chain lie as no call takes them, they are copied to one piece first."""
        storage = self.storage
        made = {n for op in node.ops for n in op.output_arg_names}
        moved = [n for op in node.ops for n in op.input_arg_names if n not in made and storage.moved(n)]
        lying = [n for n in moved if not storage.shadow[n].flags.c_contiguous]
        if lying and not covers(node.ops, [n for n in made if n in storage.roots], storage.shadow.__getitem__):
            for n in dict.fromkeys(lying):
                storage.add_scratch(node, storage.types[n], n, reads=True)

    def _known(self, node: PlanNode) -> tuple[KernelBody, Sequence[TensorType]]:
        """What was chosen where operands lay like this, and the scratch that the body asks for where they had these sizes."""
        op, definition = node.op, node.definition
        known = self._answers.kept if not definition.native_takes_ctx and definition.view_ctx is None else self._of_context
        names, (head, any_size) = op.input_arg_names + op.output_arg_names, self._answers.head(op, definition)
        key = (head, *map((self._rough if any_size else self._exact).__getitem__, names))
        body = known.bodies.get(key)
        if body is None:
            body = known.bodies[key] = self._body(node)
        if body.scratch is None:
            return body, ()
        sized = (head, body.name, *map(self._exact.__getitem__, names))
        scratch = known.scratch.get(sized)
        if scratch is None:
            scratch = known.scratch[sized] = self.storage.asked(node, body)
        return body, scratch

    # -- questions to bodies ------------------------------------------------------------------------------------------------

    def _choose(self, node: PlanNode) -> tuple[KernelBody, Sequence[TensorType]]:
        body = self._body(node)
        return body, self.storage.asked(node, body)

    def _body(self, node: PlanNode) -> KernelBody:
        """The first body that covers the operands as they lie."""
        table = bodies(node.definition, self.device, self.natively)
        if len(table) == 1:
            return table[0]
        ins, outs = self.storage.operands(node)
        attrs, part = (node.op.attrs, None) if node.here is None else (node.here.attrs, node.here.part)
        chosen = next(body for body in table if body.covers(ins, outs, attrs, self.storage.ctx, part))
        if part is not None:
            self.of_parts.append(PartChoice(node.op, table, chosen, attrs, _layout(ins), _layout(outs)))
        return chosen
