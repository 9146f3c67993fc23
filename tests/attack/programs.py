"""Random programs: each that transpile() takes must be proved, and give one device's losses and state; others get a TranspileError."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import fluidx as fx
from fluidx.ir import TranspileError

from .outcome import Outcome

L, S = fx.layers, fx.strategies
D = "float64"  # differences are the order of additions alone

STRATEGIES: dict[str, Callable[[], Any]] = {
    "data_parallel": lambda: S.data_parallel(bucket_mb=0.0005),
    "reduce_broadcast": S.reduce_broadcast,
    "ring_optimizer": lambda: S.ring_optimizer(chunk_mb=0.0002),
    "zero1": S.zero1,
    "zero2": S.zero2,
    "zero3": S.zero3,
    "fsdp": lambda: S.fsdp(units="parameter"),
    "micro_batches": lambda: S.micro_batches(2),
    "halving": lambda: S.data_parallel(algorithm="halving_doubling"),
    "double tree": lambda: S.data_parallel(algorithm="double_binary_tree"),
    "ring": lambda: S.zero1(algorithm="ring"),
    "servers": lambda: S.reduction_servers(2),
    "parameter servers": lambda: S.parameter_server(2, min_block=8),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: fx.optimizer.SGD(0.05),
    "Momentum": lambda: fx.optimizer.Momentum(0.05, 0.9, regularization=fx.regularizer.L2Decay(0.01)),
    "Adam": lambda: fx.optimizer.Adam(0.01, epsilon=1e-3),  # a larger epsilon does not magnify rounding
    "clipped": lambda: fx.optimizer.SGD(0.05, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)),
    "merged": lambda: fx.optimizer.GradientMergeOptimizer(fx.optimizer.SGD(0.05), 2),
}


class Writer:
    """Writes a random program over rows [-1, k]: every value is bounded, so that chains of them stay so."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.said: list[str] = []

    def rows(self, h: Any, depth: int = 0) -> Any:
        """A random layer over rows."""
        rng, k = self.rng, h.shape[-1]
        kinds = ["fc", "scale", "norm", "softmax", "mix", "gate", "split", "max", "centre", "tokens", "shared"]
        kind = rng.choice([*kinds, "branch", "loop", "nest"] if depth < 2 else kinds)
        self.said.append(kind)
        if kind == "fc":
            return L.fc(h, rng.randint(1, 6), act=rng.choice([None, "tanh", "sigmoid", "relu"]))
        if kind == "scale":
            return L.scale(h, rng.choice([0.0, -1.0, 0.5]), rng.choice([0.0, 1.0]))
        if kind == "norm":
            return L.layer_norm(h) if k > 1 else L.tanh(h)
        if kind == "softmax":
            return L.softmax(h)
        if kind == "mix":
            return L.elementwise_add(L.tanh(L.fc(h, k)), h)
        if kind == "gate":
            return L.elementwise_mul(L.sigmoid(L.fc(h, k)), L.tanh(h))
        if kind == "split" and k > 1:
            a, b = L.split(h, [1, k - 1], dim=1)
            return L.concat([b, L.tanh(a)], axis=1)
        if kind == "max":
            return L.elementwise_max(h, L.scale(h, 0.5))
        if kind == "centre":  # a value of the whole batch
            return L.tanh(L.elementwise_sub(h, L.reduce_mean(h, dim=0)))
        if kind == "tokens":  # rows folded and unfolded
            wide = L.fc(h, 6)
            return L.reshape(L.tanh(L.fc(L.reshape(wide, [-1, 3]), 2)), [-1, 4])
        if kind == "shared":
            w = fx.ParamAttr(name=f"shared_{k}")
            return L.tanh(L.fc(L.fc(h, k, param_attr=w, bias_attr=False), k, param_attr=w, bias_attr=False))
        if kind == "branch":
            return L.cond(L.greater_than(L.mean(h), L.fill_constant([1], D, 0.05)), lambda: L.tanh(h), lambda: L.scale(h, 0.25))
        if kind == "loop":
            w = L.create_parameter([k, k], D)
            count, last = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", rng.randint(1, 3))
            _, h = L.while_loop(lambda i, v: L.less_than(i, last), lambda i, v: [i + 1, L.tanh(L.matmul(v, w))], [count, h])
            return h
        if kind == "nest":
            high = L.greater_than(L.reduce_max(h), L.fill_constant([1], D, 0.5))
            inner = self.rows

            def taken() -> Any:
                return L.elementwise_add(L.scale(h, 0.5), L.tanh(L.reduce_mean(inner(L.tanh(h), 1), dim=1, keep_dim=True)))

            return L.cond(high, taken, lambda: L.scale(h, 0.5))
        return h

    def write(self) -> tuple[fx.Program, fx.Program, Any]:
        main, startup = fx.Program("attack"), fx.Program("attack_startup")
        main.random_seed = startup.random_seed = self.rng.randint(1, 10**6)
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            x, y = fx.data("x", [-1, 3], D), fx.data("y", [-1, 2], D)
            h = L.fc(x, 4, act="tanh")
            for _ in range(self.rng.randint(1, 5)):
                h = self.rows(h)
            error = L.square_error_cost(L.fc(h, 2), y)
            loss = L.mean(error) if self.rng.random() < 0.7 else L.reduce_sum(error) * 0.1
            optimizer = self.rng.choice(list(OPTIMIZERS))
            self.said.append(optimizer)
            OPTIMIZERS[optimizer]().minimize(loss)
        return main, startup, loss


def feeds(rng: random.Random) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(rng.randint(0, 2**31))
    count = rng.choice([1, 2, 5, 8, 13])
    return [{"x": draw.uniform(-1, 1, (count, 3)), "y": draw.uniform(-1, 1, (count, 2))} for _ in range(3)]


def state(program: fx.Program, value: Callable[[str], Any]) -> dict[str, np.ndarray]:
    return {p.name: np.asarray(value(p.name)) for p in program.all_parameters()}


def on_one_device(main: fx.Program, startup: fx.Program, loss: Any, given: list[Any]) -> tuple[list[Any], dict[str, np.ndarray]]:
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(startup, scope=scope)
    losses = [exe.run(main, feed=f, fetch_list=[loss], scope=scope)[0] for f in given]
    return losses, state(main, lambda n: scope.get(n))


def attack(number: int, seed: int, outcome: Outcome) -> None:
    rng = random.Random(f"{seed}/programs/{number}")
    writer = Writer(rng)
    main, startup, loss = writer.write()
    given, n, name = feeds(rng), rng.choice([1, 2, 3, 4]), rng.choice(list(STRATEGIES))
    what = f"{name} on {n} ranks, {len(given[0]['x'])} rows: {' '.join(writer.said)}"
    want, end = on_one_device(main, startup, loss, given)
    try:
        t = fx.DistributeTranspiler(STRATEGIES[name]()).transpile(program=main, startup_program=startup, trainers=n)
    except TranspileError:
        outcome.verdicts["refused"] += 1
        return
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size), timeout=20) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=f, fetch_list=[loss])[0] for f in given]
        after = state(main, ranks.state)
    close = {"rtol": 1e-7, "atol": 1e-9}  # float64: the order of additions, magnified by three steps
    if not np.allclose(found, want, **close):
        outcome.fail(number, f"losses {np.ravel(found)} are not {np.ravel(want)}; {what}")
    elif bad := [p for p in end if not np.allclose(after[p], end[p], **close)]:
        outcome.fail(number, f"parameter {bad[0]} ends at another value; {what}")
    else:
        outcome.verdicts["equal"] += 1
