"""The check of a recipe when it is registered: its rounds or stages are proved symbolically for a few ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ...ir.errors import TranspileError, nearest
from ...verify.recipe import prove_rounds
from ...verify.sequence import prove_sequence
from ..cluster import DATA, NODE, RAIL, Groups
from .schedule import Algorithm, Refused, Rounds, Transfer
from .sequence import SEQUENCED, CollectiveSequence, Grid, SequenceStage, Slicing

COLLECTIVES = {
    "reduce": "reduce_scatter and reduce",
    "spread": "all_gather and broadcast",
    "all_reduce": "all_reduce",
    "exchange": "all_to_all",
    "adaptive": "the adaptive sum",
}
_SIZE = 1 << 20  # elements of the value whose cut tells which blocks are empty


def check_algorithm(of: Algorithm, counts: Sequence[int] = range(1, 10)) -> None:
    """Check each collective that an algorithm can carry out, for each number of ranks. Raises TranspileError for the first wrong one, and
    for an algorithm that can carry out none.

    >>> from fluidx.transpiler.algorithms import Transfer
    >>> class Forgets(Algorithm):
    ...     name = "forgets"
    ...     def reduce(self, n):
    ...         return (tuple(Transfer(k, 0, 0, 1, True) for k in range(1, n)),)
    >>> check_algorithm(Forgets())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fluidx.ir.errors.TranspileError: algorithm forgets, reduce among 2 ranks: at the end, rank 1 has of block 1 ...; rank 0's is missing
      the method makes reduce_scatter and reduce; every term must reach the rank of its block once
    """
    why, made = None, False
    for carries in COLLECTIVES:
        for n in counts:
            try:
                check_rounds(of, carries, n)
                made = made or carries != "exchange" or type(of).exchange is not Algorithm.exchange
            except Refused as e:
                why = why or e
    if not made:
        raise TranspileError(f"algorithm {of.name} makes no collective: {why}")


def check_rounds(of: Algorithm, carries: str, n: int) -> Rounds:
    """The rounds of one collective among n ranks, checked. Raises TranspileError if they are wrong, Refused if there are none."""
    label = f"algorithm {of.name}, {carries} among {n} rank{'s' * (n > 1)}"
    try:
        rounds: Rounds = getattr(of, carries)(n)
        filled = _filled_blocks(of, carries, n)
        if not isinstance(rounds, tuple) or not all(isinstance(r, Sequence) for r in rounds):
            raise _Wrong(f"rounds are a tuple of tuples of Transfer, got {rounds!r:.80}")
        if (refusal := prove_rounds(carries, n, rounds, filled)) is not None:
            raise _Wrong(str(refusal))
        if (odd := next((t for r in rounds for t in r if not isinstance(t, Transfer)), None)) is not None:
            raise _Wrong(f"rounds are a tuple of tuples of Transfer, got {odd!r:.80} in a round")
    except Refused:
        raise
    except _Wrong as e:
        raise TranspileError(f"{label}: {e}\n  the method makes {COLLECTIVES[carries]}; {_ADVICE[carries]}") from None
    except Exception as e:
        raise TranspileError(
            f"{label}: the method ends in {type(e).__name__}: {e}\n"
            f"  {carries}(n) returns rounds for every n from 1, or raises Refused"
        ) from e
    return rounds


_ADVICE = {
    "reduce": "every term must reach the rank of its block once",
    "spread": "every block must go from its rank to all ranks",
    "all_reduce": "every term must reach every rank once",
    "exchange": "block k*n + j must go from rank k to rank j",
    "adaptive": "ranks and blocks must be those of the group",
}


class _Wrong(Exception):
    """An error in the form of rounds."""


def _filled_blocks(of: Algorithm, carries: str, n: int) -> Sequence[int] | None:
    """The blocks that may have elements, None for all: for an all_reduce, the algorithm cuts the value; for others, the operator does."""
    if carries != "all_reduce":
        return None
    return [k for k, (a, b) in enumerate(pairwise(_marks(of, n, _SIZE))) if a < b]


def block_marks(of: Algorithm, n: int, size: int) -> list[int]:
    """Where an all_reduce among n ranks cuts `size` elements, checked. Raises TranspileError for a `cut` that gives something else."""
    try:
        return _marks(of, n, size)
    except _Wrong as e:
        raise TranspileError(f"algorithm {of.name}, all_reduce among {n} rank{'s' * (n > 1)}: {e}") from e.__cause__


def _marks(of: Algorithm, n: int, size: int) -> list[int]:
    try:
        marks = list(of.cut(n, size))
    except Refused:
        raise
    except Exception as e:
        raise _Wrong(f"cut({n}, {size}) ends in {type(e).__name__}: {e}") from e
    if len(marks) != n + 1 or any(type(m) is not int for m in marks) or marks[0] != 0 or marks[-1] != size or sorted(marks) != marks:
        raise _Wrong(f"cut({n}, {size}) must be {n + 1} rising ints from 0 to {size}, got {marks!r:.80}")
    return marks


# -- sequences ----------------------------------------------------------------------------------------------------------------------------


def check_sequence(of: CollectiveSequence, counts: Sequence[int] = range(1, 10), known: Collection[str] | None = None) -> None:
    """Check each collective that a sequence carries out, for each division of these numbers of ranks into hosts and devices, for every
    root, and for values with fewer rows than ranks, as many, and a number that does not divide. Raises TranspileError for the first wrong
    one, and for a sequence that carries out none. `known` are the algorithms that stages may name; None: these are not checked.

    >>> class Forgets(CollectiveSequence):
    ...     name = "forgets"
    ...     def all_reduce(self, grid):
    ...         return SequenceStage("all_reduce", NODE), SequenceStage("broadcast", RAIL)
    >>> check_sequence(Forgets())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fluidx.ir.errors.TranspileError: recipe forgets, all_reduce of 1 row on 2 hosts with 1 device each: at the end, rank 0 has ...
    """
    why, made = None, False
    for n in counts:
        slicing_of(of, n)
    for collective in SEQUENCED:
        for grid in _grids(counts):
            for root in range(grid.hosts * grid.devices if collective in ("reduce", "broadcast") else 1):
                try:
                    _check_stages(of, collective, grid._replace(root=root), known)
                    made = True
                except Refused as e:
                    why = why or e
    if not made:
        raise TranspileError(f"recipe {of.name} makes no collective: {why}")


def slicing_of(of: CollectiveSequence, hosts: int) -> Slicing | None:
    """How a sequence slices values among some hosts, checked. Raises TranspileError for anything but None or a Slicing of ints above 0."""
    label = f"recipe {of.name}, slicing among {hosts} host{'s' * (hosts > 1)}"
    try:
        found = of.slicing(hosts)
    except Exception as e:
        raise TranspileError(f"{label}: the method ends in {type(e).__name__}: {e}") from e
    if found is not None and not (isinstance(found, Slicing) and all(type(k) is int and k > 0 for k in found)):
        raise TranspileError(f"{label}: give None, or Slicing(nbytes, in_flight) of ints above 0, got {found!r}")
    return found


def _grids(counts: Sequence[int]) -> list[Grid]:
    """Hosts, devices and rows for numbers of ranks."""
    shapes = [(n // d, d) for n in counts for d in range(1, n + 1) if n % d == 0]
    return [Grid(h, d, rows=rows) for h, d in shapes for rows in sorted({1, d, h * d, 2 * h * d + 1})]


def _check_stages(of: CollectiveSequence, collective: str, grid: Grid, known: Collection[str] | None) -> None:
    hosts, devices, root, rows = grid
    many = [f"{k} {word}{'s' * (k > 1)}" for k, word in ((rows, "row"), (hosts, "host"), (devices, "device"))]
    at = f" from or to rank {root}" if collective in ("reduce", "broadcast") else ""
    label = f"recipe {of.name}, {collective} of {many[0]}{at} on {many[1]} with {many[2]} each"
    try:
        stages = of.stages(collective, grid)
    except Refused:
        raise
    except Exception as e:
        raise TranspileError(f"{label}: the method ends in {type(e).__name__}: {e}") from e
    if not stages or not all(isinstance(s, SequenceStage) for s in stages):
        raise TranspileError(f"{label}: the method returns a tuple of one or more SequenceStage, got {stages!r:.80}")
    if odd := next((s for s in stages if type(s.root) is not int or not isinstance(s.algorithm, str)), None):
        raise TranspileError(f"{label}: the root of a stage is an int, and its algorithm the name of a registered one; got {odd!r}")
    names = [s.algorithm.partition("/")[0] for s in stages if s.algorithm]
    if known is not None and (odd_name := next((n for n in names if n not in known), None)) is not None:
        raise TranspileError(f"{label}: a stage has the unknown algorithm {odd_name!r}; {nearest(odd_name, known, 'registered are')}")
    if any(s.group == DATA for s in stages) and any(s.group != DATA for s in stages):
        raise TranspileError(f"{label}: stages are over {NODE} and {RAIL}, or all over {DATA}")
    if collective in ("reduce_scatter", "all_gather") and (len(stages) > 1 or stages[0].group != DATA):
        raise TranspileError(f"{label}: the parts of all ranks are not parts of a host's part: give one stage, over {DATA}")
    groups = _groups(hosts, devices)
    refusal = prove_sequence(collective, groups, [(s.collective, s.group, s.root) for s in stages], rows, hosts * devices, root)
    if refusal is not None:
        raise TranspileError(f"{label}: {refusal}")


def _groups(hosts: int, devices: int) -> Groups:
    n = hosts * devices
    return {
        NODE: tuple(tuple(range(h * devices, (h + 1) * devices)) for h in range(hosts)),
        RAIL: tuple(tuple(range(k, n, devices)) for k in range(devices)),
        DATA: (tuple(range(n)),),
    }
