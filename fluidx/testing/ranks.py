"""Run a function of a communicator, or one program per rank, on rank threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm.base import CommAborted
from ..comm.threads.communicator import ThreadCommunicator
from ..comm.threads.world import ThreadWorld
from ..executor.context import RunContext
from ..executor.feeds import check_feed, check_fetch, check_sizes, feed_types, fetch_names
from ..executor.ranks.split_and_join import FeedSplitter
from ..executor.run.bind import prepare
from ..executor.scope import Scope
from ..ir import Program


def each_rank(ranks: int, job: Callable[[ThreadCommunicator], Any], timeout: float = 10.0) -> list[Any]:
    """Call `job(communicator)` on each of `ranks` threads; return the results in rank order.

    The first failure stops all ranks and is raised; errors of ranks that only stopped because of it are dropped.

    >>> each_rank(2, lambda comm: comm.rank + comm.world_size)
    [2, 3]
    """
    world = ThreadWorld(ranks, timeout)
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = job(world.communicator(rank))
        except BaseException as e:  # of any kind: the other ranks must not wait for this one
            errors[rank] = e
            world.abort(e)

    threads = [threading.Thread(target=work, args=(r,), name=f"fluidx-test-rank-{r}", daemon=True) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        first = [e for _, e in sorted(errors.items()) if not isinstance(e, CommAborted) and not isinstance(e.__cause__, CommAborted)]
        raise (first or list(errors.values()))[0]
    return results


def run_ranks(
    programs: Sequence[Program],
    feeds: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    fetch: Any,
    scopes: Sequence[Scope] | None = None,
    timeout: float = 10.0,
) -> list[list[np.ndarray]]:
    """Run one program per rank together; return what each rank fetched: its local values.

    `feeds` is one feed of global values, which is split by the placements of the variables; or one feed for each rank, for variables
    without a placement. The programs declare their groups (`program.groups`); they need not come from a transpiler. `scopes` hold the
    ranks' state. Raises what `Executor.run` raises, for the first rank that failed.

    >>> p = Program("sum")
    >>> p.groups = {"dp": ((0, 1),)}
    >>> _ = p.global_block().create_var("x", (1,), "float32", is_data=True)
    >>> _ = p.global_block().append_op("all_reduce", {"X": "x"}, {"Out": "y"}, {"group": "dp"})
    >>> run_ranks([p, p], [{"x": np.float32([1])}, {"x": np.float32([2])}], ["y"])
    [[array([3.], dtype=float32)], [array([3.], dtype=float32)]]
    """
    names = fetch_names(fetch)
    if isinstance(feeds, Mapping):
        splitter, descs, given = FeedSplitter(programs), programs[0].global_block().descs, check_feed(programs[0], feeds)
        check_sizes(descs, given)
        split = splitter.plan_split(descs, given, "weight")
        parts: Sequence[Mapping[str, np.ndarray]] = splitter.split(descs, given, split)
        wholes: Sequence[Mapping[str, np.ndarray]] = [splitter.even_sizes(given, split)] * len(programs)
    else:
        wholes = parts = [check_feed(p, f) for p, f in zip(programs, feeds, strict=True)]

    def job(comm: ThreadCommunicator) -> list[np.ndarray]:
        rank, program = comm.rank, programs[comm.rank]
        check_fetch(program, names)
        groups = {g: program.group_ranks(g, rank) for g in program.groups}
        ctx = RunContext(rank, len(programs), comm, groups, program.turns)
        bound = prepare(program, feed_types(program, wholes[rank]), names, scopes[rank] if scopes else Scope(), ctx)
        return bound.run(parts[rank])

    return each_rank(len(programs), job, timeout)
