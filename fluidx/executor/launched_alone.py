"""Errors and warnings for launched scripts in which each rank would train by itself: they say what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..comm import launch_environment
from ..comm.launch_environment import Launched
from ..comm.launched_rank import entered
from ..ir.errors import ExecutionError
from ..ir.program import Program
from .feeds import trains

_ALONE = f"a process that is to train alone sets {launch_environment.RANK}=0 and {launch_environment.WORLD_SIZE}=1"
_OVER_ALL = (
    "give exe.run fx.CompiledProgram(main).with_data_parallel(loss_name=loss.name), "
    "or make ParallelExecutor(t) of a program transpiled with trainers=fx.world_size()"
)
_warned = False
_on_one_device: list[str] = []  # labels of programs that an Executor trained
_most_ranks = 1  # the largest number of ranks among the executors of this process


def launched_as() -> Launched | None:
    """The launch of which this process is one of several ranks; None otherwise. The ranks need not be connected yet."""
    there = found.launched if (found := entered()) is not None else launch_environment.found()
    return there if there is not None and there.world_size > 1 else None


def check_places(places: Sequence[Any]) -> None:
    """Raise ExecutionError if each of several launched ranks would train by itself, on its own places."""
    if len(places) < 2 or (there := launched_as()) is None:
        return
    named = ", ".join(map(repr, places[:4])) + (", ..." if len(places) > 4 else "")
    raise ExecutionError(
        f"the script was launched as {there.world_size} ranks ({there.by}), and each of them would train alone, on {len(places)} places of "
        f"its own: {named}\n"
        f"  write ParallelExecutor(t) without places, and transpile with trainers=fx.world_size(); {_ALONE}"
    )


def note_joined() -> None:
    """Note that this process runs a program over the launched ranks: an Executor that trains too is then no mistake."""
    global _warned
    _warned = True


def note_executor(ranks: int) -> None:
    """Note that this process made an executor for so many ranks."""
    global _most_ranks
    _most_ranks = max(_most_ranks, ranks)


def unused_ranks(ranks: int) -> str:
    """The message for a script that was given so many ranks as threads but trained on one device only; "" otherwise."""
    if ranks < 2 or _most_ranks > 1 or not _on_one_device:
        return ""
    trained = f"the script trained {_on_one_device[0]} on one device"
    return f"{trained}: an Executor does not use the {ranks} ranks of -n. To use them, {_OVER_ALL}"


def warn_if_alone(program: Program) -> None:
    """Warn once, on rank 0, if the Executor of each launched rank trains a program by itself."""
    global _warned
    if _warned or not trains(program):
        return
    there = launched_as()
    if there is None:
        if not _on_one_device:
            _on_one_device.append(program.label())
        return
    _warned = True
    if there.rank == 0:
        warnings.warn(
            f"Executor trains {program.label()} on one device, and the script was launched as {there.world_size} ranks ({there.by}): each "
            f"of them trains all of it by itself. To train once, over all ranks, {_OVER_ALL}; {_ALONE}",
            stacklevel=5,
        )
