"""Matrix products of the models on one thread, in a precision: fluidx's own at each level of instructions, those of NumPy (its BLAS) in
float32, and PyTorch's if it is installed.

GFLOP/s at the best of the rounds, in which they take turns: what the kernels reach, rather than what a loaded machine gave them. NumPy has
its BLAS at one thread by OPENBLAS_NUM_THREADS. On an AMD processor PyTorch is left out, whose MKL needs a library preloaded there.

    --precision float32 | bfloat16 | float16   --levels v4,amx (all: each of the processor)   --rounds 60   --save
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable
from typing import Any

import numpy as np
from _common import Log, choice, interleaved, option, options
from _peers import torch_here, versions

import fluidx as fx
from fluidx import native
from fluidx.ir.dtypes import np_dtype

torch = torch_here()
DIGITS = {"float32": 24, "bfloat16": 8, "float16": 11}

# what it is of the models; rows, columns, summed; whether the first and the second factor stand transposed
PRODUCTS = [
    ("perceptron, forward", 128, 512, 784, False, False),
    ("perceptron, gradient of the input", 128, 512, 512, False, True),
    ("perceptron, gradient of the weights", 784, 512, 128, True, False),
    ("GPT, queries, keys and values", 1024, 768, 256, False, False),
    ("GPT, down", 1024, 256, 1024, False, False),
    ("GPT, gradient of the input of down", 1024, 1024, 256, False, True),
    ("GPT, gradient of the weights of up", 256, 1024, 1024, True, False),
    ("attention, scores", 128, 128, 64, False, True),
    ("attention, values", 128, 64, 128, False, False),
    ("few rows", 4, 512, 784, False, False),
    ("few columns", 128, 10, 512, False, False),
    ("a small square", 64, 64, 64, False, False),
    ("a square of 512", 512, 512, 512, False, False),
    ("a square", 1024, 1024, 1024, False, False),
]


def contestants(m: int, n: int, k: int, ta: bool, tb: bool, precision: str, levels: list[str]) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    shapes = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    a, b = (rng.standard_normal(shape, "float32").astype(np_dtype(precision)) for shape in shapes)
    a, b = a.T if ta else a, b.T if tb else b
    outs = {peer: np.empty((m, n), a.dtype) for peer in ("numpy", "torch", *levels)}
    exact = a.astype("float32") @ b.astype("float32")
    found: dict[str, Callable[[], Any]] = {}
    if precision == "float32":
        found["numpy"] = lambda: np.matmul(a, b, out=outs["numpy"])
    for level in levels:
        with native.at_level(level):
            if (call := native.gemm(a, b, outs[level])) is not None:
                found[level] = native.compile([call])
    if torch is not None:
        kind = getattr(torch, precision)
        x, y, z = (torch.from_numpy(part.astype("float32")).to(kind) for part in (a, b, outs["torch"]))
        x, y = (t.T.contiguous().T if turned else t.contiguous() for t, turned in ((x, ta), (y, tb)))
        found["torch"] = lambda: torch.mm(x, y, out=z)
    for run in found.values():
        run()
    if torch is not None:
        outs["torch"][...] = z.float().numpy().astype(outs["torch"].dtype)
    for peer in found:  # sums in different orders, rounded once
        if not np.allclose(outs[peer].astype("float32"), exact, rtol=2.0 ** (1 - DIGITS[precision]), atol=1e-6 * k):
            raise SystemExit(f"the product of {m}, {n}, {k} by {peer} differs")
    return found


def main() -> None:
    log, rounds, precision = Log("products"), int(option("rounds", "60")), choice("precision", "float32", "bfloat16", "float16")
    levels = options("levels", native.level())
    levels = [name for name in native.levels() if name != "base"] if levels == ["all"] else levels
    log(versions())
    if torch is not None:
        torch.set_num_threads(1)
    fx.set_num_threads(1)
    peers = [*(["numpy"] if precision == "float32" else []), *levels, "torch"]
    log(f"{native.describe()}; {precision}, GFLOP/s at the best of {rounds} rounds\n")
    log(f"{'product':36} {'rows, columns, summed':>22} {' '.join(f'{p:>7}' for p in peers)}  fluidx at its best by the best other")
    for name, m, n, k, ta, tb in PRODUCTS:
        flops = 2 * m * n * k
        times = interleaved(contestants(m, n, k, ta, tb, precision, levels), rounds, calls=max(1, int(4e7 / flops)))
        reached = {peer: flops / min(seconds) / 1e9 for peer, seconds in times.items()}
        others, own = ([speed for peer, speed in reached.items() if (peer in levels) == mine] for mine in (False, True))
        shown = [f"{reached[peer]:7.0f}" if peer in reached else "      -" for peer in peers]
        by = f"{max(own) / max(others):8.2f}" if own and others else "       -"
        shape = f"{m}{'t' * ta}, {n}{'t' * tb}, {k}"
        log(f"{name:36} {shape:>22} {' '.join(shown)} {by}")
    log("\nt: the factor stands transposed in memory")
    log.close()


if __name__ == "__main__":
    main()
