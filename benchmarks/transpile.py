"""Time to transpile a deep MLP: per operator, by program size, and by ranks.

The peer's figures (Paddle 2.6.2, GradAllReduce, 4 endpoints: 1.19, 13.4 and 106.6 CPU seconds at 1,001, 2,993 and 9,953 operators) were
measured once with the same model on another machine (2 shared AMD EPYC cores), so they
stand beside ours for the order of magnitude only.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

from _common import Log, interleaved, ratio, show

import fluidx as fx

KINDS = ("data_parallel", "reduce_broadcast", "ring_optimizer")
PEER = {1000: 1.19, 3000: 13.4, 10000: 106.6}


def deep_mlp(operators: int) -> tuple[fx.Program, fx.Program]:
    """matmul + add + relu per layer, trained by SGD: about 12 operators a layer."""
    main, startup = fx.Program("deep_mlp"), fx.Program("deep_mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        layers = operators // 10
        for _ in range(layers):
            x = fx.layers.fc(x, 32, act="relu")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(x))
    return main, startup


def all_ranks(name: str, program: fx.Program, startup: fx.Program, ranks: int) -> fx.DistributeTranspiler:
    t = fx.DistributeTranspiler(name)
    t.transpile(program=program, startup_program=startup, trainers=ranks)
    for r in range(ranks):
        t.get_trainer_program(r)
    return t


def main() -> None:
    log = Log("transpile")
    log("\n4 ranks: transpile and make every rank's program")
    for size in (1000, 3000, 10000, 50000):
        start = time.process_time()
        program, startup = deep_mlp(size)
        built = time.process_time() - start
        n = len(program.ops)
        log(f"{n} operators, built in {built:.2f} s")
        for name in KINDS:
            seconds = interleaved({name: partial(all_ranks, name, program, startup, 4)}, rounds=5 if size <= 10000 else 2)[name]
            peer = ""
            if size in PEER and name == "data_parallel":
                peer = f"; Paddle 2.6.2, elsewhere: {PEER[size]:.1f} s"
            log(f"  {name:17} {show(seconds, 1e3, 'ms', 0)}, {statistics.median(seconds) / n * 1e6:.1f} us per operator{peer}")
    log("\n10,000 operators, 64 ranks against 4: all rank programs, and verify()")
    program, startup = deep_mlp(10000)
    for name in KINDS:
        got = interleaved({n: partial(all_ranks, name, program, startup, n) for n in (4, 64)}, rounds=3)
        proved = []
        for n in (4, 64):
            t = all_ranks(name, program, startup, n)
            start = time.perf_counter()
            t.verify()
            proved.append(time.perf_counter() - start)
        log(f"  {name:17} {show(got[4], 1e3, 'ms', 0)} -> {show(got[64], 1e3, 'ms', 0)}: {ratio(got[64], got[4])} times")
        log(f"  {'':17} verify() {proved[0]:.2f} s on 4 ranks, {proved[1]:.2f} s on 64")
    log.close()


if __name__ == "__main__":
    main()
