"""Joiner: replace a chain of operators by one operator, forward and backward. The passes JoinAttention and others share it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from ..ir.errors import ProgramError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator, Role
from ..ir.pass_base import Job
from ..ir.program import Program
from ..ir.unique_name import unused
from ..ir.var import Var
from .base import with_ops
from .region import Region, Write, Written, as_it_is, found_in, written
from .values import ChainValues

_SUM = "sum"  # the op with which backward adds up the gradients of one value


@dataclass
class _Edit:
    """Replacements of operators, by index, and new variables."""

    instead: dict[int, list[Operator]] = field(default_factory=dict)
    declared: dict[str, Var] = field(default_factory=dict)


class Joiner:
    """Collects the chains to be joined in a program; `program()` returns the new program."""

    def __init__(self, program: Program, job: Job):
        self.before, self.values = program, ChainValues(program, job)
        self.ops, self.descs = self.values.ops, self.values.descs
        self.edit = _Edit()
        self.names = set(self.descs)

    def program(self) -> Program:
        """The program with all joins. Constants that only joined operators read are removed."""
        if not self.edit.instead:
            return self.before
        made = self.before.copy()
        made.global_block().descs.update(self.edit.declared)
        ops = [new for k, op in enumerate(self.ops) for new in self.edit.instead.get(k, (op,))]
        return with_ops(made, self._without_lost_constants(ops))

    def _without_lost_constants(self, ops: list[Operator]) -> list[Operator]:
        lost = {n for k in self.edit.instead for n in self.ops[k].input_arg_names}
        read = {n for b in self.before.blocks[1:] for op in b.oplist for n in op.input_arg_names}
        left = []
        for op in reversed(ops):
            outs = op.output_arg_names
            free = all(n in lost and n in self.values.constants.known and not self.values.why_needed(n) for n in outs)
            if outs and free and read.isdisjoint(outs):
                lost.update(op.input_arg_names)
                continue
            left.append(op)
            read.update(op.input_arg_names)
        left.reverse()
        return left

    def taken(self, k: int) -> bool:
        """Was an operator joined?"""
        return k in self.edit.instead

    def fresh(self, name: str) -> str:
        """An unused name."""
        name = unused(name, self.names, "_".__mul__)
        self.names.add(name)
        return name

    def join(self, region: Region, write: Write) -> str:
        """Replace a region by the operators that `write` writes, and the region's gradients by theirs; returns the reason if it cannot.
        Values that `write` makes beside the region's results have names from `fresh`.
        """
        values, results = self.values, (region.out, *region.kept)
        inner = [n for k in region.ops for n in self.ops[k].output_arg_names if n not in results]
        if reason := self._why_not(region, inner):
            return reason
        differentiated = ""
        for n in (*inner, *region.kept):
            for k in set(values.uses.get(n, ())).difference(region.ops):
                if self._differentiates(self.ops[k]):
                    differentiated = differentiated or n
                elif n in inner:
                    return f"%{n} is read elsewhere"
        try:
            if differentiated:
                edit = self._both(region, inner, write) or f"%{differentiated} has gradients from other operators too"
            else:
                edit = self._edited(region, written(values, region, write))
        except ProgramError as e:
            return str(e).partition("\n")[0]
        if isinstance(edit, str):
            return edit
        self.edit.instead |= edit.instead
        self.edit.declared |= edit.declared
        return ""

    def _differentiates(self, op: Operator) -> bool:
        return op.role is Role.BACKWARD and OPS[op.type].effect is Effect.PURE and not OPS[op.type].control.bodies

    def _why_not(self, region: Region, inner: Collection[str]) -> str:
        values, ops = self.values, [self.ops[k] for k in region.ops]
        if any(map(self.taken, region.ops)):
            return "some of its operators were joined with others"
        for n in (region.out, *region.kept):
            if n in values.walk.changing or n in values.fed:
                return f"%{n} {values.why_needed(n)}"
        for n in inner:
            if why := values.why_needed(n):
                return f"%{n} {why}"
        for op in ops:
            for n in set(op.output_arg_names) - {region.out}:
                if "error_clip" in self.descs[n].attrs:
                    return f"the gradient of %{n} is clipped"
                stops = self.descs[n].stop_gradient and self.descs[n].type.is_float
                if stops and not all(self.descs[i].stop_gradient for i in op.input_arg_names):
                    return f"%{n} stops gradients"
        if not values.walk.whole(n for op in ops for n in (*op.input_arg_names, *op.output_arg_names)):
            return "ranks hold parts of the values"
        if len({op.device for op in ops}) > 1 or len({op.role for op in ops} - {Role.LOSS}) > 1:
            return "its operators are on several devices or in several sections"
        return self._changed(region.inputs, region.ops[0], region.ops[-1])

    def _changed(self, names: Collection[str], first: int, last: int) -> str:
        changed = [n for n in names if not self.values.unchanged(n, first, last)]
        return f"%{changed[0]} is written in between" if changed else ""

    def _edited(self, region: Region, joined: Written) -> _Edit:
        """The edit for the forward operators."""
        new = [n for op in joined.forward for n in op.output_arg_names if n not in self.descs]
        edit = _Edit({k: [] for k in region.ops}, {n: joined.descs[n] for n in new})
        edit.instead[region.at] = joined.forward
        return edit

    # -- with gradients -------------------------------------------------------------------------------------------------------------

    def _both(self, region: Region, inner: Collection[str], write: Write) -> _Edit | str:
        """The edit for a region and its gradients; or the reason, which is empty if the gradients are not found."""
        reason = ""
        for wanted in self._wanted(region):
            try:
                own = written(self.values, region, as_it_is(self.values, region), wanted).without_copies()
            except ProgramError:
                continue
            for names, at in found_in(self.values, own):
                found = _Found(own, names, at)
                reason = self._why_not_backward(region, inner, found)
                if not reason:
                    return self._replaced(region, found, written(self.values, region, write, wanted, names[own.seed]))
        return reason

    def _wanted(self, region: Region) -> Iterator[tuple[str, ...]]:
        """Sets of inputs that may need gradients: first the inputs that are trained or follow from trained ones, then any others."""
        floats = [n for n in region.inputs if self.descs[n].type.is_float]
        likely = tuple(n for n in floats if not self.descs[n].stop_gradient)
        if likely:
            yield likely
        for count in range(len(floats), 0, -1):
            yield from (some for some in combinations(floats, count) if some != likely)

    def _why_not_backward(self, region: Region, inner: Collection[str], found: _Found) -> str:
        values, terms, at = self.values, found.terms(), found.at
        for n in (*inner, *(found.names[n] for n in found.own.made)):
            if n in terms:
                continue
            if not at.issuperset(set(values.uses.get(n, ())).difference(region.ops)):
                return f"%{n} is read elsewhere"
            if why := values.why_needed(n):
                return f"%{n} {why}"
        if any(map(self.taken, at)):
            return "some of its gradients were joined with others"
        if found.seed in terms or len(set(terms)) < len(terms) or any(t in values.walk.changing for t in terms):
            return f"the gradient of %{region.out} or of an input is also the gradient of another value"
        if not values.walk.whole(found.names.values()):
            return "ranks hold parts of the gradients"
        read = (*region.inputs, region.out, *region.kept)
        return self._changed(read, region.ops[-1] + 1, max(at)) or self._changed([found.seed], min(at), max(at))

    def _replaced(self, region: Region, found: _Found, joined: Written) -> _Edit | str:
        """The edit that puts the gradients of the joined operators at the first operator that reads the gradient of `out`."""
        edit, called = self._edited(region, joined), dict[str, str]()
        finishes = {g: p for k in found.at for p, g in _pairs(self.ops[k])}
        edit.instead |= {k: [] for k in found.at}
        for name in dict.fromkeys(n for n, _ in joined.terms):
            add = self._sum_of(found, found.terms(name))
            if isinstance(add, str):
                return add
            made = [t for n, t in joined.terms if n == name]
            assert len(made) <= len(found.terms(name)), "one operator reads an input no more often than several did"
            if add < 0:
                called.update(zip(made, found.terms(name), strict=True))
            else:
                called |= self._added_up(add, found.terms(name), made, edit, finishes)
        for n in (n for op in joined.backward for n in op.output_arg_names):
            new = called.get(n) or called.setdefault(n, self.fresh(n))
            edit.declared[new] = joined.descs[n].changed(name=new)
        after = max(region.ops[-1], *self.values.makers.get(found.seed, [-1]))
        ops = [op.renamed(called, outputs=True) for op in joined.backward]
        edit.instead[min(k for k in found.at if k > after)] = [op.replace(role_var=_finished(op, finishes)) for op in ops]
        return edit

    def _sum_of(self, found: _Found, terms: list[str]) -> int | str:
        """The operator that adds up the gradient terms of one input; -1 if there is one term; or the reason why there is none."""
        if len(terms) == 1:
            return -1
        readers = {k for n in terms for k in self.values.uses.get(n, ())} - found.at
        needed = next((n for n in terms if self.values.why_needed(n)), None)
        if needed is not None:
            return f"%{needed} {self.values.why_needed(needed)}"
        if len(readers) != 1 or self.ops[min(readers)].type != _SUM:
            return f"%{terms[0]} is read elsewhere"
        added = self.ops[min(readers)].input_arg_names
        return min(readers) if all(added.count(n) == 1 for n in terms) else f"%{terms[0]} is not added to the others, once each"

    def _added_up(self, k: int, terms: list[str], made: list[str], edit: _Edit, finishes: dict[str, str]) -> dict[str, str]:
        """Let the sum `k` add the values `made` in place of `terms`, or remove it if it adds nothing else; returns new names for these
        values."""
        (add,) = edit.instead.get(k) or self.edit.instead.get(k) or (self.ops[k],)
        ((slot, names),) = add.inputs.items()
        left = tuple(n for n in names if n not in terms[len(made) :])
        (total,) = add.output_arg_names
        if len(left) > 1 or total in self.values.walk.changing:
            edit.instead[k] = [add.replace(inputs={slot: left})]
            return dict(zip(made, terms, strict=False))
        edit.instead[k] = []
        finishes.update({g: p for p, g in _pairs(add)})
        return {made[0]: total}


@dataclass(frozen=True)
class _Found:
    """The gradients of a region, found in the program: the operators as backward would write them, their names in the program, and their
    indices."""

    own: Written
    names: Mapping[str, str]
    at: set[int]

    @property
    def seed(self) -> str:
        return self.names[self.own.seed]

    def terms(self, name: str = "") -> list[str]:
        """The gradient terms of an input, or of all inputs."""
        return [self.names[t] for n, t in self.own.terms if name in ("", n)]


def _pairs(op: Operator) -> Iterator[tuple[str, str]]:
    """(parameter, gradient) that an operator finishes."""
    return zip(op.role_var[::2], op.role_var[1::2])


def _finished(op: Operator, finishes: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(word for g in op.output_arg_names if g in finishes for word in (finishes[g], g))
