"""Automatic mixed precision (amp): rewrite a program so that operators that may compute in 16 bits do so.

An operator's declaration says in which precision it computes: 16 bits, float32 or any. Each of its operands is read in that precision, from
an existing copy or from a new cast; a value is cast once. Weights and statistics of norms are read in float32 in any case.
An operator that takes any precision follows its operands: it computes in float32
if one of them was computed in float32, else in 16 bits if one of them has 16 bits. Parameters, data and constants do not count.

A value computed in 16 bits becomes a 16-bit variable. Some names must stay float32: state, data, variables that are written twice,
loop-carried values, variables that operators of other sections touch, and final gradients. There the 16-bit value gets a new name, and the
old name is a cast back. Bodies of branches and loops are rewritten in the same way (ir/form_walk.py).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import flow
from ..ir.conversions import Conversions, Order
from ..ir.dtypes import HALVES
from ..ir.errors import ProgramError, nearest
from ..ir.form_walk import FormWalk
from ..ir.forms import FormChoice, Held, Names
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Operator, Role
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Block, Program
from ..ir.source_location import wrong
from ..ir.sub_blocks import runs_bodies
from ..ir.types import TensorType
from ..ir.var import Var
from .amp_lists import AutoMixedPrecisionLists

WIDE = "float32"
FORWARD = (Role.FORWARD, Role.LOSS)
TRAINING = (*FORWARD, Role.BACKWARD)


@named
@dataclass(frozen=True, repr=False)
class Amp(Pass):
    """Matrix products in 16 bits, operators that need range or precision in float32: forward and backward operators as they declare.

    Parameters, the optimizer's state and finished gradients stay float32, and so do updates. `lists` are exceptions to the declarations.
    A program that has gradients already can be rewritten for bfloat16, which has the range of float32; float16 needs a scaled loss, which
    `mixed_precision.decorate` adds with the gradients. See docs/precision.md.
    """

    dtype: str = "bfloat16"
    lists: AutoMixedPrecisionLists | None = None
    requires = (ONE_DEVICE,)

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise wrong(f"amp: unknown dtype {self.dtype!r}; {nearest(str(self.dtype), HALVES, 'there are')}")

    def rewrite(self, program: Program, job: Job) -> Program:
        if self.dtype == "float16" and any(op.role is Role.BACKWARD for op in program.global_block().oplist):
            raise wrong(
                f"amp: {program.label()} has gradients, which vanish in float16 without a scaled loss; take amp{{dtype=bfloat16}}, or "
                "train with mixed_precision.decorate(optimizer), which scales the loss"
            )
        made = program.copy()
        cast_program(made, self.lists or AutoMixedPrecisionLists(), self.dtype, TRAINING)
        return made

    def conversions(self) -> Conversions:
        return Casts(self.lists or AutoMixedPrecisionLists(), self.dtype)


class Casts(Conversions):
    """The conversions of this rewrite, for the proof: casts between float32 and 16 bits, and operators that read the dtype they declare."""

    def __init__(self, lists: AutoMixedPrecisionLists, dtype: str, roles: Container[Role] = TRAINING):
        self.lists, self.dtype, self.roles = lists, dtype, roles

    def converts(self, op: Operator, block: Block) -> Order | None:
        if op.type != "cast":
            return None
        types = [block.desc(n).type for n in (*op.input_arg_names, *op.output_arg_names)]
        return () if all(t.__class__ is TensorType and t.dtype in (WIDE, *HALVES) for t in types) else None

    def misfit(self, before: Operator, after: Operator, block: Block, made: Block) -> str:
        said = self.lists.of(before) if before.role in self.roles else "float32"
        definition = opdef(after.type)
        if said == "any" and not definition.autocast.wide or definition.storage.same_variable or definition.rewrite.constant:
            return ""
        for slot, m, n in zip(_slots(after, definition), before.input_arg_names, after.input_arg_names, strict=True):
            was, found = block.desc(m).type.dtype, made.desc(n).type.dtype
            is_wide = slot in definition.autocast.wide
            works_in = self.dtype if said == "half" and not is_wide else WIDE
            if was == WIDE and found != works_in and (is_wide or said != "any"):
                return f"works in {works_in} and reads %{n} in {found}"
        return ""


def cast_program(program: Program, lists: AutoMixedPrecisionLists, dtype: str, roles: Container[Role] = FORWARD) -> None:
    """Rewrite operators of these roles in place. Raises ProgramError if one of them cannot compute in `dtype`."""
    unknown = next((n for n in lists.black_varnames if not program.declares(n)), None)
    if unknown is not None:
        has = nearest(unknown, program.global_block().descs, "it has")
        raise ProgramError(f"custom_black_varnames: {program.label()} has no variable {unknown!r}; {has}")
    program._touch()
    _Dtypes(program, lists, dtype, roles).run()


class _Dtypes(FormWalk):
    """The walk over dtypes. The forms are float32, the 16-bit dtype for values that this rewrite narrowed, and "" for all other values,
    which stay as they are: only values that the rewrite narrowed are widened. A value's mark is the dtype in which it was computed, 16 bits
    or float32; None if no operator computed it."""

    def __init__(self, program: Program, lists: AutoMixedPrecisionLists, dtype: str, roles: Container[Role]):
        super().__init__(program)
        self.lists, self.dtype, self.roles, self.fixed = lists, dtype, roles, _fixed(program, roles)

    def stored(self, d: Var) -> str | None:
        return self.given(d) if d.name in self.fixed else None

    def given(self, d: Var) -> str:
        return WIDE if d.type.__class__ is TensorType and d.type.dtype == WIDE else ""

    def enters(self, op: Operator) -> bool:
        return op.role in self.roles

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        if op.role not in self.roles:
            return None
        works_in = self._works_in(op, definition)
        wide = () if works_in == WIDE else definition.autocast.wide
        slots = _slots(op, definition, len(ins))
        wanted = [(WIDE if slot in wide else works_in) if n is not None and works_in and self.held(n).forms[0] else None
                  for slot, n in zip(slots, ins, strict=True)]  # fmt: skip
        in_names = {n: form for n, form in zip(ins, wanted, strict=True) if n is not None}
        types = {s: [self._type(n, in_names[n]) for n in names] for s, names in op.inputs.items()}
        try:
            made = definition.infer_outputs(types, op.attrs)
        except ProgramError as e:
            at = f"\n  written at {op.site}" if op.site else ""
            raise ProgramError(f"mixed precision in {self.dtype}: {e}; put {op.type!r} into custom_black_list{at}") from None
        by_name: dict[str, Held] = {}
        for slot, found in zip(definition.out_slots, made, strict=True):
            for n, t in zip(op.outputs.get(slot.name, ()), found if isinstance(found, list) else [found]):
                by_name[n] = self._made(n, t, works_in)
        return FormChoice.of(wanted, [Held(("",)) if n is None else by_name[n] for n in outs])

    def _works_in(self, op: Operator, definition: type[OpDef]) -> str:
        """The dtype in which an operator computes; "" if it takes any and none of its operands was computed."""
        if definition.storage.same_variable:  # its result is its first operand, whose dtype does not change
            first = op.input_arg_names[0]
            return self._type(first).dtype if self.held(first).forms[0] else ""
        if definition.rewrite.constant:  # the result depends only on the sizes of its operands
            return ""
        said = self.lists.of(op)
        if said != "any":
            return self.dtype if said == "half" else WIDE
        wide = definition.autocast.wide
        found = {self.held(n).mark for s, names in op.inputs.items() if s not in wide for n in names if self._type(n).is_float}
        return next((d for d in (WIDE, self.dtype) if d in found), "")

    def _type(self, name: str, form: str | None = None) -> Any:
        """The current type of a value, or its type in `form`. The declarations are updated at the end of a block."""
        t = self.block.desc(name).type
        form = form or self.home.get(name)
        return t.with_dtype(form) if form and t.dtype != form else t

    def _made(self, name: str, made: TensorType, works_in: str) -> Held:
        """The form and mark of a result to which the op's type rule gives the type `made`."""
        half, d = made.__class__ is TensorType and made.dtype == self.dtype, self.block.desc(name)
        mark = (self.dtype if half else WIDE) if works_in else None
        return Held((self.dtype if half and d.type.dtype != self.dtype else self.given(d),), mark)

    def common(self, op: Operator, out: str, held: Sequence[tuple[str, Held]]) -> Held:
        """16 bits if all branches computed the result in 16 bits."""
        first = held[0][1]
        half = all(h.forms[0] and h.mark == self.dtype for _, h in held)
        form = self.dtype if half and out not in self.home else WIDE if first.forms[0] else ""
        return Held((form,), first.mark if half else None)

    def convert(self, name: str, source: str, target: str, want: str, near: Operator) -> None:
        role = Role.FORWARD if near.role in FORWARD else near.role
        attrs = opdef("cast").complete_attrs({"dtype": want})
        self.out.append(
            near.replace(type="cast", inputs={"X": (source,)}, outputs={"Out": (target,)}, attrs=attrs, role=role, role_var=())
        )

    def declared(self, d: Var, form: str) -> Var:
        return d if form in ("", d.type.dtype) else d.changed(type=d.type.with_dtype(form))

    def copy(self, d: Var, form: str) -> Var:
        return Var(d.name, d.type.with_dtype(form), stop_gradient=d.stop_gradient)

    def numbered(self, k: int) -> str:
        return f"_{k}"


def _slots(op: Operator, definition: type[OpDef], count: int = -1) -> list[str]:
    """The slot of each operand; of `count` operands, absent ones are among them."""
    absent = count > len(op.input_arg_names)
    return [s.name for s in definition.in_slots for _ in op.inputs.get(s.name, ()) or (("",) if absent and not s.many else ())]


def _fixed(program: Program, roles: Container[Role]) -> set[str]:
    """The names of variables that keep their type."""
    fixed = {d.name for block in program.blocks for d in block.descs.values() if d.persistable or d.is_data}
    seen: set[str] = set()
    for block in program.blocks:
        for op in block.oplist:
            reads, writes = flow.touches(program, op)
            if op.role not in roles:
                fixed.update(reads, writes)
            if runs_bodies(op):
                fixed.update(n for idx in op.sub_blocks() for n in flow.sub_writes(program, program.blocks[idx]))
            fixed.update(op.role_var, (n for n in writes if n in seen))
            seen.update(writes)
    return fixed
