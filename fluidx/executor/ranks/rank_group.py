"""RankGroup: what a ParallelExecutor asks of its ranks, whichever they are: threads, processes, or ranks of a launched script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...comm.flight_recorder import STARTUP
from ...ir.types import TensorType
from ..places import Place
from ..run import observers
from ..scope import Scope
from .rank_programs import RankPrograms

if TYPE_CHECKING:
    from .background_writer import SharedCopy
    from .process_pool import ProcessPool

Feeds = Sequence[Mapping[str, np.ndarray]]  # by rank
Fetched = list[list[Any]]  # the fetched values of each rank
CLOSED = "this executor is closed; make a new one"
NOTHING: AbstractContextManager[None] = nullcontext()


class GroupSetup(NamedTuple):
    """The checked arguments of a ParallelExecutor."""

    programs: RankPrograms
    places: list[Place]
    uneven: str
    timeout: float
    scopes: Sequence[Scope] | None


class BackgroundSave(Protocol):
    """A checkpoint that background threads of the ranks write."""

    def written(self) -> bool:
        """Has this rank's thread finished writing?"""

    def finish(self) -> None:
        """Wait for all ranks' threads and complete the checkpoint together. Errors with the files are stored for a later query."""


class ScriptProcesses(Protocol):
    """The processes that run this script, of which this is one. All of them must make the same calls of these methods."""

    @property
    def spans_processes(self) -> bool:
        """Do other processes take part?"""

    @property
    def is_first(self) -> bool:
        """Does this process hold the values of rank 0?"""

    def agree_run(self, kind: tuple, known: bool, feed: Mapping[str, np.ndarray] | None) -> bool:
        """Is the run `kind` prepared (`known`) in all processes? A `feed` is compared with those of the others."""

    def gather_each(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Call `make()` in each process and gather the results (JSON data) in rank order. The first error is raised in all processes."""

    def setting(self, name: str) -> None:
        """A variable is about to be set."""

    def loading(self) -> AbstractContextManager[None]:
        """A context in which variables are set without a collective call for each."""

    def finish_later(self, save: BackgroundSave) -> None:
        """Call `save.finish()` when a later call finds it written in all processes, or when the script ends."""

    def finish_save(self) -> None:
        """Finish the background save now."""


class OneProcess:
    """The ScriptProcesses of a script that is one process."""

    spans_processes = False
    is_first = True

    def agree_run(self, kind: tuple, known: bool, feed: Mapping[str, np.ndarray] | None) -> bool:
        return known

    def gather_each(self, what: str, make: Callable[[], Any]) -> list[Any]:
        return [make()]

    def setting(self, name: str) -> None:
        pass

    def loading(self) -> AbstractContextManager[None]:
        return NOTHING

    def finish_later(self, save: BackgroundSave) -> None:
        save.finish()

    def finish_save(self) -> None:
        pass


class RankGroup(Protocol):
    """All ranks of one ParallelExecutor, as this process sees them. Calls are made one at a time, under `lock`."""

    ranks_are: str  # how the ranks belong to this process, for an error text
    places: list[Place]

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def timeout(self) -> float: ...

    @property
    def scopes(self) -> list[Scope]:
        """The variables of each rank."""

    @property
    def own(self) -> Sequence[int]:
        """The ranks whose values this process holds."""

    @property
    def script(self) -> ScriptProcesses: ...

    @property
    def pool(self) -> ProcessPool | None:
        """The processes that this group started."""

    @property
    def bound_to_process(self) -> bool:
        """Does it need threads or connections of this process, which a fork does not have?"""

    @property
    def failure(self) -> BaseException | None:
        """The failure of a run, after which the ranks may differ."""

    def take_programs(self, given: Any) -> RankPrograms:
        """Check the `programs` argument of the executor. Called first."""

    def open(self, setup: GroupSetup) -> RankPrograms:
        """Start the ranks. Returns their programs: those of the setup, or others if processes found a difference."""

    def reset(self) -> None:
        """Forget a failure, where ranks can go on."""

    def begin(self, step: int) -> None:
        """The startup program (STARTUP) or a step comes soon: wake who waits for it, and name it in errors."""

    def start(self) -> None:
        """Run the startup program of every rank."""

    def versions(self) -> tuple[int, ...]:
        """Numbers that change when a prepared step is no longer valid; the first one, when none is."""

    def prepare(self, feeds: Mapping[str, TensorType], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> Any:
        """A step: every rank's main program, planned and bound for feeds of these types and what each rank fetches. It has the
        `fetch_types` of each rank."""

    def step(self, step: Any, feeds: Feeds, number: int, watched: observers.ObserverSettings) -> tuple[Fetched, bool]:
        """Run a prepared step: the fetched values by rank, and whether they are in memory that the next step overwrites."""

    def published(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """A context in which `scopes` of all ranks have the values of these variables, and none changes them."""

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
        """For ranks that are other processes of this script: a thread in each that calls `function` ("module:function") with the values of
        variables, or with copies of them. Empty if there is none."""

    def close(self) -> None:
        """Stop the ranks."""


def activity(step: int) -> str:
    """What runs, for error texts.

    >>> activity(3), activity(STARTUP)
    ('step 3', 'the startup program')
    """
    return "the startup program" if step == STARTUP else f"step {step}"
