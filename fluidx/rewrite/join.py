"""Many operators as one, forward and backward: what the passes share that join a chain which someone wrote out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from ..ir.errors import ProgramError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator, Role
from ..ir.program import Program
from ..ir.records import Var
from .base import Request, with_ops
from .region import Region, Write, Written, as_it_is, found_in, written
from .values import Values

_SUM = "sum"  # what backward adds the gradients of one value up with


@dataclass
class _Edit:
    """Operators in the place of some, by index, and variables that are new."""

    instead: dict[int, list[Operator]] = field(default_factory=dict)
    declared: dict[str, Var] = field(default_factory=dict)


class Joiner:
    """Collects what is to be joined in a program; `program()` is the result."""

    def __init__(self, program: Program, request: Request):
        self.before, self.values = program, Values(program, request)
        self.ops, self.descs = self.values.ops, self.values.descs
        self.edit = _Edit()

    def program(self) -> Program:
        """The program with all that was joined. Constants that nothing else reads are gone with their readers."""
        if not self.edit.instead:
            return self.before
        made = self.before.copy()
        made.global_block().descs.update(self.edit.declared)
        ops = [new for k, op in enumerate(self.ops) for new in self.edit.instead.get(k, (op,))]
        read = {n for op in (*ops, *(op for b in self.before.blocks[1:] for op in b.oplist)) for n in op.input_arg_names}
        was = {n for k in self.edit.instead for n in self.ops[k].input_arg_names}
        gone = {n for n in was - read if n in self.values.constants.known and not self.values.why_needed(n)}
        return with_ops(made, [op for op in ops if not op.output_arg_names or not gone.issuperset(op.output_arg_names)])

    def taken(self, k: int) -> bool:
        """Is an operator part of what was joined?"""
        return k in self.edit.instead

    def fresh(self, name: str) -> str:
        """A name that is not in use."""
        while name in self.descs or name in self.edit.declared:
            name += "_"
        return name

    def join(self, region: Region, write: Write) -> str:
        """Put what `write` writes in the place of a region, and the gradient of that in the place of its gradients; returns why not."""
        values = self.values
        inner = [n for k in region.ops for n in self.ops[k].output_arg_names if n != region.out]
        if reason := self._why_not(region, inner):
            return reason
        differentiated = False
        for n in inner:
            for k in set(values.uses.get(n, ())).difference(region.ops):
                if not self._differentiates(self.ops[k]):
                    return f"%{n} is read elsewhere"
                differentiated = True
        try:
            edit = self._both(region, inner, write) if differentiated else self._edited(region, written(values, region, write), {})
        except ProgramError as e:
            return str(e).partition("\n")[0]
        if isinstance(edit, str):
            return edit
        self.edit.instead |= edit.instead
        self.edit.declared |= edit.declared
        return ""

    def _differentiates(self, op: Operator) -> bool:
        return op.role is Role.BACKWARD and OPS[op.type].effect is Effect.PURE and not OPS[op.type].bodies

    def _why_not(self, region: Region, inner: Collection[str]) -> str:
        values, ops = self.values, [self.ops[k] for k in region.ops]
        if any(map(self.taken, region.ops)):
            return "some of its operators were joined with others"
        if region.out in values.walk.changing or region.out in values.fed:
            return f"%{region.out} {values.why_needed(region.out)}"
        for n in inner:
            if why := values.why_needed(n):
                return f"%{n} {why}"
            if "error_clip" in self.descs[n].attrs:
                return f"the gradient of %{n} is clipped"
        for op in ops:
            stops = [n for n in op.output_arg_names if n != region.out and self.descs[n].stop_gradient]
            if stops and not all(self.descs[n].stop_gradient for n in op.input_arg_names):
                return f"%{stops[0]} stops gradients"
        if not values.walk.whole(n for op in ops for n in (*op.input_arg_names, *op.output_arg_names)):
            return "ranks hold parts of the values"
        if len({(op.device, op.role) for op in ops}) > 1:
            return "its operators stand on several devices or in several sections"
        return self._changed((*region.inputs,), region.ops[0], region.ops[-1])

    def _changed(self, names: Collection[str], first: int, last: int) -> str:
        changed = [n for n in names if not self.values.unchanged(n, first, last)]
        return f"%{changed[0]} is written in between" if changed else ""

    def _edited(self, region: Region, joined: Written, names: Mapping[str, str]) -> _Edit:
        """The edit with the joined operators at the place of the last one. `names` are those of what is not new."""
        new = {n: names.get(n) or self.fresh(n) for op in joined.forward for n in op.output_arg_names if n not in self.descs}
        edit = _Edit({k: [] for k in region.ops}, {m: joined.descs[n].changed(name=m) for n, m in new.items()})
        edit.instead[region.ops[-1]] = [op.renamed(new, outputs=True) for op in joined.forward]
        return edit

    # -- with gradients -------------------------------------------------------------------------------------------------------------

    def _both(self, region: Region, inner: Collection[str], write: Write) -> _Edit | str:
        """The edit for a region and its gradients."""
        reason = "what reads its values are not its gradients alone"
        for wanted in self._wanted(region):
            try:
                own = written(self.values, region, as_it_is(self.values, region), wanted).without_copies()
            except ProgramError:
                continue
            for names, at in found_in(self.values, own):
                if why := self._why_not_backward(region, inner, own, names, at):
                    reason = why
                    continue
                joined = written(self.values, region, write, wanted, names[own.seed])
                return self._replaced(region, own, names, at, joined)
        return reason

    def _wanted(self, region: Region) -> Iterator[tuple[str, ...]]:
        """Inputs that gradients can have been asked for: first those that are trained or follow from such, then any others."""
        floats = [n for n in region.inputs if self.descs[n].type.is_float]
        likely = tuple(n for n in floats if not self.descs[n].stop_gradient)
        yield likely
        for count in range(len(floats), 0, -1):
            yield from (some for some in combinations(floats, count) if some != likely)

    def _why_not_backward(self, region: Region, inner: Collection[str], own: Written, names: Mapping[str, str], at: set[int]) -> str:
        values, terms = self.values, [names[t] for _, t in own.terms]
        if own.seed in (t for _, t in own.terms):
            return f"the gradient of %{region.out} is one of its inputs', too"
        for n in (*inner, *(names[n] for n in own.made)):
            if n not in terms and not at.issuperset(set(values.uses.get(n, ())).difference(region.ops)):
                return f"%{n} is read elsewhere"
            if n not in terms and (why := values.why_needed(n)):
                return f"%{n} {why}"
        if any(map(self.taken, at)):
            return "some of its gradients were joined with others"
        if len(set(terms)) < len(terms) or any(t in values.walk.changing for t in terms):
            return "a gradient has one name with another"
        if not values.walk.whole(names.values()):
            return "ranks hold parts of the gradients"
        return self._changed((*region.inputs, region.out), region.ops[-1] + 1, max(at)) or self._changed([names[own.seed]], min(at), max(at))

    def _replaced(self, region: Region, own: Written, names: Mapping[str, str], at: set[int], joined: Written) -> _Edit | str:
        """The edit with the gradients of the joined operators at the place of the first that has the gradient of `out`."""
        after = max(region.ops[-1], *self.values.makers.get(names[own.seed], [-1]))
        role_var = {g: p for k in at for p, g in _pairs(self.ops[k])}
        called: dict[str, str] = {}
        sums: dict[int, list[Operator]] = {}
        for name in dict.fromkeys(n for n, _ in own.terms):
            old = [names[t] for n, t in own.terms if n == name]
            new = [t for n, t in joined.terms if n == name]
            if reason := self._added_up(old, new, at, called, sums, role_var):
                return reason
        edit = self._edited(region, joined, called)
        forward = {n: m for a, b in zip(joined.forward, edit.instead[region.ops[-1]]) for n, m in zip(a.output_arg_names, b.output_arg_names)}
        for n in (n for op in joined.backward for n in op.output_arg_names):
            called.setdefault(n, self.fresh(n))
            edit.declared[called[n]] = joined.descs[n].changed(name=called[n])
        ops = [op.renamed({**forward, **called}, outputs=True) for op in joined.backward]
        edit.instead |= {**{k: [] for k in at}, **sums}
        edit.instead[min(k for k in at if k > after)] = [
            op.replace(role_var=tuple(w for n in op.output_arg_names if n in role_var for w in (role_var[n], n))) for op in ops
        ]
        return edit

    def _added_up(
        self, old: list[str], new: list[str], at: set[int], called: dict[str, str], sums: dict[int, list[Operator]], role_var: dict[str, str]
    ) -> str:
        """Have what flows back to one input stand where it did: under its name, or among the terms of a sum. Returns why not."""
        if len(old) == len(new) == 1:
            called[new[0]] = old[0]
            return ""
        readers = {k for n in old for k in self.values.uses.get(n, ())} - at
        (k, *more) = readers or {-1}
        if k < 0 or more or self.ops[k].type != _SUM or any(map(self.values.why_needed, old)) or len(new) > len(old):
            return f"%{old[0]} is read elsewhere"
        add = sums[k][0] if k in sums else self.edit.instead.get(k, [self.ops[k]])[0]
        called.update(zip(new, old))
        (slot,) = add.inputs
        left = tuple(n for n in add.inputs[slot] if n not in old[len(new) :])
        if len(left) > 1:
            sums[k] = [add.replace(inputs={slot: left})]
            return ""
        (total,) = add.output_arg_names
        if total in self.values.walk.changing:
            return f"%{total} {self.values.why_needed(total)}"
        called[new[0]] = total
        role_var.update({g: p for p, g in _pairs(add)})
        sums[k] = []
        return ""


def _pairs(op: Operator) -> Iterator[tuple[str, str]]:
    """(parameter, gradient) that an operator finishes."""
    return zip(op.role_var[::2], op.role_var[1::2])
