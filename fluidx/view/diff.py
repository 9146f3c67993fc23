"""The diff of two programs by their operators, and the census of operators and of the bytes that communication moves.

Operators are matched by equality, not by text. Operators that occur once on both sides are matched first (patience diff); only the short
stretches between them are searched. Ten thousand operators take well under a second.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.errors import ProgramError
from ..ir.longest_increasing import longest_increasing
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator
from ..ir.program import Block, Program, ProgramPair
from ..ir.text import declarations, op_text, section_header, settings, show_var
from ..ir.valuetypes import known_bytes

CONTEXT = 1  # unchanged operators shown on either side of a change
WINDOW = 64  # longest stretch that is searched pair by pair
_COMMUNICATE = frozenset(
    {
        "nccl_init", "broadcast", "all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "scatter_parts", "gather_parts",
        "send", "recv", "barrier", "transfer",
    }  # fmt: skip
)


def diff(before: Program | ProgramPair, after: Program | ProgramPair, names: tuple[str, str] = ("before", "after")) -> ProgramDiff:
    """The changes from `before` to `after`: two programs, or two pairs. The startup section of pairs comes first.

    `str()` of the result is a listing to read; `.added` and `.removed` are the operators; `.census()` counts the added operators.
    """
    if isinstance(before, ProgramPair) != isinstance(after, ProgramPair):
        raise ProgramError("diff takes two programs or two pairs, not one of each; give the main program of the pair")
    if isinstance(before, ProgramPair) and isinstance(after, ProgramPair):
        sides = [("startup", before.startup, after.startup), ("main", before.main, after.main)]
    else:
        sides = [("", before, after)]  # type: ignore[list-item]
    return ProgramDiff(tuple(_Section(title, a, b, _block_diffs(a, b)) for title, a, b in sides), names)


@dataclass(frozen=True)
class _Section:
    title: str
    before: Program
    after: Program
    blocks: tuple[_BlockDiff, ...]


@dataclass(frozen=True)
class _BlockDiff:
    idx: int
    before: Block | None
    after: Block | None
    steps: tuple[tuple[str, int, int], ...]  # (" ", i, j), ("-", i, -1) or ("+", -1, j), in reading order

    def side(self, mark: str) -> list[Operator]:
        block = self.after if mark == "+" else self.before
        return [block.oplist[j if mark == "+" else i] for m, i, j in self.steps if m == mark] if block is not None else []


@dataclass(frozen=True)
class ProgramDiff:
    """The difference of two programs. It is false if they have the same operators, declarations and settings."""

    sections: tuple[_Section, ...]
    names: tuple[str, str] = ("before", "after")

    @property
    def added(self) -> tuple[Operator, ...]:
        """The operators of `after` that `before` does not have."""
        return tuple(op for s in self.sections for b in s.blocks for op in b.side("+"))

    @property
    def removed(self) -> tuple[Operator, ...]:
        """The operators of `before` that `after` does not have."""
        return tuple(op for s in self.sections for b in s.blocks for op in b.side("-"))

    def __bool__(self) -> bool:
        return any(s.before != s.after for s in self.sections)

    def census(self) -> Census:
        """The census of the added operators."""
        total = Census()
        for s in self.sections:
            for b in s.blocks:
                total = total.plus(_census(b.side("+"), b.after)) if b.after is not None else total
        return total

    def __str__(self) -> str:
        if not self:
            return f"{self.names[0]} and {self.names[1]} are equal: {_total(s.after for s in self.sections)} operators"
        lines = [
            f"--- {self.names[0]}: {_total(s.before for s in self.sections)} operators",
            f"+++ {self.names[1]}: {_total(s.after for s in self.sections)} operators, "
            f"{len(self.added)} added, {len(self.removed)} removed",
        ]
        main = self.sections[-1]
        shared = _head_lines(main.before, main.after)
        lines += shared
        for s in self.sections:
            if s is not main and (own := [line for line in _head_lines(s.before, s.after) if line not in shared]):
                lines += ["startup:", *own]
            for b in s.blocks:
                lines += _block_lines(b, s.title if s is not main else "")
        communication = self.census().communication
        if communication:
            lines.append(f"added communication: {'; '.join(communication.lines())}")
        return "\n".join(lines)


def _total(programs: Iterable[Program]) -> int:
    return sum(len(b.oplist) for p in programs for b in p.blocks)


def _head_lines(before: Program, after: Program) -> list[str]:
    """Lines for settings and declarations that were added, removed or changed.

    A variable that an operator defines is shown with that operator instead.
    """
    lines = []
    old, new = settings(before), settings(after)
    lines += [f"-{line[1:]}" for line in old if line not in new]
    lines += [f"+{line[1:]}" for line in new if line not in old]
    for k in range(max(len(before.blocks), len(after.blocks))):
        a = before.blocks[k].descs if k < len(before.blocks) else {}
        b = after.blocks[k].descs if k < len(after.blocks) else {}
        heads = set(declarations(before.blocks[k])[0] if a else ()) | set(declarations(after.blocks[k])[0] if b else ())
        for n in dict.fromkeys([*a, *b]):
            if n in heads and a.get(n) != b.get(n):
                lines += [f"- {show_var(a[n])}"] if n in a else []
                lines += [f"+ {show_var(b[n])}"] if n in b else []
    return lines


def _block_diffs(before: Program, after: Program) -> tuple[_BlockDiff, ...]:
    out = []
    for k in range(max(len(before.blocks), len(after.blocks))):
        a = before.blocks[k] if k < len(before.blocks) else None
        b = after.blocks[k] if k < len(after.blocks) else None
        out.append(_BlockDiff(k, a, b, tuple(_steps(a.oplist if a else [], b.oplist if b else []))))
    return tuple(out)


def _block_lines(d: _BlockDiff, section: str) -> list[str]:
    a, b = d.before, d.after
    changed = [k for k, step in enumerate(d.steps) if step[0] != " "]
    if not changed:
        return []
    near = {j for k in changed for j in range(k - CONTEXT, k + CONTEXT + 1)}
    pending = [dict(declarations(block)[1]) if block is not None else {} for block in (a, b)]
    lines: list[str] = [f"block {d.idx}:"] if d.idx else []
    role, k, steps = None, 0, d.steps
    while k < len(steps):
        run = k
        while run < len(steps) and run not in near:
            run += 1
        if run - k > 1:
            lines.append(f"  ... {run - k} unchanged operators")
            for _, i, j in steps[k:run]:
                for side, block, at in ((0, a, i), (1, b, j)):
                    for n in block.oplist[at].output_arg_names if block is not None else ():
                        pending[side].pop(n, None)
            k = run
            continue
        mark, i, j = steps[k]
        op = a.oplist[i] if mark == "-" and a is not None else b.oplist[j]  # type: ignore[union-attr]
        if mark == " ":
            for n in op.output_arg_names:
                pending[0].pop(n, None)
        if op.role is not role:
            role = op.role
            lines.append(section_header(section, role))
        lines.append(f"{mark} {op_text(op, pending[0 if mark == '-' else 1])}")
        k += 1
    return lines


# -- matching -----------------------------------------------------------------------------------------------------------------------


def _steps(a: Sequence[Operator], b: Sequence[Operator]) -> list[tuple[str, int, int]]:
    ids: dict[Hashable, int] = {}
    seen: dict[int, int] = {}  # number by id: passes share the operators that they keep

    def number(op: Operator) -> int:
        n = seen.get(id(op))
        if n is None:
            try:
                n = ids.setdefault(op.key(), len(ids))
            except TypeError:  # an attribute of a user's own type that cannot be hashed
                n = ids.setdefault(repr(op.key()), len(ids))
            seen[id(op)] = n
        return n

    x, y = [number(op) for op in a], [number(op) for op in b]
    steps: list[tuple[str, int, int]] = []
    i = j = 0
    for p, q in [*_matches(x, y), (len(x), len(y))]:
        steps += _hunk(a, b, range(i, p), range(j, q))
        if p < len(x):
            steps.append((" ", p, q))
        i, j = p + 1, q + 1
    return steps


def _hunk(a: Sequence[Operator], b: Sequence[Operator], gone: range, new: range) -> Iterator[tuple[str, int, int]]:
    """Removed and added operators in one order for reading: sections stay together, and a removed operator precedes its replacement."""
    left = Counter((b[j].role, b[j].type) for j in new)
    roles = Counter(b[j].role for j in new)
    i, j = gone.start, new.start
    while i < gone.stop or j < new.stop:
        take_old = take_new = i < gone.stop and j < new.stop
        if take_old:
            old, add = a[i], b[j]
            if (old.role, old.type) != (add.role, add.type):
                take_new = left[old.role, old.type] > 0 or (old.role is not add.role and roles[old.role] > 0)
                take_old = not take_new
        else:
            take_old, take_new = i < gone.stop, j < new.stop
        if take_old:
            yield "-", i, -1
            i += 1
        if take_new:
            left[b[j].role, b[j].type] -= 1
            roles[b[j].role] -= 1
            yield "+", -1, j
            j += 1


def _matches(x: list[int], y: list[int]) -> list[tuple[int, int]]:
    """Index pairs of a common subsequence of `x` and `y`, in order."""
    pairs: list[tuple[int, int]] = []
    todo = [(0, len(x), 0, len(y))]
    while todo:
        i0, i1, j0, j1 = todo.pop()
        while i0 < i1 and j0 < j1 and x[i0] == y[j0]:
            pairs.append((i0, j0))
            i0, j0 = i0 + 1, j0 + 1
        while i0 < i1 and j0 < j1 and x[i1 - 1] == y[j1 - 1]:
            i1, j1 = i1 - 1, j1 - 1
            pairs.append((i1, j1))
        if i0 == i1 or j0 == j1:
            continue
        anchors = _anchors(x, y, i0, i1, j0, j1)
        if anchors:
            bounds = [(i0 - 1, j0 - 1), *anchors, (i1, j1)]
            pairs += anchors
            todo += [(p + 1, r, q + 1, s) for (p, q), (r, s) in zip(bounds, bounds[1:]) if p + 1 < r and q + 1 < s]
        elif i1 - i0 <= WINDOW and j1 - j0 <= WINDOW:
            matcher = difflib.SequenceMatcher(None, x[i0:i1], y[j0:j1], autojunk=False)
            pairs += [(i0 + m.a + k, j0 + m.b + k) for m in matcher.get_matching_blocks() for k in range(m.size)]
        else:  # a long stretch of repeated operators: match each with the next equal one
            places: dict[int, list[int]] = {}
            for j in range(j1 - 1, j0 - 1, -1):
                places.setdefault(y[j], []).append(j)
            last = j0 - 1
            for i in range(i0, i1):
                found = places.get(x[i], [])
                while found and found[-1] <= last:
                    found.pop()
                if found and found[-1] - last <= WINDOW:
                    last = found.pop()
                    pairs.append((i, last))
    return sorted(pairs)


def _anchors(x: list[int], y: list[int], i0: int, i1: int, j0: int, j1: int) -> list[tuple[int, int]]:
    """Index pairs of values that occur once in both stretches: the longest sequence that increases on both sides."""
    where_x: dict[int, int] = {}
    where_y: dict[int, int] = {}
    for where, values, start, stop in ((where_x, x, i0, i1), (where_y, y, j0, j1)):
        for k in range(start, stop):
            where[values[k]] = -1 if values[k] in where else k
    pairs = [(i, where_y[v]) for v, i in where_x.items() if i >= 0 and where_y.get(v, -1) >= 0]
    return [pairs[k] for k in longest_increasing([j for _, j in pairs])]


# -- census -------------------------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """How often an operator type occurs, and the bytes that communication moves, by group."""

    count: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    by_group: dict[str, int] = field(default_factory=dict)  # occurrences

    def __iter__(self) -> Any:
        return iter((self.count, self.bytes))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, Count)) else NotImplemented


class Census(dict[str, Count]):
    """{operator type: (count, {group: bytes})}.

    `str()` has one line for each type, communication first, such as `1 all_reduce, 31.4 KB over dp`.
    """

    @property
    def communication(self) -> Census:
        """The entries of operators that communicate."""
        return Census({t: c for t, c in self.items() if c.by_group})

    def plus(self, other: Mapping[str, Count]) -> Census:
        """The sum of two counts."""
        out = Census({t: Count(c.count, dict(c.bytes), dict(c.by_group)) for t, c in self.items()})
        for t, c in other.items():
            mine = out.setdefault(t, Count())
            mine.count += c.count
            for sums, more in ((mine.bytes, c.bytes), (mine.by_group, c.by_group)):
                for g, n in more.items():
                    sums[g] = sums.get(g, 0) + n
        return out

    def lines(self) -> list[str]:
        """One line for each operator type."""
        moving = [
            f"{n} {t}, {show_bytes(c.bytes[g])} over {g}" if c.bytes.get(g) else f"{n} {t} over {g}"
            for t, c in self.items()
            for g, n in c.by_group.items()
        ]
        return moving + [f"{c.count} {t}" for t, c in self.items() if not c.by_group]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def census(program: Program | ProgramPair) -> Census:
    """How often each operator type occurs, and how many bytes communication moves. Each sub-block is counted once.

    The bytes of an operator are those of its inputs or of its outputs, whichever are more; so an all_gather and the inverse
    reduce_scatter count the same. An open axis counts as 1.
    """
    programs = (program.startup, program.main) if isinstance(program, ProgramPair) else (program,)
    total = Census()
    for p in programs:
        for block in p.blocks:
            total = total.plus(_census(block.oplist, block))
    return total


def communicates(op: Operator) -> bool:
    """True if an operator involves other ranks."""
    definition = OPS.get(op.type)
    return op.type in _COMMUNICATE or (definition is not None and definition.effect in (Effect.COLLECTIVE, Effect.P2P))


def _census(ops: Iterable[Operator], block: Block) -> Census:
    out = Census()
    for op in ops:
        c = out.setdefault(op.type, Count())
        c.count += 1
        if communicates(op):
            group = str(op.attrs.get("group", "all ranks"))
            moved = max(_nbytes(op.input_arg_names, block), _nbytes(op.output_arg_names, block))
            c.bytes[group] = c.bytes.get(group, 0) + moved
            c.by_group[group] = c.by_group.get(group, 0) + 1
    return out


def _nbytes(names: Iterable[str], block: Block) -> int:
    return sum(known_bytes(d.type) for n in names if (d := block.find(n)) is not None)


def show_bytes(n: int) -> str:
    """A number of bytes with its unit, in powers of 1000.

    >>> show_bytes(31360), show_bytes(4)
    ('31.4 KB', '4 B')
    """
    size, units = float(n), iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.95 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
