"""Split a block of the program for all ranks into segments; each segment writes the operators of a given rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Protocol

from ...ir.opdef import OPS
from ...ir.operator import Operator, op_types
from ...ir.parts import Coords, holds
from ...ir.program import Block, Program
from ...ir.sizes import StandInShapes
from ...ir.sub_blocks import runs_bodies
from ...ir.types import Placement
from ...verify.transfer_messages import TRANSFER
from .server_exchange import SERVED, ServerExchange
from .transfers import Transfers
from .write_algorithm import MessageRounds, others, written_out

_PLACEMENT = attrgetter("placement")


class RankSegment(Protocol):
    """Neighbouring operators of a block."""

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        """Append the operators of a rank to its block, and declare their results."""

    def is_common(self) -> bool:
        """Do the operators of a rank follow from the program for all ranks?"""


class OnEveryRank(tuple[Operator, ...]):
    """Operators that every rank has."""

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        block.oplist.extend(self)

    def is_common(self) -> bool:
        return True


class _OwnedRoots:
    """Which root placements include the current rank, by the ids of the placements; it is called for one rank after the other."""

    coords: Coords | None = None

    def of(self, coords: Coords) -> dict[int, bool]:
        if self.coords is not coords:
            self.coords, self.known = coords, dict[int, bool]()
        return self.known


class OnOwners:
    """Operators with results at roots: the operators of each root, with their numbers."""

    def __init__(self, ops: Iterable[tuple[Placement, Operator]], held: _OwnedRoots):
        self.held = held
        self.at: dict[int, tuple[Placement, list[tuple[int, Operator]]]] = {}  # by the id of the placement, of which there are few objects
        for k, (roots, op) in enumerate(ops):
            self.at.setdefault(id(roots), (roots, []))[1].append((k, op))

    def write(self, rank: int, coords: Coords, block: Block) -> None:
        held = self.held.of(coords)
        for key, (roots, _) in self.at.items():
            if key not in held:
                held[key] = holds(roots, coords)
        mine = [ops for key, (_, ops) in self.at.items() if held[key]]
        block.oplist.extend([op for _, op in (mine[0] if len(mine) == 1 else sorted(chain(*mine)))])

    def is_common(self) -> bool:
        return not any(runs_bodies(op) for _, ops in self.at.values() for _, op in ops)


class ProgramSegments:
    """The segments of the blocks of a program for all ranks. `kept`: do servers also store replicated state?"""

    def __init__(self, program: Program, kept: bool):
        self.program, self.kept = program, kept
        self.roots_of: list[dict[int, Placement]] = []  # by block: the root entries of the placements of its variables, by their ids
        self.of_blocks: list[list[RankSegment]] = [list(self._segments(b)) for b in program.blocks]

    def _segments(self, block: Block) -> Iterator[RankSegment]:
        types = op_types(block.oplist)
        carried = {t for t in types if OPS[t].comm.algorithm_method}
        at_roots, any_roots = self._roots(block)
        rounds = any(op.type in carried and written_out(op) for op in block.oplist)
        if not any_roots and not rounds and types.isdisjoint((*SERVED, TRANSFER)):
            yield OnEveryRank(block.oplist)
            return

        def kind(op: Operator) -> tuple:
            if op.type in carried and written_out(op):
                return ("rounds", *(op.attrs[a] for a in ("algorithm", "group", "wave")))
            if op.type in SERVED or op.type == TRANSFER:
                return ("transfer" if op.type == TRANSFER else "served",)
            return ("rooted" if at_roots(op) else "",)

        sizes, held, number = StandInShapes(block), _OwnedRoots(), 0
        make: dict[str, Callable[[Sequence[Operator]], Iterable[RankSegment]]] = {
            "": lambda ops: [OnEveryRank(ops)],
            "rooted": lambda ops: [OnOwners(((at_roots(op), op) for op in ops), held)],
            "transfer": lambda ops: [Transfers(block, tuple(ops), sizes)],
            "served": lambda ops: [ServerExchange(together, self.kept) for together in _independent(ops)],
            "rounds": lambda ops: [MessageRounds(block, together, number + k) for k, together in enumerate(_independent(ops))],
        }
        for key, run in groupby(block.oplist, key=kind):
            for segment in make[key[0]](tuple(run)):
                yield segment
                number += 1

    def _roots(self, block: Block) -> tuple[Callable[[Operator], Placement], bool]:
        """A function that gives the roots of an operator's results, and whether any value of the block is at a root."""
        find = block.find if block.idx else block.descs.get
        different = {id(q): q for q in map(_PLACEMENT, block.descs.values())}  # most values share a few placement objects
        roots_of: dict[int, Placement] = {k: roots for k, q in different.items() if (roots := tuple([e for e in q if e.root is not None]))}
        if block.idx:  # a branch writes what enclosing blocks declare
            roots_of.update(self.roots_of[block.parent_idx])
        self.roots_of.append(roots_of)
        same: dict[Placement, Placement] = {}

        def at_roots(op: Operator) -> Placement:
            d = find(op.output_arg_names[0]) if op.output_arg_names else None
            found = () if d is None else roots_of.get(id(d.placement), ())
            if found and OPS[op.type].comm.move is not None:  # all ranks that may hold the operand take part
                found = tuple(e for e in others(self.program, block, op) if e.root is not None)
                return same.setdefault(found, found)
            return found

        return at_roots, bool(roots_of)


def _independent(ops: Sequence[Operator]) -> Iterator[list[Operator]]:
    """Runs of neighbours; a new run starts before an operator that reads or overwrites values of an operator in the run."""
    run: list[Operator] = []
    made: set[str] = set()
    read: set[str] = set()
    for op in ops:
        ins, outs = op.input_arg_names, op.output_arg_names
        if not made.isdisjoint((*ins, *outs)) or not read.isdisjoint(outs):
            yield run
            run, made, read = [], set(), set()
        run.append(op)
        made.update(outs)
        read.update(ins)
    yield run
