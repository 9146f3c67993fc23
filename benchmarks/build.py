"""Time to write a program: layers, gradients and updates, per operator of the main program, at about 10,000 operators.

Times are CPU seconds of the process, so that other work on the machine disturbs them less. What the startup program costs is counted in.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

from _common import Log, show

import fluidx as fx

WIDTH, LENGTH, HEADS = 32, 16, 4


def deep_mlp(depth: int) -> tuple[fx.Program, fx.Program, float]:
    """mul + add + relu per layer, trained by SGD; also the moment when the layers stood."""
    main, startup = fx.Program("deep_mlp"), fx.Program("deep_mlp_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, WIDTH], "float32")
        for _ in range(depth):
            x = fx.layers.fc(x, WIDTH, act="relu")
        loss = fx.layers.mean(x)
        middle = time.process_time()
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup, middle


def transformer(depth: int) -> tuple[fx.Program, fx.Program, float]:
    """Blocks of attention and a wider fc, with residuals and layer norms, trained by Adam."""
    main, startup = fx.Program("transformer"), fx.Program("transformer_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, LENGTH, WIDTH], "float32")
        for _ in range(depth):
            h = fx.layers.layer_norm(x, begin_norm_axis=2)
            q, k, v = (heads(fx.layers.fc(h, WIDTH, num_flatten_dims=2)) for _ in range(3))
            weights = fx.layers.softmax(fx.layers.matmul(q, k, transpose_y=True, alpha=(WIDTH // HEADS) ** -0.5))
            h = fx.layers.transpose(fx.layers.matmul(fx.layers.dropout(weights, 0.1), v), [0, 2, 1, 3])
            x = x + fx.layers.fc(fx.layers.reshape(h, [0, 0, WIDTH]), WIDTH, num_flatten_dims=2)
            h = fx.layers.layer_norm(x, begin_norm_axis=2)
            h = fx.layers.fc(h, 4 * WIDTH, num_flatten_dims=2, act="gelu")
            x = x + fx.layers.fc(h, WIDTH, num_flatten_dims=2)
        loss = fx.layers.mean(x)
        middle = time.process_time()
        fx.optimizer.Adam(1e-3).minimize(loss)
    return main, startup, middle


def heads(x: fx.Variable) -> fx.Variable:
    return fx.layers.transpose(fx.layers.reshape(x, [0, 0, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])


MODELS = {"deep_mlp, SGD": (deep_mlp, 1000), "transformer, Adam": (transformer, 100)}


def main() -> None:
    log = Log("build")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 9
    for name, (build, depth) in MODELS.items():
        layers, rest = [], []
        for k in range(rounds + 1):  # the first one warms up
            gc.collect()
            start = time.process_time()
            program, startup, middle = build(depth)
            stop = time.process_time()
            if k:
                layers.append(middle - start)
                rest.append(stop - middle)
        n = len(program.ops)
        total = [a + b for a, b in zip(layers, rest, strict=True)]
        log(f"{name}: {n} operators, {len(startup.ops)} in startup")
        log(f"  whole     {show([t / n for t in total], 1e6, 'us', 1)} per operator; {statistics.median(total):.2f} s")
        forward = sum(op.role == "forward" or op.role == "loss" for op in program.ops)
        log(f"  layers    {show([t / forward for t in layers], 1e6, 'us', 1)} per forward operator")
        log(f"  minimize  {show([t / (n - forward) for t in rest], 1e6, 'us', 1)} per operator of the rest")
    log.close()


if __name__ == "__main__":
    main()
