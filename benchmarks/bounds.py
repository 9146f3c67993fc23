"""Where a training step goes: the costliest operators of the four models of `train.py`, and what bounds each.

Operators run one by one under the profiler; GFLOP/s and GB/s stand beside the ceilings of this machine, measured in the same run.

    --models mlp,lenet,resnet,gpt   --threads 1,2   --steps 10   --save
"""

from __future__ import annotations

from _common import Log, option, options
from _models import TRAINED, case, fluidx_model

import fluidx as fx


def main() -> None:
    log, steps = Log("bounds"), int(option("steps", "10"))
    for name in options("models", ",".join(TRAINED)):
        m, exe, scope = fluidx_model(case(name)), fx.Executor(), fx.Scope()
        exe.run(m.startup, scope=scope)
        for threads in options("threads", "1,2"):
            fx.set_num_threads(int(threads))
            for _ in range(3):
                exe.run(m.main, feed=m.feed, fetch_list=[m.result], scope=scope)
            with fx.profiler.profiler() as profile:
                for _ in range(steps):
                    exe.run(m.main, feed=m.feed, fetch_list=[m.result], scope=scope)
            log(f"\n{profile.table(limit=12)}")
    log.close()


if __name__ == "__main__":
    main()
