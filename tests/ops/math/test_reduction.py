"""Reductions: numbers by hand, exactness for small integers, errors."""

import numpy as np
import pytest

from fluidx.ir import OPS, Builder, Program, ProgramError
from fluidx.ir.parts import Part
from fluidx.testing.reference import run_op


def run(name, *args, **attrs):
    return run_op(OPS[name], args, OPS[name].complete_attrs(attrs), body="numpy")[0]


def test_sums_of_small_integers_are_exact_in_every_layout():
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 9, (6, 5, 4, 3))
    for dims in ((0,), (1,), (3,), (0, 1), (2, 3), (0, 2, 3), (0, 3), (1, 2), (1, 3), (0, 2), (0, 1, 2, 3)):
        want = a.sum(axis=dims)
        for given in (a.astype("float32"), np.asfortranarray(a.astype("float64")), a.astype("float16"), a.astype("int32")):
            got = run("reduce_sum", given, dim=dims)
            assert got.dtype == given.dtype
            assert (got == (want if want.ndim else want[None])).all()


def test_reducing_everything_gives_shape_1():
    a = np.float32([[1, 2], [3, 6]])
    assert run("reduce_sum", a).tolist() == [12]
    assert run("reduce_mean", a).tolist() == [3]
    assert run("mean", a).tolist() == [3]
    assert run("reduce_max", a, keep_dim=True).tolist() == [[6]]
    assert run("reduce_sum", np.float32([1, 2]), dim=(0,)).tolist() == [3]


def test_the_gradient_of_a_product_with_zeros():
    x = np.float32([[0, 2, 3], [1, 2, 3], [0, 0, 4]])
    got = run("reduce_prod_grad", x, np.ones(3, "float32"), dim=(1,))
    assert got.tolist() == [[6, 0, 0], [6, 3, 2], [0, 0, 0]]


def test_equal_maxima_all_get_the_gradient():
    x = np.float32([[2, 2, 1]])
    assert run("reduce_max_grad", x, np.float32([2]), np.float32([5]), dim=(1,)).tolist() == [[5, 5, 0]]


def test_logsumexp_does_not_overflow():
    got = run("logsumexp", np.float32([[1000, 1000], [-np.inf, -np.inf], [-1000, -1000]]), dim=(1,))
    np.testing.assert_allclose(got, [1000 + np.log(2), -np.inf, -1000 + np.log(2)], rtol=1e-6)


def test_squared_l2_norm_of_half_precision_is_float32():
    got = run("squared_l2_norm", np.full((300,), 20, "float16"))
    assert got.dtype == np.float32 and got.tolist() == [120000]


@pytest.mark.parametrize(
    "op, dtype, attrs, said",
    [
        ("reduce_sum", "float32", {"dim": (2,)}, "axis 2 is out of range"),
        ("reduce_sum", "float32", {"dim": (0, -2)}, "name one axis twice"),
        ("reduce_sum", "bool", {}, "expected X of a number dtype, found bool; cast it first"),
        ("reduce_all", "float32", {}, "expected X of bool, found float32"),
        ("mean", "int64", {}, "found int64"),
        ("squared_l2_norm", "int64", {}, "expected X of a float dtype, found int64"),
    ],
)
def test_wrong_reductions(op, dtype, attrs, said):
    block = Program("p").global_block()
    v = block.create_var("x", (2, 3), dtype, is_data=True)
    with pytest.raises(ProgramError, match=said):
        Builder(block).emit(op, v, **attrs)


def test_a_mean_of_a_part_is_divided_by_the_count_of_the_whole():
    x, out, dx = np.float32([1, 2, 3]), np.empty(1, "float32"), np.empty(3, "float32")
    part = Part(count=12)
    OPS["mean"].kernel(np, x, out=out, part=part)
    OPS["reduce_mean_grad"].kernel(np, x, np.float32([6]), out=dx, dim=(), keep_dim=False, part=part)
    assert out.tolist() == [0.5] and dx.tolist() == [0.5, 0.5, 0.5]


def test_a_mean_of_many_halves_neither_overflows_nor_vanishes_in_the_gradient():
    x = np.ones(100_000, "float16")
    for body in ("any", "numpy"):
        (out,) = run_op(OPS["mean"], [x], {}, body=body)
        (dx,) = run_op(OPS["reduce_mean_grad"], [x, np.float16([1000])], {"dim": (), "keep_dim": False}, body=body)
        assert out.tolist() == [1.0] and dx[0] == np.float16(0.01) and out.dtype == dx.dtype == np.float16
