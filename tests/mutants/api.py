"""What the engine needs of fluidx, in one place: strategies and clusters, transpiling, the proof, running rank programs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fluidx as fx
from fluidx.ir import OPS, Program, ProgramPair

try:  # the proof from the rank programs' texts alone
    from fluidx.verify import verify_ranks
except ImportError:
    verify_ranks = None

# Does the proof cover what is fetched, or state only?
FETCHES_PROVED = verify_ranks is not None
# Do rank programs declare the types that one device sees, and say beside them what part a rank holds?
GLOBAL_TYPES = "part" in OPS
_FROM_PAIRS = "programs" in inspect.signature(fx.ParallelExecutor.__init__).parameters

STRATEGIES: dict[str, Callable[[], Any]] = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring": fx.strategies.ring_optimizer,
    "ring_chunks": lambda: fx.strategies.ring_optimizer(chunk_mb=48 / 2**20),
}
for _name in ("zero1", "zero2"):
    if hasattr(fx.strategies, _name):
        STRATEGIES[_name] = getattr(fx.strategies, _name)

CLUSTERS: dict[str, Callable[[], Any]] = {"2": lambda: 2, "3": lambda: 3, "4": lambda: 4, "2x2": lambda: fx.Cluster(2, 2)}
MESHES: dict[str, Callable[[], Any]] = {}
if hasattr(fx, "Mesh"):
    MESHES = {
        "dp2tp2": lambda: fx.Mesh(dp=2, tp=2),
        "tp2dp2": lambda: fx.Mesh(tp=2, dp=2),
        "dp1tp2": lambda: fx.Mesh(dp=1, tp=2),
        "dp1tp3": lambda: fx.Mesh(dp=1, tp=3),
    }


@dataclass(frozen=True)
class Ranks:
    """The source and the programs of all ranks."""

    source: ProgramPair
    mains: tuple[Program, ...]
    startups: tuple[Program, ...]
    transpiler: Any

    def with_programs(self, mains: Sequence[Program], startups: Sequence[Program]) -> Ranks:
        return replace(self, mains=tuple(mains), startups=tuple(startups))

    def _handle(self) -> Any:
        t = copy.copy(self.transpiler)
        t._ranks = dict(enumerate(zip(self.mains, self.startups, strict=True)))
        t._report = None
        return t

    def verify(self) -> Any:
        """The report; VerifyError when the proof refuses."""
        if verify_ranks is not None:
            return verify_ranks(self.source, list(self.mains), list(self.startups))
        return self._handle().verify()

    def executor(self, timeout: float) -> Any:
        programs = [ProgramPair(m, s) for m, s in zip(self.mains, self.startups, strict=True)] if _FROM_PAIRS else self._handle()
        return fx.ParallelExecutor(programs, places=fx.cpu_places(len(self.mains)), timeout=timeout, verify=False)


def transpile(main: Program, startup: Program, strategy: str, cluster: str) -> Ranks:
    """The rank programs that a strategy makes for a cluster."""
    trainers = {**CLUSTERS, **MESHES}[cluster]()
    t = fx.DistributeTranspiler(STRATEGIES[strategy]()).transpile(program=main, startup_program=startup, trainers=trainers)
    n = t.world_size
    return Ranks(
        ProgramPair(main, startup), tuple(t.get_trainer_program(r) for r in range(n)), tuple(t.get_startup_program(r) for r in range(n)), t
    )


def arrays_of(exe: Any, rank: int) -> dict[str, Any]:
    """What a rank holds between steps, by name."""
    return {n: a for n, a in exe.scopes[rank].arrays.items() if a is not None}
