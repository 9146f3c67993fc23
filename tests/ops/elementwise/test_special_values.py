"""Activations and their gradients where exp overflows, sums cancel and factors are 0 and infinite, against float64 formulas and limits."""

import math

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder
from tests.each import each

INF = math.inf
X = [0.0, 1e-40, 1e-3, 0.5, 0.9, 1.1, 2.0, 2.9, 3.1, 5.0, 8.0, 13.0, 20.5, 50.0, 88.0, 89.0, 95.0, 103.9, 105.0, 200.0, 1e4, 1e10, 3e38]
X = np.float32([*X, *[-x for x in X], INF, -INF, math.nan])


def exp(x):
    return INF if x > 709 else math.exp(x)


def sigmoid(x):
    return exp(min(x, 0)) / (1 + exp(-abs(x)))


def softplus(x):
    return max(x, 0) + math.log1p(exp(-abs(x)))


def density(x):
    return exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def product(x, factor):
    """The limit of x * factor, where factor goes to 0 faster than x grows."""
    return 0.0 if factor == 0 else x * factor


def normal(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def tanh_gelu(x):
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def sech2(x):
    return 1 / math.cosh(x) ** 2 if abs(x) < 350 else 0.0


SCALE, ALPHA = 1.0507009873554805, 1.6732632423543772
# op, attributes: the value and the slope at x
OPS = {
    "relu": ({}, lambda x: max(x, 0), lambda x: x > 0),
    "leaky_relu": ({}, lambda x: x if x > 0 else 0.02 * x, lambda x: 1 if x > 0 else 0.02),
    "relu6": ({}, lambda x: min(max(x, 0), 6), lambda x: 0 < x < 6),
    "elu": ({"alpha": 0.5}, lambda x: x if x > 0 else 0.5 * math.expm1(x), lambda x: 1 if x > 0 else 0.5 * exp(x)),
    "selu": ({}, lambda x: SCALE * (x if x > 0 else ALPHA * math.expm1(x)), lambda x: SCALE * (1 if x > 0 else ALPHA * exp(x))),
    "sigmoid": ({}, sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "logsigmoid": ({}, lambda x: -softplus(-x), lambda x: sigmoid(-x)),
    "softplus": ({}, softplus, sigmoid),
    "tanh": ({}, math.tanh, sech2),
    "tanh_shrink": ({}, lambda x: x - math.tanh(x), lambda x: math.tanh(x) ** 2),
    "softsign": ({}, lambda x: math.copysign(1, x) if abs(x) == INF else x / (1 + abs(x)), lambda x: (1 / (1 + abs(x))) ** 2),
    "softshrink": ({}, lambda x: math.copysign(max(abs(x) - 0.5, 0), x), lambda x: abs(x) > 0.5),
    "hard_shrink": ({}, lambda x: x if abs(x) > 0.5 else 0, lambda x: abs(x) > 0.5),
    "hard_sigmoid": ({}, lambda x: min(max(0.2 * x + 0.5, 0), 1), lambda x: 0.2 * (-2.5 < x < 2.5)),
    "hard_swish": (
        {}, lambda x: product(x, min(max(x + 3, 0), 6) / 6), lambda x: 0 if x < -3 else 1 if x > 3 else (2 * x + 3) / 6
    ),
    "swish": ({}, lambda x: product(x, sigmoid(x)), lambda x: sigmoid(x) + product(x, sigmoid(x) * sigmoid(-x))),
    "swish -2": (
        {"beta": -2.0}, lambda x: product(x, sigmoid(-2 * x)),
        lambda x: sigmoid(-2 * x) - 2 * product(x, sigmoid(2 * x) * sigmoid(-2 * x)),
    ),
    "swish 0": ({"beta": 0.0}, lambda x: 0.5 * x, lambda x: 0.5),
    "gelu": ({}, lambda x: product(x, normal(x)), lambda x: normal(x) + product(x, density(x))),
    "gelu tanh": (
        {"approximate": True}, lambda x: product(x, sigmoid(tanh_gelu(x))),
        lambda x: sigmoid(tanh_gelu(x)) + product(
            x * (1 + 3 * 0.044715 * min(x * x, 1e300)) * 2 * math.sqrt(2 / math.pi), sigmoid(tanh_gelu(x)) * sigmoid(-tanh_gelu(x))
        ),
    ),
    "mish": (
        {}, lambda x: product(x, math.tanh(softplus(x))),
        lambda x: math.tanh(softplus(x)) + product(x, sech2(softplus(x)) * sigmoid(x)),
    ),
    "brelu": ({}, lambda x: min(max(x, 0), 24), lambda x: 0 < x < 24),
    "stanh": ({}, lambda x: 1.7159 * math.tanh(0.67 * x), lambda x: 1.7159 * 0.67 * sech2(0.67 * x)),
    "thresholded_relu": ({}, lambda x: x if x > 1 else 0, lambda x: x > 1),
    "exp": ({}, exp, exp),
    "square": ({}, lambda x: x * x, lambda x: 2 * x),
    "reciprocal": ({}, lambda x: 1 / x if x else math.copysign(INF, x), lambda x: -1 / (x * x) if x * x else -INF),
    "abs": ({}, abs, lambda x: math.copysign(1, x) if x else 0),
    "atan": ({}, math.atan, lambda x: 1 / (1 + x * x)),
    "asinh": ({}, math.asinh, lambda x: 1 / math.hypot(1, x)),
    "erf": ({}, math.erf, lambda x: 2 / math.sqrt(math.pi) * exp(-x * x)),
    "clip": ({"min": -1.0, "max": 2.0}, lambda x: min(max(x, -1), 2), lambda x: -1 < x < 2),
}  # fmt: skip


@pytest.fixture(params=["auto", "numpy"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", request.param)


def computed(name, attrs, x):
    """Value and gradient of an op, computed by a program."""
    main = fx.Program(name)
    with fx.program_guard(main, fx.Program()):
        v = fx.data("x", [-1], x.dtype.name)
        v.stop_gradient = False
        y = Builder(main.global_block()).emit(name, v, **attrs)
        (g,) = fx.gradients([fx.layers.reduce_sum(y)], [v])
    return fx.Executor().run(main, feed={"x": x}, fetch_list=[y, g])


@each("case", OPS)
@each("dtype", ["float32", "float64"])
def test_values_and_slopes_are_those_of_the_formula_or_its_limit(case, dtype, kernels):
    attrs, value, slope = OPS[case]
    x = X.astype(dtype)
    y, g = computed(case.split()[0], attrs, x)
    for found, formula, what in ((y, value, "value"), (g, slope, "slope")):
        with np.errstate(over="ignore"):
            want = np.array([math.nan if v != v else formula(float(v)) for v in X]).astype(dtype)
        for v, a, b in zip(X, found, want, strict=True):
            at = f"{what} of {case} at {v}: expected {b}, found {a}"
            if what == "slope" and v != v:
                continue  # a step function has slope 0 there, a smooth function NaN
            assert a == b or a != a and b != b or abs(float(a) - float(b)) <= 3e-6 * max(1, abs(b)), at
            assert not a * np.sign(b) < 0, f"{at}, of the other sign"
