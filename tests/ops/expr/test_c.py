"""Scalar expressions in C."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from fluidx.ir import OPS
from fluidx.ops import expr as ex
from fluidx.ops.expr.c import c_function, to_c
from fluidx.ops.expr.nodes import substitute, sym
from fluidx.ops.expr.numpy import evaluate

x, g = sym("x"), sym("g")


def test_c_statements_share_what_is_used_twice():
    t = ex.tanh(x)
    assert to_c(g * (1 - t * t), "float32") == "float t0 = tanhf(x);\nout = g * (1.0f - (t0 * t0));"
    assert to_c(ex.where(x > 0, g, 0), "float64") == "out = (x > 0.0) ? g : 0.0;"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_c_functions_compute_what_numpy_computes(tmp_path):
    names = ["relu", "gelu", "tanh_grad", "mish_grad", "leaky_relu", "hard_swish_grad", "softplus", "sigmoid_grad", "elementwise_pow",
             "elementwise_mod", "round", "rsqrt", "softshrink", "elementwise_floordiv", "gelu_grad", "sign", "erf", "abs",
             "elementwise_fmod", "tan", "sinh", "cosh", "atan", "asinh", "tan_grad", "asinh_grad"]  # fmt: skip
    cases, source = [], ["#include <math.h>"]
    for name, dtype in itertools.product(names, ("float32", "float64")):
        op = OPS[name]
        e = substitute(op.expr, op.attrs)
        symbols = ex.symbols(e)
        source.append(c_function(f"{name}_{dtype}", e, dtype, symbols))
        cases.append((name, dtype, e, symbols))
    path = tmp_path / "ops.c"
    path.write_text("\n".join(source))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", tmp_path / "ops.so", path, "-lm"], check=True)
    library = ctypes.CDLL(str(tmp_path / "ops.so"))
    rng = np.random.default_rng(0)
    for name, dtype, e, symbols in cases:
        arrays = {s: rng.uniform(0.3, 3, 50).astype(dtype) for s in symbols}
        got = np.empty(50, dtype)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays.values(), got)]
        getattr(library, f"{name}_{dtype}")(ctypes.c_long(50), *pointers)
        np.testing.assert_allclose(got, evaluate(e, np, arrays), rtol=2e-5 if dtype == "float32" else 1e-13, err_msg=name)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_c_functions_of_whole_numbers_compute_what_numpy_computes(tmp_path):
    names = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right", "elementwise_fmod"]
    dtypes = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
    source = ["#include <math.h>"]
    for name, dtype in itertools.product(names, dtypes):
        source.append(c_function(f"{name}_{dtype}", OPS[name].expr, dtype, ex.symbols(OPS[name].expr)))
    path = tmp_path / "ops.c"
    path.write_text("\n".join(source))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", tmp_path / "ops.so", path, "-lm"], check=True)
    library = ctypes.CDLL(str(tmp_path / "ops.so"))
    rng = np.random.default_rng(0)
    for name, dtype in itertools.product(names, dtypes):
        info = np.iinfo(dtype)
        y = (rng.integers(0, 75, 60) - (9 if info.min else 0)).astype(dtype)
        a = {"x": rng.integers(info.min, info.max, 60, dtype, endpoint=True), "y": np.where(y == 0, np.ones_like(y), y)}
        a = {s: a[s] for s in ex.symbols(OPS[name].expr)}
        got = np.empty(60, dtype)
        getattr(library, f"{name}_{dtype}")(ctypes.c_long(60), *(ctypes.c_void_p(v.ctypes.data) for v in (*a.values(), got)))
        np.testing.assert_array_equal(got, evaluate(OPS[name].expr, np, a), err_msg=f"{name} {dtype}")
