"""Time to transpile a deep MLP: per operator, by program size, and by ranks.

The peer's figures (Paddle 2.6.2, GradAllReduce, 4 endpoints: 1.19, 13.4 and 106.6 CPU seconds at 1,001, 2,993 and 9,953 operators) were
measured once on a machine of this kind with the same model and are printed beside ours.
"""

from __future__ import annotations

import time

from _common import Log, interleaved, show

import fluidx as fx

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


def main() -> None:
    log = Log("transpile")
    kinds = {"data_parallel": fx.strategies.data_parallel, "reduce_broadcast": fx.strategies.reduce_broadcast, "ring_optimizer": fx.strategies.ring_optimizer}
    log("\n4 ranks: transpile and make every rank's program")
    for size in (1000, 3000, 10000, 50000):
        start = time.process_time()
        program, startup = deep_mlp(size)
        built = time.process_time() - start
        n = len(program.ops)
        log(f"{n} operators, built in {built:.2f} s")
        for name, make in kinds.items():
            t = fx.DistributeTranspiler(make())

            def once(t=t):
                t.transpile(program=program, startup_program=startup, trainers=4)
                for r in range(4):
                    t.get_trainer_program(r)

            seconds = interleaved({name: once}, rounds=5 if size <= 10000 else 2)[name]
            peer = f"; Paddle 2.6.2 {PEER[size]:.1f} s, {PEER[size] / min(seconds):.0f}x" if size in PEER and name == "data_parallel" else ""
            log(f"  {name:17} {show(seconds, 1e3, 'ms', 0)}, {min(seconds) / n * 1e6:.1f} us per operator{peer}")
    log("\n10,000 operators, 64 ranks against 4: all rank programs, and verify()")
    program, startup = deep_mlp(10000)
    for name, make in kinds.items():
        t = fx.DistributeTranspiler(make())

        def ranks(n: int, t=t) -> None:
            t.transpile(program=program, startup_program=startup, trainers=n)
            for r in range(n):
                t.get_trainer_program(r)

        got = interleaved({"4": lambda: ranks(4), "64": lambda: ranks(64)}, rounds=3)
        start = time.perf_counter()
        t.transpile(program=program, startup_program=startup, trainers=4)
        t.verify()
        proved = time.perf_counter() - start
        log(f"  {name:17} {show(got['4'], 1e3, 'ms', 0)} -> {show(got['64'], 1e3, 'ms', 0)}: {min(got['64']) / min(got['4']):.2f}x; transpile + verify on 4 ranks {proved:.2f} s")
    log.close()


if __name__ == "__main__":
    main()
