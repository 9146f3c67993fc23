"""DistributeTranspiler: from a program for one device to one program per rank, verified."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import debug_level, dump_dir
from ..ir.diff import diff
from ..ir.errors import TranspileError
from ..ir.operator import Role
from ..ir.program import Program, ProgramPair, default_main_program, default_startup_program
from ..ir.types import Shard
from ..ir.verifier import Report, verify_ranks
from .cluster import Cluster
from .config import DistributeTranspilerConfig
from .rewrite import Job
from .roots import balance
from .specialize import Specializer
from .strategies import Strategy, data_parallel, get


class DistributeTranspiler:
    """Transpiles a program by a strategy (a Strategy, its name, or a DistributeTranspilerConfig; data_parallel by default).

    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     x = fx.data("x", [-1, 4], "float32")
    ...     loss = fx.layers.mean(fx.layers.fc(x, 1))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    >>> _ = t.transpile(program=main, startup_program=startup, trainers=2)
    >>> [op.type for op in t.get_trainer_program(1).ops].count("all_reduce")
    2
    """

    def __init__(self, config: Any = None):
        if config is None:
            self.strategy = data_parallel()
        elif isinstance(config, DistributeTranspilerConfig):
            self.strategy = config.strategy()
        elif isinstance(config, (str, Strategy)) or callable(config):
            self.strategy = get(config)
        else:
            raise TranspileError(
                "DistributeTranspiler takes a strategy, its name, or a DistributeTranspilerConfig, "
                f"got {type(config).__name__}: {config!r}; fx.strategies has them"
            )
        self.trainer_id = 0
        self._job: Job | None = None

    def transpile(
        self,
        trainer_id: int = 0,
        program: Program | None = None,
        pservers: str = "",
        trainers: Any = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = "",
    ) -> DistributeTranspiler:
        """Make the rank programs. `trainers`: a rank count, a Cluster, or endpoints "host:port" in rank order, grouped by host.

        The given programs stay untouched. `current_endpoint` chooses this process's trainer_id among endpoints. Raises
        TranspileError when the program is the result of a transpile, has no batch axis to split, or has gradients without a loss.
        """
        if pservers:
            raise TranspileError("pservers is not available: fluidx has no parameter servers; leave it empty")
        if not sync_mode:
            raise TranspileError("sync_mode=False is not available: asynchronous updates exist with parameter servers only")
        cluster = Cluster.of(trainers)
        program = program if program is not None else default_main_program()
        startup = startup_program if startup_program is not None else default_startup_program()
        for p in (program, startup):
            if not isinstance(p, Program):
                raise TranspileError(f"transpile takes Programs as program and startup_program, got {type(p).__name__}: {p!r}")
            if p.strategy:
                raise TranspileError(f"{p.label()} is already the result of {p.strategy}; transpile the program that it was made from")
        self.trainer_id = self._own_id(trainer_id, trainers, current_endpoint, cluster)
        self._check_startup(program, startup)
        self.source = ProgramPair(program, startup)
        job = Job(program.copy(), startup.copy(), cluster)
        with _no_collections():
            self._run_passes(job)
        for p in (job.main, job.startup):
            p.strategy = repr(self.strategy)
            p.frozen = True
        self._job = job
        with _no_collections():
            self._special = Specializer(job.main), Specializer(job.startup)
        self._ranks: dict[int, tuple[Program, Program]] = {}
        self._report: Report | None = None
        self._row_gradients: frozenset[str] | None = None
        self._dump()
        return self

    def _run_passes(self, job: Job) -> None:
        level = debug_level()
        for one in self.strategy.passes:
            before = ProgramPair(job.main.copy(), job.startup.copy()) if level >= 2 else None
            one.run(job)
            if level >= 1:
                print(f"fluidx: {one!r}: {len(job.main.ops)} main operators, {len(job.startup.ops)} startup operators", file=sys.stderr)
            if before is not None:
                print(diff(before, job.pair), file=sys.stderr)
            if level >= 3:
                print(job.pair, file=sys.stderr)

    @staticmethod
    def _own_id(trainer_id: int, trainers: Any, endpoint: str, cluster: Cluster) -> int:
        if endpoint:
            listed = trainers.split(",") if isinstance(trainers, str) else trainers if isinstance(trainers, (list, tuple)) else []
            listed = [e.strip() for e in listed]
            if endpoint not in listed:
                raise TranspileError(
                    f"current_endpoint {endpoint!r} is not among trainers: "
                    f"{', '.join(listed) or 'no endpoints were given'}; give this process's own, spelled as in the list"
                )
            return listed.index(endpoint)
        if not isinstance(trainer_id, int) or isinstance(trainer_id, bool) or not 0 <= trainer_id < cluster.world_size:
            raise TranspileError(f"trainer_id must be from 0 to {cluster.world_size - 1}, got {trainer_id!r}")
        return trainer_id

    @staticmethod
    def _check_startup(program: Program, startup: Program) -> None:
        made = {n for op in startup.global_block().oplist for n in op.output_arg_names}
        missing = [p.name for p in program.all_parameters() if p.name not in made]
        if missing:
            raise TranspileError(
                f"the startup program does not initialise parameter{'s' * (len(missing) > 1)} {', '.join(missing[:5])}; "
                "pass the startup_program that was built together with the program"
            )

    @property
    def job(self) -> Job:
        if self._job is None:
            raise TranspileError("nothing was transpiled yet; call transpile(program=..., startup_program=..., trainers=...) first")
        return self._job

    # -- results ----------------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def main(self) -> Program:
        """The main program that speaks for all ranks."""
        return self.job.main

    @property
    def startup(self) -> Program:
        return self.job.startup

    @property
    def layout(self) -> dict[str, list[tuple[str, int, int, int]]]:
        """Where state that was given to root ranks lives: name -> (variable, rank, start, stop)."""
        return self.job.layout

    @property
    def row_gradients(self) -> frozenset[str]:
        """Gradients of split rows under a mean loss: each rank's are of the mean over its own rows, n times those of the whole batch."""
        if self._row_gradients is None:
            descs = self.main.global_block().descs
            self._row_gradients = frozenset(
                n
                for op in (self.main.global_block().oplist if self.job.loss_op == "avg" else ())
                if op.role is Role.BACKWARD
                for n in op.output_arg_names
                if any(isinstance(p, Shard) for p in descs[n].placement)
            )
        return self._row_gradients

    def source_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable as the single-device program declares it."""
        return self.source.main.global_block().desc(name).type.shape

    def _rank(self, rank: int | None) -> tuple[Program, Program]:
        job = self.job
        rank = self.trainer_id if rank is None or isinstance(rank, bool) else rank
        if not isinstance(rank, int) or not 0 <= rank < job.world_size:
            raise TranspileError(
                f"the program was transpiled for {job.world_size} rank{'s' * (job.world_size > 1)}: "
                f"rank must be from 0 to {job.world_size - 1}, got {rank!r}"
            )
        if rank not in self._ranks:
            main, startup = self._special
            with _no_collections():
                self._ranks[rank] = main.rank_program(rank), startup.rank_program(rank)
        return self._ranks[rank]

    def get_trainer_program(self, rank: int | None = None, wait_port: bool = True) -> Program:
        """The main program of a rank (this process's trainer_id by default)."""
        return self._rank(rank)[0]

    def get_startup_program(self, rank: int | None = None, *fluid_args: Any) -> Program:
        """The startup program of a rank (this process's trainer_id by default)."""
        return self._rank(rank)[1]

    def verify(self) -> Report:
        """Prove the rank programs right, or raise VerifyError. The report says what was proved; see docs/verifier.md."""
        job = self.job
        if self._report is None:
            ranks = [self._rank(r) for r in range(self.world_size)]
            self._report = verify_ranks(
                self.source, [m for m, _ in ranks], [s for _, s in ranks], layout=self.layout, loss_op=job.loss_op, notes=job.notes,
                label=repr(self.strategy),
            )  # fmt: skip
        return self._report

    def diff(self, rank: int | None = None) -> Any:
        """What transpiling changed: the source against the program for all ranks, or against one rank's."""
        after = self.job.pair if rank is None else ProgramPair(*self._rank(rank))
        return diff(self.source, after, names=("one device", "all ranks" if rank is None else f"rank {rank}"))

    def explain(self) -> list[str]:
        """What the passes left alone, and why."""
        return list(self.job.skipped)

    def balance(self) -> float:
        """The heaviest root's bytes over the mean (1.0 is perfect); 1.0 for a strategy without roots."""
        return balance(self.job.roots, self.world_size) if self.job.roots else 1.0

    def _dump(self) -> None:
        folder = dump_dir()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("source", str(self.source)), ("all_ranks", str(self.job.pair))):
            (folder / f"{self.job.main.name}.{name}.txt").write_text(text, encoding="utf-8")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Rewriting makes many small objects that all stay alive: the collector would walk them again and again and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
