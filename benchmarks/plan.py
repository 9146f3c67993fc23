"""What it costs to plan a program and to bind the plan, per operator that runs: the models of `train.py`, and deep programs.

"first" is the first plan of the program, with whatever the programs before it left in memory; "new sizes" are plans for batches that were
not seen before, one after the other; "again" is the plan of a batch that was planned before. Times are CPU seconds of the process, with
the collector of garbage off, as medians with minimum and upper quartile.

    --models mlp,lenet,resnet,gpt,heads,deep_mlp,transformer   --rounds 20   --save
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

import numpy as np
from _common import Log, option, options, show
from _models import TRAINED, case, fluidx_model
from build import LENGTH, WIDTH, deep_mlp, transformer

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.executor.feeds import check_feed, feed_types
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind

DEEP = {"deep_mlp": (deep_mlp, 200, (WIDTH,)), "transformer": (transformer, 20, (LENGTH, WIDTH))}


def program(name: str) -> tuple[fx.Program, fx.Program, list[str], Mapping[str, np.ndarray]]:
    """A training program, its startup program, what is fetched and a feed."""
    if name in TRAINED:
        m = fluidx_model(case(name))
        return m.main, m.startup, [m.result.name], m.feed
    build, depth, shape = DEEP[name]
    main, startup, _ = build(depth)
    return main, startup, [], {"x": np.zeros((8, *shape), "float32")}


def main() -> None:
    log, rounds = Log("plan"), int(option("rounds", "20"))
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
