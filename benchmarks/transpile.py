"""Time to transpile a deep MLP: per operator, by program size, and by ranks.

The peer's figures (Paddle 2.6.2, GradAllReduce, 4 endpoints: 1.19, 13.4 and 106.6 CPU seconds at 1,001, 2,993 and 9,953 operators) were
measured once with the same model on another machine (2 shared AMD EPYC cores), so they
stand beside ours for the order of magnitude only.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial

from _common import Log, interleaved, ratio, show

import fluidx as fx
from fluidx.transpiler.pass_ import Job, run_passes
from fluidx.transpiler.specialize import Specializer

KINDS = tuple(fx.strategies.CATALOGUE)
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


def by_step(name: str, program: fx.Program, startup: fx.Program, ranks: int) -> dict[str, float]:
    """Microseconds per operator of each pass, and of making all rank programs."""
    spent: dict[str, list[float]] = {}
    for _ in range(5):
        gc.collect()  # what the round before left is none of the first pass's
        last = time.perf_counter()

        def mark(step: str) -> None:
            nonlocal last
            now = time.perf_counter()
            spent.setdefault(step, []).append(now - last)
            last = now

        gc.disable()  # as transpile() does
        pair = run_passes(
            fx.strategies.get(name).steps, fx.ProgramPair(program, startup), Job(fx.Cluster(1, ranks)), lambda step, *_: mark(step)
        )
        for special in (Specializer(pair.main), Specializer(pair.startup)):
            for r in range(ranks):
                special.rank_program(r)
        mark("specialize")
        gc.enable()
    return {step: statistics.median(seconds) / len(program.ops) * 1e6 for step, seconds in spent.items()}


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
    log("\nwhere the time goes, 10,000 operators on 4 ranks (medians, us per operator)")
    program, startup = deep_mlp(10000)
    for name in KINDS:
        log(f"  {name:17} {', '.join(f'{step} {us:.2f}' for step, us in by_step(name, program, startup, 4).items())}")
    log("\n10,000 operators, 64 ranks against 4: all rank programs")
    for name in KINDS:
        got = interleaved({n: partial(all_ranks, name, program, startup, n) for n in (4, 64)}, rounds=3)
        t = all_ranks(name, program, startup, 64)
        programs = [t.get_trainer_program(r).ops for r in range(64)]
        held, different = sum(map(len, programs)), len({id(op) for ops in programs for op in ops})
        log(
            f"  {name:17} {show(got[4], 1e3, 'ms', 0)} -> {show(got[64], 1e3, 'ms', 0)}: {ratio(got[64], got[4])} times; "
            f"{statistics.median(got[64]) / held * 1e6:.2f} us for each of {held} operators of all programs, {different} of them different"
        )
    log("\nverify(), 10,000 operators")
    base = 0.0
    for name, ranks in (*((name, 4) for name in KINDS), ("data_parallel", 64), ("data_parallel", 1024), ("ring_optimizer", 64)):
        t = all_ranks(name, program, startup, ranks)
        start = time.perf_counter()
        t.verify()
        seconds = time.perf_counter() - start
        base = seconds if (name, ranks) == ("data_parallel", 4) else base
        against = f", {seconds / base:.2f} times that on 4 ranks" if name == "data_parallel" and ranks > 4 else ""
        log(f"  {name:17} {ranks:5} ranks: {seconds:.2f} s{against}")
    log.close()


if __name__ == "__main__":
    main()
