"""A simulation in words: its summary, and its critical path with the user's lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..ir.operator import Operator
from ..view.diff import show_bytes
from .schedule import Compute

if TYPE_CHECKING:
    from .critical_path import PathPart
    from .simulation import Simulation

_MOST_LINES = 3
_MATTERS = 0.005  # of the step: changes below are not said


def show_seconds(seconds: float) -> str:
    """A time with a unit.

    >>> show_seconds(0.0412), show_seconds(2.5e-5), show_seconds(3.0)
    ('41.2 ms', '25 us', '3 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def show_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as text.

    >>> show_ranks((0, 1, 2, 3)), show_ranks((0, 2)), show_ranks((5,))
    ('ranks 0 to 3', 'ranks 0, 2', 'rank 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def summary(s: Simulation) -> str:
    """The result of a simulation: time, ranks, memory, bounds, and the reason."""
    return "\n".join([_first_line(s), *_rank_lines(s), *_link_lines(s), *_bound_lines(s), explain(s)])


def _first_line(s: Simulation) -> str:
    kind = "" if s.calibrated else ", not calibrated: figures of " + s.hardware.name
    interval = f", {show_seconds(s.low)} to {show_seconds(s.high)}" if s.spread else ""
    bound = f"; a lower bound: {s.lower_bound}" if s.lower_bound else ""
    ranks = f"{s.world_size} rank{'s' if s.world_size > 1 else ''}"
    return f"{s.name} on {ranks}: {show_seconds(s.seconds)} a step{interval}{kind}{bound}"


def _rank_lines(s: Simulation) -> Iterator[str]:
    shown = list(zip(s.ranks, s.memory_of, strict=True))[:8]
    for times, memory in shown:
        waits = max(times.waiting.items(), key=lambda w: w[1], default=None)
        late = f", {show_seconds(waits[1])} of it waiting for rank {waits[0]}" if waits else ""
        host = f" and {show_bytes(memory.host)} of the host" if memory.host else ""
        yield (
            f"  {show_ranks(times.ranks)}: compute {show_seconds(times.compute)}, communication {show_seconds(times.communication)}, "
            f"exposed {show_seconds(times.exposed)}{late}; memory {show_bytes(memory.device)}{host}, the system shows "
            f"{show_bytes(memory.system)}"
        )
    if len(s.ranks) > len(shown):
        yield f"  ... and {len(s.ranks) - len(shown)} more classes of ranks"


def _link_lines(s: Simulation) -> Iterator[str]:
    busy = sorted(s.link_use.items(), key=lambda u: -u[1].use)[:3]
    for link, used in busy:
        yield f"  link {link}: {show_bytes(round(used.nbytes))}, busy {used.use:.0%} of the step"


def _bound_lines(s: Simulation) -> Iterator[str]:
    b = s.bounds
    link = f", {show_seconds(b.link)} by {b.busiest_link}" if b.link else ""
    yield f"  no schedule is faster than {show_seconds(b.seconds)}: {show_seconds(b.compute)} by compute{link}"
    most = s.hardware.device.memory.value
    if s.peak_memory > most:
        yield f"  it does not fit: {show_bytes(s.peak_memory)} of {show_bytes(round(most))} of a device"


def explain(s: Simulation) -> str:
    """The critical path in words."""
    total = s.seconds
    if not total:
        return "nothing takes time"
    compute: dict[tuple[int, str], float] = {}
    communication: dict[tuple[int, str], float] = {}
    for part in s.critical_path:
        rank = s.folded.schedules[part.schedule].rank
        found = compute if part.computes else communication
        for name, seconds in _named(s, part):
            found[rank, name] = found.get((rank, name), 0.0) + seconds
    waited = sum(communication.values())
    share = waited / total
    if share > 0.5:
        first = f"communication-bound: {show_seconds(waited)} of communication, {share:.0%} of the step, are on the critical path"
    else:
        first = f"compute-bound: {show_seconds(total - waited)} of compute, {1 - share:.0%} of the step, are on the critical path"
    lines = [*_largest(communication, total), *_largest(compute, total)]
    return "\n".join([first, *lines, *_waiting(s), *_remedies(s)])


def _largest(parts: dict[tuple[int, str], float], total: float) -> Iterator[str]:
    found = sorted(parts.items(), key=lambda p: -p[1])[:_MOST_LINES]
    yield from (f"  {show_seconds(t)} ({t / total:.0%}) {name} on rank {rank}" for (rank, name), t in found if t > _MATTERS * total)


def _named(s: Simulation, part: PathPart) -> Iterator[tuple[str, float]]:
    """The communication of a part of the path by operator, its compute by type of operator, with the seconds of each."""
    plan, item = s.plans[part.schedule], s.folded.schedules[part.schedule].items[part.item]
    if not isinstance(item, Compute):
        step = plan.steps[item.steps[0]]
        yield operator_name(step.op, step.ops), part.seconds
        return
    whole = item.total or 1.0
    for k, own in zip(item.steps, item.seconds, strict=True):
        yield _types(plan.steps[k].ops) if k >= 0 else "starting a run", part.seconds * own / whole


def _types(ops: tuple[Operator, ...]) -> str:
    return " + ".join(dict.fromkeys(op.type for op in ops))


def operator_name(op: Operator, ops: tuple[Operator, ...]) -> str:
    """An operator as the user knows it: its types, its result or operand, and the line that made it."""
    name = next(iter((*op.output_arg_names, *op.input_arg_names)), "")
    line = f" ({op.site.filename}:{op.site.lineno})" if op.site else ""
    return _types(ops) + (f" of %{name}" if name else "") + line


def _waiting(s: Simulation) -> Iterator[str]:
    """Whom the ranks wait for."""
    total: dict[int, float] = {}
    for times in s.ranks:
        for rank, seconds in times.waiting.items():
            total[rank] = max(total.get(rank, 0.0), seconds)
    late = max(total.items(), key=lambda w: w[1], default=None)
    if late and late[1] > _MATTERS * s.seconds:
        yield f"  others wait up to {show_seconds(late[1])} for rank {late[0]}"


def _remedies(s: Simulation) -> Iterator[str]:
    """What would help, by simulating it."""
    for what, factors in (
        ("twice the network", {"network": 2.0}),
        ("twice the compute", {"compute": 2.0}),
        ("no latency", {"latency": 0.0}),
    ):
        saved = 1 - s.what_if(**factors).seconds / s.seconds
        if saved > _MATTERS:
            yield f"  with {what} {saved:.0%} less"
