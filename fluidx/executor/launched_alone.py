"""Scripts that were launched as several ranks, each of which would train by itself: they are told what to write."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..comm import launched
from ..comm.launched import Launched
from ..comm.member import entered
from ..ir.errors import ExecutionError
from ..ir.program import Program
from .feeds import trains

_ALONE = f"a process that is to train alone sets {launched.RANK}=0 and {launched.WORLD_SIZE}=1"
_warned = False


def launched_as() -> Launched | None:
    """What this process is one of several ranks of, if it is. It need not have met the others."""
    there = found.launched if (found := entered()) is not None else launched.found()
    return there if there is not None and there.world_size > 1 else None


def check_places(places: Sequence[Any]) -> None:
    """Raise ExecutionError where each of several launched ranks would train by itself on places of its own."""
    if len(places) < 2 or (there := launched_as()) is None:
        return
    named = ", ".join(map(repr, places[:4])) + (", ..." if len(places) > 4 else "")
    raise ExecutionError(
        f"the script was launched as {there.world_size} ranks ({there.by}), and each of them would train alone, on {len(places)} places of "
        f"its own: {named}\n"
        f"  write ParallelExecutor(t) without places, and transpile with trainers=fx.world_size(); {_ALONE}"
    )


def joins() -> None:
    """This process runs a program over the launched ranks: what an Executor trains beside that is no mistake."""
    global _warned
    _warned = True


def warn_of(program: Program) -> None:
    """Warn once, on rank 0, where an Executor of each launched rank trains a program by itself."""
    global _warned
    if _warned or (there := launched_as()) is None or not trains(program):
        return
    _warned = True
    if there.rank == 0:
        warnings.warn(
            f"Executor trains {program.label()} on one device, and the script was launched as {there.world_size} ranks ({there.by}): each "
            "of them trains all of it by itself. To train once, over all ranks: fx.CompiledProgram(main).with_data_parallel("
            "loss_name=loss.name) is what exe.run is given, or ParallelExecutor(t) of a program transpiled with "
            f"trainers=fx.world_size(); {_ALONE}",
            stacklevel=5,
        )
