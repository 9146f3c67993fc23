"""install_check: does training work here, on one device and on two ranks? fluid's first command after an installation."""

from __future__ import annotations

import numpy as np

from . import layers, optimizer
from .compiler import CompiledProgram
from .executor import CPUPlace, Executor, Scope, cpu_places, scope_guard
from .ir import Program, program_guard, unique_name


def run_check() -> None:
    """Train a small layer for a step on one device and on two CPU ranks, compare the losses, and print the result.

    >>> run_check()
    fluidx works on one device, and on 2 CPU ranks with the same loss.
    """
    losses = []
    for ranks in (1, 2):
        main, startup = Program("install_check"), Program("install_check_startup")
        main.random_seed = startup.random_seed = 1
        with program_guard(main, startup), unique_name.guard(), scope_guard(Scope()):
            x = layers.data("inp", [2, 2])
            loss = layers.reduce_sum(layers.fc(x, 3))
            optimizer.SGD(0.01).minimize(loss)
            exe = Executor(CPUPlace())
            exe.run(startup)
            compiled = CompiledProgram(main).with_data_parallel(loss_name=loss.name, places=cpu_places(ranks))
            for _ in range(2):
                (value,) = exe.run(compiled, feed={"inp": np.ones((2, 2, 2), "float32")}, fetch_list=[loss])
            losses.append(float(value[0]))
    # the order of additions differs, by a few units in the last place
    assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0]), losses
    print("fluidx works on one device, and on 2 CPU ranks with the same loss.")


__all__ = ["run_check"]
