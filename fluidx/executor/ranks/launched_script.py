"""LaunchedScript: the processes of a launched script. Each call of all begins with a collective call that compares what they are about to
do."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np

from ...comm.launched_rank import LaunchedRank
from ...ir.errors import ExecutionError, FeedError, RankError
from ...ir.program import Program
from ..error_text import describe_error, where
from .agreement import describe_call, digest_of, feeds_differ, grouped, listed, sums_of
from .local_rank import LocalRank
from .rank_group import BackgroundSave, activity
from .remote_errors import ErrorRecord, rebuilt
from .thread_workers import root_cause

_NO_SUMS: Mapping[str, int] = {}


class LaunchedScript:
    """The processes of a launched script, of which this is one. Each holds `each` ranks; `ranks` are those of this process, once they are
    made."""

    spans_processes = True

    def __init__(self, member: LaunchedRank, each: int):
        self.member, self.each, self.is_first = member, each, member.rank == 0
        self.own = range(member.rank * each, (member.rank + 1) * each)
        self.ranks: Sequence[LocalRank] = ()
        self.main_of: Callable[[int], Program]  # the main program of a rank
        self.observed: Callable[[], bool] = lambda: False  # does a profiler of this process want to observe a run?
        self.failure: BaseException | None = None  # after it no collective call is possible
        self.begun: int | None = None  # the step that runs now, or the startup program
        self.profiled = False  # does a profiler of any process observe the run that begins?
        self._runs = 0
        self._loading = False  # are variables set without a collective call for each?
        self._save: BackgroundSave | None = None  # the checkpoint that is written in the background

    # -- collective calls ------------------------------------------------------------------------------------------------------

    def collective(self, meet: Callable[[], Any]) -> Any:
        try:
            return meet()
        except BaseException as e:
            self.fail(e, each=self.each)

    def gather(self, said: Any) -> list[Any]:
        """JSON data of every process, once for each of its ranks."""
        return [one for one in self.collective(lambda: self.member.gather(said)) for _ in range(self.each)]

    def together(self, make: Callable[[], Any], whose: str = "") -> list[Any]:
        """The results of `make()` in every process (JSON data). The first error is raised in all; in the others `whose` is added to it."""
        error, said = None, {}
        try:
            said = {"done": make()}
        except Exception as e:
            error, fault = e, ErrorRecord.of(e, None)
            fault["own"][1] += whose
            said = {"fault": fault}
        all_said = self.collective(lambda: self.member.gather(said))
        for process, one in enumerate(all_said):
            if "fault" in one:
                raise error if error is not None else rebuilt(one["fault"], self.main_of(process * self.each))
        return [one["done"] for one in all_said]

    def agree(self, what: tuple, ready: bool = True, sums: Mapping[str, int] = _NO_SUMS) -> bool:
        """Check that all make the call `what`; returns whether all are `ready`. After it, nobody still reads results of the call before.
        Raises ExecutionError if one makes another call, FeedError if checksums of feeds differ."""
        mine, written = digest_of(what), self._save is not None and self._save.written()
        all_of = self.collective(lambda: self.member.gather_numbers([mine, ready, written, self.observed(), sum(sums.values())]))
        if any(one[0] != mine for one in all_of):
            said = self.gather(describe_call(what))
            error = ExecutionError(
                "the ranks make different calls: "
                + "; ".join(f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {words}" for words, ranks in grouped(said))
                + "\n  all ranks must make the same calls: do not run, save or load only where fx.rank() has some value"
            )
            self.fail(error)
        if any(one[4] != all_of[0][4] for one in all_of):
            raise FeedError(feeds_differ(self.gather(sums)))
        if all(one[2] for one in all_of):
            self.finish_save()
        self.profiled = any(one[3] for one in all_of)
        return all(bool(one[1]) for one in all_of)

    def agree_run(self, kind: tuple, known: bool, feed: Mapping[str, np.ndarray] | None) -> bool:
        self._runs += 1
        # checksums of feeds cost time: runs 1, 2, 4, 8, ... compare them, which finds different seeds or orders sooner or later
        sums = sums_of(feed) if feed is not None and self._runs & (self._runs - 1) == 0 else _NO_SUMS
        return self.agree(("run", *kind), known, sums)

    def fail(self, error: BaseException, k: int = 0, each: int = 1) -> NoReturn:
        """Fail the job: report the error of this process's rank number `k`, or that of another process, which ended this one. The error
        names a rank, or a process that holds `each` ranks."""
        rank, text, mine = getattr(root_cause(error), "rank", None), describe_error(error), self.own[k]
        rank = None if rank is None else rank * each
        if not isinstance(error, Exception) and self.ranks and self.ranks[k].current is not None:
            text += where(self.ranks[k].running())
        text = text if text.startswith("rank ") else f"rank {mine}: {text}"
        text += "" if self.begun is None else f"\n  in {activity(self.begun)}"
        self.failure = error
        (self.ranks[k].comm if self.ranks else self.member.comm).abort(RuntimeError(text))
        if not isinstance(error, Exception):  # Ctrl-C
            raise error
        failed = RankError(text, mine if rank is None else rank)
        failed.process = (failed.rank or 0) // self.each
        raise failed from error

    # -- ScriptProcesses -----------------------------------------------------------------------------------------------------------------

    def gather_each(self, what: str, make: Callable[[], Any]) -> list[Any]:
        self.finish_save()
        self.agree((what,))
        return self.together(make, f" (rank {self.own[0]}, on host {socket.gethostname()})")

    def setting(self, name: str) -> None:
        """All must set the same value."""
        if not self._loading:
            self.agree((f"set {name!r}",))

    @contextmanager
    def loading(self) -> Iterator[None]:
        self.finish_save()
        self.agree(("load a checkpoint",))
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def finish_later(self, save: BackgroundSave) -> None:
        self.finish_save()
        self._save = save
        atexit.register(self._finish_at_exit)

    def finish_save(self) -> None:
        save, self._save = self._save, None
        if save is not None:
            atexit.unregister(self._finish_at_exit)
            save.finish()

    def _finish_at_exit(self) -> None:
        with suppress(ExecutionError):  # another rank may have ended, which is reported elsewhere
            self.agree(("end the script",))
            self.finish_save()
