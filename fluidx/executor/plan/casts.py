"""Casts that C kernels do themselves: an operator whose kernel can read or write the other float type does so, and the cast is removed.

Such a kernel computes in float32, widens what it reads and rounds what it writes once, so no bit changes:

- an operator that reads a cast of a 16-bit value to float32 reads the value;
- an operator whose float32 result only a cast to 16 bits reads writes it in 16 bits;
- products of a cast of a weight or of data to bfloat16 read it in float32 and round it while they pack it.

Only the operators of a plan change: the program and the declared types stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...ir.dtypes import HALVES
from ...ir.message_batches import batch_of
from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.sub_blocks import bodies as blocks_of
from ...ops.kernels import bodies
from ..context import RunContext
from .liveness import nested, op_reads, op_writes
from .selection import Outline
from .shadows import Shadows
from .sizes import RankSizes


class _Renaming(NamedTuple):
    """Operator number `at` has the name `new` in place of `old`, among its inputs or among its outputs."""

    at: int
    is_input: bool
    old: str
    new: str


def without_casts(outline: Outline, sizes: RankSizes, shadows: Shadows, ctx: RunContext) -> Outline:
    """The outline without the casts that C kernels do themselves."""
    casts = outline.fact(_casts)
    return outline.fact(_changed, tuple(_CastSearch(outline, sizes, shadows, ctx).changes(casts))) if casts else outline


class _CastSearch:
    """Asks the kernels which casts they do themselves."""

    def __init__(self, outline: Outline, sizes: RankSizes, shadows: Shadows, ctx: RunContext):
        self.outline, self.types, self.here, self.ctx = outline, sizes.types, sizes.here, ctx
        self.ops = list(outline.ops)
        self.readers, self.writers = ({n: [*at] for n, at in found.items()} for found in outline.fact(_touching))
        self.touched = outline.fact(_of_blocks)
        self.found: list[_Renaming] = []
        self._shadow = lambda n: shadows.of(sizes.types[n])

    def changes(self, casts: Sequence[int]) -> list[_Renaming]:
        # weights before data: a product rounds one of its operands, and weights are larger
        for k in sorted(casts, key=lambda k: not self._is_state(self.ops[k].input_arg_names[0])):
            (source,), (made,) = self.ops[k].input_arg_names, self.ops[k].output_arg_names
            narrows = self.types[made].dtype in HALVES
            if id(self.ops[k]) in self.here or self._is_state(made) or not self._is_between_floats(source, made, narrows):
                continue
            if self.writers[made] != [k]:  # the name has other values, too
                continue
            readers = tuple(self.readers.get(made, ()))
            if narrows and self._is_only_for(source, k) and all(at > k for at in readers):
                self._write(_Renaming(self.writers[source][0], False, source, made))
            if narrows:
                self._round(source, made, readers)
            for at in () if narrows else readers:
                if at > k and not any(k < w <= at for w in self.writers.get(source, ())):  # it is still there
                    if not opdef(self.ops[at].type).native.rounds:  # which would round its other operand
                        self._read(_Renaming(at, True, made, source))
        return self.found

    def _is_between_floats(self, source: str, made: str, narrows: bool) -> bool:
        """Is it a cast between float32 and 16 bits, of values that no sub-block touches?"""
        wide, half = (source, made) if narrows else (made, source)
        return self.touched.isdisjoint((source, made)) and self.types[wide].dtype == "float32" and self.types[half].dtype in HALVES

    def _write(self, change: _Renaming) -> None:
        if self._supports(change):
            self.writers[change.new] = self.writers.pop(change.old)
            self.readers.pop(change.old)

    def _read(self, change: _Renaming) -> None:
        if self._supports(change):
            self.readers[change.old].remove(change.at)
            self.readers.setdefault(change.new, []).append(change.at)

    def _round(self, source: str, made: str, readers: Sequence[int]) -> None:
        """Let products round data themselves, so that no cast of it is kept; state too, if only products read its cast."""
        is_data = source in self.outline.given
        if made in self.outline.fetch or not (is_data or self._is_state(source)):
            return
        if any(w <= max(readers, default=-1) for w in self.writers.get(source, ())):
            return
        changes = [c for at in readers if self._multiplies_rounded(c := _Renaming(at, True, made, source))]
        if is_data or len(changes) == len(readers):
            for change in changes:
                self._read(change)

    def _multiplies_rounded(self, change: _Renaming) -> bool:
        """Does a product take a float32 operand as rounded, because the other one is bfloat16? Of a third one only the shape is read."""
        op = self.ops[change.at]
        many = opdef(op.type).native.rounds
        factors = op.input_arg_names[:many]
        others = [self.types[n].dtype for n in factors if n != change.old]
        fits = many > 0 and (change.old not in factors or others == ["bfloat16"])
        return fits and self._after(change) is not None

    def _is_only_for(self, name: str, k: int) -> bool:
        """Does exactly one earlier operator compute a value, and is operator `k` its only reader?"""
        alone = self.readers.get(name) == [k] and name not in self.outline.fetch and not self._is_state(name)
        return alone and [at < k for at in self.writers.get(name, ())] == [True]

    def _is_state(self, name: str) -> bool:
        d = self.outline.program.global_block().descs.get(name)
        return d is not None and d.persistable

    def _supports(self, change: _Renaming) -> bool:
        """Change an operator if a C kernel computes it after the change. Did it change?"""
        if (new := self._after(change)) is None:
            return False
        self.ops[change.at] = new
        self.found.append(change)
        return True

    def _after(self, change: _Renaming) -> Operator | None:
        """The operator after a change, if a C kernel computes it."""
        op = self.ops[change.at]
        definition = opdef(op.type)
        if op.type == "cast" or op.sub_blocks() or id(op) in self.here or definition.native.calls is None:
            return None
        if not definition.widens("cpu", [self.types[n] for n in op.output_arg_names]):
            return None
        new = _replaced(op, change)
        ins, outs = definition.operands(new, self._shadow, self._shadow)
        return new if bodies(definition, "cpu", True)[0].covers(ins, outs, op.attrs, self.ctx, None) else None


def _replaced(op: Operator, change: _Renaming) -> Operator:
    slots = op.inputs if change.is_input else op.outputs
    renamed = {slot: tuple([change.new if n == change.old else n for n in names]) for slot, names in slots.items()}
    return op.replace(inputs=renamed) if change.is_input else op.replace(outputs=renamed)


def _casts(outline: Outline) -> list[int]:
    return [k for k, op in enumerate(outline.ops) if op.type == "cast"]


def _of_blocks(outline: Outline) -> frozenset[str]:
    """The values that operators with sub-blocks and those in sub-blocks name."""
    found = [op for op in outline.ops if outline.runs_blocks and op.sub_blocks()]
    inside = [inner for op in found for _, inner in nested(outline.program, op)]
    results = [n for op in (*found, *inside) for body in blocks_of(op) for n in body.results(op)]
    return frozenset([*results, *[n for op in (*found, *inside) for n in (*op.input_arg_names, *op.output_arg_names)]])


def _touching(outline: Outline) -> tuple[Mapping[str, list[int]], Mapping[str, list[int]]]:
    """The numbers of the operators that read each value, and of those that write it, with those of their sub-blocks."""
    found: tuple[dict[str, list[int]], dict[str, list[int]]] = {}, {}
    for names_of, numbers in zip((outline.fact(op_reads), outline.fact(op_writes)), found, strict=True):
        for k, names in enumerate(names_of):
            for n in dict.fromkeys(names):
                numbers.setdefault(n, []).append(k)
    return found


def _changed(outline: Outline, changes: tuple[_Renaming, ...]) -> Outline:
    """The outline after these changes, without casts whose results no operator reads any more or another operator computes."""
    ops = list(outline.ops)
    for change in changes:
        ops[change.at] = _replaced(ops[change.at], change)
    made = {change.new for change in changes if not change.is_input}
    left = Outline(outline.program, ops, outline.given, outline.fetch)
    needed = {n for names in op_reads(left) for n in names} | {*outline.fetch}
    descs = outline.program.global_block().descs

    def stays(op: Operator) -> bool:
        name = op.output_arg_names[0] if op.type == "cast" else ""
        return not name or name not in made and (name in needed or name in descs and descs[name].persistable)

    return Outline(outline.program, _ahead([op for op in ops if stays(op)]), outline.given, outline.fetch)


def _is_apart(op: Operator, other: Operator) -> bool:
    """Does neither operator read or write what the other one writes?"""
    if op.sub_blocks() or other.sub_blocks():
        return False
    (ins, outs), (others, made) = ((x.input_arg_names, {*x.output_arg_names}) for x in (op, other))
    return outs.isdisjoint((*others, *made)) and made.isdisjoint(ins)


def _ahead(ops: Sequence[Operator]) -> list[Operator]:
    """The operators in an order in which no cast stands between those of a chain (fusion.py)."""
    found: list[Operator] = []
    waiting: list[Operator] = []  # casts behind the last of `found`
    for op in ops:
        if op.type == "cast" and found and _is_apart(op, found[-1]):
            waiting.append(op)
            continue
        if waiting:
            at = _start(found, op, waiting)
            found[at:at] = waiting
            waiting.clear()
        found.append(op)
    return found + waiting


def _start(found: Sequence[Operator], op: Operator, casts: Sequence[Operator]) -> int:
    """The number of the operator that begins the chain which `op` goes on; casts may stand before it."""
    at, definition = len(found), opdef(op.type)
    while at and definition.expr is not None and not {*found[at - 1].output_arg_names}.isdisjoint(op.input_arg_names):
        before = found[at - 1]
        if batch_of(before) or not all(_is_apart(cast, before) for cast in casts):  # messages that start together stay together
            break
        at, op, definition = at - 1, before, opdef(before.type)
    return at
