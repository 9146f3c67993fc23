"""The strategies side by side on 4 CPU ranks, a model whose optimizer is Adam; and how well root cards balance known models."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from functools import partial

import numpy as np
from _common import Log, interleaved, ratio, show
from _shapes import MODELS

import fluidx as fx
from fluidx.transpiler import roots

RANKS = 4


def mlp(width: int):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 784], "float32")
        label = fx.data("label", [-1, 1], "int64")
        h = fx.layers.fc(x, width, act="relu")
        h = fx.layers.fc(h, width, act="relu")
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(h, 10), label))
        fx.optimizer.Adam(1e-3).minimize(loss)
    return main, startup, loss


def state_bytes(scope) -> int:
    return sum(a.nbytes for n, a in scope.arrays.items() if "moment" in n)


def steps(log: Log) -> None:
    rng = np.random.default_rng(0)
    for width, batch in ((512, 128), (1024, 64)):
        main, startup, loss = mlp(width)
        feed = {"x": rng.standard_normal((batch, 784), "float32"), "label": rng.integers(0, 10, (batch, 1))}
        cases, executors = {}, {}
        for name in fx.strategies.CATALOGUE:
            t = fx.DistributeTranspiler(name)
            t.transpile(program=main, startup_program=startup, trainers=RANKS)
            t.verify()
            exe = fx.ParallelExecutor(t, places=fx.cpu_places(RANKS))
            exe.run_startup()
            executors[name] = exe
            cases[name] = partial(exe.run, [loss], feed)
        got = interleaved(cases, rounds=25, calls=5)
        log(f"\nMLP 784-{width}-{width}-10, batch {batch}, Adam, {RANKS} ranks")
        for name, seconds in got.items():
            exe = executors[name]
            per_rank = [state_bytes(s) for s in exe.scopes]
            log(
                f"  {name:17} {show(seconds, 1e3, 'ms')}; {ratio(seconds, got['data_parallel'])} of data_parallel; "
                f"optimizer state {max(per_rank) / 2**20:.2f} MiB on the fullest rank"
            )
            exe.close()


def balances(log: Log) -> None:
    log("\nheaviest root over the mean, 4 MiB chunks (and whole parameters); transpile refuses nothing, 1.00 is perfect")
    for ranks in (8, 64):
        for name, params in MODELS.items():
            line = f"  {ranks:2} ranks  {name:11}"
            size = roots.chunk_bytes(sum(4 * n for _, n in params), ranks, 4)
            for method in roots.METHODS:
                for chunk in (size, 2**62):
                    chunks = [c for p, n in params for c in roots.cut(p, n, 4, chunk)]
                    line += f"  {method}{'' if chunk == size else ' whole'} {roots.balance(roots.assign(chunks, ranks, method), ranks):.3f}"
            log(line)


def main() -> None:
    log = Log("strategies")
    balances(log)
    steps(log)
    log.close()


if __name__ == "__main__":
    main()
