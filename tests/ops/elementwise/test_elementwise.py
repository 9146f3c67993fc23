"""Elementwise ops: broadcasting of operands, integer division, open axes, and refused arguments."""

import math

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import OPS, Builder, Program, ProgramError


def test_axis_aligns_operands_as_in_fluid():
    a, b = np.zeros((2, 3, 4), "float32"), np.float32([1, 2, 3])
    target = np.empty_like(a)
    OPS["elementwise_add"].kernel(np, a, b, out=target, axis=1)
    assert target[1, :, 3].tolist() == [1, 2, 3]


def test_integer_division_rounds_towards_zero_and_floordiv_down():
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    target = np.empty_like(a)
    OPS["elementwise_div"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [3, -3, -3, 3]
    OPS["elementwise_floordiv"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [3, -4, -4, 3]
    OPS["elementwise_mod"].kernel(np, a, b, out=target, axis=-1)
    assert target.tolist() == [1, 1, -1, -1]


def written(*types, op="elementwise_add", **attrs):
    block = Program("p").global_block()
    made = [block.create_var(f"x{k}", shape, dtype, is_data=True) for k, (dtype, shape) in enumerate(types)]
    return Builder(block).emit(op, *made, **attrs)


def test_open_axes_broadcast():
    assert written(("float32", (-1, 4)), ("float32", (4,))).shape == (-1, 4)
    assert written(("float32", (-1, 1)), ("float32", (1, 4))).shape == (-1, 4)
    assert written(("float32", (-1,)), ("float32", (8,))).shape == (8,)


@pytest.mark.parametrize(
    "types, attrs, said",
    [
        ([("float32", (2, 3)), ("float32", (4,))], {}, r"shapes \[2, 3\] and \[4\] do not broadcast: 3 against 4"),
        ([("float32", (2, 3)), ("int64", (3,))], {}, "X is float32 and Y is int64; cast one of them"),
        ([("float32", (2, 3)), ("float32", (3, 4))], {"axis": 1}, "shapes|does not fit"),
        ([("float32", (2, 3, 4)), ("float32", (4, 5))], {"axis": 2}, "with axis 2, Y of shape .* does not fit into X of shape"),
        ([("bool", (2,)), ("bool", (2,))], {}, "expected a number, found bool; cast it first"),
    ],
)
def test_operands_that_do_not_broadcast_are_refused(types, attrs, said):
    with pytest.raises(ProgramError, match=said):
        written(*types, **attrs)


@pytest.mark.parametrize(
    "op, dtype, attrs, said",
    [
        ("clip", "uint8", {"min": -1000.0, "max": 1.0}, "min is -1000.0, but uint8 holds integers from 0 to 255; use one"),
        ("clip", "int8", {"min": -128.0, "max": 128.0}, "max is 128.0, but int8 holds integers from -128 to 127"),
        ("clip", "int32", {"min": 0.5, "max": 2.0}, "min is 0.5, but int32 holds"),
        ("clip", "int64", {"min": 0.0, "max": math.inf}, "max is inf, but int64 holds"),
        ("increment", "int64", {"step": math.nan}, "step is nan, but int64 holds"),
        ("increment", "uint8", {"step": -1.0}, "step is -1.0, but uint8 holds"),
        ("scale", "uint8", {"bias": 256.0}, "bias is 256.0, but uint8 holds"),
        ("scale", "int32", {"scale": math.inf}, "scale is inf, but int32 holds"),
    ],
)
def test_numbers_outside_an_integer_dtype_are_refused(op, dtype, attrs, said):
    with pytest.raises(ProgramError, match=f"op {op}: {said}"):
        written((dtype, (4,)), op=op, **attrs)


@pytest.mark.parametrize(
    "op, dtype, attrs, made",
    [
        ("clip", "uint8", {"min": 1.0, "max": 255.0}, [1, 1, 2, 3]),
        ("clip", "int8", {"min": -128.0, "max": 2.0}, [0, 1, 2, 2]),
        ("clip", "float16", {"min": -1e30, "max": 1.5}, [0, 1, 1.5, 1.5]),
        ("increment", "int32", {"step": -1.0}, [-1, 0, 1, 2]),
        ("scale", "uint8", {"scale": -1.0, "bias": 3.0}, [3, 2, 1, 0]),  # numbers wrap around, like unsigned integers
        ("scale", "uint8", {"scale": 0.5}, [0, 0, 1, 1]),  # computed in float64 and rounded towards zero
    ],
)
def test_numbers_inside_a_dtype_are_accepted(run_op, op, dtype, attrs, made):
    assert written((dtype, (4,)), op=op, **attrs).dtype == dtype
    assert run_op(op, np.arange(4).astype(dtype), **attrs).tolist() == made


def test_the_gradient_of_a_sum_of_equal_shapes_is_the_gradient_itself():
    from fluidx.backward import gradients

    program = Program("p")
    block = program.global_block()
    a, b, w = (block.create_var(n, (2, 3), "float32", is_data=True) for n in "abw")
    c = Builder(block).elementwise_add(a, b)
    gradients([c], [a, b], [w])
    assert not {op.type for op in program.ops} & {"reduce_to", "elementwise_mul", "scale"}


@pytest.mark.parametrize("dtype, large", [("float16", 2048), ("bfloat16", 256)])
def test_several_terms_of_16_bits_are_added_in_32(dtype, large):
    # one more than `large` is not representable: added one by one in that dtype, the small terms would be lost
    def summed(*terms):
        main = fx.Program()
        with fx.program_guard(main, fx.Program()):
            total = fx.layers.sums([fx.layers.cast(fx.data(f"x{k}", [-1], "float32"), dtype) for k in range(len(terms))])
            out = fx.layers.cast(total, "float32")
        return fx.Executor().run(main, feed={f"x{k}": np.array([t], "float32") for k, t in enumerate(terms)}, fetch_list=[out])[0]

    assert summed(large, 1.0, 1.0, 1.0, 1.0) == large + 4
    assert summed(large, 1.0) == large  # half way: to even
