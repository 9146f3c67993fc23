"""An operator at which a test does what it likes to a rank: hold it, let it fail, leave it stuck."""

import threading

import numpy as np

from fluidx.ir import OpDef, Sample

HOOK = {}


class Trip(OpDef):
    """X itself; `HOOK["call"]`, where there is one, is called with the run context first."""

    name = "t_trip"
    inputs = ("X",)
    pattern = "* -> * | L(0)"

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def grad(b, op, g):
        return g

    @staticmethod
    def kernel(xp, x, *, ctx, out):
        if HOOK:
            HOOK["call"](ctx)
        xp.copyto(out, x)

    @staticmethod
    def samples():
        yield Sample.of(np.ones(2, "float32"))


def hold(rank):
    """The rank waits at the operator until the event is set, 20 seconds at most."""
    go = threading.Event()

    def call(ctx):
        if ctx.rank == rank:
            assert go.wait(20)

    HOOK["call"] = call
    return go
