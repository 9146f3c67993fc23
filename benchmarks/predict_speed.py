"""What a prediction costs: transpile, plans, and the simulation behind them, for a GPT on 8 ranks, and for ranks that are alike on 10,000.

CPU seconds of the process with the collector of garbage off, as `simulate` has it. The simulation is the fastest of five: the first one
estimates the costs of the steps, later ones, as in a what-if or a search, find them.

    --operators 10000   --strategies data_parallel,zero1,fsdp,ring   --save
"""

from __future__ import annotations

import gc
import time
from functools import partial

from _common import Log, option, options
from _strategies import STRATEGIES, against
from transpile import deep_gpt

import fluidx as fx


def one(log: Log, name: str, operators: int, ranks: int, goal: float) -> None:
    main, startup = deep_gpt(operators)
    make, ranks_of = STRATEGIES[name]
    gc.collect()
    gc.disable()
    clock = time.process_time
    start = clock()
    t = fx.DistributeTranspiler(make()).transpile(program=main, startup_program=startup, trainers=ranks_of(ranks))
    middle = clock()
    found = fx.simulate(t, cluster="dgx-a100", batch=8 * ranks, fetch=[], verify=False)
    first, again = clock(), []
    for _ in range(5):
        before = clock()
        found.what_if()
        again.append(clock() - before)
    gc.enable()
    steps = sum(len(p.steps) for p in found.plans)
    whole, best = first - start, min(again)
    reached = against(goal, best if ranks <= 8 else whole)
    log(
        f"  {name:18} {ranks:6} ranks, {len(main.ops)} operators, {len(found.plans)} planned with {steps} steps: "
        f"transpile {middle - start:.2f} s, all {whole:.2f} s; simulated again {best:.3f} s, {best / steps * 1e6:.1f} us a step ({reached})"
    )


def main() -> None:
    log = Log("predict_speed")
    measure = partial(one, log)
    log("10,000 operators on 8 ranks, the simulation after the plan in seconds")
    for name in options("strategies", "data_parallel,zero1,fsdp,ring"):
        measure(name, int(option("operators", "10000")), 8, 0.3)
    log("alike ranks, with transpile and plans in seconds")
    for name in ("data_parallel", "zero1", "fsdp"):
        measure(name, 1900, 10000, 10)
    log.close()


if __name__ == "__main__":
    main()
