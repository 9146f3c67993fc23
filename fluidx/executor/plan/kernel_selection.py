"""Kernel selection: each operator of a plan gets the first kernel body in its op's table that supports the layouts of the operands.

Asking the bodies costs more time than the rest of planning. So their answers are cached for the process: other sizes of a program, other
ranks, and other programs with the same operators get them without asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.constants import arrays_in
from ...ir.opdef import OpDef
from ...ir.operator import Frozen, Operator
from ...ir.parts import Part
from ...ir.types import TensorType
from ...ops.kernels import KernelBody, bodies
from ..context import RunContext
from .fusion import covers
from .shadows import LayoutKeys
from .storage import PlanNode, StorageAssignment

_MOST = 1 << 16  # entries of one cache of answers
_NEXT = count(1)  # numbers are never reused, also after a cache is cleared


class _Kept(NamedTuple):
    """Bodies by op and operand layouts; scratch types by op, body and exact sizes."""

    bodies: dict[tuple, KernelBody]
    scratch: dict[tuple, Sequence[TensorType]]


class KernelAnswers:
    """A cache of the kernel bodies' answers, on one device and for one choice of kernels.

    Keys are numbers. Each stands for one op with attributes and slots, or for one layout. Objects that are numbered by identity are kept
    alive, so that their ids are not reused; equal attributes need not be the same object. Attributes that hold arrays are not kept: the
    cache of a process would keep their memory.
    """

    def __init__(self) -> None:
        self._heads: dict[tuple, tuple[int, bool, Frozen]] = {}
        self._types: dict[int, tuple[TensorType, LayoutKeys]] = {}
        self._ways: dict[tuple, int] = {}
        self.kept = _Kept({}, {})

    @staticmethod
    def of(device: str, natively: bool) -> KernelAnswers:
        key = device, natively, native.chosen() if natively else ()
        found = _ANSWERS.get(key)
        if found is None or max(len(found._types), len(found._ways), len(found.kept.bodies), len(found.kept.scratch)) > _MOST:
            found = _ANSWERS[key] = KernelAnswers()
        return found

    def head(self, op: Operator, definition: type[OpDef]) -> tuple[int, bool]:
        """The number of an op with these attributes and slots; and whether its kernels treat all sizes above 1 alike."""
        ins, outs = op.inputs, op.outputs
        key = (definition, id(op.attrs), *ins, *outs)
        if len(ins) != len(op.input_arg_names) or len(outs) != len(op.output_arg_names):
            key = (*key, *map(len, ins.values()), *map(len, outs.values()))
        known = self._heads.get(key)
        if known is None:
            said = definition.native.any_size
            known = next(_NEXT), bool(said(op.attrs) if callable(said) else said), op.attrs
            if next(arrays_in(op.attrs.values()), None) is None:
                known = self._heads.setdefault(key, known)
        return known[0], known[1]

    def plain(self, types: Mapping[str, TensorType]) -> dict[str, LayoutKeys]:
        """The layout keys of values of these types, each in its own storage."""
        layouts, found = self._types, {}
        for name, t in types.items():
            known = layouts.get(id(t))
            if known is None or known[0] is not t:
                exact = next(_NEXT)
                # the strides of an empty array mean nothing
                rough = exact if 0 in t.shape else self._way((t.dtype, tuple([d if d < 2 else 2 for d in t.shape])))
                known = layouts[id(t)] = t, LayoutKeys(exact, rough)
            found[name] = known[1]
        return found

    def view(self, a: np.ndarray) -> LayoutKeys:
        """The layout key of a view: every size counts."""
        way = self._way((a.dtype, a.shape, a.strides))
        return LayoutKeys(way, way)

    def _way(self, key: tuple) -> int:
        return self._ways.get(key) or self._ways.setdefault(key, next(_NEXT))


_ANSWERS: dict[tuple, KernelAnswers] = {}


class PartChoice(NamedTuple):
    """The body chosen for an operator whose kernel depends on which part of the global values its operands are. Operands are kept as shape,
    dtype and strides, so that a cached plan holds no memory."""

    op: Operator
    table: Sequence[KernelBody]
    body: KernelBody
    attrs: Mapping[str, Any]
    ins: Any
    outs: Any

    def holds(self, ctx: RunContext, part: Part | None) -> bool:
        """Would the same body be chosen for this part?"""
        ins, outs = _stand_in(self.ins), _stand_in(self.outs)
        return next(body for body in self.table if body.covers(ins, outs, self.attrs, ctx, part)) is self.body


def _layout(a: Any) -> Any:
    return list(map(_layout, a)) if isinstance(a, list) else None if a is None else (a.shape, a.dtype, a.strides)


def _stand_in(layout: Any) -> Any:
    """An array of this layout whose elements must not be accessed."""
    if isinstance(layout, list) or layout is None:
        return layout and list(map(_stand_in, layout))
    shape, dtype, strides = layout
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)


class Chooser:
    """Chooses a kernel body for every operator of a plan."""

    def __init__(self, storage: StorageAssignment, device: str, natively: bool, answers: KernelAnswers, layouts: dict[str, LayoutKeys]):
        self.storage, self.device, self.natively = storage, device, natively
        self._answers = answers
        self._of_context = _Kept({}, {})  # answers that depend on the rank and its communicator
        self.of_parts: list[PartChoice] = []
        for n in (*storage.view_of, *storage.strided):
            if (a := storage.shadow[n]) is not storage.shadows.of(storage.types[n]):  # only if its layout differs from the plain one
                layouts[n] = self._answers.view(a)
        self._exact = {n: keys.exact for n, keys in layouts.items()}
        self._rough = {n: keys.rough for n, keys in layouts.items()}

    def kernel(self, node: PlanNode) -> str:
        """The kernel of a step (see `Step`). If a body of its op runs, storage is reserved for the scratch that the body needs."""
        definition, here = node.definition, node.here
        if node.made:
            return node.made
        if len(node.ops) > 1 or self.natively and definition.arithmetic.sums_products:
            self._straighten(node)
        if len(node.ops) > 1 and not definition.native.tail:
            return "fused"
        if definition.control.bind is not None:
            return "control"
        if here is not None and (here.skip or here.fills):
            return "nothing" if here.skip else "fill"
        copied = bool(node.scratch)  # copies that do not follow from the types alone, unlike those of `widen`
        asks = copied or here is not None and here.part is not None
        if self.storage.halves and len(node.ops) == 1 and self.storage.has_halves(node):
            taken = self._body(node) if asks else self._known_body(node)[0]
            if taken.name != "native":  # there is no C kernel for the 16-bit operands themselves
                self.storage.widen(node, self.device)
        asks = asks or node.here is not here
        body, scratch = self._choose(node) if asks else self._known(node)
        for t in scratch:
            self.storage.add_scratch(node, t)
        return body.name if len(node.ops) == 1 else "fused"

    def _straighten(self, node: PlanNode) -> None:
        """If no call supports the layouts of a chain's operands, or those of a product or convolution, because they are views, copy them to
        contiguous scratch first."""
        storage = self.storage
        made = {n for op in node.ops for n in op.output_arg_names}
        moved = [n for op in node.ops for n in op.input_arg_names if n not in made and storage.moved(n)]
        lying = [n for n in moved if not storage.shadow[n].flags.c_contiguous]
        if not lying:
            return
        if len(node.ops) > 1:
            taken = covers(node.ops, [n for n in made if n in storage.roots], storage.shadow.__getitem__, storage.dtype)
        else:
            widened = storage.halves and storage.has_halves(node)  # that copies them, too
            taken = widened or node.definition.native.calls is None or self._known_body(node)[0].name == "native"
        for n in () if taken else dict.fromkeys(lying):
            storage.add_scratch(node, storage.types[n], n, reads=True)

    def _known_body(self, node: PlanNode) -> tuple[KernelBody, _Kept, Any]:
        """The cached choice for operands of these layouts, the cache that has it, and the key of the operator there."""
        op, definition = node.op, node.definition
        of_rank = definition.native_takes_ctx or definition.storage.view_ctx is not None or node.here is not None
        known = self._of_context if of_rank else self._answers.kept
        names, (number, any_size) = op.input_arg_names + op.output_arg_names, self._answers.head(op, definition)
        # with scratch, operands are widened; the plan keeps `here` alive
        head = (number, bool(node.scratch)) if node.here is None else (number, bool(node.scratch), id(node.here))
        if callable(definition.native.any_size) and self.storage.halves and self.storage.has_halves(node):
            any_size = False  # the answer was for float32: which 16-bit images are taken as they are depends on more (conv_native.py)
        key = (head, *map((self._rough if any_size and node.here is None else self._exact).__getitem__, names))
        body = known.bodies.get(key)
        if body is None:
            body = known.bodies[key] = self._body(node)
        return body, known, head

    def _known(self, node: PlanNode) -> tuple[KernelBody, Sequence[TensorType]]:
        """The cached choice for operands of these layouts, and the body's scratch for these sizes."""
        body, known, head = self._known_body(node)
        if body.scratch is None:
            return body, ()
        sized = (head, body.name, *map(self._exact.__getitem__, node.op.input_arg_names + node.op.output_arg_names))
        scratch = known.scratch.get(sized)
        if scratch is None:
            scratch = known.scratch[sized] = self.storage.asked(node, body)
        return body, scratch

    # -- questions to bodies ------------------------------------------------------------------------------------------------

    def _choose(self, node: PlanNode) -> tuple[KernelBody, Sequence[TensorType]]:
        body = self._body(node)
        return body, self.storage.asked(node, body)

    def _body(self, node: PlanNode) -> KernelBody:
        """The first body that supports the layouts of the operands."""
        table = bodies(node.definition, self.device, self.natively)
        if len(table) == 1 and (node.here is None or node.here.part is None):
            return table[0]
        ins, outs = self.storage.operands(node)
        attrs, part = (node.op.attrs, None) if node.here is None else (node.here.attrs, node.here.part)
        chosen = next(body for body in table if body.covers(ins, outs, attrs, self.storage.ctx, part))
        if part is not None:
            self.of_parts.append(PartChoice(node.op, table, chosen, attrs, _layout(ins), _layout(outs)))
        return chosen
