"""What the executor adds to the kernels: a chain of 1,000 adds on a [4] tensor, and the fixed cost of a run.

The chain runs on C kernels (FLUIDX_KERNELS=auto, where they are built) and on NumPy (FLUIDX_KERNELS=numpy), against NumPy's own loop of as
many adds into a prepared array. Everything is interleaved in one process; a figure is the median over rounds of 20 runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from _common import Log, interleaved, ratio, show

import fluidx as fx
from fluidx import native


def chain(length: int) -> tuple[fx.Program, str]:
    program = fx.Program("chain")
    with fx.unique_name.guard(), fx.program_guard(program, fx.Program("unused")):
        x = fx.data("x", [4], "float32")
        y = x
        for _ in range(length):
            y = fx.layers.elementwise_add(y, x)
    return program, y.name


def runner(length: int, kernels: str) -> Callable[[], object]:
    """A run of the chain, planned for these kernels."""
    program, y = chain(length)
    exe, feed = fx.Executor(fx.CPUPlace()), {"x": np.ones(4, "float32")}

    def run() -> object:
        return exe.run(program, feed=feed, fetch_list=[y])

    os.environ["FLUIDX_KERNELS"] = kernels
    run()  # the plan is made here, and kept
    del os.environ["FLUIDX_KERNELS"]
    return run


def main() -> None:
    log = Log("overhead")
    log(native.describe())
    a, b = np.ones(4, "float32"), np.ones(4, "float32")
    out = np.empty(4, "float32")

    def bare() -> None:
        add = np.add
        for _ in range(1000):
            add(a, b, out)

    cases: dict[str, Callable[[], object]] = {"loop": bare, "numpy": runner(1000, "numpy"), "numpy 1": runner(1, "numpy")}
    if native.enabled():
        cases |= {"native": runner(1000, "auto"), "native 1": runner(1, "auto")}
    got = interleaved(cases, rounds=30, calls=20)
    log(f"bare NumPy loop, per add                  {show(got['loop'], 1e3, 'us', 3)}")
    for kind in ("numpy", "native"):
        if kind not in got:
            log("native kernels are not built: not measured")
            continue
        long, short = got[kind], got[f"{kind} 1"]
        added = [x - y for x, y in zip(long, got["loop"], strict=True)]
        each = [(x - y) / 999 for x, y in zip(long, short, strict=True)]
        log(f"{kind:6} chain of 1,000, per add             {show(long, 1e3, 'us', 3)}; {ratio(long, got['loop'])} of the loop")
        log(f"{kind:6} without the fixed cost, per add     {show(each, 1e6, 'us', 4)}")
        log(f"{kind:6} added to NumPy's own loop, per add  {show(added, 1e3, 'us', 3)}   (reach: <= 0.05)")
        log(f"{kind:6} run of 1 operator                   {show(short, 1e6, 'us', 1)}   (reach: <= 10; Paddle 2.6.2, elsewhere: 194)")
    log.close()


if __name__ == "__main__":
    main()
