"""Programs with quantized values compute in 8 bits: what is joined, and that the integers are those of the definition."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.scope import Scope
from fluidx.rewrite.quantized import join_quantized
from fluidx.rewrite.quantized_values import Steps

# scales are powers of two and sums are small, so floats hold every value exactly, and results are compared with ==
WEIGHTS, X_SCALE, Y_SCALE = 2.0**-4, 2.0**-3, 2.0**-1


def program(write):
    """The program that `write` writes, and the values of its parameters."""
    main, startup, scope = fx.Program("net"), fx.Program(), Scope()
    main.random_seed = startup.random_seed = 3
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x, y = write(main.global_block())
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    rng = np.random.default_rng(0)
    for name, a in scope.arrays.items():
        values = rng.integers(-127, 128, a.shape) * WEIGHTS if a.ndim > 1 else rng.integers(-50, 50, a.shape) * 2.0**-5
        scope.set(name, values.astype(a.dtype))
    return main, scope, x, y


def rounded(b, x, scale, zero=0, lowest=0.0, highest=255.0):
    like = b.program.current_block()
    build = fx.ir.Builder(like)
    s, z = (build.fill_constant(shape=(), dtype="float32", value=float(v)) for v in (scale, zero))
    return build.fake_quantize(x, s, z, lowest=lowest, highest=highest)


def joined(write, *feeds):
    """The joined program's operators; checks that it gives what the program gives, for each feed."""
    main, scope, x, y = program(write)
    found = join_quantized(main, scope.arrays.__getitem__, {y.name})
    own = Scope()
    for name, array in {**scope.arrays, **found.values}.items():
        own.set(name, array)
    exe = fx.Executor(fx.CPUPlace())
    for fed in feeds:
        (want,), (got,) = (exe.run(p, feed={x.name: fed}, fetch_list=[y.name], scope=s) for p, s in ((main, scope), (found.program, own)))
        assert np.array_equal(want, got), np.abs(want - got).max()
        assert np.ptp(want) > 0, "the test shows something"
    return [op.type for op in found.program.ops if op.type not in ("fill_constant", "assign_value")]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def weight(b, shape):
    w = fx.layers.create_parameter(shape, "float32")
    return rounded(b, w, WEIGHTS, 0, -128.0, 127.0)


def test_a_product_with_bias_and_relu_is_rounded_at_once():
    def write(b):
        x = fx.data("x", [-1, 70], "float32")
        y = fx.layers.matmul(rounded(b, x, X_SCALE, 128), weight(b, [70, 33]))
        y = fx.layers.relu(fx.layers.elementwise_add(y, fx.layers.create_parameter([33], "float32", is_bias=True)))
        return x, rounded(b, y, Y_SCALE, 7)

    assert joined(write, normal(5, 70), normal(1, 70)) == ["quantize_linear", "quantized_matmul", "dequantize_linear"]


def test_a_product_that_is_not_quantized_is_a_float():
    def write(b):
        x = fx.data("x", [-1, 3, 8], "float32")
        y = fx.layers.matmul(rounded(b, x, X_SCALE, -5, -128.0, 127.0), weight(b, [5, 8]), transpose_y=True)
        return x, fx.layers.elementwise_add(y, fx.layers.create_parameter([5], "float32", is_bias=True))

    assert joined(write, normal(2, 3, 8)) == ["quantize_linear", "quantized_matmul"]


@pytest.mark.parametrize("rows", [1, 40])
def test_what_follows_a_product_in_float_is_computed_with_it(rows):
    def write(b):
        x = fx.data("x", [-1, 70], "float32")
        y = fx.layers.matmul(rounded(b, x, X_SCALE, 128), weight(b, [70, 300]))
        y = fx.layers.elementwise_add(y, fx.layers.create_parameter([300], "float32", is_bias=True))
        return x, fx.layers.relu(fx.layers.scale(y, 0.5))

    assert joined(write, normal(rows, 70)) == ["quantize_linear", "quantized_matmul", "scale", "relu"]


def conv(b, x, filters, size=3, stride=1, groups=1):
    y = fx.ir.Builder(b.program.current_block()).conv2d(
        x, weight(b, [filters, x.shape[1] // groups, size, size]), strides=(stride, stride), paddings=(size // 2, size // 2), groups=groups
    )
    return fx.layers.elementwise_add(y, fx.layers.create_parameter([filters], "float32", is_bias=True), axis=1)


def test_a_residual_block_has_integers_alone():
    def write(b):
        x = fx.data("x", [-1, 3, 9, 8], "float32")
        a = rounded(b, fx.layers.relu(conv(b, rounded(b, x, X_SCALE, 128), 16)), Y_SCALE)
        a = rounded(b, fx.layers.pool2d(a, 3, "max", 2, 1), Y_SCALE)
        c = rounded(b, fx.layers.relu(conv(b, a, 16, 1)), 2.0)
        c = rounded(b, conv(b, c, 16), 4.0, 100)
        return x, rounded(b, fx.layers.relu(fx.layers.elementwise_add(c, a)), 4.0)

    found = joined(write, normal(2, 3, 9, 8))
    turned = ["transpose", "assign"]
    middle = ["quantized_conv", "quantized_max_pool", *["quantized_conv"] * 2]
    assert found == ["quantize_linear", *turned, *middle, *turned, "dequantize_linear"]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions_in_groups(groups):
    def write(b):
        x = fx.data("x", [-1, 8, 6, 5], "float32")
        return x, rounded(b, conv(b, rounded(b, x, X_SCALE, 3), 8, 3, 2, groups), Y_SCALE, 128)

    assert "quantized_conv" in joined(write, normal(2, 8, 6, 5))


def test_a_function_of_a_quantized_value_is_a_table():
    def write(b):
        x = fx.data("x", [-1, 40], "float32")
        a = rounded(b, x, 2.0**-4, 100)
        return x, rounded(b, fx.layers.elementwise_mul(a, fx.layers.sigmoid(a)), 2.0**-5, 9)

    assert joined(write, normal(3, 40)) == ["quantize_linear", "quantized_lookup", "dequantize_linear"]


def test_sums_reshapes_and_equal_steps_stay_integers():
    def write(b):
        x = fx.data("x", [-1, 4, 6], "float32")
        a, c = rounded(b, x, X_SCALE, 100), rounded(b, fx.layers.scale(x, -0.5), X_SCALE, 90)
        total = rounded(b, fx.layers.elementwise_add(a, c), 2.0**-2, 128)
        turned = fx.layers.transpose(fx.layers.reshape(total, [0, 4, 2, 3]), [0, 2, 1, 3])
        return x, rounded(b, turned, 2.0**-2, 128)

    found = joined(write, normal(2, 4, 6))
    assert found == ["quantize_linear", "scale", "quantize_linear", "quantized_sum", "reshape", "transpose", "dequantize_linear"]


def test_what_8_bits_do_not_hold_stays():
    def write(b):
        x = fx.data("x", [-1, 4], "float32")
        return x, fx.layers.matmul(rounded(b, x, X_SCALE, 0, 0.0, 65535.0), weight(b, [4, 3]))

    assert joined(write, normal(2, 4)) == ["fake_quantize", "fake_quantize", "matmul"]


def test_a_program_without_quantized_values_is_the_same():
    main, scope, x, y = program(lambda b: (x := fx.data("x", [-1, 4], "float32"), fx.layers.relu(x)))
    assert join_quantized(main, scope.arrays.__getitem__, {y.name}).program is main


def test_bounds_become_integers():
    steps = Steps(0.5, 10, 0, 255)
    assert steps.between(0.0, np.inf) == (10, 255)
    assert steps.between(-np.inf, 6.0) == (0, 22)
    assert steps.between(-1.25, 1.25) == (8, 12)  # ties to even
