"""C kernels that read and write 16-bit floats: they compute in float32 and round each result once."""

from itertools import combinations

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.ir import np_dtype, opdef
from fluidx.ops.expr.native import bind_native
from fluidx.ops.expr.nodes import make_node, sym
from fluidx.ops.shared.native import reduce_calls

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
BOTH = pytest.mark.parametrize("dtype", [np_dtype("float16"), np_dtype("bfloat16")], ids=str)
HALF_A_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative, of normal numbers
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def run(calls):
    assert calls is not None
    native.compile(calls)()


def op(name, ins, outs, **attrs):
    """Run the C kernel of an op."""
    definition = opdef(name)
    run(definition.native.calls(ins, outs, definition.complete_attrs(attrs)))


def near(found, want, wide=1e-6):
    """`found` is `want`, computed in float64, after an error of float32 arithmetic and one rounding."""
    d = found.dtype.name
    bound = HALF_A_UNIT.get(d, 0) * np.abs(want) + SMALLEST.get(d, 0) + wide * (1 + np.abs(want))
    assert (np.abs(found.astype("float64") - want) <= bound).all()


def every(dtype):
    return np.arange(1 << 16, dtype="uint16").view(dtype)


def alike(a, b):
    """Equal bits, or both NaN."""
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    some = ~np.isnan(a)
    bits = f"uint{8 * a.itemsize}"
    np.testing.assert_array_equal(a.view(bits)[some], b.view(bits)[some])


@BOTH
def test_every_16_bit_number_is_widened_and_rounded_back(dtype):
    x, wide, back = every(dtype), np.empty(1 << 16, "float32"), np.empty(1 << 16, dtype)
    run([bind_native([sym("x")], {"x": x}, [wide])])
    alike(wide, x.astype("float32"))
    run([bind_native([sym("x")], {"x": wide}, [back])])
    alike(back, x)


@BOTH
def test_a_store_rounds_to_the_nearest_and_ties_to_even(dtype):
    x = every(dtype)
    finite = np.sort(x[np.isfinite(x)].astype("float32"))
    ties = (finite[1:] + finite[:-1]) / 2
    next_to_them = [np.nextafter(ties, np.float32(way * np.inf)) for way in (1, -1)]
    beside = np.concatenate([ties, *next_to_them, [np.inf, -np.inf, 3e38, -3e38]])
    found, beside = np.empty(beside.shape, dtype), beside.astype("float32")
    run([bind_native([sym("x")], {"x": beside}, [found])])
    with np.errstate(over="ignore"):
        alike(found, beside.astype(dtype))


FORMS = {
    "one": lambda a: a[:1, :1],
    "row": lambda a: a[:1],
    "odd": lambda a: a[:3, :17],
    "none": lambda a: a[:0],
    "long": lambda a: a.reshape(1, -1),
    "strided": lambda a: a[:, ::2],
    "turned": lambda a: a.T,
    "backwards": lambda a: a[::-1],
}


@BOTH
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", ["add", "mul", "max", "gelu"])
def test_an_expression_is_that_of_float32_rounded_once(dtype, form, function):
    x, y = (FORMS[form](drawn(9, 1100, seed=k).astype(dtype)) for k in range(2))
    e = make_node(function, sym("x"), sym("y")) if function != "gelu" else sym("x") * make_node("sigmoid", sym("y") * 1.7)
    found, wide = np.empty(x.shape, dtype), np.empty(x.shape, "float32")
    run([bind_native([e], {"x": x, "y": y}, [found])])
    run([bind_native([e], {"x": x.astype("float32"), "y": y.astype("float32")}, [wide])])
    np.testing.assert_array_equal(found, wide.astype(dtype))


@BOTH
@pytest.mark.parametrize("columns", [1, 5, 40, 300])
def test_rows_columns_and_numbers_are_broadcast(dtype, columns):
    x, row, column, number = drawn(6, columns), drawn(columns, seed=1), drawn(6, 1, seed=2), drawn(1, 1, seed=3)
    values = {"x": x.astype(dtype), "r": row.astype(dtype), "c": column.astype(dtype), "n": number.astype("float32")}
    out, strided = np.empty((6, columns), dtype), np.empty((6, 2 * columns), dtype)[:, ::2]
    want = np.float64(values["x"]) * values["c"] + values["r"] - values["n"]
    for target in (out, strided):
        run([bind_native([sym("x") * sym("c") + sym("r") - sym("n")], values, [target])])
        near(target, want)


@BOTH
def test_a_result_may_take_the_place_of_an_operand_and_others_may_have_other_types(dtype):
    x = drawn(7, 33).astype(dtype)
    kept, wide, is_large = x.copy(), np.empty(x.shape, "float32"), np.empty(x.shape, bool)
    run([bind_native([sym("x") + sym("x"), sym("x"), make_node("gt", sym("x"), sym("x") * sym("x"))], {"x": x}, [x, wide, is_large])])
    np.testing.assert_array_equal(x, kept + kept)
    np.testing.assert_array_equal(wide, kept.astype("float32"))
    np.testing.assert_array_equal(is_large, kept.astype("float64") > kept.astype("float64") ** 2)


ROWS = [(1, 1), (3, 7), (5, 64), (17, 300), (40, 129)]


@BOTH
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("weights", [True, False])
def test_layer_norm(dtype, shape, weights):
    x, g, (rows, n) = drawn(*shape).astype(dtype), drawn(*shape, seed=1).astype(dtype), shape
    scale, bias = (1 + drawn(n, seed=2) / 8).astype("float32"), drawn(n, seed=3).astype("float32")
    y, mean, variance = np.empty_like(x), np.empty(rows, "float32"), np.empty(rows, "float32")
    op("layer_norm", [x, scale if weights else None, bias if weights else None], [y, mean, variance])
    wide = x.astype("float64")
    m, v = wide.mean(1, keepdims=True), wide.var(1, keepdims=True)
    normal = (wide - m) / np.sqrt(v + 1e-5)
    near(mean, m[:, 0]), near(variance, v[:, 0])
    near(y, normal * scale + bias if weights else normal, 1e-5)
    dx, ds, db = np.empty_like(x), np.empty(n, "float32"), np.empty(n, "float32")
    some = [scale if weights else None, None, mean, variance, g]
    op("layer_norm_grad", [x, *some], [dx, ds if weights else None, db if weights else None])
    d = g.astype("float64") * (scale if weights else 1)
    near(dx, (d - d.mean(1, keepdims=True) - normal * (d * normal).mean(1, keepdims=True)) / np.sqrt(v + 1e-5), 1e-3 if n == 1 else 2e-5)
    if weights:
        near(ds, (g.astype("float64") * normal).sum(0), 1e-4), near(db, g.astype("float64").sum(0), 1e-4)


@BOTH
@pytest.mark.parametrize("layout, shape", [("NCHW", (3, 5, 4, 7)), ("NHWC", (3, 4, 7, 5)), ("NCHW", (40, 3)), ("NHWC", (1, 1, 2, 1))])
def test_batch_norm(dtype, layout, shape):
    x, g = drawn(*shape).astype(dtype), drawn(*shape, seed=1).astype(dtype)
    last = layout == "NHWC" or len(shape) == 2
    c = shape[-1] if last else shape[1]
    scale, bias, mean, variance = ((drawn(c, seed=k) ** 2).astype("float32") for k in (2, 3, 4, 5))
    y, stats = np.empty_like(x), [np.empty(c, "float32") for _ in range(4)]
    op("batch_norm", [x, scale, bias, mean, variance], [y, *stats], data_layout=layout)
    rest = tuple(k for k in range(x.ndim) if k != (x.ndim - 1 if last else 1))
    at = [1] * x.ndim
    at[x.ndim - 1 if last else 1] = c
    wide, d = x.astype("float64"), g.astype("float64")
    m, v = wide.mean(rest, keepdims=True), wide.var(rest, keepdims=True)
    normal, s = (wide - m) / np.sqrt(v + 1e-5), scale.reshape(at)
    near(y, normal * s + bias.reshape(at), 2e-5)
    near(stats[0], 0.9 * mean + 0.1 * m.ravel()), near(stats[3], 1 / np.sqrt(v.ravel() + 1e-5), 1e-5)
    dx, ds, db = np.empty_like(x), np.empty(c, "float32"), np.empty(c, "float32")
    op("batch_norm_grad", [x, scale, *stats[2:], g], [dx, ds, db], data_layout=layout)
    near(ds, (d * normal).sum(rest), 1e-4), near(db, d.sum(rest), 1e-4)
    count = x.size // c
    slope = (d * normal).sum(rest, keepdims=True) / count
    near(dx, (d - d.mean(rest, keepdims=True) - normal * slope) * s / np.sqrt(v + 1e-5), 2e-5)


@BOTH
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_and_its_loss_along_any_axis(dtype, axis):
    x, g = (3 * drawn(4, 6, 5)).astype(dtype), drawn(4, 6, 5, seed=1).astype(dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    op("softmax", [x], [y], axis=axis)
    wide = x.astype("float64")
    e = np.exp(wide - wide.max(axis, keepdims=True))
    want = e / e.sum(axis, keepdims=True)
    near(y, want)
    op("softmax_grad", [y, g], [dx], axis=axis)
    p, d = y.astype("float64"), g.astype("float64")
    near(dx, (d - (p * d).sum(axis, keepdims=True)) * p)
    label = np.random.default_rng(0).integers(0, x.shape[axis], [1 if k == axis else n for k, n in enumerate(x.shape)])
    loss, soft = np.empty(label.shape, dtype), np.empty_like(x)
    op("softmax_with_cross_entropy", [x, label], [soft, loss], axis=axis)
    near(soft, want), near(loss, -np.log(np.take_along_axis(want, label, axis)), 1e-5)
    # results may be wider than operands
    wide_loss, wide_soft = np.empty(label.shape, "float32"), np.empty(x.shape, "float32")
    op("softmax_with_cross_entropy", [x, label], [wide_soft, wide_loss], axis=axis)
    near(wide_soft, want), near(wide_loss, -np.log(np.take_along_axis(want, label, axis)), 1e-5)


REDUCED = [
    ((9, 1030), (0,)), ((9, 1030), (1,)), ((3, 70, 5), (0, 2)), ((5000,), (0,)), ((2, 3, 4), (1,)), ((0, 4), (0,)), ((1, 1), (0, 1)),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("how", ["sum", "max", "squares"])
@pytest.mark.parametrize("shape, axes", REDUCED)
def test_reductions(dtype, how, shape, axes):
    x = drawn(*shape).astype(dtype)
    if how == "max" and not x.size:
        return
    wide = x.astype("float64")
    want = {"sum": wide.sum, "max": lambda a: wide.max(a), "squares": (wide**2).sum}[how](axes)
    for to in (dtype, np.dtype("float32")):
        out = np.empty(want.shape, to)
        run(reduce_calls(how, x, axes, out))
        near(out, want, 1e-5 * max(1, np.abs(wide).sum() ** 0.5))


VIEWS = {
    "plain": lambda x: x,
    "backwards": lambda x: x[..., ::-1],
    "rows backwards": lambda x: x[::-1],
    "every other": lambda x: x[..., ::2],
    "part": lambda x: x[..., 1:-1],
    "transposed": lambda x: x.T,
    "turned": lambda x: np.moveaxis(x, 0, -1),
    "axes 0 and 1 changed": lambda x: np.swapaxes(x, 0, 1),
    "repeated": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "repeated rows": lambda x: np.broadcast_to(x[:1], x.shape),
}


@BOTH
@pytest.mark.parametrize("shape", [(1000, 8), (40, 300), (70, 4, 3), (5, 6, 70), (3, 4, 5, 66), (4300, 3), (3, 9000)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_reductions_of_views_over_all_axes(dtype, shape, view):
    """Each has the bits of the reduction of the same numbers in float32 with the same strides."""
    whole = drawn(*shape).astype(dtype)
    x, wide = VIEWS[view](whole), VIEWS[view](whole.astype("float32"))
    for axes in (c for r in range(1, x.ndim + 1) for c in combinations(range(x.ndim), r)):
        for how, exact in (("sum", np.sum), ("max", np.max), ("min", np.min)):
            want = exact(wide.astype("float64"), axis=axes)
            out, other = np.full(want.shape, np.nan, "float32"), np.full(want.shape, np.nan, "float32")
            calls = reduce_calls(how, x, axes, out)
            assert (reduce_calls(how, x, axes, out, dry=True) is None) == (calls is None)
            if calls is None:  # more than two loops of a kind
                continue
            run(calls)
            near(out, want, 1e-5 * max(1, np.abs(wide).sum() ** 0.5))
            run(reduce_calls(how, wide, axes, other))
            np.testing.assert_array_equal(out, other)


@BOTH
def test_sums_of_short_rows_by_the_executor(dtype):
    x = drawn(1000, 8).astype(dtype)
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        data = fx.data("x", [1000, 8], dtype.name)
        results = [fx.layers.reduce_sum(data, dim=1), fx.layers.reduce_sum(fx.layers.cast(data, "float32"), dim=1)]
    for found in fx.Executor().run(main, feed={"x": x}, fetch_list=results):
        near(found, x.astype("float64").sum(1), 1e-5)


@BOTH
def test_infinities_and_nan_go_through(dtype):
    x = np.array([[np.inf, 1, 2, 3], [np.nan, 1, 2, 3], [-np.inf, 1, 2, 3]]).astype(dtype)
    y, top = np.empty_like(x), np.empty(3, dtype)
    op("softmax", [x], [y])
    assert np.isnan(y[:2].astype("float64")).any(1).all() and y[2, 0] == 0
    assert y[2, 1:].astype("float64").sum() == pytest.approx(1, rel=1e-2)
    run(reduce_calls("max", x, (1,), top))
    assert top[0] == np.inf and np.isnan(float(top[1])) and top[2] == 3


@BOTH
def test_rows_may_have_the_shape_of_their_weights(dtype):
    """One axis: X, its weights and gradients have one shape. Nothing is written behind the results."""
    x, g, scale, bias = (
        drawn(8).astype(dtype),
        drawn(8, seed=1).astype(dtype),
        drawn(8, seed=2).astype("float32"),
        drawn(8, seed=3).astype("float32"),
    )
    room = np.full(16, 7, dtype)
    y, mean, variance = room[:8], *np.empty((2, 1), "float32")
    op("layer_norm", [x, scale, bias], [y, mean.reshape(()), variance.reshape(())], begin_norm_axis=0, epsilon=0.0)
    wide, up, weights = x.astype("float64"), g.astype("float64"), scale.astype("float64")
    z = (wide - wide.mean()) / wide.std()
    near(y, z * weights + bias)
    assert (room[8:] == 7).all()
    dx, dscale, dbias = room[:8], *np.empty((2, 8), "float32")
    op("layer_norm_grad", [x, scale, bias, mean.reshape(()), variance.reshape(()), g], [dx, dscale, dbias], begin_norm_axis=0, epsilon=0.0)
    u = up * weights
    near(dx, (u - u.mean() - z * (u * z).mean()) / wide.std(), wide=1e-5)
    near(dscale, up * z, wide=1e-5)
    np.testing.assert_array_equal(dbias, g.astype("float32"))
    assert (room[8:] == 7).all()
