"""Native work on rows against its definition in float64: softmax, its logarithm and losses, layer_norm, and their gradients."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import ExecutionError, opdef
from fluidx.ir.parts import Part
from fluidx.ops import kernels
from tests.native.bodies import close, normal, one, run

# (shape, axis): one element, odd lengths, longer than a block of sums, axes that do not lie in memory
ALONG = [((1, 1), -1), ((3, 5), -1), ((130, 63), -1), ((17, 64), 1), ((2, 3, 130), -1), ((3, 2500), -1)]
ALONG += [((5, 3, 4), 1), ((70, 33), 0), ((9,), 0)]


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, axis", ALONG)
def test_softmax_and_its_logarithm(shape, axis, dtype):
    x, g = normal(shape, dtype, scale=3), normal(shape, dtype, seed=1)
    wide = x.astype("float64")
    y = softmax(wide, axis)
    close(one("softmax", x, axis=axis), y, ulps=20, floor=0)  # x - max is rounded: at a distance d that is d / 2 units of the result
    close(one("log_softmax", x, axis=axis), np.log(y), ulps=3)
    y, g64 = y.astype(dtype), g.astype("float64")
    wide = y.astype("float64")
    close(one("softmax_grad", y, g, axis=axis), wide * (g64 - (wide * g64).sum(axis=axis, keepdims=True)), ulps=6)
    logs = np.log(wide).astype(dtype)
    exact = g64 - np.exp(logs.astype("float64")) * g64.sum(axis=axis, keepdims=True)
    close(one("log_softmax_grad", logs, g, axis=axis), exact, ulps=6)


def test_results_in_the_memory_of_operands():
    x = normal((40, 100))
    expected, own = one("softmax", x), x.copy()
    native.compile(opdef("softmax").native.calls([own], [own], {"axis": -1}))()
    assert own.tobytes() == expected.tobytes()
    g = normal((40, 100), seed=1)
    wanted, own = one("softmax_grad", expected, g), g.copy()
    native.compile(opdef("softmax_grad").native.calls([expected, own], [own], {"axis": -1}))()
    assert own.tobytes() == wanted.tobytes()


def test_softmax_of_what_is_not_finite():
    x = np.array([[np.nan, 0, 1], [np.inf, 0, 1], [-np.inf, 0, 0], [-np.inf] * 3], "float32")
    with np.errstate(invalid="ignore"):
        assert np.array_equal(one("softmax", x), softmax(x, 1), equal_nan=True)


def test_equal_logits_are_exact():
    assert (one("softmax", np.full((3, 8), 5, "float32")) == 0.125).all()


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("shape, axis", ALONG)
def test_softmax_with_cross_entropy(shape, axis, ids):
    x, n = normal(shape, scale=3), shape[axis]
    single = tuple(1 if k == axis % len(shape) else d for k, d in enumerate(shape))
    label = np.random.default_rng(2).integers(0, n, single).astype(ids)
    label.reshape(-1)[0] = -100  # ignored
    counts = label != -100
    y = softmax(x.astype("float64"), axis)
    soft, loss = run("softmax_with_cross_entropy", x, label, axis=axis)
    close(soft, y, ulps=20, floor=0)
    close(loss, np.where(counts, -np.log(np.take_along_axis(y, np.where(counts, label, 0).astype("int64"), axis)), 0), ulps=4)
    g = normal(single, seed=3)
    hot = np.moveaxis(np.eye(n)[np.where(counts, label, 0)[(slice(None),) * (axis % len(shape)) + (0,)]], -1, axis)
    exact = np.where(counts, (soft.astype("float64") - hot) * g, 0)
    close(one("softmax_with_cross_entropy_grad", soft, label, g, axis=axis), exact, ulps=2, floor=1e-3)


def test_soft_labels():
    x, d = normal((30, 70), scale=2), softmax(normal((30, 70), "float64", seed=1), 1).astype("float32")
    d[3, :5] = 0
    y = softmax(x.astype("float64"), 1)
    soft, loss = run("softmax_with_cross_entropy", x, d, soft_label=True)
    close(soft, y, ulps=20, floor=0)
    close(loss, -(d * np.log(y)).sum(axis=1, keepdims=True), ulps=4)
    g, wide = normal((30, 1), seed=3), soft.astype("float64")
    exact = (wide * d.astype("float64").sum(axis=1, keepdims=True) - d) * g
    close(one("softmax_with_cross_entropy_grad", soft, d, g, soft_label=True), exact, ulps=4)


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_parts_of_the_classes_make_the_losses_and_gradients_of_all(ids):
    p, g = softmax(normal((40, 11)), 1), normal((40, 1), seed=1)
    label = np.random.default_rng(2).integers(0, 11, (40, 1)).astype(ids)
    label[3] = -100
    cuts = [(a, b, Part(start=a, size=11)) for a, b in ((0, 2), (2, 7), (7, 11))]

    def in_parts(op, *more):
        return [one(op, np.ascontiguousarray(p[:, a:b]), label, *more, told={"part": part}) for a, b, part in cuts]

    assert np.array_equal(sum(in_parts("cross_entropy")), one("cross_entropy", p, label))
    for op in ("cross_entropy_grad", "softmax_with_cross_entropy_grad"):
        assert np.array_equal(np.concatenate(in_parts(op, g), axis=1), one(op, p, label, g))
    label[9] = 11
    with pytest.raises(ExecutionError, match="label 11 is out of range for 11 classes"):
        in_parts("cross_entropy")


LOSSES = [("softmax_with_cross_entropy", ()), ("softmax_with_cross_entropy_grad", (np.ones((500, 1), "float32"),))]


@pytest.mark.parametrize("op, more", LOSSES)
def test_a_label_out_of_range_is_named_as_by_numpy(op, more):
    x, label = np.full((500, 4), 0.25, "float32"), np.zeros((500, 1), "int64")
    label[77], label[400] = 4, -1
    with pytest.raises(ExecutionError) as by_numpy:
        definition = opdef(op)
        outs = [np.empty((500, 4), "float32"), np.empty((500, 1), "float32")][: len(definition.out_slots)]
        kernels.bind(definition, np, [x, label, *more], outs, definition.complete_attrs({}), None, name="numpy")()
    with pytest.raises(ExecutionError, match="label 4 is out of range for 4 classes; a label is 0 to 3, or -100 to ignore") as by_native:
        run(op, x, label, *more)
    assert str(by_native.value) == str(by_numpy.value)


NORMS = [((1, 1), 1), ((4, 6), 1), ((3, 2500), 1), ((1000, 65), 1), ((5, 3, 4), 1), ((5, 3, 64), 2), ((300, 256), 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, axis", NORMS)
def test_layer_norm(shape, axis, dtype):
    rows, columns = int(np.prod(shape[:axis])), int(np.prod(shape[axis:]))
    x, scale, bias, g = normal(shape, dtype) + 1, normal(columns, dtype, 1), normal(columns, dtype, 2), normal(shape, dtype, 3)
    wide, g64 = x.astype("float64").reshape(rows, columns), g.astype("float64").reshape(rows, columns)
    mean, var = wide.mean(axis=1, keepdims=True), wide.var(axis=1, keepdims=True)
    inv = 1 / np.sqrt(var + 1e-5)
    hat = (wide - mean) * inv
    for s, b in ((scale, bias), (scale, None), (None, bias), (None, None)):
        y, m, v = run("layer_norm", x, s, b, begin_norm_axis=axis)
        exact = hat * (1 if s is None else s) + (0 if b is None else b)
        # the rounding of the mean moves a column of a short row by up to as much, times 1 / deviation, which epsilon keeps below 320
        close(y.reshape(rows, columns), exact, ulps=320 if columns == 1 else 40)
        assert m.shape == v.shape == shape[:axis]
        close(m.reshape(-1), mean[:, 0], ulps=2)
        close(v.reshape(-1), var[:, 0], ulps=4, floor=1)
        stats = [mean[:, 0].astype(dtype), var[:, 0].astype(dtype)]
        m64, i64 = stats[0].astype("float64")[:, None], 1 / np.sqrt(stats[1].astype("float64")[:, None] + 1e-5)
        h = (wide - m64) * i64
        t = g64 if s is None else g64 * s
        dx = (t - t.mean(axis=1, keepdims=True) - h * (t * h).mean(axis=1, keepdims=True)) * i64
        w = np.empty(columns, dtype)
        outs = [np.empty_like(x), None if s is None else w, None if b is None else w]
        got = run("layer_norm_grad", x, s, b, *stats, g, begin_norm_axis=axis, outs=outs)
        close(got[0].reshape(rows, columns), dx, ulps=20 if columns > 1 else 1e9, floor=1)
        for a, exact in zip(got[1:], ((g64 * h).sum(axis=0), g64.sum(axis=0)), strict=True):
            if a is not None:  # sums over the rows: their terms are larger than the result
                assert np.abs(a - exact).max() <= 4 * np.finfo(dtype).eps * np.abs(g64 * (1 + np.abs(h))).sum(axis=0).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, axis", NORMS)
def test_rms_norm(shape, axis, dtype):
    rows, columns = int(np.prod(shape[:axis])), int(np.prod(shape[axis:]))
    x, scale, g = normal(shape, dtype) + 1, normal(columns, dtype, 1), normal(shape, dtype, 3)
    wide, g64 = x.astype("float64").reshape(rows, columns), g.astype("float64").reshape(rows, columns)
    square = (wide * wide).mean(axis=1)
    for s in (scale, None):
        y, found = run("rms_norm", x, s, begin_norm_axis=axis)
        hat = wide / np.sqrt(square + 1e-5)[:, None]
        close(y.reshape(rows, columns), hat * (1 if s is None else s), ulps=6)  # some roundings one behind the other
        assert found.shape == shape[:axis]
        close(found.reshape(-1), square, ulps=4)
        t = g64 if s is None else g64 * s
        dx = (t - hat * (t * hat).mean(axis=1, keepdims=True)) / np.sqrt(square + 1e-5)[:, None]
        outs = [np.empty_like(x), None if s is None else np.empty_like(scale)]
        got = run("rms_norm_grad", x, s, found, g, begin_norm_axis=axis, outs=outs)
        close(got[0].reshape(rows, columns), dx, ulps=20 if columns > 1 else 1e9)  # one column: epsilon alone is left of the difference
        if s is not None:  # sums over the rows: their terms are larger than the result
            assert np.abs(got[1] - (g64 * hat).sum(axis=0)).max() <= 8 * np.finfo(dtype).eps * np.abs(g64 * hat).sum(axis=0).max()


def test_layer_norm_without_what_is_not_wanted():
    x, g = normal((6, 8)), normal((6, 8), seed=1)
    full = run("layer_norm", x, None, None)
    y = run("layer_norm", x, None, None, outs=[x, None, None])
    assert y[0].tobytes() == full[0].tobytes() and y[1:] == [None, None]
    scale = normal(8, seed=2)
    stats = full[1:]
    whole = run("layer_norm_grad", x, scale, None, *stats, g, outs=[x, scale, scale])
    no_dx = run("layer_norm_grad", x, scale, None, *stats, g, outs=[None, scale, None])
    assert no_dx[1].tobytes() == whole[1].tobytes()


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_cross_entropy(ids):
    x, label = softmax(normal((90, 11), "float64"), 1).astype("float32"), np.random.default_rng(0).integers(0, 11, (90, 1)).astype(ids)
    label[5], x[6] = -100, 0
    picked = np.take_along_axis(x.astype("float64"), np.maximum(label, 0).astype("int64"), 1)
    counts = label != -100
    with np.errstate(divide="ignore"):
        exact = np.where(counts, np.where(picked > 0, -np.log(picked), 1e20), 0)
    close(one("cross_entropy", x, label), exact, ulps=1, floor=0)
    x[6] = 0.5
    picked = np.take_along_axis(x, np.maximum(label, 0).astype("int64"), 1)
    g = normal((90, 1), seed=1)
    exact = np.where(counts & (label == np.arange(11)), -g / picked, np.float32(0))
    assert np.array_equal(one("cross_entropy_grad", x, label, g), exact)
    label[9] = 11
    with pytest.raises(ExecutionError, match="op cross_entropy: label 11 is out of range for 11 classes"):
        run("cross_entropy", x, label)


def test_squared_errors():
    x, y, g = normal((5, 7)), normal((5, 7), seed=1), normal((5, 7), seed=2)
    assert np.array_equal(one("square_error_cost", x, y), (x - y) * (x - y))
    assert np.array_equal(one("square_error_cost_grad", x, y, g), (x - y) * g * 2)


@pytest.mark.parametrize("layout, shape", [("NCHW", (5, 3, 4, 7)), ("NHWC", (5, 4, 7, 3)), ("NCHW", (40, 3))])
def test_batch_norm_in_parts(layout, shape):
    """Against its definition, given the sums of all ranks; `count` is twice what lies here."""
    channel = 1 if layout == "NCHW" else len(shape) - 1
    gone = tuple(k for k in range(len(shape)) if k != channel)
    line = [1] * len(shape)
    line[channel] = 3
    x, g, told = normal(shape), normal(shape, seed=1), {"part": Part(count=2 * 5 * 28 if len(shape) > 2 else 80)}
    a, d, n = x.astype("float64"), g.astype("float64"), told["part"].count
    m, v, s, b, dm, dv = (np.abs(normal(3, seed=k)) + 0.5 for k in range(6))
    wide = [w.astype("float64").reshape(line) for w in (m, v, s, b, dm, dv)]
    mean, var, scale, bias, dbias, dscale = wide
    kw = {"data_layout": layout}
    close(one("bn_mean", x, told=told, **kw), a.sum(axis=gone) / n)
    close(one("bn_variance", x, m, told=told, **kw), ((a - mean) ** 2).sum(axis=gone) / n)
    outs = run("bn_apply", x, s, b, m, v, dm, dv, **kw)
    inv = 1 / np.sqrt(dscale + 1e-5)
    close(outs[0], (a - dbias) * scale * inv + bias, ulps=6)
    for got, exact in zip(outs[1:], (0.9 * mean + 0.1 * dbias, 0.9 * var + 0.1 * dscale, dbias, inv), strict=True):
        close(got, exact.reshape(-1))
    db, ds = run("bn_grad_sums", x, s, m, v, g, **kw)
    close(db, d.sum(axis=gone), ulps=20)  # terms of both signs
    close(ds, (d * (a - mean) * var).sum(axis=gone), ulps=20)
    exact = (d - (a - mean) * dscale * var / n - dbias / n) * scale * var
    close(one("bn_grad_apply", x, s, m, v, g, dm, dv, told=told, **kw), exact, ulps=6)


@pytest.mark.parametrize("shape, groups", [((2, 4, 2, 3), 2), ((4, 6, 1, 3), 3), ((3, 64, 9, 9), 8), ((5, 6), 2), ((2, 3, 50), 1)])
def test_group_norm(shape, groups):
    n, c = shape[:2]
    x, g, scale, bias = normal(shape) + 1, normal(shape, seed=1), normal(c, seed=2), normal(c, seed=3)
    rows, per = x.astype("float64").reshape(n, groups, -1), (c, *[1] * (len(shape) - 2))
    mean, var = rows.mean(axis=2), rows.var(axis=2)
    hat = ((rows - mean[:, :, None]) / np.sqrt(var[:, :, None] + 1e-5)).reshape(shape)
    for s, b in ((scale, bias), (scale, None), (None, bias), (None, None)):
        y, m, v = run("group_norm", x, s, b, groups=groups)
        exact = hat * (1 if s is None else s.astype("float64").reshape(per)) + (0 if b is None else b.reshape(per))
        close(y, exact, ulps=40)  # as layer_norm
        close(m, mean)
        close(v, var)
        stats = [mean.astype("float32"), var.astype("float32")]
        m64, i64 = stats[0].astype("float64")[:, :, None], 1 / np.sqrt(stats[1].astype("float64")[:, :, None] + 1e-5)
        h = (rows - m64) * i64
        d = g.astype("float64")
        t = (d if s is None else d * s.reshape(per)).reshape(n, groups, -1)
        dx = ((t - t.mean(axis=2, keepdims=True) - h * (t * h).mean(axis=2, keepdims=True)) * i64).reshape(shape)
        outs = [x, None if s is None else scale, None if b is None else bias]
        got = run("group_norm_grad", x, s, b, *stats, g, groups=groups, outs=outs)
        close(got[0], dx, ulps=40)
        gone = (0, *range(2, len(shape)))
        for a, terms in zip(got[1:], (d * h.reshape(shape), d), strict=True):
            if a is not None:  # sums of terms that are larger than the result
                assert np.abs(a - terms.sum(axis=gone)).max() <= 4 * np.finfo("float32").eps * np.abs(terms).sum(axis=gone).max()
