"""Move operators of one kind later, so that they stand next to each other. Only independent operators change their order. Linear time."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from functools import partial
from operator import attrgetter

from ...ir import flow
from ...ir.operator import Operator, Role
from ...ir.program import Program


class AdjacentOperators:
    """A run of operators of one kind that will stand next to each other. A subclass may limit its members.

    The run stands where its last operator stood; a `late` run stands before the first operator that needs a result of it.
    """

    late = False

    def __init__(self, kind: Hashable):
        self.kind = kind
        self.ops: list[Operator] = []
        self.place = (0, 0)  # the index of the other operator that it stands before, and its position among the runs there

    def add(self, op: Operator) -> bool:
        """Add an operator to the run if it fits; returns whether it was added. The first operator always fits."""
        self.ops.append(op)
        return True

    @property
    def full(self) -> bool:
        return False

    def in_order(self) -> list[Operator]:
        """The operators in the order in which they are written."""
        return self.ops

    def close(self) -> None:
        """Called when the run takes no more operators; the next operator of the kind begins a new run."""


def gathered(
    program: Program, types: Container[str], run_of: Callable[[Operator], Hashable], begin: Callable[[Hashable], AdjacentOperators]
) -> Iterator[list[Operator] | AdjacentOperators]:
    """The operators of block 0 in their new order: runs of operators that stand together, and lists of the other operators.

    Only operators of these `types` move. `run_of` gives the kind of an operator, and `begin` makes an empty run of a kind.
    """
    return _Gathering(program, begin).run(types, run_of)


_NAMES = attrgetter("input_arg_names", "output_arg_names")


def _touching(program: Program) -> Callable[[Operator], tuple[tuple[str, ...], tuple[str, ...]]]:
    """A function that gives the names that an operator reads and writes, including its sub-blocks."""
    return partial(flow.touches, program) if len(program.blocks) > 1 else _NAMES


class _Gathering:
    def __init__(self, program: Program, begin: Callable[[Hashable], AdjacentOperators]):
        self.program, self.begin = program, begin
        self.others: list[Operator] = []
        self.runs: list[AdjacentOperators] = []
        self.open: dict[Hashable, AdjacentOperators] = {}  # runs that more operators may join
        self.makes: dict[str, AdjacentOperators] = {}  # runs that may still move, by the names that they write, and by those that they read
        self.reads: dict[str, tuple[AdjacentOperators, ...]] = {}
        self.turn = 0

    def run(self, types: Container[str], run_of: Callable[[Operator], Hashable]) -> Iterator[list[Operator] | AdjacentOperators]:
        touches, made, read = _touching(self.program), self.makes.keys(), self.reads.keys()
        for op in self.program.global_block().oplist:
            ins, outs = touches(op)
            if made and not (made.isdisjoint(ins) and made.isdisjoint(outs) and read.isdisjoint(outs)):
                self._settle(ins, outs)
            if op.type in types:
                self._join(run_of(op), op, ins, outs)
            else:
                self.others.append(op)
        for run in dict.fromkeys(self.makes.values()):
            self._end(run)
        return self._merged()

    def _settle(self, ins: tuple[str, ...], outs: tuple[str, ...]) -> None:
        """End the runs whose results an operator reads, or that read a value that it overwrites."""
        for n in (*ins, *outs):
            if (run := self.makes.get(n)) is not None:
                self._end(run)
        for n in outs:
            for run in self.reads.get(n, ()):
                self._end(run)

    def _join(self, kind: Hashable, op: Operator, ins: tuple[str, ...], outs: tuple[str, ...]) -> None:
        run = self.open.get(kind)
        if run is None or not run.add(op):
            if run is not None:
                self._fill(run)
            run = self.open[kind] = self.begin(kind)
            self.runs.append(run)
            run.add(op)
        self._stand(run)
        for n in outs:
            self.makes[n] = run
        for n in ins:
            runs = self.reads.get(n, ())
            if run not in runs:
                self.reads[n] = (*runs, run)
        if run.full:
            self._fill(run)

    def _fill(self, run: AdjacentOperators) -> None:
        """Close a run: no more operators join it."""
        run.close()
        del self.open[run.kind]
        if not run.late:
            self._forget(run)

    def _end(self, run: AdjacentOperators) -> None:
        """Fix the place of a run: later operators stand after it."""
        if self.open.get(run.kind) is run:
            del self.open[run.kind]
        if run.late:
            self._stand(run)
        self._forget(run)

    def _stand(self, run: AdjacentOperators) -> None:
        self.turn += 1
        run.place = len(self.others), self.turn

    def _forget(self, run: AdjacentOperators) -> None:
        for op in run.ops:
            for n in op.output_arg_names:
                self.makes.pop(n, None)
            for n in op.input_arg_names:
                if left := tuple([r for r in self.reads.pop(n, ()) if r is not run]):
                    self.reads[n] = left

    def _merged(self) -> Iterator[list[Operator] | AdjacentOperators]:
        done = 0
        for run in sorted(self.runs, key=lambda r: r.place):
            if done < run.place[0]:
                yield self.others[done : run.place[0]]
            yield run
            done = run.place[0]
        yield self.others[done:]


class Waiting:
    """Operators that are written late: before the first operator that touches their results, or at the end."""

    def __init__(self, program: Program):
        self.touches = _touching(program)
        self.writes: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {}

    def add(self, names: Iterable[str], write: Callable[[], None]) -> None:
        """Register `write`, which writes the operators that make these names."""
        found = tuple(names), write
        self.writes.update(dict.fromkeys(found[0], found))

    def before(self, ops: Iterable[Operator], keep: Callable[[Operator], None] | None = None) -> None:
        """Before each of these operators, write the waiting operators whose results it touches; then pass it to `keep`."""
        touches, waiting = self.touches, self.writes.keys()
        for op in ops:
            if waiting:
                ins, outs = touches(op)
                if not (waiting.isdisjoint(ins) and waiting.isdisjoint(outs)):
                    for n in (*ins, *outs):
                        self._write(n)
            if keep is not None:
                keep(op)

    def rest(self) -> None:
        for n in list(self.writes):
            self._write(n)

    def _write(self, name: str) -> None:
        if (found := self.writes.get(name)) is not None:
            names, write = found
            for n in names:
                del self.writes[n]
            write()


def first_readers(program: Program, types: Container[str]) -> dict[int, Role | None]:
    """For each operator of these types in block 0, by id, the role of the first operator that computes with its results; None if no
    operator reads them. A communication operator does not compute: its readers count instead.
    """
    ops = program.global_block().oplist
    touches = _touching(program)
    followed = {n for op in ops if op.type in types or op.role is Role.DIST for n in touches(op)[1]}
    made: dict[int, Role | None] = {}
    found: dict[str, Role | None] = {}
    for op in reversed(ops):
        ins, outs = touches(op)
        if followed.isdisjoint(ins) and followed.isdisjoint(outs):
            continue
        role = None
        for n in outs:
            later = found.pop(n, None)
            role = role or later
        if op.type in types:
            made[id(op)] = role
        mine = role if op.role is Role.DIST else op.role
        for n in ins:
            found[n] = mine
    return made
