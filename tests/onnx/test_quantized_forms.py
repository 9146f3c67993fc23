"""Quantized models in the forms that ONNX allows: biases and scales with more axes than a product, no rows, large sums, vectors."""

import numpy as np
import pytest

from fluidx.onnx.sessions import session

onnx = pytest.importorskip("onnx")

# Scales are powers of two and rows are multiples of them, so floats hold every value exactly, and results are compared with ==
X, W = np.float32([[1, -2, 0.5], [3, 0, -1.5]]), np.int8([[4, -8], [2, 127], [-128, 6]])
PRODUCT = X @ (W.astype("float32") * 0.25)
STATIC = """
    <float sx = {0.5}, uint8 zx = {100}, float sw = {0.25}, int8 zw = {0}> {
        xq = QuantizeLinear (x, sx, zx)
        xd = DequantizeLinear (xq, sx, zx)
        wd = DequantizeLinear (w, sw, zw)
"""
DYNAMIC = """
    <int8 zw = {0}> {
        q, s, z = DynamicQuantizeLinear (x)
        i = MatMulInteger (q, w, z, zw)
        f = Cast <to = 1> (i)
"""


def opened(body, shape="n, 3", dtype="float", **arrays):
    """A session of a model of one input x, whose nodes are `body`, and whose output is y."""
    head = f'<ir_version: 10, opset_import: ["" : 21]> net ({dtype}[{shape}] x) => (y) '
    model = onnx.parser.parse_model(head + body)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    return session(model)


def kinds(s):
    (plans,) = s._plans.values()
    return {op.type for op in plans[0][0].main.ops}


def same(found, wanted, dtype="float32"):
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1, 2), (1, 1, 1), (3, 1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_bias_may_have_more_axes_than_a_product(shape, whole):
    b = np.arange(1, 1 + np.prod(shape), dtype="int32").reshape(shape)  # in steps of 0.5 * 0.25
    real = b.astype("float32") * np.float32(0.125)
    body = "bd = DequantizeLinear (b, sb) y = Add (m, bd) }" if whole else "y = Add (b, m) }"
    given = {"b": b, "sb": np.float32(0.125)} if whole else {"b": real}
    s = opened(STATIC + "m = MatMul (xd, wd)" + body, w=W, **given)
    same(s.run([X])[0], PRODUCT + real)
    assert "quantized_matmul" in kinds(s)


def test_a_bias_may_have_more_axes_than_a_convolution_of_one_filter():
    image, w = np.float32(np.arange(9).reshape(1, 1, 3, 3)), np.full((1, 1, 1, 1), 4, "int8")
    body = STATIC + "c = Conv (xd, wd) y = Add (c, b) }"
    same(opened(body, "n, 1, 3, 3", w=w, b=np.ones((1, 1, 1, 1, 1), "float32")).run([image])[0], image[None] + 1)


# from 0 to 127.5 the steps are 0.5 and the zero point is 0
RANGE = np.float32([[0, 127.5, 1], [2, 4, 8]])
SUMS = RANGE @ W.astype("float32")


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2), (1, 1, 1), (1, 1, 2)])
def test_a_scale_of_sums_may_have_more_axes_than_they(shape):
    scale = np.float32([0.5, 2])[: np.prod(shape, dtype=int)].reshape(shape)
    body = DYNAMIC + "sw = Mul (s, scale) y = Mul (f, sw) }"
    same(opened(body, w=W, scale=scale).run([RANGE])[0], SUMS * scale)
    bias = np.float32([[[1, -1]]])
    body = DYNAMIC + "sw = Mul (s, scale) m = Mul (f, sw) y = Add (m, bias) }"
    same(opened(body, w=W, scale=scale, bias=bias).run([RANGE])[0], SUMS * scale + bias)


def test_a_computed_scale_may_have_more_axes_than_the_sums():
    body = DYNAMIC + "cube = Reshape (s, to) y = Mul (f, cube) }"
    same(opened(body, w=W, to=np.int64([1, 1, 1])).run([RANGE])[0], SUMS[None])


@pytest.mark.parametrize("first", [0, 2])
def test_no_rows_have_no_results(first):
    image, filters, zero = np.zeros((2, 3, 4, 4)), np.ones((5, 3, 3, 3), "int8"), np.uint8(7)
    convolved, bias = (5, 2, 2), np.ones(2, "float32")
    models = [
        (opened(STATIC + "m = MatMul (xd, wd) y = Add (m, b) }", w=W, b=bias), X, (2,)),
        (opened(STATIC + "y = Conv (xd, wd) }", "n, 3, 4, 4", w=filters), np.float32(image), convolved),
        (opened(DYNAMIC + "y = Mul (f, s) }", w=W), X, (2,)),
        (opened("{ y = MatMulInteger (x, w, z) }", "n, 3", "uint8", w=W, z=zero), np.uint8(X > 0), (2,)),
        (opened("{ y = ConvInteger (x, w, z) }", "n, 3, 4, 4", "uint8", w=filters, z=zero), np.uint8(image), convolved),
        (opened("{ y = MatMulInteger (x, w, z, z) }", "n, 3", "uint8", w=W.view("uint8"), z=zero), np.uint8(X > 0), (2,)),
    ]
    for s, x, rest in models:
        for rows in (first, 2 - first):
            assert s.run([x[:rows]])[0].shape == (rows, *rest)


def test_a_bias_that_32_bits_hold_only_without_the_sum_is_added_in_float():
    b = np.int32([2**31 - 1024, 1024 - 2**31])
    body = STATIC + "m = MatMul (xd, wd) bd = DequantizeLinear (b, sb) y = Add (m, bd) }"
    (found,) = opened(body, w=np.int8([[127, -127]] * 3), b=b, sb=np.float32(0.125)).run([np.full((1, 3), 70, "float32")])
    # 2 ** 28 - 128 + 3 * 70 * 127 / 4 = 2 ** 28 + 6539.5, where float32 has steps of 32
    assert found.tolist() == [[2.0**28 + 6528, -(2.0**28) - 6528]]


def test_products_of_floats_whose_sums_32_bits_do_not_hold_are_computed_in_float():
    # 120 000 * 155 * 127 = 2.36e9
    s = opened(STATIC + "y = MatMul (xd, wd) }", "n, 120000", w=np.full((120000, 1), 127, "int8"))
    np.testing.assert_allclose(s.run([np.full((1, 120000), 77.5, "float32")])[0], [[120000 * 77.5 * 127 / 4]], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_integers_of_a_matrix_by_a_vector(dtype):
    x, w = np.array([[1, 2, 3], [100, 0, 50]], dtype), np.int8([4, -5, 6])
    s = opened("{ y = MatMulInteger (x, w, z) }", "n, 3", dtype, w=w, z=np.array(1, dtype))
    same(s.run([x])[0], np.array([0 * 4 + 1 * -5 + 2 * 6, 99 * 4 + 5 + 49 * 6]), "int32")
    s = opened("{ y = MatMulInteger (x, w) }", "3", dtype, w=w)
    same(s.run([x[0]])[0], np.array(4 - 10 + 18), "int32")


def test_a_result_and_a_scale_of_16_bits():
    s = opened(STATIC + "m = MatMul (xd, wd) y = Cast <to = 10> (m) }", w=W)
    same(s.run([X])[0], PRODUCT.astype("float16"), "float16")
    assert "quantized_matmul" in kinds(s)
    x = np.float32([[255, 0, 51]])  # the scale is 1
    s = opened(DYNAMIC + "g = Cast <to = 1> (h) t = Mul (s, g) m = Mul (f, t) y = Cast <to = 10> (m) }", w=W, h=np.float16([0.25]))
    same(s.run([x])[0], (x @ (W.astype("float32") * 0.25)).astype("float16"), "float16")
