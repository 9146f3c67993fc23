"""Calls are packed into blocks, and blocks run in order, from any thread, in a child process too."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from fluidx import native
from fluidx.ops import expr as ex
from fluidx.ops.expr.native import bind_native

X = ex.sym("x")


def call(e, x, out):
    c = bind_native([e], {"x": x}, [out])
    assert c is not None
    return c


def test_a_block_executes_its_calls_in_order_each_time():
    x, y = np.ones(5, "float32"), np.zeros(5, "float32")
    run = native.compile([call(X + 1.0, x, x), call(X * 2.0, x, y)])
    assert run() is None
    assert (y == 4).all()
    run()
    assert (y == 6).all()


def test_an_empty_block_does_nothing():
    native.compile([])()


def test_a_block_keeps_its_arrays_alive_and_lets_them_go():
    class Array(np.ndarray):
        pass

    x = np.zeros(1000, "float32").view(Array)
    alive = weakref.ref(x)
    run = native.compile([call(X + 1.0, x, x)])
    del x
    gc.collect()
    run()
    assert alive() is not None and (alive() == 1).all()
    del run
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "bad, says",
    [
        (native.NativeCall("gem_f32", ()), "there is no native kernel 'gem_f32'; there are .*gemm_f32"),
        (native.NativeCall("gemm_f32", (1, 2)), "native kernel gemm_f32 takes 22 words, got 2"),
    ],
)
def test_a_call_that_fits_no_kernel_is_refused(bad, says):
    with pytest.raises(native.NativeError, match=says):
        native.compile([bad])


@pytest.mark.parametrize("words", [b"\0" * 8, b"\xff" * 32, b"\0" * 8 + b"\x05" + b"\0" * 23])
def test_words_that_describe_no_calls_are_refused(words):
    from fluidx import _native

    with pytest.raises(ValueError, match="do not describe calls"):
        _native.block(words, None)


def test_four_python_threads_run_at_once():
    """Some find the pool taken and run alone; all results are right."""
    rng = np.random.default_rng(0)
    e = ex.tanh(X) * X
    x = rng.standard_normal(200_000).astype("float32")
    expected = np.empty_like(x)
    native.compile([call(e, x, expected)])()
    outs = [np.empty_like(x) for _ in range(4)]
    wrong = []

    def work(out):
        run = native.compile([call(e, x, out)] * 3)
        for _ in range(20):
            out[:] = 0
            run()
            if not np.array_equal(out, expected):
                wrong.append(out)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_thread_may_limit_itself():
    """A limit holds for the thread that set it, and changes no result."""
    x = np.random.default_rng(0).standard_normal(100_000).astype("float32")
    outs = [np.empty_like(x), np.empty_like(x)]

    def work():
        native.use_threads(1)
        native.compile([call(ex.exp(X), x, outs[0])])()

    t = threading.Thread(target=work)
    t.start()
    t.join()
    native.compile([call(ex.exp(X), x, outs[1])])()
    assert np.array_equal(*outs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_makes_its_own_pool():
    x = np.ones(500_000, "float32")
    out = np.empty_like(x)
    run = native.compile([call(ex.exp(X), x, out)])
    run()
    expected = out.copy()
    child = os.fork()
    if child == 0:
        out[:] = 0
        for _ in range(5):
            run()
        os._exit(0 if np.array_equal(out, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run()


def python(code, **env):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


def test_environment_variables_choose():
    ask = "from fluidx import native; print(native.describe())"
    assert python(ask, FLUIDX_KERNELS="numpy") == "native kernels off: FLUIDX_KERNELS=numpy"
    assert python(ask, FLUIDX_NATIVE_LEVEL="base", FLUIDX_THREADS="3").startswith("native kernels on: level base, products by ")
    assert python(ask, FLUIDX_NATIVE_LEVEL="base", FLUIDX_THREADS="3").endswith(", 3 threads")
    without = "import sys; sys.modules['fluidx._native'] = None\nfrom fluidx import native\nprint(native.enabled())"
    assert python(without) == "False"
    assert "NativeError: FLUIDX_KERNELS=native, but the extension is not built" in python(without, FLUIDX_KERNELS="native")


def test_each_level_can_be_forced():
    known = ["base", "v3", "v4", "v4_vnni", "v4_bf16", "amx"]
    found = native.levels()
    assert found == known[: len(found)]
    for name in found:
        said = python("from fluidx import native; print(native.describe())", FLUIDX_NATIVE_LEVEL=name)
        assert said.startswith(f"native kernels on: level {name}, ")
    for name in known[len(found) :]:
        said = python("from fluidx import native; print(native.describe())", FLUIDX_NATIVE_LEVEL=name)
        assert f"and this processor has {', '.join(found)}" in said


def test_a_level_that_the_processor_lacks_is_said_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("FLUIDX_NATIVE_LEVEL", "amx")
    monkeypatch.setattr(native, "import_module", lambda name: SimpleNamespace(levels=lambda: ["base", "v3"]))
    with pytest.warns(UserWarning, match="FLUIDX_NATIVE_LEVEL=amx, and this processor has base, v3; NumPy computes instead, which"):
        assert native._start().module is None


def test_importing_fluidx_does_not_load_the_extension():
    assert python("import sys, fluidx; print('fluidx._native' in sys.modules)") == "False"
