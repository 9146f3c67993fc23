"""What the engine needs of fluidx, in one place: strategies and clusters, transpiling, the proof, running rank programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fluidx as fx
from fluidx.ir import Program, ProgramPair
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import verify_common, verify_ranks
from fluidx.verify.rank_program import check_rank_program
from fluidx.verify.refusal import Refusal

STRATEGIES: dict[str, Callable[[], Any]] = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring": fx.strategies.ring_optimizer,
    "ring_chunks": lambda: fx.strategies.ring_optimizer(chunk_mb=48 / 2**20),
    "zero1": fx.strategies.zero1,
    "zero2": fx.strategies.zero2,
    "small_buckets": lambda: fx.strategies.data_parallel(bucket_mb=48 / 2**20, first_bucket_mb=16 / 2**20),
    "late_buckets": lambda: fx.strategies.data_parallel(overlap=False),
    "zero2_buckets": lambda: fx.strategies.zero2(bucket_mb=48 / 2**20, first_bucket_mb=16 / 2**20),
    "one_by_one": lambda: fx.strategies.zero1(bucket_mb=0),
    "zero3": fx.strategies.zero3,
    "fsdp": lambda: fx.strategies.fsdp(units=48 / 2**20),
    "fsdp_kept": lambda: fx.strategies.fsdp(units="scope", reshard_after_forward=False, prefetch=0),
    "servers": lambda: fx.strategies.parameter_server(2, min_block=4),
    "reducers": lambda: fx.strategies.reduction_servers(2, bucket_mb=48 / 2**20, first_bucket_mb=16 / 2**20),
    "halving": lambda: fx.strategies.data_parallel(algorithm="halving_doubling"),
    "trees": lambda: fx.strategies.data_parallel(algorithm="double_binary_tree"),
    "rails": lambda: fx.strategies.rails(slice_mb=48 / 2**20, staging_mb=96 / 2**20),
    "turns2": lambda: fx.strategies.micro_batches(2),
    "turns3_zero1": lambda: fx.strategies.micro_batches(3, fx.strategies.zero1()),
}
PIPELINES: dict[str, Callable[[], Any]] = {
    "1f1b": lambda: fx.strategies.pipeline(3),
    "gpipe_zero1": lambda: fx.strategies.pipeline(2, "gpipe", fx.strategies.zero1()),
}
CLUSTERS: dict[str, Callable[[], Any]] = {"2": lambda: 2, "3": lambda: 3, "4": lambda: 4, "2x2": lambda: fx.Cluster(2, 2)}
HOSTS: dict[str, Callable[[], Any]] = {"2x2": CLUSTERS["2x2"], "2x4": lambda: fx.Cluster(2, 4)}
MESHES: dict[str, Callable[[], Any]] = {
    "dp2tp2": lambda: fx.Mesh(dp=2, tp=2),
    "tp2dp2": lambda: fx.Mesh(tp=2, dp=2),
    "dp1tp2": lambda: fx.Mesh(dp=1, tp=2),
    "dp1tp3": lambda: fx.Mesh(dp=1, tp=3),
}
STAGES: dict[str, Callable[[], Any]] = {"pp2": lambda: fx.Mesh(pp=2), "pp2dp2": lambda: fx.Mesh(pp=2, dp=2)}


def strategies_of(model: str) -> dict[str, Callable[[], Any]]:
    """The strategies that a model is transpiled by."""
    return {**STRATEGIES, **PIPELINES} if model.startswith("stage_") else STRATEGIES


def clusters(model: str, strategy: str) -> dict[str, Callable[[], Any]]:
    """Where a model is tried under a strategy: annotated ones on meshes too, marked ones in stages, rails on several hosts alone."""
    if model.startswith("stage_"):
        return {} if strategy in ("rails", "servers", "reducers") else STAGES
    if model.startswith("mesh_"):
        return {} if strategy == "rails" else MESHES
    return HOSTS if strategy == "rails" else CLUSTERS


@dataclass(frozen=True)
class Ranks:
    """The source and the programs of all ranks. `common`: the programs for all ranks, if one proof of them is enough."""

    source: ProgramPair
    mains: tuple[Program, ...]
    startups: tuple[Program, ...]
    common: ProgramPair | None = None

    def with_programs(self, mains: Sequence[Program], startups: Sequence[Program]) -> Ranks:
        return replace(self, mains=tuple(mains), startups=tuple(startups))

    def proved_in_common(self, main: Program, startup: Program) -> Ranks:
        """The rank programs that follow from other programs for all ranks. VerifyError unless the proof of these accepts them."""
        pair, n = ProgramPair(main, startup), len(self.mains)
        try:
            specials = [Specializer(p) for p in (main, startup)]
            common = all(s.is_common for s in specials)
        except Exception as e:
            raise fx.VerifyError(f"this is no program for all ranks: {type(e).__name__}: {e}") from None
        if not common:
            raise fx.VerifyError("the rank programs do not follow from the program for all ranks")
        verify_common(self.source, pair, n)
        made = [[s.rank_program(r) for r in range(n)] for s in specials]
        try:
            for special, programs in zip(specials, made, strict=True):
                for rank, mine in enumerate(programs):
                    check_rank_program(special.program, mine, rank, special.recipe)
        except Refusal as e:
            raise fx.VerifyError(str(e)) from None
        return self.with_programs(*made)

    def verify(self) -> Any:
        """The report; VerifyError when the proof refuses."""
        return verify_ranks(self.source, self.mains, self.startups)

    def executor(self, timeout: float) -> Any:
        programs = [ProgramPair(m, s) for m, s in zip(self.mains, self.startups, strict=True)]
        return fx.ParallelExecutor(programs, places=fx.cpu_places(len(self.mains)), timeout=timeout, verify=False)


def transpile(main: Program, startup: Program, strategy: str, cluster: str) -> Ranks:
    """The rank programs that a strategy makes for a cluster."""
    trainers = {**CLUSTERS, **HOSTS, **MESHES, **STAGES}[cluster]()
    t = fx.DistributeTranspiler({**STRATEGIES, **PIPELINES}[strategy]()).transpile(program=main, startup_program=startup, trainers=trainers)
    ranks = range(t.world_size)
    common = t.pair if all(special.is_common for special in t._special) else None
    programs = tuple(map(t.get_trainer_program, ranks)), tuple(map(t.get_startup_program, ranks))
    return Ranks(ProgramPair(main, startup), *programs, common)


def arrays_of(exe: Any, rank: int) -> dict[str, Any]:
    """What a rank holds between steps, by name."""
    return {n: a for n, a in exe.scopes[rank].arrays.items() if a is not None}
