"""What ranks train alike whatever they are, in test_bodies.py: every strategy on small integers, of which every sum is exact in any order,
and models whose sums are rounded. MPI processes are told the names."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import fluidx as fx
from fluidx.comm import launch_environment
from fluidx.comm.launched_rank import LaunchedRank, enter
from fluidx.testing.models import TestModel, classifier, integer_mlp, train_single
from tests.sweep import ALL, some
from tests.transpiler import models, staged, test_matrix, test_parity

S = fx.strategies
ROWS = (8, 8, 7)  # of three steps; the first is exact


class Case(NamedTuple):
    """A model, what distributes it, and over how many trainers, or over which mesh of them."""

    model: str
    strategy: Callable[[], Any]
    trainers: Any


EXACT: dict[str, Callable[[], TestModel]] = {  # the first step gives one device's bits
    "integers": lambda: integer_mlp("sum", fx.optimizer.Momentum(0.5, 0.5)),
    "layers": lambda: staged.layers(2),
    "cut layers": lambda: staged.layers(2, tp=True),
}
APART = {"apart": lambda: integer_mlp("sum", fx.optimizer.LocalSGDOptimizer(fx.optimizer.SGD(0.5), 2))}
ROUNDED = {f"{kind} classifier": partial(classifier, kind=kind) for kind in ("mlp", "dropout", "norm", "batch_norm", "conv")}
if ALL:
    ROUNDED |= {name: partial(models.written, write) for name, write in models.MODELS.items()}
SERVED = {
    "parameter_server": partial(S.parameter_server, min_block=8),
    "reduction_servers": partial(S.reduction_servers, bucket_mb=1 / 2**10, first_bucket_mb=1 / 2**11),
}
STRATEGIES = {**test_matrix.STRATEGIES, **test_parity.STRATEGIES}


@cache
def model(name: str) -> TestModel:
    return {**EXACT, **APART, **ROUNDED}[name]()


def cases(ranks: int) -> dict[str, Case]:
    """What so many ranks train, by name."""
    half = ranks // 2
    served = [(name, n) for name in SERVED for n in (1, 2) if n < ranks]
    rounded = some(len(models.STRATEGIES), list(ROUNDED), list(models.STRATEGIES))
    return {
        **{name: Case("integers", strategy, ranks) for name, strategy in STRATEGIES.items() if name not in SERVED},
        **{f"{name} of {n}": Case("integers", partial(SERVED[name], n), ranks - n) for name, n in served},
        "rails": Case("integers", lambda: S.rails(slice_mb=256 / 2**20, staging_mb=1 / 2**10), fx.Cluster(2, half)),
        "two hosts": Case("integers", S.data_parallel, fx.Cluster(2, half)),
        **{s: Case("layers", lambda s=s: S.pipeline(micro_batches=2, schedule=s), fx.Mesh(dp=half, pp=2)) for s in ("gpipe", "1f1b")},
        "cut weights": Case("cut layers", S.data_parallel, fx.Mesh(dp=half, tp=2)),
        "cut weights in stages": Case("cut layers", lambda: S.pipeline(micro_batches=2), fx.Mesh(pp=2, tp=half)),
        "replicas": Case("apart", S.replicas, ranks),
        **{f"{strategy}, {name}": Case(name, models.STRATEGIES[strategy], ranks) for name, strategy in rounded},
    }


def wanted(m: TestModel) -> list[str]:
    """The loss, the gradients, and all state as a step leaves it."""
    return [m.loss.name, *(g for _, g in m.gradients), *(d.name for d in m.main.global_block().descs.values() if d.persistable)]


@cache
def of_one_device(name: str) -> dict[str, str]:
    """The bits of what a first step gives."""
    m = model(name)
    (values,), _ = train_single(m, [m.feed(ROWS[0])], wanted(m))
    return told(m, 0, values)


def of_ranks(case: Case, places: Any) -> dict[str, str]:
    """The bits of what three steps give."""
    m, t, found = model(case.model), fx.DistributeTranspiler(case.strategy()), {}
    t.transpile(program=m.main, startup_program=m.startup, trainers=case.trainers)
    with fx.ParallelExecutor(t, places=places, verify=False, timeout=30) as exe:
        exe.run_startup()
        for step, rows in enumerate(ROWS):
            found |= told(m, step, exe.run(feed=m.feed(rows, step), fetch_list=wanted(m)))
    return found


def told(m: TestModel, step: int, values: Sequence[np.ndarray]) -> dict[str, str]:
    """A digest of every bit, by name."""
    return {
        f"{name} in step {step}": f"{a.dtype}{list(a.shape)} {hashlib.sha256(a.tobytes()).hexdigest()}"
        for name, a in zip(wanted(m), values, strict=True)
    }


def take_part(comm: Any) -> None:
    """Be a rank of the world of `comm`, which is that of all MPI processes or of some, whatever it meets by."""
    there = launch_environment.found()
    assert there is not None
    enter(LaunchedRank(there._replace(world_size=comm.world_size), comm.world))


def over_mpi(comm: Any, names: Sequence[str]) -> list[dict[str, str]]:
    """What this rank is given of those cases."""
    return [of_ranks(cases(comm.world_size)[name], fx.mpi_places()) for name in names]
