"""What it costs to plan a program and to bind the plan, per operator that runs: the models of `train.py`, and deep programs.

"first" is the first plan of the program, with whatever the programs before it left in memory; "new sizes" are plans for batches that were
not seen before, one after the other; "again" is the plan of a batch that was planned before. Times are CPU seconds of the process, with
the collector of garbage off, as medians with minimum and upper quartile.

    --models mlp,lenet,resnet,gpt,heads,deep_mlp,transformer   --rounds 20   --save
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping

import numpy as np
from _common import Log, option, options, show
from _models import TRAINED, case, fluidx_model
from _strategies import STRATEGIES, against
from build import LENGTH, WIDTH, deep_mlp, transformer
from transpile import deep_gpt

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.executor.feeds import check_feed, feed_types
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind
from fluidx.transpiler.strategies.base import OWN

DEEP = {"deep_mlp": (deep_mlp, 200, (WIDTH,)), "transformer": (transformer, 20, (LENGTH, WIDTH))}


def program(name: str) -> tuple[fx.Program, fx.Program, list[str], Mapping[str, np.ndarray]]:
    """A training program, its startup program, what is fetched and a feed."""
    if name in TRAINED:
        m = fluidx_model(case(name))
        return m.main, m.startup, [m.result.name], m.feed
    build, depth, shape = DEEP[name]
    main, startup, _ = build(depth)
    return main, startup, [], {"x": np.zeros((8, *shape), "float32")}


def of_ranks(log: Log) -> None:
    """The plan of one rank of 4 of a GPT, by strategy, with buckets of 1 and 25 MB: per operator of the rank's program."""
    main, startup = deep_gpt(10000)
    log(f"\nthe plan of one rank of 4, a GPT of {len(main.ops)} operators, us per operator of its program")
    for name in options("strategies", "data_parallel,reduce_broadcast,ring_optimizer,zero1,zero2,zero3,fsdp,rails,hierarchical,ring"):
        make, ranks_of = STRATEGIES[name]
        for mb in (1, 25):
            strategy = make()
            takes = OWN.get(strategy.name, ())
            if "bucket_mb" in takes:
                first = {"first_bucket_mb": min(1, mb)} if "first_bucket_mb" in takes else {}
                strategy = fx.strategies.get(strategy.name, **{**dict(strategy.options), "bucket_mb": mb, **first})
            elif mb == 1:
                continue
            t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks_of(4))
            program = t.get_trainer_program(1)
            spent = []
            for k in range(4):
                gc.collect()
                gc.disable()
                start = time.process_time()
                dry_plan(program, batch=8 + k)
                spent.append((time.process_time() - start) / len(program.ops))
                gc.enable()
            found = statistics.median(spent[1:]) * 1e6
            size = f"buckets of {mb} MB" if "bucket_mb" in takes else ""
            of = f"first {spent[0] * 1e6:.1f} us, of {len(program.ops)} operators"
            log(f"  {name:18} {size:17} {found:.1f} us ({against(25, found)}), {of}")


def main() -> None:
    log, rounds = Log("plan"), int(option("rounds", "20"))
    of_ranks(log)
    for name in options("models", ",".join([*TRAINED, *DEEP])):
        main, startup, fetch, feed = program(name)
        scope, ctx = fx.Scope(), RunContext()
        fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
        fed = feed_types(main, check_feed(main, feed))

        def cost(batch: int, fed=fed, main=main, fetch=fetch, scope=scope, ctx=ctx) -> tuple[float, float, int]:  # type: ignore[no-untyped-def]
            """Seconds of planning and of binding, and how many operators run."""
            types = {n: t.with_shape((batch, *t.shape[1:])) for n, t in fed.items()}
            gc.collect()
            gc.disable()
            start = time.process_time()
            planned = plan(main, types, fetch, scope.arrays, ctx)
            middle = time.process_time()
            bind(planned, scope, ctx)
            stop = time.process_time()
            gc.enable()
            return middle - start, stop - middle, sum(len(step.ops) for step in planned.all_steps())

        first, new, again = cost(8), [cost(9 + k) for k in range(rounds)], [cost(8) for _ in range(rounds)]
        log(f"\n{name}: {first[2]} operators run")
        for k, what in enumerate(("plan", "bind")):
            per = [[c[k] / c[2] for c in some] for some in ([first], new, again)]
            log(f"  {what}  first {per[0][0] * 1e6:.1f} us; new sizes {show(per[1], 1e6, 'us', 1)}; again {show(per[2], 1e6, 'us', 1)}")
    log.close()


if __name__ == "__main__":
    main()
