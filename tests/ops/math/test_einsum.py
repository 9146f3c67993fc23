"""Sums of products, running products and determinants, by hand."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, opdef


def f32(*shape):
    return TensorType("float32", shape)


def test_einsum_keeps_the_batch_open():
    assert opdef("einsum").infer([f32(-1, 3, 4), f32(4, 5)], equation="bij,jk->bki") == f32(-1, 5, 3)


@pytest.mark.parametrize("equation", ["ij,jk", "ii->i", "ij->k", "ij->ii", "i...->i", "i1->i"])
def test_einsum_names_every_axis_by_a_letter_of_its_own(equation):
    with pytest.raises(ProgramError, match="must name each axis by a letter, no letter twice in one operand"):
        opdef("einsum").infer([f32(3, 3)], equation=equation)


def test_einsum_compares_sizes_and_axes():
    with pytest.raises(ProgramError, match="op einsum: the axes 'j' in 'ij,jk->ik' must be equal, found 3 and 4"):
        opdef("einsum").infer([f32(2, 3), f32(4, 5)], equation="ij,jk->ik")
    with pytest.raises(ProgramError, match="op einsum: equation 'ij->i' is for operands with 2 axes, found f32\\[2\\]"):
        opdef("einsum").infer([f32(2)], equation="ij->i")


@pytest.mark.parametrize("x, g, exclusive, expected", [
    ([2, 3, 4], [1, 1, 1], False, [16, 10, 6]),  # 1 + 3 + 12, 2 + 8, 6
    ([2, 0, 4], [1, 1, 1], False, [1, 10, 0]),
    ([2, 3, 4], [1, 1, 1], True, [4, 2, 0]),
])  # fmt: skip
def test_the_gradient_of_running_products_is_exact_with_zeros(x, g, exclusive, expected, run_op):
    assert run_op("cumprod_grad", np.float32(x), np.float32(g), exclusive=exclusive).tolist() == expected


def test_the_gradient_of_a_determinant_is_its_cofactors(run_op):
    x = np.array([[1.0, 2.0], [2.0, 4.0]])  # singular
    assert run_op("det", x) == 0
    np.testing.assert_allclose(run_op("det_grad", x, np.array(1.0)), [[4, -2], [-2, 1]], rtol=1e-12)  # float64, numbers near 1
