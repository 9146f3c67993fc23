"""Products with weights of a few bits, worked by hand."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType
from fluidx.ops.math.matmul_n_bits import MatMulNBits, MatMulNBitsGrad, dequantized

F = "float32"


def run(op, *arrays, bits):
    t = op.infer(*(None if a is None else TensorType(a.dtype.name, a.shape) for a in arrays), bits=bits)
    found = np.full(t.shape, 77, arrays[0].dtype)
    op.kernel(np, *arrays, out=found, bits=bits)
    return found


def test_bytes_hold_the_lowest_bits_first_and_every_block_has_a_scale_and_a_zero_point():
    y = np.array([[[0x21, 0x43], [0x65, 0x87]], [[0xFF, 0xFF], [0x00, 0x00]]], "uint8")  # 1 2 3 4 | 5 6 7 8; 15 .. | 0 ..
    scale = np.array([[1, 10], [2, 0.5]], F)
    packed = np.array([[0x31], [0x4F]], "uint8")  # zero points 1, 3 and 15, 4
    want = [[0, 1, 2, 3, 20, 30, 40, 50], [0, 0, 0, 0, -2, -2, -2, -2]]
    assert dequantized(np, y, scale, packed, 4).tolist() == want
    assert dequantized(np, y, scale, np.array([[1, 3], [15, 4]], F), 4).tolist() == want
    assert dequantized(np, y, scale, None, 4)[0].tolist() == [-7, -6, -5, -4, -30, -20, -10, 0], "the middle, 8"
    two = dequantized(np, np.array([[[0b11100100]]], "uint8"), np.ones((1, 1), F), None, 2)
    assert two.tolist() == [[-2, -1, 0, 1]]


def test_the_product_and_its_gradient():
    """Columns of the weight: (1, -2, 3) times 2 and (0, 1, 127) times 0.5; the fourth element of each is beyond k."""
    y = np.array([[[129, 126, 131, 9]], [[128, 129, 255, 9]]], "uint8")
    scale, x, g = np.array([[2], [0.5]], F), np.array([[1, 1, 1], [0, 2, 0]], F), np.array([[1, 2], [0, 1]], F)
    assert run(MatMulNBits, x, y, scale, None, bits=8).tolist() == [[4, 64], [-8, 1]]
    assert run(MatMulNBitsGrad, g, y, scale, None, x, bits=8).tolist() == [[2, -3, 133], [0, 0.5, 63.5]]
    assert run(MatMulNBits, x[0], y, scale, None, bits=8).tolist() == [4, 64], "a vector is one row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ({"y": TensorType("int8", (5, 2, 8))}, "Y must be uint8 [columns, blocks, bytes of a block], got i8[5,2,8]"),
        ({"x": TensorType(F, (3, 33))}, "5 columns and 2 blocks of 16 rows, and the product needs a weight of 33 rows"),
        ({"x": TensorType(F, (3, 16))}, "5 columns and 2 blocks of 16 rows, and the product needs a weight of 16 rows"),
        ({"scale": TensorType(F, (5, 1))}, "Scale must be floats [5, 2], one for each block of Y, got f32[5,1]"),
        ({"zero": TensorType("uint8", (5, 2))}, "ZeroPoint must be uint8 [5, 1] or floats [5, 2], got u8[5,2]"),
    ],
)
def test_operands_that_do_not_fit(change, message):
    given = {"x": TensorType(F, (3, 20)), "y": TensorType("uint8", (5, 2, 8)), "scale": TensorType(F, (5, 2)), "zero": None, **change}
    with pytest.raises(ProgramError) as e:
        MatMulNBits.infer(given["x"], given["y"], given["scale"], given["zero"], bits=given.get("bits", 4))
    assert message in str(e.value)
