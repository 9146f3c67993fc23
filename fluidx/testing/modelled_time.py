"""Runs on modelled time: each kernel that computes is replaced by one that takes its modelled time; ranks communicate as they do, and a
collective takes its modelled time when all have come.

They compare a simulated schedule with what the executor does: the order of calls, where the two threads of a rank wait for each other, and
where ranks meet. Results are not computed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..executor.plan.cost import communicates
from ..executor.plan.records import Plan, Step
from ..executor.run import bind as bind_module
from ..executor.run.overlap_threads import Threads
from ..executor.run.thread_calls import Call
from ..ir.opdef import Effect, opdef

Seconds = Callable[[Plan, Step], float]
EAGER = 64 * 1024  # bytes of the largest message whose sender does not wait for a receiver among ranks that are threads


@contextmanager
def sleeping_kernels(seconds: Seconds) -> Iterator[None]:
    """Plans that are bound inside sleep for `seconds(plan, step)` where they would compute a step, and behind a step that communicates. By
    as much as the system woke a thread too late, its next sleep is shorter, unless the thread communicates in between.

    >>> import fluidx as fx
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), scale=2.0)
    >>> with sleeping_kernels(lambda plan, step: 0.01):
    ...     start = time.perf_counter()
    ...     _ = fx.Executor().run(main, feed={"x": [[1.0, 2.0]]}, fetch_list=[y])
    ...     time.perf_counter() - start > 0.01
    True
    """
    sleepers: dict[tuple[int, bool], Sleeper] = defaultdict(Sleeper)

    def replace(planned: Plan, rank: int, step: Step, call: Call) -> Call:
        sleeper, long = sleepers[rank, step.overlapped], seconds(planned, step)
        return partial(sleeper.communicate, call, long) if communicates(step) else partial(sleeper.sleep, long)

    with _replaced(replace):
        yield


@contextmanager
def virtual_clocks(seconds: Seconds) -> Iterator[VirtualClocks]:
    """Plans that are bound inside compute nothing, and the clocks of their threads go on by `seconds(plan, step)`.

    >>> import fluidx as fx
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), scale=2.0)
    >>> with virtual_clocks(lambda plan, step: 3.0) as clocks:
    ...     _ = fx.Executor().run(main, feed={"x": [[1.0, 2.0]]}, fetch_list=[y])
    >>> clocks.seconds
    3.0
    """
    clocks = VirtualClocks()

    def replace(planned: Plan, rank: int, step: Step, call: Call) -> Call:
        beside = step.overlapped
        if not communicates(step):
            return partial(clocks.compute, rank, beside, seconds(planned, step))
        if opdef(step.op.type).effect is Effect.P2P:
            sends = [(op.attrs["peer"], planned.values[op.input_arg_names[0]].type.nbytes) for op in step.ops if op.inputs]
            return partial(clocks.exchange, rank, beside, sends, [op.attrs["peer"] for op in step.ops if not op.inputs], call)
        members = tuple(planned.program.group_ranks(step.op.attrs["group"], rank))
        return partial(clocks.meet, rank, beside, members, seconds(planned, step), call)

    class ClockedThreads(Threads):
        def _call(self, name: str, beside: bool, at: int) -> Call:
            return partial(getattr(clocks, name), self.ctx.rank, beside, at, super()._call(name, beside, at))

    with _replaced(replace, ClockedThreads):
        yield clocks


class Sleeper:
    """The sleeps of one thread."""

    def __init__(self) -> None:
        self.late = 0.0

    def sleep(self, seconds: float) -> None:
        start, wanted = time.perf_counter(), seconds - self.late
        time.sleep(max(0.0, wanted))
        self.late = max(0.0, time.perf_counter() - start - wanted)

    def communicate(self, call: Call, seconds: float) -> None:
        call()
        self.late = 0.0
        self.sleep(seconds)


@contextmanager
def _replaced(replace: Callable[[Plan, int, Step, Call], Call], threads: Any = Threads) -> Iterator[None]:
    """Calls of steps are those that `replace(plan, rank, step, call)` gives. A branch or loop stays, and the steps inside are replaced."""
    given = bind_module._Binder

    class ReplacingBinder(given):  # type: ignore[valid-type, misc]
        def step(self, step: Step) -> Call | None:
            call = super().step(step)
            return call if call is None or step.kernel == "control" else replace(self.plan, self.ctx.rank, step, call)

    bind_module._Binder, bind_module.Threads = ReplacingBinder, threads  # type: ignore[misc]
    try:
        yield
    finally:
        bind_module._Binder, bind_module.Threads = given, Threads  # type: ignore[misc]


class VirtualClocks:
    """A clock for each thread of each rank. Communication sets the clocks of those that wait to the time of the last one that came. Each
    thread writes only clocks of its own, so the times do not depend on how the system schedules threads."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Before another run."""
        self.now: dict[tuple[int, bool], float] = defaultdict(float)  # (rank, beside) -> seconds
        self._posts: dict[Any, float] = {}
        self._counts: Counter[Any] = Counter()
        self._paces: dict[tuple[int, bool], dict[int, float]] = defaultdict(dict)

    @property
    def seconds(self) -> float:
        """The time of the run: the last clock."""
        return max(self.now.values(), default=0.0)

    def compute(self, rank: int, beside: bool, seconds: float) -> None:
        with self._moved:
            self.now[rank, beside] += seconds

    def meet(self, rank: int, beside: bool, members: Sequence[int], seconds: float, call: Call) -> None:
        """A collective: all members wait for the last one, and it takes `seconds` from then on."""
        key = members, self._number(rank, members)
        self._post((key, rank), rank, beside)
        call()
        self._wait_for([(key, r) for r in members], rank, beside)
        self.compute(rank, beside, seconds)

    def exchange(self, rank: int, beside: bool, sends: Sequence[tuple[int, int]], receives: Sequence[int], call: Call) -> None:
        """Messages, `sends` as (receiver, bytes) and `receives` as senders: a receiver waits for the sender, and the sender of a large
        one for the receiver."""
        waits = []
        for peer, nbytes in sends:
            key = rank, peer, self._number(rank, ("to", peer))
            self._post((key, "sent"), rank, beside)
            if nbytes > EAGER:
                waits.append((key, "asked"))
        for peer in receives:
            key = peer, rank, self._number(rank, ("from", peer))
            self._post((key, "asked"), rank, beside)
            waits.append((key, "sent"))
        call()
        self._wait_for(waits, rank, beside)

    def reach(self, rank: int, beside: bool, at: int, call: Call) -> None:
        with self._moved:
            self._paces[rank, beside][at] = self.now[rank, beside]
        call()

    def follow(self, rank: int, beside: bool, at: int, call: Call) -> None:
        call()
        with self._moved:
            other = self._paces[rank, not beside]
            self.now[rank, beside] = max(self.now[rank, beside], other[min(k for k in other if k >= at)])

    def _number(self, rank: int, what: Any) -> int:
        with self._moved:
            self._counts[rank, what] += 1
            return self._counts[rank, what]

    def _post(self, key: Any, rank: int, beside: bool) -> None:
        with self._moved:
            self._posts[key] = self.now[rank, beside]
            self._moved.notify_all()

    def _wait_for(self, keys: Sequence[Any], rank: int, beside: bool) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: all(key in self._posts for key in keys), timeout=60)
            self.now[rank, beside] = max(self.now[rank, beside], *(self._posts[key] for key in keys), 0.0)
