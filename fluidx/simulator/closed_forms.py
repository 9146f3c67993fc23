"""What a strategy needs, in closed form: bytes sent, memory of the busiest rank, and a lower bound of the time of a step.

Nothing is transpiled. The facts come from the steps of the strategy (where parameters are stored and updated, what travels together, how
far ahead it is gathered) and from the plan of one device that has the rows of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.entries import Entry
from ..ir.parts import coords_of, entry_of, local_type
from ..ir.pass_base import Pass
from ..ir.types import TensorType
from ..ir.var import Var
from ..ops.comm.volume import share
from ..transpiler.cluster import Cluster, Mesh
from ..transpiler.passes.bucket import Bucket
from ..transpiler.passes.offload import Offload
from ..transpiler.passes.place import Place
from ..transpiler.passes.prefetch import Prefetch
from ..transpiler.passes.time_axis import Turns
from ..transpiler.passes.wire import Wire
from ..transpiler.placement.parameter_homes import Reshard, matching_scopes, staying
from ..transpiler.placement.roots import fill
from ..transpiler.strategies import Strategy
from .one_device import OneDevice, Trained

_P = TypeVar("_P", bound=Pass)
Collective = Callable[[str, float], float]  # seconds of a collective over `dp`: its method, and the bytes of the whole value


class ClosedForm(NamedTuple):
    """What a strategy needs. `seconds` is a lower bound: no schedule of this strategy is faster. Bytes are of the busiest rank."""

    seconds: float
    compute: float  # seconds
    communication: float  # seconds
    memory: int  # of a device
    state: int  # of that: parameters and optimizer state
    host_memory: int
    sent: float  # bytes that a rank sends in a step


class ModelBytes(NamedTuple):
    """Bytes of a model on one rank: parameters, gradients and optimizer state. `of(...)` gives what a rank keeps.

    >>> ModelBytes(2, 2, 12).of(stored=1, gradients=1 / 64, updated=1 / 64).total  # zero2 with mixed precision on 64 ranks, a parameter
    2.21875
    """

    parameters: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.state

    def of(self, stored: float, gradients: float, updated: float) -> ModelBytes:
        """The bytes on a rank that stores a share of the parameters, keeps a share of the gradients, and updates a share."""
        return ModelBytes(self.parameters * stored, self.gradients * gradients, self.state * updated)


@dataclass(frozen=True)
class Homes:
    """Where a strategy has parameters, over the group of `ranks` ranks that train on different data. `stored` and `updated` are their
    entries, None for every rank; `units` are gathered together, `buckets` are the gradients that travel together, in the order in which
    they are sent. `early`: gradients are reduced as soon as they are finished, and not after backward."""

    ranks: int
    stored: Mapping[str, Entry | None]
    updated: Mapping[str, Entry | None]
    units: Sequence[Sequence[str]]
    buckets: Sequence[Sequence[str]]
    early: bool
    reshard: Reshard  # which units that forward gathers are freed before backward (parameter_homes.staying)
    matching: Container[str]  # the parameters in the scopes that it names
    ahead: int  # units that are gathered before they are needed
    half: bool  # gradients travel in 16 bits
    turns: int
    offload: bool


def homes(strategy: Strategy, one: OneDevice, trainers: Cluster | Mesh) -> Homes:
    """Read from the steps of a strategy where it stores and updates the parameters of a program.

    >>> import fluidx as fx
    >>> from fluidx.simulator.one_device import one_device
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2, bias_attr=False))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> one = one_device(main, 8, lambda plan, step: 1.0)
    >>> found = homes(fx.strategies.zero1(), one, fx.Cluster(1, 4))
    >>> print(found.stored["fc_0.w_0"], found.updated["fc_0.w_0"])
    None pieces(0, 2, 4, 6, 8) over dp
    """
    place = _the(strategy, Place) or Place()
    bucket, turns, prefetch = _the(strategy, Bucket), _the(strategy, Turns), _the(strategy, Prefetch)
    ranks = trainers.axes.get(place.group, 1)
    params = {n: t.var for n, t in one.trained.items()}
    resting = place.rest.seen(one.program) if hasattr(place.rest, "seen") else place.rest
    stored = _entries(resting, params, place.group, ranks)
    updated = stored if place.update is None else _entries(place.update, params, place.group, ranks)
    units = resting.units(params) if hasattr(resting, "units") else [[n] for n in params]
    matching = matching_scopes(one.program, stored, place.reshard) if isinstance(place.reshard, tuple) else ()
    late = bucket is not None and ("all_reduce" if all(e is None for e in updated.values()) else "reduce_scatter") in bucket.late
    return Homes(
        ranks, stored, updated, units, _buckets(place.update, updated, stored, units, one, bucket), not late, place.reshard, matching,
        0 if prefetch is None else prefetch.ahead, _the(strategy, Wire) is not None,
        1 if turns is None else turns.count, _the(strategy, Offload) is not None,
    )  # fmt: skip


def kept_bytes(at: Homes, model: ModelBytes) -> ModelBytes:
    """What the busiest rank keeps of a model with evenly distributed parameters, where `model` has the bytes of one rank without sharding:
    the bytes of gradients are those that are left when all are reduced.

    >>> whole = ModelBytes(parameters=4, gradients=4, state=8)
    >>> kept_bytes(Homes(4, {"w": None}, {"w": None}, [["w"]], [["w"]], True, True, (), 0, False, 1, False), whole).total
    16
    """
    part = 1 / at.ranks
    stored = part if any(e is not None for e in at.stored.values()) else 1
    updated = part if any(e is not None for e in at.updated.values()) else 1
    return model.of(stored, updated if at.early else 1, updated)


def _the(strategy: Strategy, kind: type[_P]) -> _P | None:
    """The step of a strategy that is a pass of this kind."""
    return next((p for p in strategy.passes if isinstance(p, kind)), None)


def _entries(choice: Any, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
    own = {n: entry_of(d.placement, group) for n, d in params.items()}
    free = {n: d for n, d in params.items() if own[n] is None}
    return {**own, **(choice.entries(free, group, ranks) if ranks > 1 else {})}


def _buckets(
    choice: Any, updated: Mapping[str, Entry | None], stored: Mapping[str, Entry | None], units: Sequence[Sequence[str]], one: OneDevice,
    bucket: Bucket | None,
) -> list[list[str]]:  # fmt: skip
    """The parameters whose gradients travel together, in the order in which they are complete."""
    found: list[list[str]] = []
    if choice is None and any(e is not None for e in stored.values()):
        found = [[n for n in unit if n in one.trained] for unit in units]
    elif hasattr(choice, "buckets"):
        found = [list(b) for b in choice.buckets({n: t.var for n, t in one.trained.items()})]
    within = {n for b in found for n in b}
    rest = {n: t.grad.type.nbytes for n, t in one.trained.items() if n not in within}
    if any((e := updated[n]) is not None and e.axis is None for n in rest):  # roots: one message has the values of all, at best
        found += [list(rest)]
    elif bucket is None or not bucket.mb or any(updated[n] is not None for n in rest):
        found += [[n] for n in rest]
    else:
        found += fill(rest, bucket.mb, bucket.first_mb)
    return sorted((b for b in found if b), key=lambda b: max(one.trained[n].made for n in b))


def closed_form(
    strategy: Strategy, one: OneDevice, trainers: Cluster | Mesh, collective: Collective, to_host: float = inf, slowdown: float = 1.0
) -> ClosedForm:  # fmt: skip
    """What a strategy needs for a program on these ranks. `one` is the program with the rows of one micro-batch of one rank; `collective`
    the seconds of a collective among the ranks that train on different data, `to_host` bytes a second between device and host memory,
    `slowdown` the factor on the time of compute while communication runs beside it.

    >>> import fluidx as fx
    >>> from fluidx.simulator.one_device import one_device
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2, bias_attr=False))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> one = one_device(main, 8, lambda plan, step: 0.0)
    >>> found = closed_form(fx.strategies.data_parallel(), one, fx.Cluster(1, 4), lambda method, nbytes: nbytes)
    >>> found.seconds, found.sent  # the gradient has 32 bytes, of which a rank sends 2 * 3/4
    (32.0, 48.0)
    """
    at = homes(strategy, one, trainers)
    model = _Holding(one, at, trainers)
    split = 1 / (trainers.world_size // at.ranks)  # of the work: other axes cut it, too
    events = _Exchanges(model, collective)
    update = model.update_seconds * split if not at.offload else model.moved / to_host
    computing = at.turns * float(one.computing[-1] if len(one.computing) else 0.0) * split
    # a second of communication is exposed, or slows compute down
    beside = computing + update + events.first + (events.total - events.first) * (1 - 1 / slowdown)
    seconds = max(events.bound(at.turns, split, update), beside, events.total)
    state = model.state_bytes
    return ClosedForm(seconds, computing + update, events.total, state + model.arena_bytes(split), state, model.host_bytes, events.sent)


class _Holding:
    """The parameters of a program as the busiest rank has them."""

    def __init__(self, one: OneDevice, at: Homes, trainers: Cluster | Mesh):
        self.one, self.at = one, at
        coords = {g: c for g, c in coords_of(trainers.groups(), 0).items() if g in trainers.axes}
        self.local = {n: _local(t.var, coords) for n, t in one.trained.items()}
        self.rank = _busiest(one.trained, at)
        self.stored = {n: self._share(n, e) for n, e in at.stored.items()}
        self.updated = {n: self._share(n, e) for n, e in at.updated.items()}

    def _share(self, name: str, e: Entry | None) -> float:
        """The share of a parameter that the busiest rank holds."""
        numel = self.one.trained[name].var.type.numel
        return 1.0 if e is None or not numel else _sizes(e, self.one.trained[name].var, self.at.ranks).get(self.rank, 0) / numel

    def nbytes(self, v: Var, of: str) -> float:
        """The bytes of a whole variable that has the placement of parameter `of` over the other axes."""
        return v.type.nbytes * self.local[of]

    @property
    def update_seconds(self) -> float:
        """Seconds of the updates on this rank; what updates do beside, such as a norm of all gradients, is done by every rank."""
        return self.one.updating - sum(self.one.update_seconds(n) * (1 - part) for n, part in self.updated.items())

    @property
    def moved(self) -> float:
        """Bytes that pass between device and host if updates are on the host: a gradient one way, a parameter the other."""
        return sum((self.nbytes(t.grad, n) + self.nbytes(t.var, n)) * self.updated[n] for n, t in self.one.trained.items())

    def wire_bytes(self, t: Trained, name: str) -> float:
        """The bytes of a gradient on its way."""
        each = np_dtype(t.grad.type.dtype).itemsize
        return t.grad.type.numel * (min(each, 2) if self.at.half else each) * self.local[name]

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory: those of state, and the gradients, which wait there for their updates."""
        gradients = sum(self.nbytes(t.grad, n) * self.updated[n] for n, t in self.one.trained.items())
        return round(self._state_bytes(True) + gradients) if self.at.offload else 0

    def _state_bytes(self, on_host: bool) -> float:
        """The bytes of parameters and optimizer state, those that offload has on the host, or those that stay."""
        total = 0.0
        for n, t in self.one.trained.items():
            away = self.at.offload
            if (away and self.at.stored[n] is not None) is on_host:
                total += self.nbytes(t.var, n) * self.stored[n]
            if away is on_host:
                total += sum(self.nbytes(s, n) for s in t.state) * self.updated[n]
        return total

    @property
    def state_bytes(self) -> int:
        """The bytes of state on the device."""
        return round(self._state_bytes(False)) + self.one.other_state

    def arena_bytes(self, split: float) -> int:
        """Feeds, and the most bytes of values that are live at a time: a plan without gaps between them."""
        live = _Live(self.one, split)
        for bucket in self.at.buckets:
            done = max(self.one.trained[n].made for n in bucket)
            for n in bucket:
                kept = 0.0 if self.at.offload and self.at.turns == 1 else self.updated[n]  # the host has it when it is finished
                live.gradient(n, kept, done if self.at.early else inf, self.local[n] / split, self.at.turns > 1)
        for start, stop, nbytes in self._gathered():
            live.add(start, stop, nbytes)
        return self.one.plan.nbytes("feed") * self.at.turns + live.peak

    def _gathered(self) -> Iterable[tuple[int, int, float]]:
        """(first operator, last operator, bytes) of gathered units."""
        for order in _gather_order(self.one, self.at):
            if self.at.turns > 1 and order:  # all turns of forward find what the first one gathered, and so do those of backward
                order = [(order[0][0], order[-1][1], unit) for _, _, unit in order]
            begins = [first for first, _, _ in order]
            for k, (_, last, unit) in enumerate(order):
                size = sum(self.nbytes(self.one.trained[n].read, n) for n in unit)
                yield begins[max(0, k - self.at.ahead)], last, size


class _Live:
    """Bytes that are live on a device beside each operator, of values in the arena of one device, cut into parts of `split`."""

    def __init__(self, one: OneDevice, split: float):
        self.one, self.split = one, split
        self.changes = np.zeros(len(one.roles) + 2)
        for number, b in enumerate(one.plan.buffers):
            if b.kind == "arena" and not b.on_host:
                self.add(b.start, one.shapes.get(number, b.stop), b.nbytes * split)

    def add(self, start: float, stop: float, nbytes: float) -> None:
        last = len(self.changes) - 2
        self.changes[int(max(0, min(start, last)))] += nbytes
        self.changes[int(max(0, min(stop, last))) + 1] -= nbytes

    def gradient(self, name: str, kept: float, reduced: float, scale: float, from_start: bool) -> None:
        """A gradient whose part `kept` alone stays once operator `reduced` has run. `from_start`: earlier micro-batches left it."""
        value = self.one.plan.values.get(self.one.trained[name].grad.name)
        buffer = None if value is None else self.one.plan.buffers[value.buffer]
        if buffer is None or buffer.kind != "arena":
            return
        nbytes = buffer.nbytes * self.split * scale
        if kept < 1 and reduced < buffer.stop:
            self.add(reduced + 1, buffer.stop, -nbytes * (1 - kept))
        if from_start and buffer.start:
            self.add(0, buffer.start - 1, nbytes)

    @property
    def peak(self) -> int:
        return round(float(np.cumsum(self.changes).max()))


class _Exchanges:
    """The seconds of the communication among the ranks that train on different data, and the bytes that a rank sends on average."""

    def __init__(self, model: _Holding, collective: Collective):
        self.model, self.collective, self.sent = model, collective, 0.0
        at, trained = model.at, model.one.trained
        self.reduces, self.spreads, self.gathers = [], [], []
        for bucket in at.buckets if at.ranks > 1 else ():
            whole = all(at.updated[n] is None for n in bucket)
            self.reduces.append(self._seconds("all_reduce" if whole else "reduce", sum(model.wire_bytes(trained[n], n) for n in bucket)))
            back = [n for n in bucket if at.updated[n] is not None and at.stored[n] is None]
            self.spreads.append(self._seconds("spread", sum(model.nbytes(trained[n].var, n) for n in back)))
        for order in _gather_order(model.one, at) if at.ranks > 1 else ():
            for _, _, unit in order:
                self.gathers.append(self._seconds("spread", sum(model.nbytes(trained[n].read, n) for n in unit)))

    def _seconds(self, method: str, nbytes: float) -> float:
        self.sent += share(method, self.model.at.ranks) * nbytes
        return self.collective(method, nbytes) if nbytes else 0.0

    @property
    def first(self) -> float:
        """The first gather: nothing computes before it has ended."""
        return self.gathers[0] if self.gathers else 0.0

    @property
    def total(self) -> float:
        return sum(self.reduces) + sum(self.spreads) + sum(self.gathers)

    def bound(self, turns: int, split: float, update: float) -> float:
        """Nothing is sent before it is finished: from each bucket on, all that follows must be sent, and the last one be updated."""
        if not self.reduces:
            return 0.0
        one, at = self.model.one, self.model.at
        times = one.computing * split
        before = (turns - 1) * float(times[-1]) + self.first
        most, follow = 0.0, 0.0
        for bucket, seconds, back in zip(reversed(at.buckets), reversed(self.reduces), reversed(self.spreads), strict=True):
            follow += seconds + back
            ready = float(times[max(one.trained[n].made for n in bucket)] if at.early else times[-1])
            most = max(most, before + ready + follow)
        everything = sum(one.update_seconds(n) * self.model.updated[n] for n in one.trained) or 1.0
        return most + update * sum(one.update_seconds(n) * self.model.updated[n] for n in at.buckets[-1]) / everything


def _gather_order(one: OneDevice, at: Homes) -> list[list[tuple[int, int, Sequence[str]]]]:
    """For forward and for backward: the units that are gathered, as (first and last operator that reads them, parameters), in order.
    Backward finds the units that stay; if all do, a unit is gathered for both, and there is one side."""
    sides: list[list[tuple[int, int, Sequence[str]]]] = []
    for forward in (True, False):
        found: list[tuple[int, int, Sequence[str]]] = []
        for unit in at.units:
            reads = {n: t.forward if forward else t.backward for n in unit if (t := one.trained.get(n)) and at.stored[n] is not None}
            ends = [e for e in reads.values() if e is not None]
            if at.reshard is False and forward:
                ends += [e for n in reads if (e := one.trained[n].backward) is not None]
            if ends:
                names = [n for n, e in reads.items() if e is not None]
                found.append((min(e[0] for e in ends), max(e[1] for e in ends), names))
        sides.append(sorted(found, key=lambda one: one[:2]))
    if at.reshard is False:
        return sides[:1]
    gathered, again = sides
    stay = {n for unit in staying([unit for _, _, unit in gathered], at.reshard, at.matching) for n in unit}
    for k, (first, last, unit) in enumerate(gathered):
        if not stay.isdisjoint(unit):
            gathered[k] = first, max([last, *(u[1] for u in again if not set(u[2]).isdisjoint(unit))]), unit
    return [gathered, [u for u in again if stay.isdisjoint(u[2])]]


def _local(v: Var, coords: Mapping[str, tuple[int, int]]) -> float:
    """The share of a variable that a rank has, by its annotation."""
    placed = tuple(e for e in v.placement if e.group in coords)
    return local_type(v.type, placed, coords).numel / v.type.numel if placed and v.type.numel else 1.0


def _sizes(e: Entry, v: Var, ranks: int) -> Mapping[int, int]:
    """The elements of a variable by rank."""
    if e.root is not None:
        return {e.root: v.type.numel}
    return dict(e.bounds.sizes()) if e.bounds is not None else _cut(v.type, e, ranks)


@lru_cache(maxsize=4096)
def _cut(t: TensorType, e: Entry, ranks: int) -> Mapping[int, int]:
    return {r: local_type(t, (e,), {e.group: (r, ranks)}).numel for r in range(ranks)}


def _busiest(trained: Mapping[str, Trained], at: Homes) -> int:
    """The rank that stores and updates most bytes."""
    loads = np.zeros(at.ranks)
    for name, t in trained.items():
        for e, nbytes in ((at.stored[name], t.var.type.nbytes), (at.updated[name], sum(s.type.nbytes for s in t.state))):
            if e is not None and t.var.type.numel:
                for rank, numel in _sizes(e, t.var, at.ranks).items():
                    loads[rank] += nbytes * numel / t.var.type.numel
    return int(loads.argmax())
