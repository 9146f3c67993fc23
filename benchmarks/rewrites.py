"""What rewrites take and give: the walk before a plan, batch normalization folded for inference, channels last, chains joined.

    walk      microseconds an operator of the rewrites that executors do by themselves, on the models of the other benchmarks, where nothing
              applies
    shapes    one convolution, forward and backward, with channels first and last, and one transpose of its input
    models    steps of ResNet-18 and LeNet as written, after ChannelsLast, and (inference) after InferenceTranspiler
    joined    steps of one normalization, one attention and a block of both, written out of small layers, as written and after JoinLayerNorm
              and JoinAttention; and what the two passes take for a stack of twelve such blocks

CPU seconds of one thread, minima and medians over the rounds.   --rounds 10   --only walk,shapes,models,joined   --save
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _common import Log, option, options, ratio, show
from _models import NETS, case, fluidx_model, start

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.ir import TensorType, opdef
from fluidx.ops import kernels
from fluidx.ops.shared.types import empty_arrays
from fluidx.rewrite import ChannelsLast, JoinAttention, JoinLayerNorm, rewritten

# rows, channels in, size of the image, channels out, size of the filter, stride, padding
SHAPES = (
    (64, 1, 28, 6, 5, 1, 0), (64, 6, 12, 16, 5, 1, 0), (32, 3, 32, 64, 3, 1, 1), (32, 16, 32, 16, 3, 1, 1), (32, 32, 32, 32, 3, 1, 1),
    (32, 64, 32, 64, 3, 1, 1), (32, 64, 32, 128, 3, 2, 1), (32, 64, 32, 128, 1, 2, 0), (32, 128, 16, 128, 3, 1, 1),
    (32, 256, 8, 256, 3, 1, 1), (32, 512, 4, 512, 3, 1, 1), (1, 64, 56, 64, 3, 1, 1), (8, 64, 56, 256, 1, 1, 0),
)  # fmt: skip


def timed(cases: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    """CPU seconds of each case, one after the other in every round; the first round warms up."""
    times: dict[Any, list[float]] = {name: [] for name in cases}
    for k in range(rounds + 1):
        for name, call in cases.items():
            begin = time.thread_time()
            call()
            if k:
                times[name].append(time.thread_time() - begin)
    return times


def walk(log: Log, rounds: int) -> None:
    log("\nplanning, us an operator, without and with the rewrites")
    for name in NETS:
        m, exe, scope = fluidx_model(case(name)), fx.Executor(), fx.Scope()
        exe.run(m.startup, scope=scope)
        types = {n: TensorType(a.dtype.name, a.shape) for n, a in m.feed.items()}
        make = partial(plan, m.main, types, [m.result.name], scope.arrays, RunContext())
        found = timed({on: partial(make, rewrite=on) for on in (False, True)}, 5 * rounds)
        low = {on: min(t) / len(m.main.ops) * 1e6 for on, t in found.items()}
        log(f"  {name:8} {len(m.main.ops):4} operators: {low[False]:.1f} and {low[True]:.1f}")


def bound(kind: str, ins: list[Any], outs: list[Any], attrs: dict[str, Any]) -> Callable[[], Any]:
    definition = opdef(kind)
    full = definition.complete_attrs(attrs)
    body = next(b for b in kernels.bodies(definition, "cpu") if b.covers(ins, outs, full, None, None))
    types = [[TensorType(a.dtype.name, a.shape) for a in some] for some in (ins, outs)]
    step = body.bind(np, ins, outs, full, None, None, empty_arrays(body.scratch(*types, full)) if body.scratch else ())
    assert step is not None
    return step


def shapes(log: Log, rounds: int) -> None:
    log("\na convolution: channels last over channels first, forward and backward; transposing its input, ns an element")
    rng = np.random.default_rng(0)
    for n, c, size, o, k, stride, pad in SHAPES:
        cases: dict[Any, Callable[[], Any]] = {}
        made = (size + 2 * pad - k) // stride + 1
        for fmt in ("NCHW", "NHWC"):
            x, y = (
                rng.standard_normal((n, channels, s, s) if fmt == "NCHW" else (n, s, s, channels), "float32")
                for channels, s in ((c, size), (o, made))
            )
            w = rng.standard_normal((o, c, k, k), "float32")
            attrs = {"strides": (stride, stride), "paddings": (pad, pad), "data_format": fmt}
            cases[fmt, 0] = bound("conv2d", [x, w], [y], attrs)
            cases[fmt, 1] = bound("conv2d_grad", [x, w, y.copy()], [np.empty_like(x), np.empty_like(w)], attrs)
        turned = np.empty((n, size, size, c), "float32")
        cases["turn"] = bound("assign", [rng.standard_normal((n, c, size, size), "float32").transpose(0, 2, 3, 1)], [turned], {})
        t = {name: min(times) for name, times in timed(cases, rounds).items()}
        gflops = [2 * n * made * made * o * c * k * k * (1 + back) / t["NCHW", back] / 1e9 for back in (0, 1)]
        shape, ratios = f"{n}x{c}x{size}x{size} * {o}x{k}x{k}/{stride}", [t["NHWC", back] / t["NCHW", back] for back in (0, 1)]
        log(
            f"  {shape:28} {ratios[0]:.2f} and {ratios[1]:.2f}, from {gflops[0]:.0f} and {gflops[1]:.0f} GFLOP/s; "
            f"{t['turn'] / turned.size * 1e9:.2f}"
        )


def models(log: Log, rounds: int) -> None:
    for name in ("resnet", "lenet"):
        for train in (True, False):
            c, steps = case(name), {}
            for way in ("as written", "channels last", *(() if train else ("folded", "both"))):
                m = fluidx_model(c, train)
                main, exe, scope = m.main, fx.Executor(), fx.Scope()
                exe.run(m.startup, scope=scope)
                start(scope, c)
                if way in ("folded", "both"):
                    fx.InferenceTranspiler().transpile(main, None, scope)
                if way in ("channels last", "both"):
                    main = rewritten(main, [ChannelsLast()], fetch=[m.result.name])
                steps[way] = partial(exe.run, main, m.feed, [m.result.name], scope=scope)
            found = timed(steps, rounds)
            log(f"\n{name}, {'training' if train else 'inference'}")
            for way, times in found.items():
                log(f"  {way:14} {show(times, 1e3, 'ms')}; {ratio(times, found['as written'])}")


JOINS = (JoinLayerNorm(), JoinAttention())
ROWS, LENGTH, WIDTH, HEADS = 8, 128, 256, 8


def written_norm(x: Any) -> Any:
    L = fx.layers
    d = x - L.reduce_mean(x, -1, keep_dim=True)
    y = L.elementwise_div(d, L.sqrt(L.scale(L.reduce_mean(L.square(d), -1, keep_dim=True), bias=1e-5)))
    scale = L.create_parameter([WIDTH], "float32", default_initializer=fx.initializer.Constant(1.0))
    return L.elementwise_add(L.elementwise_mul(y, scale), L.create_parameter([WIDTH], "float32", is_bias=True))


def written_attention(x: Any, project: bool = True) -> Any:
    L, d = fx.layers, WIDTH // HEADS

    def heads() -> Any:
        h = L.fc(x, WIDTH, num_flatten_dims=2) if project else x
        return L.transpose(L.reshape(h, [0, 0, HEADS, d]), [0, 2, 1, 3])

    q, k, v = heads(), heads(), heads()
    mask = L.assign(np.triu(np.full((LENGTH, LENGTH), -1e9, "float32"), 1))
    weights = L.softmax(L.elementwise_add(L.matmul(q, k, transpose_y=True, alpha=d**-0.5), mask))
    return L.reshape(L.transpose(L.matmul(weights, v), [0, 2, 1, 3]), [0, 0, WIDTH])


def written_block(x: Any) -> Any:
    L = fx.layers
    x = x + L.fc(written_attention(written_norm(x)), WIDTH, num_flatten_dims=2)
    return x + L.fc(L.fc(written_norm(x), 4 * WIDTH, num_flatten_dims=2, act="relu"), WIDTH, num_flatten_dims=2)


def chain(write: Callable[[Any], Any], train: bool, times: int = 1) -> tuple[Any, Any, Any]:
    """(main, startup, loss) of what `write` writes of [ROWS, LENGTH, WIDTH]."""
    main, startup = fx.Program("chain"), fx.Program("chain_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [ROWS, LENGTH, WIDTH])
        h = h + fx.layers.create_parameter([WIDTH], "float32", is_bias=True)  # so that gradients go all the way
        for _ in range(times):
            h = write(h)
        loss = fx.layers.mean(fx.layers.square(h))
        if train:
            fx.optimizer.SGD(0.01).minimize(loss)
    return main, startup, loss


def joined(log: Log, rounds: int) -> None:
    feed = {"x": np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDTH), "float32")}
    writes = {"normalization": written_norm, "attention": partial(written_attention, project=False), "block": written_block}
    for name, write in writes.items():
        for train in (True, False):
            main, startup, loss = chain(write, train)
            steps = {}
            for way, program in (("as written", main), ("joined", rewritten(main, JOINS, fetch=[loss]))):
                exe, scope = fx.Executor(), fx.Scope()
                exe.run(startup, scope=scope)
                steps[way] = partial(exe.run, program, feed, [loss.name], scope=scope)
            found = timed(steps, rounds)
            log(f"\n{name} of {ROWS}x{LENGTH}x{WIDTH}, {'training' if train else 'inference'}")
            for way, times in found.items():
                log(f"  {way:14} {show(times, 1e3, 'ms')}; {ratio(times, found['as written'])}")
    main, _, loss = chain(written_block, True, 12)
    (times,) = timed({"passes": partial(rewritten, main, JOINS, [loss])}, min(rounds, 5)).values()
    log(f"\nthe two passes over {len(main.ops)} operators of twelve blocks: {show(times, 1e3, 'ms')}")


def main() -> None:
    fx.set_num_threads(1)
    log, rounds = Log("rewrites"), int(option("rounds", "10"))
    parts = {"walk": walk, "shapes": shapes, "models": models, "joined": joined}
    for name in options("only", ",".join(parts)):
        parts[name](log, rounds)
    log.close()


if __name__ == "__main__":
    main()
