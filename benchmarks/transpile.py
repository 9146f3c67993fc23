"""Time to transpile a deep MLP: per operator, by program size, and by ranks.

The peer's figures (Paddle 2.6.2, GradAllReduce, 4 endpoints: 1.19, 13.4 and 106.6 CPU seconds at 1,001, 2,993 and 9,953 operators) were
measured once with the same model on another machine (2 shared AMD EPYC cores), so they
stand beside ours for the order of magnitude only.

    --strategies NAME,NAME   --rounds 5   --tables ranks (those about 1,000 ranks and growth alone)   --save
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from functools import partial

from _common import Log, interleaved, option, options, ratio, show
from _strategies import AT_FOUR, STRATEGIES, against

import fluidx as fx
from fluidx.ir.pass_base import Job, run_passes
from fluidx.transpiler.specialize import Specializer

# those that need no several hosts, no stages and no servers
KINDS = ("data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp")
PEER = {1000: 1.19, 3000: 13.4, 10000: 106.6}


def deep_mlp(operators: int) -> tuple[fx.Program, fx.Program]:
    """matmul + add + relu per layer, trained by SGD: about 12 operators a layer."""
    main, startup = fx.Program("deep_mlp"), fx.Program("deep_mlp_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        layers = operators // 10
        for _ in range(layers):
            x = fx.layers.fc(x, 32, act="relu")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(x))
    return main, startup


def deep_gpt(operators: int) -> tuple[fx.Program, fx.Program]:
    """Transformer blocks of width 64, a tied table, trained by Adam: about 114 operators and 16 parameters a block."""
    layers = fx.layers
    main, startup = fx.Program("deep_gpt"), fx.Program("deep_gpt_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, 16], "int64"), fx.data("label", [-1, 16, 1], "int64")
        h = fx.embedding(ids, [100, 64], param_attr=fx.ParamAttr(name="table"))
        for k in range(operators // 114):
            with fx.name_scope(f"block{k}"):
                h = transformer_block(h)
        logits = layers.matmul(layers.layer_norm(h, begin_norm_axis=2), main.global_block().var("table"), transpose_y=True)
        fx.optimizer.Adam(1e-3).minimize(layers.mean(layers.softmax_with_cross_entropy(logits, label)))
    return main, startup


def transformer_block(h: fx.Variable) -> fx.Variable:
    layers = fx.layers
    a = layers.layer_norm(h, begin_norm_axis=2)
    q, k, v = (layers.transpose(layers.reshape(layers.fc(a, 64, num_flatten_dims=2), [0, 0, 4, 16]), [0, 2, 1, 3]) for _ in range(3))
    mixed = layers.matmul(layers.softmax(layers.matmul(q, k, transpose_y=True, alpha=0.25)), v)
    h = h + layers.fc(layers.reshape(layers.transpose(mixed, [0, 2, 1, 3]), [0, 0, 64]), 64, num_flatten_dims=2)
    wide = layers.fc(layers.layer_norm(h, begin_norm_axis=2), 256, num_flatten_dims=2, act="gelu")
    return h + layers.fc(wide, 64, num_flatten_dims=2)


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


def many_ranks(log: Log, program: fx.Program, startup: fx.Program, names: list[str], rounds: int) -> None:
    """transpile for 1,000 ranks against 4, and the program of one of them, by strategy."""
    n = len(program.ops)
    for name in names:
        make, ranks_of = STRATEGIES[name]
        spent: dict[int, list[float]] = {4: [], 1000: []}
        one: list[float] = []
        for k in range(rounds + 1):
            for ranks, times in spent.items():
                gc.collect()
                t = fx.DistributeTranspiler(make())
                start = time.process_time()
                t.transpile(program=program, startup_program=startup, trainers=ranks_of(ranks))
                middle = time.process_time()
                own = len(t.get_trainer_program(1).ops)
                if k:
                    times.append(middle - start)
                    if ranks == 1000:
                        one.append((time.process_time() - middle) / own)
        few, many, rank = (statistics.median(x) for x in (spent[4], spent[1000], one))
        at_four = f" ({against(AT_FOUR[name], few / n * 1e6)})" if name in AT_FOUR else ""
        log(
            f"  {name:18} 4 ranks {few / n * 1e6:.1f} us per operator{at_four}, 1,000 ranks {many / n * 1e6:.1f}: "
            f"{ratio(spent[1000], spent[4])} times ({against(1.3, many / few)}); "
            f"one rank's program {rank * 1e6:.2f} us per operator of {own} ({against(30, rank * 1e6)})"
        )


def growth(log: Log, names: list[str]) -> None:
    """The exponent of transpile's time from 9,002 to 45,002 operators, on 4 ranks."""
    programs = [deep_mlp(size) for size in (10000, 50000)]
    for name in names:
        make, ranks_of = STRATEGIES[name]
        times: list[list[float]] = [[], []]
        for _ in range(3):
            for (program, startup), found in zip(programs, times, strict=True):
                gc.collect()
                t = fx.DistributeTranspiler(make())
                start = time.process_time()
                t.transpile(program=program, startup_program=startup, trainers=ranks_of(4))
                found.append(time.process_time() - start)
        sizes = [len(program.ops) for program, _ in programs]
        exponent = math.log(min(times[1]) / min(times[0])) / math.log(sizes[1] / sizes[0])
        log(f"  {name:18} {min(times[0]) * 1e3:.0f} ms -> {min(times[1]) * 1e3:.0f} ms, exponent {exponent:.2f} ({against(1.1, exponent)})")


def main() -> None:
    log, names = Log("transpile"), options("strategies", ",".join(STRATEGIES))
    program, startup = deep_mlp(10000)
    log(f"\n{len(program.ops)} operators, 1,000 ranks against 4, CPU seconds of transpile(); and the program of rank 1 of 1,000")
    many_ranks(log, program, startup, names, int(option("rounds", "5")))
    log("\n9,002 -> 45,002 operators, 4 ranks, CPU seconds of transpile()")
    growth(log, names)
    if option("tables", "all") == "ranks":
        log.close()
        return
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
    program, startup = deep_gpt(10000)
    log(f"\na GPT of {len(program.ops)} operators, 64 ranks: all rank programs, and verify() (reach for fsdp: 1 s and 5 s)")
    for name in ("data_parallel", "zero2", "zero3", "fsdp"):
        seconds = interleaved({name: partial(all_ranks, name, program, startup, 64)}, rounds=3)[name]
        t = all_ranks(name, program, startup, 64)
        start = time.perf_counter()
        t.verify()
        log(f"  {name:17} {show(seconds, 1e3, 'ms', 0)}, verify() {time.perf_counter() - start:.2f} s")
    log.close()


if __name__ == "__main__":
    main()
