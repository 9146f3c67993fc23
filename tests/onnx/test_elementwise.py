"""Types, arithmetic and quantized values of ONNX models, held to the operators' specification and to ONNX Runtime."""

import numpy as np
import pytest

from fluidx.onnx import OnnxError, session

onnx = pytest.importorskip("onnx")
ml_dtypes = pytest.importorskip("ml_dtypes")
helper, T = onnx.helper, onnx.TensorProto

OPSET = 28


def run(op, *inputs, opset=OPSET, **attrs):
    """The outputs of one node, all of whose inputs are fed."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **attrs)
    ins = [helper.make_tensor_value_info(n, kind(a), a.shape) for n, a in zip(names, inputs)]
    graph = helper.make_graph([node], "one", ins, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return session(model).run(list(inputs))[0]


def kind(a):
    return T.STRING if a.dtype.kind in "OU" else helper.np_dtype_to_tensor_dtype(a.dtype)


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.dtype, want.shape)
    assert np.array_equal(got.astype("f8"), want.astype("f8"), equal_nan=True), (got, want)


# -- types --------------------------------------------------------------------------------------------------------------------------


def test_whole_numbers_drop_the_bits_that_do_not_fit():
    x = np.array([200, -129, 256, 7], np.int16)
    same(run("Cast", x, to=T.INT8), np.array([-56, 127, 0, 7], np.int8))
    same(run("Cast", x, to=T.INT4), np.array([-8, -1, 0, 7], ml_dtypes.int4))
    same(run("Cast", x, to=T.UINT2), np.array([0, 3, 0, 3], ml_dtypes.uint2))


def test_floats_of_eight_bits_hold_at_their_largest_value_or_overflow():
    x = np.array([1e6, -np.inf, np.nan, 0.5], np.float32)
    for to, dtype, most in ((T.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn, 448), (T.FLOAT8E5M2, ml_dtypes.float8_e5m2, 57344)):
        same(run("Cast", x, to=to), np.array([most, -most, np.nan, 0.5], dtype))
    same(run("Cast", x, to=T.FLOAT8E4M3FN, saturate=0), np.array([np.nan, np.nan, np.nan, 0.5], ml_dtypes.float8_e4m3fn))
    same(run("Cast", x, to=T.FLOAT8E5M2, saturate=0), np.array([np.inf, -np.inf, np.nan, 0.5], ml_dtypes.float8_e5m2))


@pytest.mark.parametrize("mode, want", [("up", [1, 2, 2, 4]), ("down", [1, 1, 1, 2]), ("nearest", [1, 1, 2, 4])])
def test_powers_of_two_round_as_asked(mode, want):
    x = np.array([1, 1.25, 1.5, 3.75], np.float32)
    same(run("Cast", x, to=T.FLOAT8E8M0, round_mode=mode), np.array(want, ml_dtypes.float8_e8m0fnu))


def test_powers_of_two_outside_of_their_range():
    x = np.array([0, np.inf, np.nan], np.float32)
    assert run("Cast", x, to=T.FLOAT8E8M0).view(np.uint8).tolist() == [0, 254, 255]
    assert run("Cast", x, to=T.FLOAT8E8M0, saturate=0, round_mode="nearest").view(np.uint8).tolist() == [255, 255, 255]


def test_text_becomes_numbers_and_numbers_text():
    same(run("Cast", np.array(["1e-5", "-INF", "nan", "100.5"], object), to=T.DOUBLE), np.array([1e-5, -np.inf, np.nan, 100.5]))
    same(run("Cast", np.array(["18446744073709551615", "12"], object), to=T.UINT64), np.array([2**64 - 1, 12], np.uint64))
    assert run("Cast", np.array([314.125, np.inf, np.nan], np.float32), to=T.STRING).tolist() == ["314.125", "INF", "NaN"]
    assert run("Cast", np.array([[2**53 + 1], [-3]]), to=T.STRING).tolist() == [["9007199254740993"], ["-3"]]


def test_a_cast_like_another_input():
    same(run("CastLike", np.array([1.7, -1.7], np.float32), np.zeros(3, np.int8)), np.array([1, -1], np.int8))
    same(run("CastLike", np.array([1, 9]), np.zeros(1, ml_dtypes.float8_e5m2)), np.array([1, 8], ml_dtypes.float8_e5m2))


def test_bits_are_read_as_another_type():
    same(run("BitCast", np.array([1.0, -2.0], np.float32), to=T.INT32), np.array([0x3F800000, -0x40000000], np.int32))
    same(run("BitCast", np.array([-1, 7, -8], ml_dtypes.int4), to=T.UINT4), np.array([15, 7, 8], ml_dtypes.uint4))
    same(run("BitCast", np.array([3, 2], ml_dtypes.uint2), to=T.INT2), np.array([-1, -2], ml_dtypes.int2))
    with pytest.raises(OnnxError, match="as many bits as float32, found int16"):
        run("BitCast", np.zeros(1, np.float32), to=T.INT16)


# -- arithmetic -----------------------------------------------------------------------------------------------------------------------


def test_whole_numbers_divide_towards_zero():
    same(run("Div", np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])), np.array([3, -3, -3, 3]))


def test_remainders_have_the_sign_that_is_asked_for():
    x, y = np.array([-7, 7, -4]), np.array([3, -3, 2])
    same(run("Mod", x, y), np.array([2, -2, 0]))
    same(run("Mod", x, y, fmod=1), np.array([-1, 1, 0]))
    same(run("Mod", x.astype("f4") / 2, y.astype("f4"), fmod=1), np.array([-0.5, 0.5, 0], np.float32))


def test_powers_have_the_type_of_their_base():
    same(run("Pow", np.array([2, -1, 3]), np.array([-1, -3, 2])), np.array([0, -1, 9]))
    same(run("Pow", np.array([4, 9]), np.array([0.5], np.float32)), np.array([2, 3]))
    same(run("Pow", np.array([1.5, -2], np.float32), np.array([2, 3], np.int8)), np.array([2.25, -8], np.float32))


def test_shifts_by_no_number_of_bits_leave_the_sign():
    x, y = np.array([-8, 4, -1, 5], np.int8), np.array([-1, -8, 9, 1], np.int8)
    same(run("BitShift", x, y, direction="RIGHT"), np.array([-1, 0, -1, 2], np.int8))
    same(run("BitShift", x, y, direction="LEFT"), np.array([0, 0, 0, 10], np.int8))


def test_many_operands_broadcast():
    a, b, c = np.array([[1.0], [4.0]]), np.array([2.0, 3.0, 9.0]), np.array(6.0)
    for op, want in (("Sum", a + b + c), ("Max", np.maximum(np.maximum(a, b), c)), ("Mean", (a + b + c) / 3)):
        assert np.allclose(run(op, a, b, c), want, rtol=1e-15)  # a mean is a product with a third


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float32, ml_dtypes.bfloat16])
def test_clip_has_two_bounds_of_which_the_upper_wins(dtype):
    x = np.array([1, 5, 9], dtype)
    same(run("Clip", x, np.array(4, dtype), np.array(6, dtype)), np.array([4, 5, 6], dtype))
    same(run("Clip", x, np.array(7, dtype), np.array(6, dtype)), np.array([6, 6, 6], dtype))


def test_infinities_of_one_sign():
    x = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    assert run("IsInf", x, detect_negative=0).tolist() == [True, False, False, False]
    assert run("IsInf", x.astype(ml_dtypes.float8_e5m2), detect_positive=0).tolist() == [False, True, False, False]
    assert run("IsInf", x, detect_positive=0, detect_negative=0).tolist() == [False] * 4


def test_text_is_chosen_and_compared():
    x, y = np.array(["a", "b"], object), np.array(["a", "c"], object)
    assert run("Equal", x, y).tolist() == [True, False]
    assert run("Where", np.array([False, True]), x, y).tolist() == ["a", "b"]


# -- quantized values ---------------------------------------------------------------------------------------------------------------------


def test_a_value_is_rounded_to_even_before_its_zero_point_is_added():
    x = np.array([0.5, 1.5, -0.5, 300, -300], np.float32)
    same(run("QuantizeLinear", x, np.array(1, np.float32), np.array(3, np.int8)), np.array([3, 5, 3, 127, -128], np.int8))


def test_blocks_of_a_scale_may_end_in_a_short_one():
    x = np.arange(1, 6, dtype=np.uint8)[None]
    scale, zero = np.array([[1, 10, 100]], np.float32), np.array([[0, 1, 2]], np.uint8)
    want = np.array([[1, 2, 20, 30, 300]], np.float32)
    same(run("DequantizeLinear", x, scale, zero, axis=1, block_size=2), want)
    same(run("QuantizeLinear", want, scale, zero, axis=1, block_size=2), x)
    four = x.astype(ml_dtypes.uint4)
    same(run("DequantizeLinear", four, scale, zero.astype(ml_dtypes.uint4), axis=1, block_size=2), want)


@pytest.mark.parametrize("zero", [121, 200, 0])
def test_products_with_weights_of_8_bits_that_are_no_signed_ones_after_their_zero_point(zero):
    """From 0 - zero to 255 - zero."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 3, 40), np.uint8), rng.integers(0, 256, (40, 5), np.uint8)
    b[0, :2] = 0, 255
    want = (a.astype("i8") - 7) @ (b.astype("i8") - zero)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b", "x", "w"], ["y"])], "one", [helper.make_tensor_value_info("a", kind(a), a.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(v, n) for n, v in (("b", b), ("x", np.array(7, np.uint8)), ("w", np.array(zero, np.uint8)))],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    same(session(model).run({"a": a})[0], want.astype(np.int32))


def test_a_scale_for_each_row_of_an_axis():
    x = np.array([[10.0, -20.0], [10.0, -20.0]], np.float16)
    scale = np.array([2, 5], np.float16)
    same(run("QuantizeLinear", x, scale, axis=0, output_dtype=T.INT4), np.array([[5, -8], [2, -4]], ml_dtypes.int4))
    same(run("DequantizeLinear", np.array([[5, -10], [2, -4]], np.int8), scale, axis=0), x)


def test_products_of_whole_numbers_are_exact_beyond_the_digits_of_float32():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (3, 2000), np.uint8), rng.integers(-128, 128, (2000, 4), np.int8)
    rows, columns = np.array([3, 250, 0], np.uint8), np.array([-5, 0, 127, -128], np.int8)
    want = (a.astype("i8") - rows[:, None].astype("i8")) @ (b.astype("i8") - columns.astype("i8"))
    assert np.abs(want).max() > 1 << 24
    same(run("MatMulInteger", a, b, rows, columns), want.astype(np.int32))


# -- beside ONNX Runtime -------------------------------------------------------------------------------------------------------------


def runtime(op, inputs, opset=21, known=(), **attrs):
    """What ONNX Runtime and fluidx make of a node; inputs of the numbers `known` are initializers."""
    ort = pytest.importorskip("onnxruntime")
    names = [f"x{k}" for k in range(len(inputs))]
    ins = [helper.make_tensor_value_info(n, kind(a), a.shape) for k, (n, a) in enumerate(zip(names, inputs)) if k not in known]
    given = [onnx.numpy_helper.from_array(inputs[k], names[k]) for k in known]
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attrs)], "one", ins, [helper.make_empty_tensor_value_info("y")], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    feed = {n: a for k, (n, a) in enumerate(zip(names, inputs)) if k not in known}
    theirs = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
    return theirs, session(model).run(feed)[0]


# Signed weights have 7 bits in what follows: on processors without VNNI, ONNX Runtime adds pairs of products of 8 bits in 16 bits, which
# saturate.


@pytest.mark.parametrize("known", [(), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_quantized_convolutions_are_those_of_onnx_runtime(known):
    rng = np.random.default_rng(1)
    x, w = rng.integers(0, 256, (2, 4, 9, 7), np.uint8), rng.integers(-64, 64, (6, 2, 3, 3), np.int8)
    scales = rng.uniform(0.01, 0.02, 6).astype(np.float32)
    inputs = [x, np.array(0.05, np.float32), np.array(120, np.uint8), w, scales, np.zeros(6, np.int8),
              np.array(0.3, np.float32), np.array(110, np.uint8), rng.integers(-900, 900, 6).astype(np.int32)]  # fmt: skip
    theirs, ours = runtime("QLinearConv", inputs, known=known, strides=[2, 1], pads=[1, 0, 1, 2], group=2)
    # scales are multiplied in another order, so that a value half way between two may fall to either
    assert theirs.shape == ours.shape and np.abs(theirs.astype(int) - ours).max() <= 1 and (theirs == ours).mean() > 0.99


def test_products_less_zero_points_are_those_of_onnx_runtime():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 256, (2, 5, 8), np.uint8), rng.integers(-64, 64, (8, 3), np.int8)
    theirs, ours = runtime("MatMulInteger", [a, b, np.array(7, np.uint8), np.array([1, -2, 3], np.int8)], known=(1, 3))
    same(ours, theirs)
    x, w = rng.integers(0, 256, (1, 3, 8, 8), np.uint8), rng.integers(0, 256, (4, 3, 3, 3), np.uint8)
    theirs, ours = runtime("ConvInteger", [x, w, np.array(9, np.uint8), np.array(100, np.uint8)], opset=10, known=(1,), pads=[1, 1, 1, 1])
    same(ours, theirs)


@pytest.mark.parametrize("known", [(), (0, 1, 2)])
def test_dequantized_weights_are_those_of_onnx_runtime(known):
    rng = np.random.default_rng(3)
    w, scale = rng.integers(-128, 128, (4, 6), np.int8), rng.uniform(0.01, 0.02, 6).astype(np.float32)
    theirs, ours = runtime("DequantizeLinear", [w, scale, rng.integers(-9, 9, 6).astype(np.int8)], known=known, axis=-1)
    same(ours, theirs)


@pytest.mark.parametrize("op", ["Tan", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh"])
def test_functions_of_angles_are_those_of_numpy(op):
    x = np.linspace(1.01, 3, 9) if op == "Acosh" else np.linspace(-0.95, 0.95, 9)
    ours = run(op, x)
    assert np.allclose(ours, getattr(np, op.lower().replace("a", "arc", 1) if op.startswith("A") else op.lower())(x), rtol=1e-14)
