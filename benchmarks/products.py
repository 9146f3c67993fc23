"""Matrix products of the models, float32, one thread: fluidx's own, those of NumPy (its BLAS), and PyTorch's if it is installed.

GFLOP/s at the best of the rounds, in which they take turns: what the kernels reach, rather than what a loaded machine gave them. NumPy has
its BLAS at one thread by OPENBLAS_NUM_THREADS. On an AMD processor PyTorch is left out, whose MKL needs a library preloaded there.

    --rounds 60   --save
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable
from typing import Any

import numpy as np
from _common import Log, interleaved, option
from _peers import torch_here, versions

import fluidx as fx
from fluidx import native

torch = torch_here()

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
    ("a square", 1024, 1024, 1024, False, False),
]


def contestants(m: int, n: int, k: int, ta: bool, tb: bool) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((k, m) if ta else (m, k), "float32"), rng.standard_normal((n, k) if tb else (k, n), "float32")
    a, b = a.T if ta else a, b.T if tb else b
    outs = {peer: np.empty((m, n), "float32") for peer in ("numpy", "fluidx", "torch")}
    found: dict[str, Callable[[], Any]] = {"numpy": lambda: np.matmul(a, b, out=outs["numpy"])}
    if (call := native.gemm(a, b, outs["fluidx"])) is not None:
        found["fluidx"] = native.compile([call])
    if torch is not None:
        x, y, z = torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(outs["torch"])
        found["torch"] = lambda: torch.mm(x, y, out=z)
    for run in found.values():
        run()
    if not all(np.allclose(outs[peer], outs["numpy"], rtol=0, atol=1e-6 * k) for peer in found):  # sums in different orders
        raise SystemExit(f"the products of {m}, {n}, {k} differ")
    return found


def main() -> None:
    log, rounds = Log("products"), int(option("rounds", "60"))
    log(versions())
    if torch is not None:
        torch.set_num_threads(1)
    fx.set_num_threads(1)
    log(f"{native.describe()}; GFLOP/s at the best of {rounds} rounds\n")
    log(f"{'product':36} {'rows, columns, summed':>22}   numpy  fluidx  torch  fluidx by the best other")
    for name, m, n, k, ta, tb in PRODUCTS:
        flops = 2 * m * n * k
        times = interleaved(contestants(m, n, k, ta, tb), rounds, calls=max(1, int(4e7 / flops)))
        reached = {peer: flops / min(seconds) / 1e9 for peer, seconds in times.items()}
        others = max(speed for peer, speed in reached.items() if peer != "fluidx")
        shown = [f"{reached[peer]:7.0f}" if peer in reached else "      -" for peer in ("numpy", "fluidx", "torch")]
        by = f"{reached['fluidx'] / others:8.2f}" if "fluidx" in reached else "       -"
        shape = f"{m}{'t' * ta}, {n}{'t' * tb}, {k}"
        log(f"{name:36} {shape:>22} {' '.join(shown)} {by}")
    log("\nt: the factor stands transposed in memory")
    log.close()


if __name__ == "__main__":
    main()
