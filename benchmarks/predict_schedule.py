"""The simulated schedule against the clock: every kernel sleeps for its modelled time, every collective for its modelled time when all
have come, and ranks, their second threads and their waits are those of the executor. The makespan must be within 2 % + 1 ms of
`fx.simulate`. tests/simulator/test_sleeping.py has the same on virtual clocks, to the last digit.

Sleeping threads use no cores, but a busy machine wakes them late. Each figure is the fastest of several steps.

    --ranks 2,4,8,16   --strategies data_parallel,...   --rounds 3   --save
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["FLUIDX_OVERLAP"] = "1"

import numpy as np
from _common import Log, option, options

import fluidx as fx
from fluidx.executor.plan.records import Plan, Step
from fluidx.hardware.records import Device, Figure, Hardware, LinkFigures
from fluidx.simulator.machine_prices import MachinePrices
from fluidx.simulator.rank_items import ItemMaker
from fluidx.simulator.schedule import Meeting
from fluidx.testing.modelled_time import sleeping_kernels
from fluidx.transpiler.strategies import CATALOGUE

WIDTH, ROWS = 24, 64
NEEDS: dict[str, dict[str, Any]] = {"pipeline": {"micro_batches": 4}, "micro_batches": {"count": 2}}


def machine() -> Hardware:
    """Steps of 10 ms and more, collectives of 15 ms and more, and messages that take no time beside their real one."""

    def figure(value: float) -> Figure:
        return Figure(value, "made up")

    device = Device("sleeper", "cpu", figure(1e12), {"float32": figure(4e6)}, figure(1.0), figure(2e6), figure(1.0), figure(1e-2),
                    figure(1.0), figure(0.0))  # fmt: skip
    links = LinkFigures(figure(1e-9), figure(1e18), 1, {1: figure(8e5)}, figure(15e-3))
    return Hardware("sleepers", "made up", 64, None, device, links, links, figure(1e12))


def perceptron() -> tuple[Any, Any]:
    main, startup = fx.Program("uneven"), fx.Program("uneven_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, WIDTH], "float32")
        for k in (2, 5, 1, 3):
            h = fx.layers.fc(h, k * WIDTH // 2, act="relu")
        fx.optimizer.Adam(0.1).minimize(fx.layers.mean(h))
    return main, startup


def stages() -> tuple[Any, Any]:
    main, startup = fx.Program("stages"), fx.Program("stages_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, WIDTH], "float32")
        for stage in range(2):
            with fx.device_guard(f"gpu:{stage}"):
                h = fx.layers.fc(h, WIDTH * (1 + stage), act="relu")
                loss = fx.layers.mean(h)
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def transpiled(strategy: str, ranks: int) -> Any:
    trainers: Any = ranks
    if strategy == "rails":
        trainers = fx.Cluster(hosts=2, devices_per_host=ranks // 2)
    main, startup = perceptron()
    if strategy == "pipeline":
        (main, startup), trainers = stages(), fx.Mesh(pp=2, dp=ranks // 2)
    made = fx.strategies.get(strategy, **NEEDS.get(strategy, {}))
    return fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=trainers)


def seconds_of(t: Any, hardware: Hardware) -> Callable[[Plan, Step], float]:
    """The modelled seconds of a step."""
    prices = MachinePrices(hardware, t.world_size, -(-t.world_size // t.cluster.hosts))

    def seconds(plan: Plan, step: Step) -> float:
        parts = ItemMaker(plan, prices).parts(step, 0)
        return sum(p if isinstance(p, float) else p.seconds if isinstance(p, Meeting) else 0.0 for p in parts)

    return seconds


def measured(t: Any, hardware: Hardware, rounds: int) -> float:
    """The fastest of some steps, in seconds."""
    feed, found = {"x": np.zeros((ROWS, WIDTH), "float32")}, []
    with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size), verify=False) as exe:
        exe.run_startup()
        with sleeping_kernels(seconds_of(t, hardware)):
            exe.run(feed=feed, fetch_list=[])
        for _ in range(rounds):
            start = time.perf_counter()
            exe.run(feed=feed, fetch_list=[])
            found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    log, hardware, missed, worst = Log("predict_schedule"), machine(), 0, 0.0
    log("strategy             ranks  predicted ms  measured ms   error  within 2 % + 1 ms")
    for strategy in options("strategies", ",".join(CATALOGUE)):
        for ranks in map(int, options("ranks", "2,4,8,16")):
            t = transpiled(strategy, ranks)
            predicted = fx.simulate(t, cluster=hardware, batch=ROWS, fetch=[]).seconds - hardware.device.call.value
            took = measured(t, hardware, int(option("rounds", "3")))
            error = took / predicted - 1
            good = abs(took - predicted) <= 0.02 * predicted + 1e-3
            missed, worst = missed + (not good), max(worst, abs(error))
            log(f"{strategy:20} {ranks:5}  {1e3 * predicted:12.2f}  {1e3 * took:11.2f}  {error:+6.1%}  {'yes' if good else 'no'}")
    log(f"worst {worst:.1%}, missed {missed}")
    log.close()


if __name__ == "__main__":
    main()
