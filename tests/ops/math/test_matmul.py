"""mul, matmul and bmm against einsum in float64 and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx import native
from fluidx.ir import Builder, Program, ProgramError, TensorType
from fluidx.ops.math.matmul import Bmm, MatMul, Mul, MulGradY


def ints(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def run(op, *arrays, **attrs):
    attrs = {**op.attrs, **attrs}
    t = op.infer(*(TensorType(a.dtype.name, a.shape) for a in arrays), **attrs)
    found = np.full(t.shape, 77).astype(arrays[0].dtype)
    op.kernel(np, *arrays, out=found, **attrs)
    return found


SIZE = st.integers(1, 5)


@settings(max_examples=150, deadline=None)
@given(st.lists(SIZE, max_size=2), SIZE, SIZE, SIZE, st.booleans(), st.booleans(), st.integers(0, 7), st.sampled_from([1.0, 0.5, 2.0]))
def test_matmul_broadcasts_and_transposes_like_numpy(batch, m, k, n, tx, ty, thin, alpha):
    bx = tuple(1 if thin >> i & 1 else d for i, d in enumerate(batch))[thin % 2 :]
    by = tuple(d if thin >> i & 1 else 1 for i, d in enumerate(batch))[thin // 4 :]
    x, y = ints(thin, *bx, m, k), ints(thin + 1, *by, k, n)
    want = alpha * np.matmul(x.astype(float), y.astype(float))
    x = np.ascontiguousarray(x.swapaxes(-1, -2)) if tx else x
    y = np.ascontiguousarray(y.swapaxes(-1, -2)) if ty else y
    got = run(MatMul, x, y, transpose_x=tx, transpose_y=ty, alpha=alpha)
    assert got.shape == want.shape and (got == want).all()


def test_vectors_are_rows_on_the_left_and_columns_on_the_right():
    v, m = np.array([1, 2, 3], "float32"), np.array([[1, 0], [0, 1], [1, 1]], "float32")
    assert run(MatMul, v, v).tolist() == [14]
    assert run(MatMul, v, v, transpose_x=True, transpose_y=True).tolist() == [[1, 2, 3], [2, 4, 6], [3, 6, 9]]
    assert run(MatMul, v, m).tolist() == [4, 5]
    assert run(MatMul, m, v, transpose_x=True).tolist() == [4, 5]
    assert run(MatMul, np.stack([m.T, 2 * m.T]), v).tolist() == [[4, 5], [8, 10]]


def test_mul_flattens_both_operands():
    x, y = ints(0, 2, 3, 4), ints(1, 3, 4, 5, 2)
    assert (run(Mul, x, y, y_num_col_dims=2) == np.einsum("bij,ijkl->bkl", x, y)).all()
    w = ints(2, 4, 6)
    assert (run(Mul, x, w, x_num_col_dims=2) == x @ w).all()


def test_the_gradient_of_a_shared_weight_sums_over_all_rows():
    x, g, w = ints(0, 2, 3, 4), ints(1, 2, 3, 5), ints(2, 4, 5)
    assert (run(MulGradY, x, g, w, x_num_col_dims=2) == np.einsum("bti,btj->ij", x, g)).all()


def test_bmm_pairs_the_matrices():
    x, y = ints(0, 3, 2, 4), ints(1, 3, 4, 2)
    assert (run(Bmm, x, y) == np.einsum("bij,bjk->bik", x, y)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "int64", "uint8", "float64"])
def test_every_dtype_gives_exact_small_integers(dtype):
    import ml_dtypes

    np_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    x, y = (np.random.default_rng(k).integers(0, 3, (3, 4)).astype(np_dtype) for k in (0, 1))
    assert (run(MatMul, x, y, transpose_y=True).astype(int) == x.astype(int) @ y.astype(int).T).all()


def test_half_sums_do_not_stall_at_2048():
    ones = np.ones((1, 5000), "float16")
    assert run(MatMul, ones, ones, transpose_y=True)[0, 0] == 5000


def test_bool_products_are_or_of_and():
    x = np.array([[True, False], [False, False]])
    assert run(MatMul, x, x).tolist() == [[True, False], [False, False]]


def test_an_open_batch_stays_open():
    x, w = TensorType("float32", (-1, 7, 4)), TensorType("float32", (4, 5))
    assert MatMul.infer(x, w, **MatMul.attrs).shape == (-1, 7, 5)
    assert Mul.infer(x, w, x_num_col_dims=2, y_num_col_dims=1).shape == (-1, 7, 5)
    assert MatMul.infer(x, x, transpose_x=False, transpose_y=True, alpha=1.0).shape == (-1, 7, 7)


def test_gradients_of_a_layer_are_plain_products():
    block = Program("p").global_block()
    x, w = block.create_var("x", (-1, 3, 4)), block.create_parameter((4, 5), name="w")
    b = Builder(block)
    out = b.mul(x, w, x_num_col_dims=2)
    op = block.ops[-1]

    class View:
        attrs = op.attrs

        def __getitem__(self, slot):
            return {"X": x, "Y": w, "Out": out}[slot]

    Mul.grad(b, View(), out)
    assert [o.type for o in block.ops[1:]] == ["mul_grad_y", "matmul"]  # the gradient of the weight first


@pytest.mark.parametrize(
    "op, shapes, attrs, message",
    [
        (MatMul, [(2, 3), (4, 5)], {}, "has 3 columns and Y f32.4,5. has 4 rows; they must be equal"),
        (MatMul, [(2, 3), (3, 5)], {"transpose_x": True}, "after transposing"),
        (MatMul, [(2, 2, 3), (3, 3, 5)], {}, "the leading axes of X f32.2,2,3. and Y f32.3,3,5. do not broadcast"),
        (MatMul, [(), (3,)], {}, "at least one axis"),
        (Mul, [(2, 3), (4, 5)], {}, "has 3 columns when flattened at axis 1, Y f32.4,5. has 4 rows"),
        (Mul, [(2, 3), (3, 5)], {"x_num_col_dims": 2}, "x_num_col_dims must be between 1 and 1"),
        (Bmm, [(2, 3), (3, 5)], {}, "needs two operands of 3 axes"),
    ],
)
def test_a_product_that_does_not_fit_says_why(op, shapes, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*(TensorType("float32", s) for s in shapes), **{**op.attrs, **attrs})


def test_operands_of_two_dtypes_are_refused():
    with pytest.raises(ProgramError, match="X is float32, Y is float64; use cast"):
        MatMul.infer(TensorType("float32", (2, 2)), TensorType("float64", (2, 2)), **MatMul.attrs)


@pytest.mark.skipif(not native.has_products(), reason="no native products")
def test_stacked_rows_of_a_transposed_matrix_are_one_product():
    """Rows that stand one after the other in a transposed matrix are its rows: one product, not one of a row for each of the stack."""
    whole = ints(0, 6, 7)
    x, w, out = whole.T.reshape((7, 1, 6), copy=False), ints(1, 6, 5), np.full((7, 1, 5), np.nan, "float32")
    calls = MatMul.native.calls([x, w], [out], MatMul.attrs)
    assert len(calls) == 1 and calls[0].args[2] == 7
    native.compile(calls)()
    np.testing.assert_array_equal(out[:, 0], whole.T @ w)
    apart = np.zeros((3, 4, 6), "float32")[:, ::2]  # no view has these as the rows of one matrix
    again = np.full((3, 2, 5), np.nan, "float32")
    native.compile(MatMul.native.calls([apart, w], [again], MatMul.attrs))()
    assert not again.any()
