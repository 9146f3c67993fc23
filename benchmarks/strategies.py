"""The strategies side by side: on CPU ranks, what a step takes, sends, leaves exposed and holds; and how well roots balance known models.

For each model and strategy, on 4 ranks that are threads of one process (batches are one rank's times 4):

    time       of a step, against data_parallel's in the same rounds
    sent       by a rank in a step, in MB (10**6 bytes), the mean over the ranks; and the strategy's formula of P, the parameters' bytes,
               which is the most for zero3 and fsdp: a weight that no gradient reads is not gathered again
    exposed    milliseconds of a step in which a rank communicated and computed nothing, the mean over the ranks
    memory     of the fullest rank in MB: what plans announce, and the arrays that a run really holds (state, feeds, arena)

    --models mlp,gpt   --strategies zero1,"rails 2 hosts of 2"   --rounds 15   --save
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from _common import Log, interleaved, option, options, ratio, show
from _models import case, fluidx_model
from _shapes import MODELS

import fluidx as fx
from fluidx.transpiler.placement import roots

RANKS, MB = 4, 1e6
S = fx.strategies


class Row(NamedTuple):
    """A strategy, on which ranks it runs, and what a rank sends in a step: a formula of P, of n ranks, as text and as a function of n."""

    make: Callable[[], Any]
    trainers: Any
    formula: str
    share: Callable[[int], float]


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _thrice(n: int) -> float:
    return 3 * (n - 1) / n


ROWS: dict[str, Row] = {
    "data_parallel": Row(S.data_parallel, RANKS, "2(n-1)/n P", _twice),
    "data_parallel ring": Row(lambda: S.data_parallel(algorithm="ring"), RANKS, "2(n-1)/n P", _twice),
    "reduce_broadcast": Row(S.reduce_broadcast, RANKS, "2(n-1)/n P", _twice),
    "ring_optimizer": Row(S.ring_optimizer, RANKS, "2(n-1)/n P", _twice),
    "zero1": Row(S.zero1, RANKS, "2(n-1)/n P", _twice),
    "zero2": Row(S.zero2, RANKS, "2(n-1)/n P", _twice),
    "zero3": Row(S.zero3, RANKS, "at most 3(n-1)/n P", _thrice),
    "fsdp": Row(lambda: S.fsdp(units=1), RANKS, "at most 3(n-1)/n P", _thrice),
    "rails 2 hosts of 2": Row(S.rails, fx.Cluster(2, 2), "2(n-1)/n P", _twice),
    "parameter_server": Row(lambda: S.parameter_server(2), 2, "P; servers 2/2 P", lambda n: 1.0),
}


def prepared(row: Row, model: str) -> tuple[Any, Any, dict[str, np.ndarray], list[Any]]:
    """The transpiler, its executor after one step, the feed and what is fetched."""
    m = fluidx_model(case(model))
    t = fx.DistributeTranspiler(row.make()).transpile(program=m.main, startup_program=m.startup, trainers=row.trainers)
    t.verify()
    exe = fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size))
    exe.run_startup()
    feed = {name: np.concatenate([value] * RANKS) for name, value in m.feed.items()}
    exe.run([m.result], feed)
    return t, exe, feed, [m.result]


def held(exe: Any) -> tuple[float, float]:
    """MB of the fullest rank: as planned, and in arrays that are there."""
    bounds = [r.current for r in exe.group.ranks if r.current is not None]
    planned = max(b.plan.peak_bytes for b in bounds)
    there = max(
        sum(a.nbytes for a in scope.arrays.values()) + sum(a.nbytes for _, a in bound.feeds) + bound.plan.arena_bytes
        for scope, bound in zip(exe.scopes, bounds, strict=True)
    )
    return planned / MB, there / MB


def exposed(exe: Any, fetch: list[Any], feed: dict[str, np.ndarray]) -> float:
    """Milliseconds of a step, the mean over the ranks."""
    with fx.profiler.profiler(profile_path=None) as profile:
        for _ in range(5):
            exe.run(fetch, feed)
    found = [e.exposed / e.runs for e in profile.exposed()]
    return 1e3 * sum(found) / max(1, len(found))


def steps(log: Log, model: str, rounds: int) -> None:
    wanted = ["data_parallel", *(name for name in options("strategies", ",".join(ROWS)) if name != "data_parallel")]
    made = {name: prepared(ROWS[name], model) for name in wanted}
    parameters = sum(p.desc.type.nbytes for p in made[wanted[0]][0].source.main.all_parameters())
    log(f"\n{model}: {parameters / MB:.2f} MB of parameters, batch {len(next(iter(made[wanted[0]][2].values())))}")
    got = interleaved({name: partial(exe.run, fetch, feed) for name, (_, exe, feed, fetch) in made.items()}, rounds=rounds, calls=2)
    for name, (t, exe, feed, fetch) in made.items():
        row, planned = ROWS[name], held(exe)
        ranks = range(t.world_size - t.strategy.servers)
        sent = sum(t.traffic(r, batch=len(next(iter(feed.values())))).total for r in ranks) / len(ranks)
        formula = row.share(t.world_size) * parameters
        log(
            f"  {name:20} {show(got[name], 1e3, 'ms')}; {ratio(got[name], got['data_parallel'])} of data_parallel; "
            f"sent {sent / MB:.3f} MB, {row.formula} = {formula / MB:.3f}; exposed {exposed(exe, fetch, feed):.2f} ms; "
            f"memory {planned[0]:.2f} MB planned, {planned[1]:.2f} held"
        )
        exe.close()


def balances(log: Log) -> None:
    log("\nheaviest root over the mean, 4 MiB chunks (and whole parameters); transpile refuses nothing, 1.00 is perfect")
    for ranks in (8, 64):
        for name, params in MODELS.items():
            line = f"  {ranks:2} ranks  {name:11}"
            size = roots.chunk_bytes(sum(4 * n for _, n in params), ranks, 4)
            for method in ("greedy", "hash"):
                for chunk in (size, 2**62):
                    chunks = [c for p, n in params for c in roots.cut(p, n, 4, chunk)]
                    line += f"  {method}{'' if chunk == size else ' whole'} {roots.balance(roots.assign(chunks, ranks, method), ranks):.3f}"
            log(line)


def main() -> None:
    log = Log("strategies")
    balances(log)
    for model in options("models", "mlp,gpt"):
        steps(log, model, int(option("rounds", "15")))
    log.close()


if __name__ == "__main__":
    main()
