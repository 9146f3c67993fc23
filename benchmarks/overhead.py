"""What the executor adds to the kernels: a chain of 1,000 adds on a [4] tensor, and the fixed cost of a run."""

from __future__ import annotations

import numpy as np
from _common import Log, interleaved, show

import fluidx as fx


def chain(length: int) -> tuple[fx.Program, str]:
    program = fx.Program("chain")
    with fx.unique_name.guard(), fx.program_guard(program, fx.Program("unused")):
        x = fx.data("x", [4], "float32")
        y = x
        for _ in range(length):
            y = fx.layers.elementwise_add(y, x)
    return program, y.name


def main() -> None:
    log = Log("overhead")
    exe = fx.Executor(fx.CPUPlace())
    feed = {"x": np.ones(4, "float32")}
    long, y = chain(1000)
    short, z = chain(1)
    a, b = np.ones(4, "float32"), np.ones(4, "float32")
    out = np.empty(4, "float32")

    def bare() -> None:
        add = np.add
        for _ in range(1000):
            add(a, b, out)

    got = interleaved(
        {
            "numpy": bare,
            "long": lambda: exe.run(long, feed=feed, fetch_list=[y]),
            "short": lambda: exe.run(short, feed=feed, fetch_list=[z]),
        },
        rounds=30,
        calls=20,
    )
    log(f"bare NumPy loop, per add         {show(got['numpy'], 1e3, 'us', 3)}")
    log(f"fluidx chain of 1,000, per add   {show(got['long'], 1e3, 'us', 3)}")
    log(f"fluidx run of 1 operator         {show(got['short'], 1e6, 'us', 1)}")
    added = [x - y for x, y in zip(got["long"], got["numpy"], strict=True)]
    log(f"added by the executor, per add   {show(added, 1e3, 'us', 3)}   (reach: <= 1.5; Paddle 2.6.2, elsewhere: 9.3 in all)")
    log(f"fixed cost of a run              {show(got['short'], 1e6, 'us', 1)}   (reach: <= 30; Paddle 2.6.2, elsewhere: 194)")
    log.close()


if __name__ == "__main__":
    main()
