"""simulate: predict the step of a transpiled program on a machine, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from .._collector import collections_paused
from ..executor.plan.dry_run import dry_plan
from ..executor.plan.overlap import least_hidden
from ..executor.plan.records import Plan
from ..hardware.records import Hardware
from ..ir.errors import ExecutionError
from ..ir.program import Program
from ..ir.types import ANY
from ..transpiler.cluster import Cluster
from ..transpiler.transpiler import DistributeTranspiler
from .arguments import check_exact, check_fetch, check_sizes, check_slow, check_transpiled
from .events import simulate_events
from .folding import RankItems, fold
from .machine_prices import AS_IT_IS, Factors, MachinePrices
from .memory import rank_memory
from .micro_batch_memory import more_bytes
from .micro_batches import MicroBatches, RepeatedItems, WorkOfSteps, repeat
from .plan_ranks import EXACT, PlannedClass, plan_ranks
from .rank_items import GroupSets, ItemMaker, own_messages
from .runtimes import GradientRuntime, check_runtime
from .schedule import Item
from .simulation import Simulation


@collections_paused()
def simulate(
    t: DistributeTranspiler,
    cluster: Any = None,
    batch: int | None = None,
    *,
    feed: Mapping[str, Sequence[int]] | None = None,
    slow: Mapping[int, float] | None = None,
    iterations: int | None = None,
    micro_batches: int | None = None,
    runtime: str = "static",
    fetch: Sequence[str] | None = None,
    verify: bool = True,
    exact: int = EXACT,
) -> Simulation:
    """Predict one step of the rank programs of `t`.

    `cluster`: a Cluster with figures, the name of a cluster file, or a path: `fx.Cluster.load` tells more. `batch`: the rows of every
    feed in a step, of all ranks together; `feed` gives shapes instead. `slow`: {rank: factor on the time of its compute}. `iterations`:
    how often a loop runs that does not say it. `micro_batches`: as many instead of the 2 or more of a strategy `pipeline` or
    `micro_batches`, whose last but one stands for those that it does not have; memory is that of as many. `runtime`: "ddp" or "horovod"
    instead of the program's own order: when these would send the gradients of `data_parallel(bucket_mb=0)`, and how many together.
    `fetch`: the fetched variables; by default all that no operator reads. `verify`: prove the programs first. `exact`: above so many
    ranks with the same operators, ranks whose shards differ by an element count as alike; 0: and no collective is carried out by
    messages, which is fast and a little less exact.

    Nothing is computed or allocated. Raises ExecutionError, FeedError or TranspileError for what cannot be predicted, VerifyError for
    programs that are not proved.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 1024], "float32"), size=1024))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=8)
    >>> found = fx.simulate(t, cluster="dgx-a100", batch=4096)
    >>> found.bounds.seconds <= found.seconds < 1e-2, found.calibrated
    (True, False)
    """
    check_transpiled(t)
    machine = _hardware(t, cluster)
    per_host = _ranks_per_host(t, machine)
    _check(t, machine, per_host)
    check_slow(slow or {}, t.world_size)
    check_sizes(t, batch, feed, iterations)
    check_runtime(runtime, t.strategy)
    check_fetch(t, fetch)
    check_exact(exact)
    if verify:
        t.verify()
    many = None if micro_batches is None else MicroBatches.of(t, micro_batches)
    if many is not None:
        batch, feed = many.of_the_program(batch, feed)
    if not exact:
        batch, feed = _evenly(t, batch, feed)
    make = partial(_planned, machine=machine, world_size=t.world_size, batch=batch, feed=feed, fetch=fetch)
    planned = plan_ranks(t, make, exact, _rows(t, batch, feed))
    return _simulated(t, machine, per_host, planned, slow or {}, iterations, many, runtime)


def _simulated(
    t: DistributeTranspiler, machine: Hardware, per_host: int, planned: Sequence[PlannedClass], slow: Mapping[int, float],
    iterations: int | None, many: MicroBatches | None = None, runtime: str = "static",
    network: float = 1.0, compute: float = 1.0, latency: float = 1.0,
) -> Simulation:  # fmt: skip
    factors = Factors(network, compute, latency)
    prices = MachinePrices(machine, t.world_size, per_host, AS_IT_IS if factors == AS_IT_IS else factors)
    ranks: list[Any] = [None] * t.world_size
    plan_of: dict[int, Plan] = {}
    spent, sets = list[ItemMaker](), GroupSets()
    for (plan, members, programs), (given, items, repeated) in zip(
        planned, _items(planned, prices, slow, iterations, many, runtime, spent), strict=True
    ):
        for rank in members:
            program = programs.get(rank, plan.program)
            messages = own_messages(given, program, rank)
            ranks[rank] = RankItems(items, sets.of(program, rank), messages if repeated is None else repeated.messages(messages))
            plan_of[rank] = plan
    folded = fold(ranks, slow, prices.host_of, prices.network)
    run = simulate_events(folded, prices.network, prices.slowdown)
    plans = [plan_of[s.rank] for s in folded.schedules]
    memory = [rank_memory(p, machine, 0 if many is None else more_bytes(p, many)) for p in plans]
    whole = sum(m.seconds for m in spent)
    return Simulation(
        t.strategy.call, machine, t.world_size, folded, run, plans, memory,
        sum(m.uncertain for m in spent) / whole if whole else 0.0, _lower_bound(prices), prices.network.capacity,
        partial(_simulated, t, machine, per_host, planned, slow, iterations, many, runtime),
    )  # fmt: skip


def _items(
    planned: Sequence[PlannedClass], prices: MachinePrices, slow: Mapping[int, float], iterations: int | None, many: MicroBatches | None,
    runtime: str, spent: list[ItemMaker],
) -> list[tuple[list[Item], list[Item], RepeatedItems | None]]:  # fmt: skip
    """The items of each class: those of its plan, those that run, and how these came of them. Adds the makers to `spent`."""
    found: list[tuple[list[Item], list[Item], RepeatedItems | None]] = []
    for plan, _, _ in planned:
        work_of = None if many is None else WorkOfSteps(plan, many)
        maker = ItemMaker(plan, prices, iterations, work_of, like=spent[-1] if spent else None)
        items = maker.items()
        spent.append(maker)
        repeated = None if work_of is None else repeat(items, maker.works, work_of)
        found.append((items, items if repeated is None else repeated.items, repeated))
    if runtime == "static":
        return found
    made = GradientRuntime(runtime, prices.hardware, prices)
    slowest = [max([slow.get(r, 1.0) for r in c.ranks]) for c in planned]
    made.decide([(items, factor) for (_, items, _), factor in zip(found, slowest, strict=True)])
    return [(items, made.items(items, c.plan, f), None) for (_, items, _), c, f in zip(found, planned, slowest, strict=True)]


def _evenly(
    t: DistributeTranspiler, batch: int | None, feed: Mapping[str, Sequence[int]] | None
) -> tuple[int | None, Mapping[str, Sequence[int]] | None]:  # fmt: skip
    """As many rows that every rank has what the one with the most has: rank 0 stands for all."""
    most, shapes = 1, dict(feed or {})
    for name, d in t.main.global_block().descs.items():
        if d.is_data:
            ways = prod(len(t.main.groups[e.group][0]) for e in d.placement if e.axis == 0)
            most = max(most, ways)
            if name in shapes:
                rows, *rest = shapes[name]
                shapes[name] = (-(-rows // ways) * ways if d.type.shape[0] == ANY else rows, *rest)
    return None if batch is None else -(-batch // most) * most, shapes


def _rows(t: DistributeTranspiler, batch: int | None, feed: Mapping[str, Sequence[int]] | None) -> list[int]:
    """The sizes that open axes of the feeds have."""
    found = set() if batch is None else {batch}
    for name, shape in (feed or {}).items():
        d = t.main.global_block().descs.get(name)
        found.update(given for given, declared in zip(shape, () if d is None else d.type.shape, strict=False) if declared == ANY)
    return sorted(found)


def _lower_bound(prices: MachinePrices) -> str:
    cores = prices.hardware.device.cores
    return f"there are more ranks than the {cores} cores of the host, and how they take turns is not predicted" if prices.turns > 1 else ""


def _planned(
    program: Program, machine: Hardware, world_size: int, batch: int | None, feed: Mapping[str, Sequence[int]] | None,
    fetch: Sequence[str] | None,
) -> Plan:  # fmt: skip
    """The plan of a rank, as the executor would make it on this machine."""
    names = None if fetch is None else [n for n in fetch if n in program.global_block().descs]
    shapes = {n: s for n, s in (feed or {}).items() if n in program.global_block().descs}
    if machine.device.kind == "gpu":
        return dry_plan(program, shapes, batch, names, device="cuda")
    return dry_plan(program, shapes, batch, names, overlap=least_hidden(world_size))


def _hardware(t: DistributeTranspiler, cluster: Any) -> Hardware:
    """The machine of a prediction, from the argument or from the Cluster that was transpiled for."""
    given = (
        t.cluster
        if cluster is None
        else Cluster.load(cluster)
        if isinstance(cluster, (str, bytes)) or hasattr(cluster, "__fspath__")
        else cluster
    )
    machine = given if isinstance(given, Hardware) else getattr(given, "hardware", None)
    if machine is None:
        raise ExecutionError(
            f"simulate needs the figures of a machine, and {given!r} has none: give cluster='dgx-a100' (fluidx clusters lists them), or "
            "the file that fluidx calibrate wrote for this machine"
        )
    return machine


def _ranks_per_host(t: DistributeTranspiler, machine: Hardware) -> int:
    hosts = t.cluster.hosts
    if hosts > 1:
        return -(-t.world_size // hosts)
    # the cores of one host take turns, if there are more ranks
    return max(t.world_size, machine.devices_per_host) if machine.device.kind == "cpu" and machine.hosts == 1 else machine.devices_per_host


def _check(t: DistributeTranspiler, machine: Hardware, per_host: int) -> None:
    n = t.world_size
    hosts = -(-n // per_host)
    if machine.device.kind == "gpu" and per_host > machine.devices_per_host:
        raise ExecutionError(f"{per_host} ranks are on a host, and one of {machine.name} has {machine.devices_per_host} devices")
    if machine.hosts is not None and hosts > machine.hosts:
        has = machine.hosts * machine.devices_per_host
        raise ExecutionError(
            f"the program is for {n} ranks, and {machine.name} has {has} devices; transpile for at most {has}, or load a larger cluster"
        )
    if hosts > 1 and machine.between is None:
        raise ExecutionError(
            f"{n} ranks need {hosts} hosts of {machine.name}, and its file has no network between hosts; add a section 'between'"
        )
