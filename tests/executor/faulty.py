"""An operator at which a rank fails in a way of its own, in a step: another process knows it by this module's name."""

import os
import signal
import time

import numpy as np

from fluidx.ir import OpDef, Sample


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def throw(error):
    raise error


def note():
    """Say when it happens, where somebody wants to know that."""
    if path := os.environ.get("FLUIDX_TEST_NOTE"):
        with open(path, "w") as f:
            f.write(str(time.monotonic()))


HOW = {
    "raise": lambda: throw(ZeroDivisionError("of all things")),
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "leave": lambda: throw(SystemExit(3)),
    "exit": lambda: os._exit(7),
    "kill": die,
    "stop": stop,
}


class Faulty(OpDef):
    """X itself; in step `step` the rank `rank` fails as `how` says."""

    name = "t_faulty"
    inputs = ("X",)
    attrs = {"how": "raise", "rank": 0, "step": 0}
    pattern = "* -> * | L(0)"

    @staticmethod
    def infer(x, *, how, rank, step):
        return x

    @staticmethod
    def grad(b, op, g):
        return g

    @staticmethod
    def kernel(xp, x, *, how, rank, step, ctx, out):
        if (ctx.rank, ctx.step, ctx.world_size > 1) == (rank, step, True):
            note()
            HOW[how]()
        xp.copyto(out, x)

    @staticmethod
    def samples():
        yield Sample.of(np.ones(2, "float32"))
