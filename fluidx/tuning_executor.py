"""TuningExecutor: training goes on while several strategies are tried, and the fastest is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from .executor.places import Place
from .executor.ranks.parallel_executor import ParallelExecutor
from .executor.ranks.state import State, StateHolder
from .ir.errors import FluidxError, TranspileError
from .ir.program import Program
from .simulator.planned import Planned
from .transpiler.strategies import Strategy
from .tuning import Tried, chosen_strategies, transpiled


class TuningExecutor(StateHolder):
    """Trains a program like a ParallelExecutor, with one strategy after the other: each for `warm_up` steps that do not count and `steps`
    that do. Then it stays with the one whose median step was shortest.

    `tried` are the strategies so far, with the seconds of their steps, `strategy` is the one in use, and `settled` says whether all were
    tried. Parameters, optimizer state and the number of steps go on from one strategy to the next, so the training is the one that each
    strategy alone would do. A strategy that is refused, or cannot take the state over, is skipped with the reason.

    `strategies` are Strategies, or what `fx.plan` found, of which the best `most` are tried. `places` is None if ranks are processes of one
    script: all ranks must make the same calls, and the times of rank 0 decide.

    >>> import numpy as np, fluidx as fx
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> some = [fx.strategies.data_parallel(), fx.strategies.zero1()]
    >>> with fx.TuningExecutor(some, main, startup, fx.cpu_places(2), steps=2, warm_up=1) as exe:
    ...     exe.run_startup()
    ...     for _ in range(8):
    ...         _ = exe.run(fetch_list=[loss], feed={"x": np.ones((8, 4), "float32")})
    ...     len(exe.tried), exe.strategy in some, exe.step
    (2, True, 8)
    """

    def __init__(
        self,
        strategies: Planned | Sequence[Strategy],
        program: Program,
        startup: Program,
        places: Sequence[Place] | None,
        *,
        most: int = 3,
        steps: int = 10,
        warm_up: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not all(isinstance(n, int) and n >= least for n, least in ((steps, 1), (warm_up, 0))):
            raise TranspileError(f"TuningExecutor needs steps >= 1 and warm_up >= 0, got steps={steps!r}, warm_up={warm_up!r}")
        choices = chosen_strategies(strategies, most if isinstance(strategies, Planned) else None)
        if not choices:
            raise TranspileError(f"TuningExecutor takes a list of strategies, or what fx.plan found, got {strategies!r}")
        self._program, self._startup, self._places, self._clock = program, startup, places, clock
        self._steps, self._warm_up = steps, warm_up
        self._left = list(choices)
        self.tried: list[Tried] = []
        self._measured: list[float] = []
        self.settled = False  # were all strategies tried?
        self._last: Exception | None = None
        self._choice, self._executor = self._first()

    def __enter__(self) -> TuningExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the ranks."""
        self._executor.close()

    @property
    def strategy(self) -> Strategy:
        """The strategy in use."""
        return self._choice["strategy"]

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self._executor.step

    @property
    def held(self) -> State:
        return self._executor.held

    def state(self, name: str) -> Any:
        """The global value of a persistable variable."""
        return self._executor.state(name)

    def run_startup(self) -> None:
        """Initialise the state on every rank."""
        self._executor.run_startup()

    def run(self, *args: Any, **named: Any) -> Any:
        """One step, with the arguments and results of ParallelExecutor.run."""
        if self.settled:
            return self._executor.run(*args, **named)
        start = self._clock()
        found = self._executor.run(*args, **named)
        self._measured.append(self._clock() - start)
        if len(self._measured) == self._warm_up + self._steps:
            self._change()
        return found

    def _change(self) -> None:
        """Note the times of the strategy in use, and go on with the next one, or with the fastest."""
        mine = self._measured[self._warm_up :]
        self.tried.append(Tried(self._choice, tuple(self._executor.script.gather_each("measure steps", lambda: mine)[0])))
        self._measured = []
        while self._left:
            choice = self._left.pop(0)
            if self._take(choice):
                return
        self.settled = True
        best = min((t for t in self.tried if t.seconds), key=lambda t: t.median).options
        if best is not self._choice:
            self._take(best)

    def _first(self) -> tuple[Any, ParallelExecutor]:
        while self._left:
            choice = self._left.pop(0)
            try:
                return choice, self._made(choice)
            except FluidxError as e:
                self._refused(choice, e)
        tried = "".join(f"\n  {t.options['strategy']!r}: {t.why.partition(chr(10))[0]}" for t in self.tried)
        raise TranspileError(f"TuningExecutor: none of {len(self.tried)} strategies can be taken:{tried}") from self._last

    def _made(self, choice: Any) -> ParallelExecutor:
        there = self._places
        t = transpiled(choice["strategy"], self._program, self._startup, there, choice.get("trainers"))
        return ParallelExecutor(t, places=None if there is None else there[: t.world_size])

    def _take(self, choice: Any) -> bool:
        """Go on with another strategy. If that cannot be, the one in use stays; False is returned."""
        old, made = self._executor, None
        try:
            made = self._made(choice)
            made.run_startup()
            _hand_over(old, made)
        except FluidxError as e:
            if made is not None:
                made.close()
            self._refused(choice, e)
            return False
        old.close()
        self._choice, self._executor = choice, made
        return True

    def _refused(self, choice: Any, e: FluidxError) -> None:
        self._last = e
        self.tried.append(Tried(choice, (), str(e)))


def _hand_over(old: ParallelExecutor, new: ParallelExecutor) -> None:
    """Give the state of one executor to another one of the same program. State that one strategy alone has, such as what it did not send
    yet, begins anew."""
    before = old.layout().global_block().descs
    for name in new.layout().global_block().descs:
        if name in before and old.is_global(name) and new.is_global(name):
            new.set_state(name, old.state(name))
    new.step = old.step
