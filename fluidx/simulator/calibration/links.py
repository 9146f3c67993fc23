"""What collectives and messages take among ranks of this machine, by size, on arrays that are in no cache."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ...executor.places import Place
from ...executor.ranks.parallel_executor import ParallelExecutor
from ...ir.opdef import Effect, opdef
from ...ir.program import Program, ProgramPair
from ...profiler.profile import Profile
from .probe import Clock, Speed
from .records import MESSAGE, CurvePoint, Curves
from .steps import EmptyTurns, observe
from .traces import Statistic, relative_spread

SIZES = (256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23, 1 << 26)  # bytes of the whole value
MEASURED = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather", "broadcast", "reduce")
_GROUP = "all"
_PLACED = {"x": "", "y": "", "r": f"shard(0) over {_GROUP}", "c": f"shard(1) over {_GROUP}"}  # values of a size and their placements
_SMALL, _COPIES = 1 << 16, 4  # up to this size, so many arrays of each size


class LinkTurns:
    """Collectives and messages among ranks on some places, which are timed in turns of about `seconds`."""

    def __init__(self, places: Sequence[Place], seconds: float, sizes: Sequence[int] = SIZES, least: int = 1):
        self.seconds, self._least, self._n = seconds, least, len(places)
        self._ranks = ParallelExecutor(_programs(self._n, sizes), places=places, verify=False)
        self._ranks.run_startup()
        self._ranks.run([], {})
        self.turns: list[Any] = []

    def turn(self, clock: Clock) -> None:
        profile = Profile()
        observe(profile, lambda: self._ranks.run([], {}), self.seconds, clock, self._least)
        self.turns.append(_times(profile, self._n))

    def close(self) -> None:
        self._ranks.close()

    def curves(self, speeds: Sequence[Speed], usual: Speed, statistic: Statistic) -> Curves:
        """The times by size at the `usual` speed of the machine. `speeds` are those of the machine in each turn."""
        found: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for turn, speed in zip(self.turns, speeds, strict=True):
            for op, sizes in turn.items():
                for size, calls in sizes.items():
                    for number, times in calls.items():
                        found[op][size][number] += [t / speed.over(usual, 0, size) for t in times]
        return {op: tuple(_points(samples, statistic)) for op, samples in found.items()}


def curves(
    places: Sequence[Place], seconds: float, statistic: Statistic = statistics.median, clock: Clock = time.perf_counter,
    sizes: Sequence[int] = SIZES,
) -> tuple[Curves, CurvePoint]:  # fmt: skip
    """The times of collectives and messages among ranks on these places, and that of a run of a program without them, in one turn."""
    same = Speed(1.0, 1.0)
    made: list[Any] = []
    for begin in (lambda: LinkTurns(places, seconds, sizes, least=5), lambda: EmptyTurns(places)):
        one = begin()
        try:
            one.turn(clock)
        finally:
            one.close()
        made.append(one)
    return made[0].curves([same], same, statistic), made[1].point([same], same, statistic)


def _pair(n: int, rank: int, declared: Sequence[str], startup: Sequence[str], main: Sequence[str]) -> ProgramPair:
    """The programs of a rank, from the lines of their texts."""
    made = []
    for name, ops in (("links", main), ("links_startup", startup)):
        head = [f"program {name} {{", f"  rank {rank}", f"  group {_GROUP} = {list(range(n))}"]
        made.append(Program.parse_from_string("\n".join([*head, *declared, "forward:", *(f"  {op}" for op in ops), "}"])))
    return ProgramPair(*made)


def _programs(n: int, sizes: Sequence[int]) -> list[ProgramPair]:
    """For each rank a program of every collective over all sizes. The other sizes push the arrays of one out of the caches."""
    made = []
    for rank in range(n):
        declared, startup, walks = [], [], []
        for size in sizes:
            for k in range(_COPIES if size <= _SMALL else 1):
                names, shape = {p: f"{p}{size}.{k}" for p in _PLACED}, _shape(size, n)
                declared += [f"  var %{name}: f32[{shape[0]},{shape[1]}] {_PLACED[p]} persistable" for p, name in names.items()]
                startup += [f"%{name} = fill_constant() {{shape=[{shape[0]},{shape[1]}], value=0.0}}" for name in names.values()]
                walks.append(_walk(names, shape, rank))
        main = [line for lines in zip(*walks, strict=True) for line in lines]
        made.append(_pair(n, rank, declared, startup, main))
    return made


def _shape(size: int, n: int) -> tuple[int, int]:
    """Rows and columns of about `size` bytes; both divide by n.

    >>> _shape(1024, 2), _shape(1 << 20, 4)
    ((16, 16), (512, 512))
    """
    columns = n * max(1, int((size // 4) ** 0.5) // n)
    return n * max(1, size // 4 // columns // n), columns


def _walk(names: dict[str, str], shape: tuple[int, int], rank: int) -> list[str]:
    """All collectives, and a message of rank 0 to rank 1 and back."""
    x, y, rows, columns = (names[p] for p in _PLACED)
    lines = [
        f'%{y} = all_reduce(%{x}) {{group="{_GROUP}"}}',
        f'%{rows} = reduce_scatter(%{y}) {{group="{_GROUP}"}}',
        f'%{columns} = all_to_all(%{rows}) {{group="{_GROUP}", to_axis=1}}',
        f'%{x} = all_gather(%{rows}) {{group="{_GROUP}"}}',
        f'%{y} = broadcast(%{x}) {{group="{_GROUP}", root=0}}',
        f'%{x} = reduce(%{y}) {{group="{_GROUP}", root=0}}',
    ]
    there = f'{{group="{_GROUP}", peer={1 - rank}}}'
    received = f'%{y} = recv() {{group="{_GROUP}", peer={1 - rank}, shape=[{shape[0]},{shape[1]}]}}'
    message = [f"send(%{x}) {there}", received] if rank == 0 else [received, f"send(%{y}) {there}"]
    return [*lines, "\n  ".join(message)] if rank < 2 else lines


def _times(profile: Profile, n: int) -> dict[str, dict[int, dict[int, list[float]]]]:
    """Seconds by operator, bytes of the whole value and number of the call, for each run: those of the rank that came last and did not
    wait, and for a message half of the way there and back."""
    runs: dict[int, list[Any]] = defaultdict(list)
    for run in profile.runs:
        runs[run.rank or 0].append(run)
    found: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for together in zip(*(runs[r] for r in range(n)), strict=True):
        for op, size, number, seconds in _calls(together):
            found[op][size][number].append(seconds)
    return found


def _calls(together: Sequence[Any]) -> Iterator[tuple[str, int, int, float]]:
    """(operator, bytes, number, seconds) of the calls of one run of all ranks."""
    rows = [[(run.calls[i], 1e-9 * (stop - start)) for i, start, stop in run.times] for run in together]
    walks = [[(c, t) for c, t in row if c.communicates and c.op.type in MEASURED] for row in rows]
    for number, calls in enumerate(zip(*walks, strict=True)):
        c = calls[0][0]
        sizes = [together[0].plan.values[name].type.nbytes for name in (*c.op.input_arg_names, *c.op.output_arg_names)]
        whole = len(together) if opdef(c.op.type).comm.algorithm_method == "exchange" else 1  # each rank has a part on both sides
        yield c.op.type, whole * max(sizes), number, min(t for _, t in calls)
    messages = [(c, t) for c, t in rows[0] if opdef(c.op.type).effect is Effect.P2P]
    yield from _messages(messages, together[0].plan.values)


def _messages(messages: Sequence[tuple[Any, float]], values: Any) -> Iterator[tuple[str, int, int, float]]:
    spent = 0.0
    for number, (c, t) in enumerate(messages):
        spent += t
        names = [n for n in c.op.output_arg_names if n in values]
        if c.kernel == "exchange" or not c.op.inputs:
            name = names[0] if names else c.op.input_arg_names[0]
            yield MESSAGE, values[name].type.nbytes, number, spent / 2
            spent = 0.0


def _points(samples: dict[int, dict[int, list[float]]], statistic: Statistic) -> Iterator[CurvePoint]:
    for size, calls in sorted(samples.items()):
        each = [(statistic(times), relative_spread(times)) for times in calls.values()]
        yield CurvePoint(size, sum(t for t, _ in each) / len(each), sum(s for _, s in each) / len(each))
