"""Ctrl-C on one device: a step is left between two kernel calls, also where all of it is one call into C."""

import signal

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.run.thread_calls import CallList

L = fx.layers
pytestmark = pytest.mark.skipif(bool(native.why_not()) or not hasattr(signal, "setitimer"), reason="the C kernels are not built")


def long_step(calls):
    """A step of products, one behind the other, and at its end one that says that it was there."""
    w = L.create_parameter([768, 768], "float32", name="w", default_initializer=fx.initializer.ConstantInitializer(0.0))
    done = L.create_global_var([1], 0.0, "float32", persistable=True, name="done")
    y = fx.data("x", [768, 768], "float32")
    for _ in range(calls):
        y = L.matmul(y, w)
    L.assign(done + L.reduce_sum(y) + 1.0, done)


def test_ctrl_c_leaves_a_step_between_its_kernels(monkeypatch):
    """The signal comes while the step is on its way; a machine that made a thousand products in milliseconds would see `done`."""
    long_step(1000)
    exe, x = fx.Executor(), np.zeros((768, 768), "float32")
    exe.run(fx.default_startup_program())
    real = CallList.run

    def run(track):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        real(track)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with monkeypatch.context() as patched:
        patched.setattr(CallList, "run", run)
        with pytest.raises(KeyboardInterrupt):
            exe.run(feed={"x": x})
    signal.signal(signal.SIGALRM, before)
    assert fx.global_scope().get("done").tolist() == [0.0]
    with fx.program_guard(fx.Program("small"), fx.Program()):
        small = L.scale(fx.data("s", [2], "float32"), 2.0)
        assert exe.run(feed={"s": np.ones(2, "float32")}, fetch_list=[small])[0].tolist() == [2.0, 2.0]  # the executor goes on
