"""Native copies, conversions, and rows by id."""

from itertools import permutations

import numpy as np
import pytest

from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.ir import ExecutionError, np_dtype, opdef
from fluidx.ir.parts import Part
from fluidx.ops.shared.native import copy_calls, fill_calls
from tests.native.bodies import normal, one, run, whole_numbers

TYPES = ["float32", "float64", "int32", "int64", "bool"]


def copied(out, x):
    calls = copy_calls(out, x)
    assert calls is not None
    native.compile(calls)()
    return out


@pytest.mark.parametrize("dtype", [*TYPES, "uint8", "int16"])
def test_copies_between_views(dtype):
    x = np.arange(7 * 33 * 50).reshape(7, 33, 50).astype(dtype)
    for order in permutations(range(3)):
        for cut in (np.s_[:], np.s_[::-1], np.s_[1::3], np.s_[:, ::-2, 5:40], np.s_[:, :, 3:4]):
            view = x.transpose(order)[cut]
            assert np.array_equal(copied(np.zeros(view.shape, dtype), view), view)
            wide = np.zeros([2 * n for n in view.shape], dtype)
            target = wide[tuple(slice(0, n) for n in view.shape)]
            copied(target, view)
            assert np.array_equal(target, view) and np.count_nonzero(wide) == np.count_nonzero(view)


def test_long_rows_and_large_transpositions():
    x = normal((300, 1000))
    assert np.array_equal(copied(np.empty((1000, 300), "float32"), x.T), x.T)
    x = normal(200_001)
    assert np.array_equal(copied(np.empty_like(x), x), x) and np.array_equal(copied(np.empty_like(x), x[::-1]), x[::-1])
    assert (copied(np.empty((3, 70_000), "float32"), np.float32([[2], [3], [4]])) == [[2], [3], [4]]).all()


def test_a_copy_onto_itself_is_nothing_and_onto_a_shifted_self_is_refused():
    x = normal((4, 4))
    assert copy_calls(x, x) == [] and copy_calls(x[1:], x[:-1]) is None and copy_calls(x, x.T) is None


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("source", TYPES)
def test_conversions_are_those_of_numpy(source, to):
    x = (np.array([0, -0.0, 1.9, -1.9, 3, 1e6, -7, 0.4]) if source.startswith("float") else np.array([0, 1, -5, 300, 7])).astype(source)
    if source in ("float32", "float64") and to in ("float32", "float64", "bool"):
        x = np.append(x, np.array([np.nan, np.inf, -np.inf], source))
    for a in (x, np.tile(x, (40, 3))[:, ::2], np.tile(x, 9000)):
        got = one("cast", a, dtype=to)
        assert got.dtype == to and np.array_equal(got, a.astype(to), equal_nan=to.startswith("float"))


def test_fills():
    for dtype, value in (("float32", 1.5), ("float64", -2), ("int64", 7), ("int32", -7), ("bool", 1), ("float16", 0.5)):
        for shape in ((), (1,), (3, 0), (5, 7), (100_000,)):
            out = np.empty(shape, dtype)
            native.compile(fill_calls(out, value))()
            assert (out == value).all()
    assert one("fill_constant", shape=(3,), value=2.0).tolist() == [2, 2, 2]
    assert one("fill_any_like", np.zeros(3, "float32"), value=2.0, dtype="int64").tolist() == [2, 2, 2]
    values = list(range(12))
    assert one("assign_value", shape=(3, 4), values=tuple(values)).reshape(-1).tolist() == values
    part = {"part": Part(box=((1, 3), (0, 4)), shape=(3, 4))}
    assert one("assign_value", shape=(3, 4), values=tuple(values), outs=[np.empty((2, 4), "float32")], told=part).tolist() == [
        [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_joining_and_cutting(dtype):
    parts = [whole_numbers((5, n, 6), dtype, n) for n in (3, 1, 7)]
    whole = np.concatenate(parts, axis=1)
    assert np.array_equal(one("concat", parts, axis=-2), whole)
    for got, part in zip(run("split", whole, sections=(3, 1, -1), axis=1)[0], parts, strict=True):
        assert np.array_equal(got, part)
    for got, part in zip(run("concat_grad", parts, whole, axis=1)[0], parts, strict=True):
        assert np.array_equal(got, part)
    alike = [whole_numbers((4, 5), dtype, k) for k in range(3)]
    for axis in (0, 1, 2):
        stacked = np.stack(alike, axis=axis)
        assert np.array_equal(one("stack", alike, axis=axis), stacked)
        assert all(np.array_equal(a, b) for a, b in zip(run("unstack", stacked, axis=axis)[0], alike, strict=True))


def test_repeats_and_their_sums():
    x = whole_numbers((3, 1, 5))
    y = one("expand", x, expand_times=(2, 4, 3))
    assert np.array_equal(y, np.tile(x, (2, 4, 3))) and np.array_equal(one("expand_as", x, y), y)
    g = whole_numbers((3, 4, 5))
    assert np.array_equal(one("expand_grad", x[:, :, :1], g), g.sum(axis=(1, 2), keepdims=True))


def test_windows_are_put_back():
    x, g = whole_numbers((3, 5, 4)), whole_numbers((3, 2, 4), seed=1)
    expected = np.zeros_like(x)
    expected[:, 4:0:-2, 0:9] = g
    assert np.array_equal(one("slice_grad", x, g, axes=(1, 2), starts=(4, 0), ends=(0, 9), strides=(-2, 1)), expected)


def test_terms_are_added_from_first_to_last():
    xs = [normal((50, 7), seed=k) for k in range(5)]
    assert np.array_equal(one("sum", xs), (((xs[0] + xs[1]) + xs[2]) + xs[3]) + xs[4])
    assert np.array_equal(one("sum", xs[:1]), xs[0])


def test_where():
    c, x, y = normal((4, 1)) > 0, normal((4, 5)), normal(5, seed=1)
    assert np.array_equal(one("where", c, x, y), np.where(c, x, y))


# -- rows by id --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("rows, width, n", [(5, 3, 4), (1000, 64, 3000), (7, 1, 1), (50, 700, 90)])
def test_rows_by_id(rows, width, n, ids):
    w, at = whole_numbers((rows, width)), np.random.default_rng(1).integers(0, rows, n).astype(ids)
    expected = w[at]
    assert np.array_equal(one("lookup_table_v2", w, at), expected)
    assert np.array_equal(one("lookup_table", w, at[:, None]), expected)
    assert np.array_equal(one("gather", w, at), expected) and np.array_equal(one("index_select", w, at), expected)
    padded = expected.copy()
    padded[at == 2] = 0
    assert np.array_equal(one("lookup_table_v2", w, at, padding_idx=2), padded)
    g = whole_numbers((n, width), seed=2)
    total = np.zeros((rows, width), "float64")
    for k, i in enumerate(at):
        total[i] += g[k]
    for name, ins in (("lookup_table_grad", (w, at, g)), ("gather_grad", (w, at, g)), ("index_select_grad", (w, at, g))):
        assert np.array_equal(one(name, *ins), total)
    total[2] = 0
    assert np.array_equal(one("lookup_table_grad", w, at, g, padding_idx=2), total)
    scattered = w.copy()
    for k, i in enumerate(at):
        scattered[i] = g[k]
    assert np.array_equal(one("scatter", w, at, g), scattered)
    added = w.copy()
    added[at] = 0
    for k, i in enumerate(at):
        added[i] += g[k]
    assert np.array_equal(one("scatter", w, at, g, overwrite=False), added)


def test_repeated_rows_are_added_in_their_order():
    """So the bits are those of a loop over the ids, for any number of threads."""
    g, at = normal((5000, 33)), np.random.default_rng(0).integers(0, 20, 5000)
    total = np.zeros((20, 33), "float32")
    for k, i in enumerate(at):
        total[i] += g[k]
    assert np.array_equal(one("lookup_table_grad", total, at, g), total)


def test_a_part_of_a_table():
    w, at = whole_numbers((4, 3)), np.array([0, 5, 9, 4, 7])
    part = {"part": Part(start=4, size=12)}  # rows 4 to 8 lie here
    here = (at >= 4) & (at < 8)
    out = [np.empty((5, 3), "float32")]
    assert np.array_equal(one("lookup_table_v2", w, at, told=part, outs=out), np.where(here[:, None], w[np.clip(at - 4, 0, 3)], 0))
    g = whole_numbers((5, 3), seed=1)
    total = np.zeros((4, 3), "float32")
    for k in np.flatnonzero(here):
        total[at[k] - 4] += g[k]
    assert np.array_equal(one("lookup_table_grad", w, at, g, told=part), total)
    total[1] = 0
    assert np.array_equal(one("lookup_table_grad", w, at, g, told=part, padding_idx=5), total)


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40])
def test_an_id_out_of_range_is_named_as_by_numpy(bad):
    w, at = normal((6, 3)), np.array([1, 5, bad, 99])
    with pytest.raises(ExecutionError) as by_numpy:
        opdef("lookup_table_v2").kernel(np, w, at, out=np.empty((4, 3), "float32"), padding_idx=-1)
    with pytest.raises(ExecutionError, match=f"id {bad} is out of range; table W has 6 rows") as by_native:
        run("lookup_table_v2", w, at)
    assert str(by_native.value) == str(by_numpy.value)
    with pytest.raises(ExecutionError, match=f"op lookup_table_grad: id {bad} is out of range"):
        run("lookup_table_grad", w, at, normal((4, 3)))


def test_one_hot():
    at = np.array([[3], [0], [2]])
    for dtype in ("float32", "int64", "bool"):
        assert np.array_equal(one("one_hot", at, depth=4, dtype=dtype), np.eye(4)[at[:, 0]].astype(dtype))
    got = one("one_hot_v2", np.array([[0, 9], [-1, 3]]), depth=5, allow_out_of_range=True)
    assert got.sum() == 2 and got[0, 0, 0] == got[1, 1, 3] == 1
    part = one("one_hot_v2", at[:, 0], depth=4, told={"part": Part(start=2, size=4)}, outs=[np.empty((3, 2), "float32")])
    assert np.array_equal(part, np.eye(4)[at[:, 0], 2:])
    with pytest.raises(ExecutionError, match="op one_hot: id 9 is out of range; the one-hot depth has 4 rows, ids go from 0 to 3"):
        run("one_hot", np.array([[9]]), depth=4)


def test_dropout_grad():
    mask, g = (normal((30, 7)) > 0).astype("uint8"), normal((30, 7), seed=1)
    assert np.array_equal(one("dropout_grad", mask, g, dropout_prob=0.5), g * mask)
    got = one("dropout_grad", mask, g, dropout_prob=0.3, dropout_implementation="upscale_in_train")
    assert np.array_equal(got, g * mask * np.float32(1 / 0.7))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dropout_draws_what_numpy_draws(dtype):
    op, ctx, upscale = opdef("dropout"), RunContext(), "upscale_in_train"
    cases = ((0, (7,), 3, 0.25, upscale), (5, (300, 77), -2, 0.3, "downgrade_in_infer"), (9, (40,), 1, 1.0, upscale))
    for step, shape, seed, p, how in cases:
        ctx.step = step
        attrs = op.complete_attrs({"dropout_prob": p, "seed": seed, "dropout_implementation": how})
        rest = [(0, n) for n in shape[1:]]
        rows = Part(box=((2, 2 + shape[0]), *rest), shape=(900, *shape[1:]))
        for part in (None, Part(box=((0, shape[0]), *rest), shape=shape), rows):
            x = normal(shape, dtype)
            x.reshape(-1)[:2] = np.inf, -1  # what is dropped is multiplied by 0, as by NumPy
            expected = [np.empty_like(x), np.empty(shape, "uint8")]
            with np.errstate(invalid="ignore"):
                op.kernel(np, x, out=expected, ctx=ctx, part=part, **attrs)
            got = run("dropout", x, outs=expected, told={"ctx": ctx, "part": part}, **attrs)
            assert all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(got, expected, strict=True))


def test_dropout_reads_the_step_when_it_runs():
    op, ctx, x = opdef("dropout"), RunContext(), np.ones(64, "float32")
    y, seen = np.empty_like(x), set()
    step = native.compile(op.native.calls([x], [y, None], op.complete_attrs({"dropout_prob": 0.5, "seed": 1}), ctx=ctx))
    for ctx.step in range(4):
        step()
        seen.add(y.tobytes())
    assert len(seen) == 4


HALVES = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_the_float_that_it_is_for_numpy(dtype, level):
    x = np.arange(1 << 16, dtype="uint16").view(np_dtype(dtype))
    with np.errstate(invalid="ignore"):
        want = x.astype("float32")
    for view, wanted in ((x, want), (x[::-1], want[::-1]), (x[5:], want[5:])):
        found = copied(np.empty(wanted.shape, "float32"), view)
        nan = np.isnan(wanted)
        assert np.array_equal(found.view("uint32")[~nan], wanted.view("uint32")[~nan])
        assert np.isnan(found[nan]).all() and np.array_equal(np.signbit(found), np.signbit(wanted))
    assert np.array_equal(copied(np.empty_like(x), want).view("uint16")[~np.isnan(want)], x.view("uint16")[~np.isnan(want)])


@pytest.mark.parametrize("dtype", HALVES)
def test_floats_are_rounded_to_halves_as_numpy_rounds_them(dtype, level):
    """Around every half and every tie between two, infinities, what overflows, what underflows; and floats of random bits."""
    half = np.arange(1 << 16, dtype="uint16").view(np_dtype(dtype))
    with np.errstate(all="ignore"):
        exact = half.astype("float32").view("uint32")
        near = [exact + np.uint32(k % (1 << 32)) for j in range(11, 17) for e in (-1, 0, 1) for k in ((1 << j) + e, e)]
        bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, "uint64").astype("uint32")
        x = np.concatenate([*near, bits]).view("float32")
        want = x.astype(half.dtype)
    found, nan = copied(np.empty(x.shape, half.dtype), x), np.isnan(x)
    assert np.array_equal(found.view("uint16")[~nan], want.view("uint16")[~nan])
    assert np.isnan(found[nan].astype("float32")).all()
    # of a NaN the sign and what fits of its payload; it is made quiet, where NumPy sets the last bit if no other one is
    assert np.isin(found.view("uint16")[nan] ^ want.view("uint16")[nan], (0, 0x200, 0x201)).all()
    assert np.array_equal(copied(np.empty(x.shape, half.dtype), x[::-1]).view("uint16"), found.view("uint16")[::-1])


def test_halves_of_one_kind_become_the_other_with_one_rounding(level):
    for a, b in (HALVES, HALVES[::-1]):
        x = np.arange(1 << 16, dtype="uint16").view(np_dtype(a))
        with np.errstate(all="ignore"):
            want = x.astype("float32").astype(np_dtype(b))
        found, nan = copied(np.empty(x.shape, np_dtype(b)), x), np.isnan(x.astype("float32"))
        assert np.array_equal(found.view("uint16")[~nan], want.view("uint16")[~nan]) and np.isnan(found[nan].astype("float32")).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8"])
@pytest.mark.parametrize("shape, axis", [((3, 5), 1), ((2, 5, 3), 1), ((2, 3, 5), -1), ((4, 5, 40_001), 1), ((0, 5, 2), 1)])
def test_slices_along_any_axis(shape, axis, dtype):
    x, at = whole_numbers(shape, dtype), np.array([4, 0, 0, 3, 1, 4])
    assert np.array_equal(one("index_select", x, at, dim=axis), np.take(x, at, axis))
    with pytest.raises(ExecutionError, match="id 5 is out of range; axis 1 of X has 5 rows"):
        one("index_select", whole_numbers((3, 5), dtype), np.array([1, 5]), dim=1)
