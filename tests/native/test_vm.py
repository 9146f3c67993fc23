"""The vector machine gives NumPy's bits for arithmetic, and values next to the true ones for exp, log, tanh, erf and their kin."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx import native
from fluidx.ops import expr as ex
from fluidx.ops.expr.native import bind_native
from fluidx.ops.expr.numpy import evaluate
from tests.each import each

X, Y, Z, C = (ex.sym(n) for n in "xyzc")
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5]
SPECIAL += [1e-45, -1e-45, 1e-40, 1.17549435e-38, 3.4028235e38, -3.4028235e38]  # denormal, smallest normal, largest


def compute(*outs, dtype="float32", **values):
    """The values of expressions on arrays by one native call, into new arrays."""
    shape = np.broadcast_shapes(*(v.shape for v in values.values()))
    arrays = [np.full(shape, 7, bool if e.fn in ex.BOOLEAN else dtype) for e in outs]
    call = bind_native(outs, values, arrays)
    assert call is not None
    native.compile([call])()
    return arrays if len(outs) > 1 else arrays[0]


def same_bits(a, b):
    """Equal shapes, dtypes and bits, except that any NaN is like any other."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.all((a == b) & (np.signbit(a) == np.signbit(b)) | (a != a) & (b != b)))


def ulps(got, exact):
    """The largest error in units of the last place of float32; infinities and NaN must be where the exact result has them."""
    rounded = exact.astype("float32")
    assert np.array_equal(np.isnan(got), np.isnan(rounded))
    edge = np.isinf(got) | np.isinf(rounded)
    assert np.array_equal(got[edge], rounded[edge])
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype("float64") - exact) / np.spacing(np.abs(rounded)).astype("float64")
    return float(np.nanmax(np.where(edge, 0, error), initial=0))


def some(n, dtype="float32", seed=0):
    """Random numbers of every size, beginning with the special ones as far as there is room."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(dtype)
    x[: min(n, len(SPECIAL))] = rng.permutation(np.array(SPECIAL, dtype))[:n]
    return x


EXACT = {
    "add": X + Y, "sub": X - Y, "mul": X * Y, "div": X / Y, "min": ex.min(X, Y), "max": ex.max(X, Y), "neg": -X, "abs": ex.abs(X),
    "sqrt": ex.sqrt(X), "rsqrt": ex.rsqrt(X), "sign": ex.sign(X), "floor": ex.floor(X), "ceil": ex.ceil(X), "round": ex.round(X),
    "gt": X > Y, "ge": X >= Y, "lt": X < Y, "le": X <= Y, "eq": ex.eq(X, Y), "ne": ex.ne(X, Y),
    "isnan": ex.isnan(X), "isinf": ex.isinf(X), "isfinite": ex.isfinite(X),
    "and": (X > 0) & (Y > 0), "or": (X > 0) | (Y > 0), "xor": (X > 0) ^ (Y > 0), "not": ~(X > Y),
    "where": ex.where(X > Y, X, Y), "where constant": ex.where(X > 0, 2.0, Y), "relu": ex.max(X, 0.0), "clip": ex.min(ex.max(X, -1.0), 1.0),
    "scalar first": 3.0 - X, "reciprocal": 1.0 / X, "fused sum": X * Y + X, "fused difference": X * Y - 3.0, "fused from": Y - X * 0.1,
    "two scaled": X * 0.9 + Y * 0.1, "mask as number": (X > 0) * Y + X,
}  # fmt: skip


@each("dtype", ["float32", "float64"])
@each("name", EXACT)
def test_arithmetic_has_the_bits_of_numpy(name, dtype, level):
    e = EXACT[name]
    x, y = some(1500, dtype), some(1500, dtype, seed=1)
    used = {n: v for n, v in {"x": x, "y": y}.items() if n in ex.symbols(e)}
    with np.errstate(all="ignore"):
        assert same_bits(compute(e, dtype=dtype, **used), evaluate(e, np, used))


# A bound in units of the last place of float32, the function in float64 and the interval in which it is not constant or infinite.
FUNCTIONS = {
    "exp": (1.0, np.exp, -104.0, 89.5), "log": (1.0, np.log, 0.0, 3e38), "log1p": (1.4, np.log1p, -1.0, 3e38),
    "tanh": (1.3, np.tanh, -10.0, 10.0), "erf": (1.3, np.vectorize(math.erf), -4.5, 4.5),
    "sigmoid": (2.0, lambda x: np.where(x < 0, np.exp(x), 1) / (1 + np.exp(-np.abs(x))), -104.0, 20.0),
    "softplus": (2.0, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), -104.0, 100.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_next_to_the_true_value(name, level):
    bound, exact, low, high = FUNCTIONS[name]
    rng = np.random.default_rng(2)
    n = 2000 if name == "erf" else 40000
    small = rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-44, 1, n)
    near = 1 + rng.uniform(-0.5, 1, n)
    x = np.concatenate([rng.uniform(low, high, n), small, near, 10.0 ** rng.uniform(0, 38, n), SPECIAL, [88.72, 88.73, -87.4, -103.9]])
    x = x.astype("float32")
    with np.errstate(all="ignore"):
        assert ulps(compute(ex.apply(name, X), x=x), exact(x.astype("float64"))) <= bound


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_float64_are_those_of_the_c_library(name):
    _, exact, _, _ = FUNCTIONS[name]
    x = some(800, "float64")
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(compute(ex.apply(name, X), dtype="float64", x=x), exact(x), rtol=1e-14, atol=1e-320)


@pytest.mark.parametrize("n", [0, 1, 15, 1023, 1024, 1025, 100_003])
def test_any_length_and_number_of_threads_gives_the_same_bits(n, level):
    x, y = some(n), some(n, seed=1)
    e = (ex.tanh(X) * Y, X * 0.5 + Y)
    native.set_num_threads(1)
    alone = compute(*e, x=x, y=y)
    native.set_num_threads(2)
    for a, b in zip(alone, compute(*e, x=x, y=y), strict=True):
        assert same_bits(a, b)


LAYOUTS = {
    "a row": lambda r: (r(7, 5), r(5)),
    "a column": lambda r: (r(7, 5), r(7, 1)),
    "a channel": lambda r: (r(3, 4, 5), r(4, 1)),
    "a number": lambda r: (r(7, 5), r()),
    "both": lambda r: (r(7, 1), r(1, 5)),
    "a transpose": lambda r: (r(7, 5), r(5, 7).T),
    "both transposed": lambda r: (r(5, 7).T, r(5, 7).T),
    "steps": lambda r: (r(7, 10)[:, ::2], r(14, 5)[::2]),
    "backwards": lambda r: (r(7, 5)[::-1, ::-1], r(7, 5)),
    "one element": lambda r: (r(1, 1), r(1)),
    "wide rows": lambda r: (r(2, 3000), r(2, 1)),
    "many short rows": lambda r: (r(900, 10), r(10)),
    "many short rows and columns": lambda r: (r(900, 10), r(900, 1)),
    "short rows of parts": lambda r: (r(900, 12)[:, 1:11], r(900, 20)[:, ::2]),
    "images": lambda r: (r(4, 30, 9), r(30, 1)),
    "batches of short rows": lambda r: (r(3, 500, 7), r(3, 1, 7)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_broadcast_and_may_lie_anyhow(layout):
    rng = np.random.default_rng(3)
    x, y = LAYOUTS[layout](lambda *shape: rng.standard_normal(shape).astype("float32"))
    e = (X - Y) * Y + ex.where(Y > 0, X, 0.5)
    assert same_bits(compute(e, x=x, y=y), np.asarray(evaluate(e, np, {"x": x, "y": y})))


def test_an_output_may_have_strides():
    x = some(30).reshape(5, 6)
    big = np.zeros((10, 12), "float32")
    native.compile([bind_native([X + 1.0], {"x": x}, [big[::2, ::2]])])()
    assert same_bits(big[::2, ::2], x + np.float32(1)) and not big[1::2].any() and not big[:, 1::2].any()


def test_conditions_may_be_inputs():
    x, c = some(1030), np.arange(1030) % 3 == 0
    e = ex.where(C, X, -1.0)
    assert same_bits(compute(e, x=x, c=c), np.where(c, x, np.float32(-1)))
    assert same_bits(compute(e, x=x, c=np.array(True)), x)


def test_several_outputs_may_be_the_inputs_in_place():
    """y is overwritten although z still needs its old value: then the result waits in scratch."""
    x, y = some(2000), some(2000, seed=1)
    outs = [X * Y, X + Y]
    with np.errstate(all="ignore"):
        expected = [x * y, x + y]
    native.compile([bind_native(outs, {"x": x, "y": y}, [y, x])])()
    assert same_bits(y, expected[0]) and same_bits(x, expected[1])


def test_outputs_may_swap_their_inputs():
    x, y = some(1500), some(1500, seed=1)
    before = x.copy(), y.copy()
    native.compile([bind_native([Y, X], {"x": x, "y": y}, [x, y])])()
    assert same_bits(x, before[1]) and same_bits(y, before[0])


def test_scalar_parts_are_computed_once_and_rows_keep_their_own():
    x = some(40).reshape(8, 5)
    column, number = np.abs(some(8, seed=4)).reshape(8, 1), np.full((), 2, "float32")
    e = X * ex.exp(-ex.sqrt(Y) / Z)
    got = compute(e, x=x, y=column, z=number)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, x * np.exp(-np.sqrt(column) / number), rtol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        lambda f: ([ex.apply("pow", X, 0.7)], {"x": f(4)}, [f(4)]),
        lambda f: ([ex.sin(X)], {"x": f(4)}, [f(4)]),
        lambda f: ([X + 1], {"x": f(4).astype("int32")}, [f(4).astype("int32")]),
        lambda f: ([X + Y], {"x": f(4), "y": f(4).astype("float64")}, [f(4)]),
        lambda f: ([X + Y], {"x": f(4).astype("float16"), "y": f(4).astype("float64")}, [f(4).astype("float64")]),
        lambda f: ([X + Y], {"x": f(2, 3, 2, 3), "y": f(2, 1, 2, 1)}, [f(2, 3, 2, 3)]),
    ],
)
def test_what_is_not_covered_gives_none(case):
    """Powers, sine, integers, mixes with float64, and axes that would need four loops: the NumPy kernels serve."""
    assert bind_native(*case(lambda *shape: np.ones(shape, "float32"))) is None


def test_an_axis_of_one_element_steps_nowhere():
    """In place, whatever the strides of such an axis say: a row cut out of a transposed matrix has those of the matrix."""
    line = some(3)
    row = np.lib.stride_tricks.as_strided(line, (1, 3), (4, 4))
    assert row.strides != line.reshape(1, 3).strides
    expected = line + np.float32(1)
    native.compile([bind_native([X + 1.0], {"x": row}, [line.reshape(1, 3)])])()
    assert same_bits(line, expected)


def test_a_shifted_overlap_gives_none():
    line = np.ones(10, "float32")
    assert bind_native([X + 1.0], {"x": line[:-1]}, [line[1:]]) is None


def _expressions():
    leaves = st.sampled_from([X, Y, Z, ex.const(0.5), ex.const(-2.0), ex.const(3)])
    binary = st.sampled_from(["add", "sub", "mul", "min", "max"])
    unary = st.sampled_from(["neg", "abs", "sign", "floor"])

    def choose(fn, a, b, c, d):
        return ex.make_node("where", ex.make_node(fn, a, b), c, d)

    def grow(inner):
        return st.one_of(
            st.builds(ex.make_node, binary, inner, inner),
            st.builds(ex.make_node, unary, inner),
            st.builds(choose, st.sampled_from(["gt", "le", "ne"]), *[inner] * 4),
        )

    return st.recursive(leaves, grow, max_leaves=25)


@settings(max_examples=150, deadline=None)
@given(st.lists(_expressions(), min_size=1, max_size=3), st.sampled_from([(3, 40), (40, 3), (2, 300), (1, 7)]))
def test_random_expressions_have_the_bits_of_evaluate(outs, shape):
    """x is a matrix, y a row, z a column: every mix of scalars and vectors, fused sums and shared parts comes up."""
    rng = np.random.default_rng(0)
    shapes = {"x": shape, "y": shape[1:], "z": (shape[0], 1)}
    whole = {n: rng.integers(-4, 5, s).astype("float32") for n, s in shapes.items()}
    used = {n: whole[n] for n in dict.fromkeys(s for e in outs for s in ex.symbols(e))}
    arrays = [np.empty(shape, "float32") for _ in outs]
    call = bind_native(outs, used, arrays)
    assert call is not None
    native.compile([call])()
    for e, got in zip(outs, arrays, strict=True):
        expected = np.asarray(evaluate(e, np, {n: np.broadcast_to(v, shape) for n, v in used.items()}), "float32")
        assert np.array_equal(got, np.broadcast_to(expected, shape), equal_nan=True)
