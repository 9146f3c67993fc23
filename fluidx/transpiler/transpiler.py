"""DistributeTranspiler: from a program for one device to one program per rank, verified."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from html import escape
from itertools import chain
from typing import Any

from .._collector import collections_paused
from ..config import debug_level, dump_dir, verify_all
from ..ir.change_stamps import Stamp
from ..ir.data_dependent_ops import cutting
from ..ir.defaults import default_main_program, default_startup_program
from ..ir.errors import TranspileError, VerifyError, explains_arguments
from ..ir.operator import Operator, Role
from ..ir.parts import coords_of, holds, local_shape
from ..ir.pass_base import ONE_DEVICE, Job, Pass, run_passes
from ..ir.program import Program, ProgramPair
from ..ir.source_location import warn
from ..ir.types import TensorType
from ..verify import Report, check_program, verify_common, verify_ranks
from ..verify.conversions import check_conversions
from ..verify.rank_program import check_rank_program
from ..verify.refusal import Refusal
from ..view import diff, in_notebook
from .cluster import Cluster, Mesh, Served, endpoints
from .common_programs import CommonPrograms, Fingerprint
from .config import DistributeTranspilerConfig
from .passes.lower import Lower
from .passes.unroll import Unroll
from .placement.placement_walk import where
from .specialize import Specializer
from .strategies import Strategy, data_parallel, get, parameter_server
from .traffic import Traffic, traffic
from .unused import unused

_FEW_RANKS = 64  # up to so many rank programs are proved together if one does not follow from the program for all ranks


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
    1
    """

    def __init__(self, config: Any = None):
        self._chosen = config is not None
        self._ranks_of = config.ranks if isinstance(config, DistributeTranspilerConfig) else Cluster.of
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
        self._pair: ProgramPair | None = None

    @explains_arguments
    def transpile(
        self,
        trainer_id: int = 0,
        program: Program | None = None,
        pservers: Any = "",
        trainers: Any = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = "",
    ) -> DistributeTranspiler:
        """Make the rank programs. `trainers`: a rank count, a Cluster, or endpoints "host:port" in rank order, grouped by host; `pservers`:
        the endpoints of servers. The given programs are not changed. `current_endpoint` chooses this process's trainer_id among endpoints.
        Raises TranspileError when the program is the result of a transpile, has no batch axis to split, or has gradients without a loss.
        """
        self._take_servers(pservers, sync_mode)
        ranks = self._ranks_of(trainers)
        cluster = Served.of(ranks, self.strategy.servers, self.strategy.keep) if self.strategy.servers else ranks
        program = program if program is not None else default_main_program()
        startup = startup_program if startup_program is not None else default_startup_program()
        for p in (program, startup):
            if not isinstance(p, Program):
                raise TranspileError(f"transpile takes Programs as program and startup_program, got {type(p).__name__}: {p!r}")
            if p.strategy:
                raise TranspileError(f"{p.label()} is already the result of {p.strategy}; transpile the program that it was made from")
        if program is startup:
            raise TranspileError(f"{program.label()} is given as program and as startup_program; pass the one that initialises parameters")
        self.trainer_id = self._own_id(trainer_id, trainers, current_endpoint, cluster)
        self._check_startup(program, startup)
        self._check_sizes(program, startup)
        job = Job(cluster)
        with collections_paused():
            sources = [ProgramPair(program, startup)]
            pair = run_passes(self.strategy.steps, sources[0], job, partial(self._after, sources, job))
            self._given, self.source, self._cluster = sources[0], sources[-1], cluster
            self._pair = ProgramPair(pair.main.copy(), pair.startup.copy())
            for p in (self._pair.main, self._pair.startup):
                p.strategy, p.frozen = self.strategy.call, True
            self._special = Specializer(self._pair.main), Specializer(self._pair.startup)
        self._log = job.log
        for said in unused(self.strategy, self.source.main, pair, job):
            warn(said)
        self._ranks: dict[int, tuple[Program, Program]] = {}
        self._origin = Fingerprint(self.pair)
        self._as_made = Stamp([self.main, self.startup])  # and rank programs
        self._report: Report | None = None
        self._common = False  # is the report a proof of the programs for all ranks?
        for k in range(self.strategy.servers):  # raise for programs that a server cannot run
            for special in self._special:
                special.check_server(self._server(k))
        self._dump()
        return self

    def _take_servers(self, pservers: Any, sync_mode: bool) -> None:
        """Take the number of servers from `pservers`, as fluid's call does."""
        if not sync_mode:
            parameter_server(sync=False)
        listed = [] if pservers in ("", None) else endpoints(pservers, "pservers must be", "strategies.parameter_server(4)")
        own, options = self.strategy.servers, dict(self.strategy.options)
        if listed and own != len(listed) and self._chosen and "servers" not in options:
            has = f"{own}: give it as many servers" if own else "none; use strategies.parameter_server()"
            raise TranspileError(f"pservers lists {len(listed)} servers, and {self.strategy!r} has {has}")
        if listed and own != len(listed):
            name, options = (self.strategy.name, options) if own else (parameter_server.__name__, {})
            self.strategy = get(name, **{**options, "servers": len(listed)}).with_rewrites(*self.strategy.rewrites)
        self._pservers = listed

    def _after(self, sources: list[ProgramPair], job: Job, step: str, one: Pass, before: ProgramPair, result: ProgramPair) -> None:
        """Debug output after each pass. FLUIDX_DEBUG=1 prints a line and checks the program by itself, 2 prints the diff, 3 the programs.
        With FLUIDX_VERIFY, the result is proved. The ranks are proved against the last of `sources`."""
        if ONE_DEVICE in one.requires:  # the proof trusts this pass, but not the passes for ranks that came before it
            source = sources[-1]
            sources.append(result if before is source else one.run(source, Job(job.mesh, job.fetch, job.fed)))
        level = debug_level()
        if level >= 1:
            print(
                f"fluidx: {step}: {one!r}: {len(result.main.ops)} main operators, {len(result.startup.ops)} startup operators",
                file=sys.stderr,
            )
            check_program(result.main)
            check_program(result.startup)
        if level >= 2:
            print(diff(before, result), file=sys.stderr)
        if level >= 3:
            print(result, file=sys.stderr)
        if verify_all():
            self._prove_conversions(job, step, one, before, result)
        if verify_all() and "placed" in job.facts:
            self._prove(sources[-1], job, step, one, result)

    @staticmethod
    def _prove_conversions(job: Job, step: str, one: Pass, before: ProgramPair, result: ProgramPair) -> None:
        """Prove that a pass which converts values did no more than that. Raises VerifyError, which names the pass."""
        if (promise := one.conversions()) is None:
            return
        try:
            check_conversions(before.main, result.main, promise, job.fetch or ())
            check_conversions(before.startup, result.startup, promise)
        except VerifyError as e:
            raise VerifyError(f"behind step {step!r}, {one!r}, the program does not compute what it was made of does: {e}") from None

    def _prove(self, source: ProgramPair, job: Job, step: str, one: Pass, pair: ProgramPair) -> None:
        """Prove what a pass made, moves that are not lowered yet taken as collectives. Raises VerifyError, which names the pass."""
        if "lowered" not in job.facts:
            pair = Lower().rewrite_pair(pair, Job(job.mesh))
        if "unrolled" not in job.facts:
            pair = ProgramPair(Unroll().rewrite(pair.main, Job(job.mesh)), pair.startup)
        ranks = range(job.mesh.world_size)
        main, startup = Specializer(pair.main), Specializer(pair.startup)
        try:
            verify_ranks(source, [main.rank_program(r) for r in ranks], [startup.rank_program(r) for r in ranks], self.strategy.call)
        except VerifyError as e:
            raise VerifyError(f"behind step {step!r}, {one!r}, the programs do not compute what the source does: {e}") from None

    @staticmethod
    def _own_id(trainer_id: int, trainers: Any, endpoint: str, cluster: Cluster | Mesh | Served) -> int:
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
        trains = next((op for op in startup.global_block().oplist if op.role in (Role.BACKWARD, Role.OPTIMIZE)), None)
        if trains is not None:
            raise TranspileError(
                f"startup_program is {startup.label()}, which trains: it has op {trains.type} of role {trains.role.value}; "
                f"are program and startup_program exchanged?{where(trains)}"
            )
        made = {n for op in startup.global_block().oplist for n in op.output_arg_names}
        missing = [p.name for p in program.all_parameters() if p.name not in made]
        if missing:
            raise TranspileError(
                f"the startup program does not initialise parameter{'s' * (len(missing) > 1)} {', '.join(missing[:5])}; "
                "pass the startup_program that was built together with the program"
            )

    @staticmethod
    def _check_sizes(*programs: Program) -> None:
        for p in programs:
            for op, why in cutting(p):
                raise TranspileError(
                    f"op {op.type} {why.does}, and a rank program is planned as a whole; {why.instead}, or run {p.label()} on one "
                    f"device{where(op)}"
                )
            for v in p.list_vars():
                if v.desc.type.__class__ is not TensorType:
                    raise TranspileError(
                        f"variable {v.name!r} is {v.desc.type}, and the ranks deal with tensors of a known number of axes; "
                        f"{v.desc.type.next_step}, or run {p.label()} on one device"
                    )

    @property
    def pair(self) -> ProgramPair:
        """The main and startup programs for all ranks."""
        if self._pair is None:
            raise TranspileError("nothing was transpiled yet; call transpile(program=..., startup_program=..., trainers=...) first")
        return self._pair

    def _repr_html_(self) -> str:
        """The comparison of before and after, for notebooks; the repr if nothing was transpiled."""
        return escape(repr(self)) if self._pair is None else in_notebook(self)

    # -- results ----------------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self._cluster.world_size if self.pair else 0

    @property
    def cluster(self) -> Cluster | Mesh | Served:
        """The description of the ranks that the program was transpiled for."""
        _ = self.pair
        return self._cluster

    @property
    def ranks_have_all_operators(self) -> bool:
        """Has every rank the operators of the main program for all ranks, and no others?"""
        _ = self.pair
        return self._special[0].writes_nothing

    @property
    def ranks_differ_in_rounds_only(self) -> bool:
        """Has every rank the operators of the main program for all ranks, but for the messages of collectives?"""
        _ = self.pair
        return self._special[0].differs_in_rounds_only

    @property
    def messages(self) -> int:
        """How many messages all ranks send in a step, beside those inside collectives of the communicator."""
        _ = self.pair
        return self._special[0].exchanges[1]

    def without_rounds(self) -> Program | None:
        """The main program of rank 0 in which collectives with an algorithm stay as they are, to plan one rank for all; None if ranks
        differ in more than their messages."""
        if not self.ranks_differ_in_rounds_only:
            return None
        made = self.main.copy()
        made.rank, made.frozen = 0, True
        return made

    @property
    def main(self) -> Program:
        """The main program for all ranks."""
        return self.pair.main

    @property
    def startup(self) -> Program:
        """The startup program for all ranks."""
        return self.pair.startup

    def _rank(self, rank: int | None) -> tuple[Program, Program]:
        world = self.world_size
        rank = self.trainer_id if rank is None or isinstance(rank, bool) else rank
        if not isinstance(rank, int) or not 0 <= rank < world:
            raise TranspileError(
                f"the program was transpiled for {world} rank{'s' * (world > 1)}: rank must be from 0 to {world - 1}, got {rank!r}"
            )
        if rank not in self._ranks:
            main, startup = self._special
            with collections_paused():
                self._ranks[rank] = made = main.rank_program(rank), startup.rank_program(rank)
            for p in made:
                p.origin = self._origin
                self._as_made.add(p)
            if self._common:
                self._check_rank(rank)
        return self._ranks[rank]

    def _check_rank(self, rank: int) -> None:
        """Compare a rank's programs with the programs for all ranks, if those are proved. Raises VerifyError if they do not follow from
        them."""
        report = self._report
        if report is None or report.stamp is None or report.stamp.changed(self.main) or report.stamp.changed(self.startup):
            return
        for special, mine in zip(self._special, self._ranks[rank], strict=True):
            try:
                check_rank_program(special.program, mine, rank, special.recipe)
            except Refusal as e:
                self._common = False
                if self.world_size > _FEW_RANKS:
                    raise VerifyError(f"{mine.label()}, rank {rank}, does not follow from the program for all ranks: {e}") from None
                self._report = None
                self._report = self._prove_each()
                return
            report.stamp.add(mine)

    def common_programs(self, rank: int) -> CommonPrograms | None:
        """The programs for all ranks, if the programs of `rank` and all rank programs made so far follow from them; None if one of them was
        changed. A launched rank compares them with the other ranks instead of the programs of each rank."""
        self._rank(rank)
        if any(map(self._as_made.changed, chain((self.main, self.startup), *self._ranks.values()))):
            return None
        common = CommonPrograms(self._special, self._origin, self._rank)
        return common if common.cover(self._ranks) else None

    def get_trainer_program(self, rank: int | None = None, wait_port: bool = True) -> Program:
        """The main program of a rank (this process's trainer_id by default)."""
        return self._rank(rank)[0]

    def get_startup_program(self, rank: int | None = None, *fluid_args: Any) -> Program:
        """The startup program of a rank (this process's trainer_id by default)."""
        return self._rank(rank)[1]

    def _server(self, endpoint: str | int) -> int:
        """The rank of a server, by its endpoint or its number among the servers."""
        servers = self.strategy.servers if self.pair else 0
        k = self._pservers.index(endpoint) if endpoint in self._pservers else endpoint
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k < servers:
            known = ", ".join(self._pservers) or f"{servers} servers, numbered from 0"
            raise TranspileError(f"there is no server {endpoint!r}; there are: {known}")
        return self.world_size - servers + k

    def get_pserver_program(self, endpoint: str | int) -> Program:
        """The main program of a server, by its endpoint in `pservers` or its number."""
        return self._rank(self._server(endpoint))[0]

    def get_pserver_programs(self, endpoint: str | int) -> tuple[Program, Program]:
        """The main and the startup program of a server."""
        return self._rank(self._server(endpoint))

    @explains_arguments
    def verify(self, every_rank: bool = False) -> Report:
        """Prove the rank programs right, or raise VerifyError. The report says what was proved; see docs/verifier.md.

        The proof is made once, and again if a rank program has changed since. If the rank programs follow from the programs for all ranks,
        those are proved; a rank program that is made later is compared with them, and VerifyError is raised if it does not follow.
        `every_rank`: make all rank programs and prove each of them.

        >>> import fluidx as fx
        >>> main, startup = fx.Program("line"), fx.Program("line_startup")
        >>> with fx.program_guard(main, startup):
        ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2], "float32"), size=1))
        ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
        >>> t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=1000)
        >>> print(str(t.verify()).splitlines()[0])
        proved for data_parallel() on 1000 ranks:
        """
        _ = self.pair
        report, self._report = self._report, None
        common = self._common and not every_rank
        if every_rank:
            made = [self._rank(r) for r in range(self.world_size)]
        else:
            made = [*self._ranks.values(), *([(self.main, self.startup)] if common else ())]
        again = report is None or report.stamp is None or every_rank and self._common
        if report is not None and not again and not any(map(report.stamp.changed, chain(*made))):  # type: ignore[union-attr]
            self._report = report
            return report
        with collections_paused():
            report = (self._proved_for_all() if not every_rank else None) or self._prove_each()
        self._report = report
        return report

    def _proved_for_all(self) -> Report | None:
        """The proof of the programs for all ranks; None if it fails, or if an existing rank program does not follow from them."""
        if not all(special.is_common for special in self._special):
            return None
        try:
            self._report = report = verify_common(self.source, self.pair, self.world_size, self.strategy.call)
            self._common = True
            for special in self._special:
                written_out, messages = special.exchanges
                report.collectives, report.messages = report.collectives - written_out, report.messages + messages
            for rank in [*self._ranks]:
                if self._common:
                    self._check_rank(rank)
        except VerifyError:  # the error is reported for rank programs instead
            self._common, self._report = False, None
            return None
        return self._report

    def _prove_each(self) -> Report:
        """The proof of the programs of all ranks."""
        self._common = False
        mains, startups = zip(*[self._rank(r) for r in range(self.world_size)], strict=True)
        return verify_ranks(self.source, mains, startups, self.strategy.call)

    def diff(self, rank: int | None = None) -> Any:
        """What transpiling changed: the given program compared with the program for all ranks, or with the program of `rank`."""
        after = self.pair if rank is None else ProgramPair(*self._rank(rank))
        return diff(self._given, after, names=("one device", "all ranks" if rank is None else f"rank {rank}"))

    def explain(self) -> list[str]:
        """One line for each change of placement, with its bytes and reason, and for each operator that a pass did not change, with the
        reason."""
        _ = self.pair
        return [str(line) for line in self._log]

    def balance(self) -> float:
        """The bytes that the busiest rank updates, divided by the mean: 1.0 is perfect. A strategy without roots has 1.0. If there are
        servers, only they update, and the mean is over the servers.
        """
        main = self.main
        descs = main.global_block().descs
        first = self.world_size - self.strategy.servers if self.strategy.servers else 0
        loads = dict.fromkeys(range(first, self.world_size), 0.0)
        carried = {n: op for op in main.ops if op.role is Role.DIST for n in op.output_arg_names if n not in op.input_arg_names}
        for op in main.ops:
            for param in op.role_var[::2]:
                place, t = descs[_updated(param, carried)].placement, descs[param].type
                for rank in loads:
                    coords = coords_of(main.groups, rank, main.turns)
                    if holds(place, coords):
                        loads[rank] += TensorType(t.dtype, local_shape(t.shape, place, coords)).nbytes
        total = sum(loads.values())
        return max(loads.values()) * len(loads) / total if total else 1.0

    def traffic(self, rank: int | None = None, batch: int = 1) -> Traffic:
        """What a rank sends in a step with `batch` rows: bytes over each group (see transpiler/traffic.py)."""
        main = self.get_trainer_program(rank)
        return traffic(main, self.trainer_id if rank is None else rank, batch)

    def _dump(self) -> None:
        folder = dump_dir()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("source", str(self.source)), ("all_ranks", str(self.pair))):
            (folder / f"{self.main.name}.{name}.txt").write_text(text, encoding="utf-8")


def _updated(param: str, carried: Mapping[str, Operator]) -> str:
    """The name of a parameter's new value where it is updated: before the communication that brings it, alone or packed, to its storage
    placement."""
    number = 0
    while (op := carried.get(param)) is not None and op.input_arg_names:
        if len(op.output_arg_names) > 1:
            number = op.output_arg_names.index(param)
        param = op.input_arg_names[number if len(op.input_arg_names) > 1 else 0]
    return param
