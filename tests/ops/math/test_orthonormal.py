"""orthonormalize: the result is always a basis, and its span contains the columns."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder


def orthonormalized(x):
    main = fx.Program("basis")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        data = fx.data("x", list(x.shape), str(x.dtype))
        out = Builder(main.global_block()).orthonormalize(data)
    return fx.Executor().run(main, feed={"x": x}, fetch_list=[out])[0]


def columns(*vectors, dtype="float64"):
    return np.array(vectors, dtype).T


@pytest.mark.parametrize("dtype, eps", [("float32", 1e-6), ("float64", 1e-14)])
def test_columns_are_the_components_orthogonal_to_those_before(dtype, eps):
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(dtype)
    q = orthonormalized(x)
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=eps)
    r = q.T @ x
    np.testing.assert_allclose(q @ r, x, atol=10 * eps)  # a basis of the columns
    np.testing.assert_allclose(np.tril(r, -1), 0, atol=10 * eps)
    assert (np.diag(r) > 0).all()


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((5, 3)),
        columns([1, 2, 2, 0], [2, 4, 4, 0], [0, 0, 0, 1]),  # the second depends on the first
        columns([1, 1, 1], [1, 1, 1 + 1e-12]),  # the remainder is rounding error
        columns([0, 0, 0], [3, 4, 0]),
        columns([1e30, 1e30, 0], [1e-30, 0, 1e-30]),
        columns([1, 0], [0, 1]),
        np.full((4, 4), np.inf),
    ],
    ids=["zeros", "dependent", "almost dependent", "a zero in front", "large and small", "a basis", "infinite"],
)
def test_the_result_is_a_basis_for_any_input(x):
    q = orthonormalized(x)
    np.testing.assert_allclose(q.T @ q, np.eye(x.shape[1]), atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_of_rounding_errors_give_no_direction(dtype):
    eps = np.finfo(dtype).eps
    x = columns([3, 4, 0, 0], [0, 0, 1, 2], [1, 1, 1, 1], dtype=dtype)
    noise = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(dtype) * 20 * eps
    noise[:, :, 0] = 0
    given = [x * [1, 0, 0] + n for n in noise]
    np.testing.assert_allclose(*(orthonormalized(g.astype(dtype)) for g in given), atol=100 * eps)
    exact = orthonormalized((x * [1, 0, 0]).astype(dtype))
    np.testing.assert_allclose(orthonormalized(given[0].astype(dtype)), exact, atol=100 * eps)
    # a column that is small, but larger than rounding errors, keeps its direction
    kept = orthonormalized((x * [1, 100 * eps**0.5, 0]).astype(dtype))
    np.testing.assert_allclose(kept[:, 1], x[:, 1] / np.sqrt(5), atol=100 * eps)


def test_nearly_dependent_columns_of_single_precision_are_orthogonal_all_the_same():
    x = columns([1, 1, 1, 1], [1, 1, 1, 1.01], [1, 1, 1.01, 1.02], dtype="float32")
    q = orthonormalized(x)
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-6)


def test_other_operands_are_refused():
    with pytest.raises(fx.ProgramError, match="there are no 3 orthonormal columns of 2 rows"):
        orthonormalized(np.zeros((2, 3)))
    with pytest.raises(fx.ProgramError, match="must be a matrix of floats"):
        orthonormalized(np.zeros((2, 3, 4)))
