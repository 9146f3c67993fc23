"""InferenceTranspiler: batch normalization by fixed statistics computed into the parameters before it."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope

L = fx.layers
RNG = np.random.default_rng(3)


def ready(startup):
    """A scope in which every statistic is one that training could have left."""
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    for name, a in scope.arrays.items():
        if name.startswith("batch_norm"):
            scope.set(name, RNG.uniform(0.5, 1.5, a.shape).astype(a.dtype))
        elif a.ndim == 1:
            scope.set(name, RNG.standard_normal(a.shape).astype(a.dtype))
    return scope


def folded_like(write, shape, kinds, dtype="float64", tolerance=1e-12):
    """Fold what `write` writes over images: these operators, and values as before but for rounding (1e-12 is thousands of float64's)."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        y = write(fx.data("x", [-1, *shape], dtype))
    main, scope = main.clone(for_test=True), ready(startup)
    feed = {"x": RNG.standard_normal((3, *shape)).astype(dtype)}
    (before,) = fx.Executor().run(main, feed=feed, fetch_list=[y], scope=scope)
    t, version = fx.InferenceTranspiler(), main.version
    assert t.transpile(main, fx.CPUPlace(), scope) is None
    assert [op.type for op in main.ops] == kinds and main.version > version
    (after,) = fx.Executor().run(main, feed=feed, fetch_list=[y.name], scope=scope)
    np.testing.assert_allclose(after, before, tolerance, tolerance)
    assert fx.Program.parse_from_string(str(main)) == main
    return main, scope, t


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_takes_the_normalization_in(layout, bias, groups):
    def write(x):
        h = L.conv2d(x, 8, 3, padding=1, groups=groups, bias_attr=None if bias else False, data_format=layout)
        return L.batch_norm(h, act="relu", epsilon=1e-3, data_layout=layout)

    kind = "depthwise_conv2d" if groups == 4 else "conv2d"
    main, scope, t = folded_like(write, (4, 5, 6) if layout == "NCHW" else (5, 6, 4), [kind, "elementwise_add", "relu"])
    assert t.explain() == []
    assert [p.name for p in main.all_parameters()] == ["conv2d_0.w_0", "conv2d_0.b_0" if bias else "batch_norm_0.b_0"]


def test_products_take_it_in_too():
    folded_like(lambda x: L.batch_norm(L.fc(x, 6)), (5,), ["mul", "elementwise_add"])
    folded_like(lambda x: L.batch_norm(L.fc(x, 6, bias_attr=False)), (5, 2), ["mul", "elementwise_add"])
    folded_like(
        lambda x: L.batch_norm(L.matmul(x, L.create_parameter([6, 5], "float64"), transpose_y=True)), (5,), ["matmul", "elementwise_add"]
    )


def test_a_residual_net_keeps_its_values_in_float32():
    def write(x):
        for _ in range(3):
            h = L.batch_norm(L.conv2d(x, 4, 3, padding=1, bias_attr=False), act="relu")
            x = L.relu(x + L.batch_norm(L.conv2d(h, 4, 3, padding=1)))
        return x

    kinds = ["conv2d", "elementwise_add", "relu", "conv2d", "elementwise_add", "elementwise_add", "relu"] * 3
    folded_like(write, (4, 6, 6), kinds, "float32", 2e-5)  # a few roundings of float32 in each of 12 layers


def test_the_new_filters_are_those_worked_out_by_hand():
    main, startup = fx.Program(), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        L.batch_norm(L.conv2d(fx.data("x", [-1, 1, 1, 1], "float64"), 2, 1), epsilon=0.0, is_test=True)
    scope = Scope()
    for name, value in {
        "conv2d_0.w_0": [[[[3.0]]], [[[5.0]]]], "conv2d_0.b_0": [1.0, 2.0], "batch_norm_0.w_0": [2.0, 10.0], "batch_norm_0.b_0": [7.0, 0.5],
        "batch_norm_0.w_1": [4.0, -1.0], "batch_norm_0.w_2": [4.0, 25.0],
    }.items():  # fmt: skip
        scope.set(name, np.array(value))
    fx.InferenceTranspiler().transpile(main, None, scope)
    assert scope.get("conv2d_0.w_0").ravel().tolist() == [3.0, 10.0]  # times scale / sqrt(variance): 2 / 2 and 10 / 5
    assert scope.get("conv2d_0.b_0").tolist() == [1 - 4 + 7.0, 2 * (2 + 1) + 0.5]


def test_what_cannot_be_folded_is_left_with_a_reason():
    w = fx.ParamAttr(name="shared")

    def write(x):
        a = L.conv2d(x, 4, 1, bias_attr=False)
        b = L.batch_norm(a) + a
        b = L.batch_norm(L.relu(b))
        b = L.batch_norm(L.conv2d(b, 4, 1, param_attr=w, bias_attr=False))
        return L.batch_norm(L.conv2d(b, 4, 1, param_attr=w, bias_attr=False))

    norm, conv = "batch_norm", "conv2d"
    _, _, t = folded_like(write, (4, 3, 3), [conv, norm, "elementwise_add", "relu", norm, conv, norm, conv, norm])
    reasons = [line.rpartition(": ")[2] for line in t.explain()]
    assert reasons == [
        "%conv2d_0.tmp_0 is read elsewhere", "op relu has no parameter with an axis for the channels", "%shared is read elsewhere",
        "%shared is read elsewhere",
    ]  # fmt: skip
    assert t.explain()[0].startswith("kept %batch_norm_0.tmp_0") or t.explain()[0].startswith("kept [%batch_norm_0.tmp_0")


def test_a_program_that_trains_is_refused():
    x = fx.data("x", [-1, 3, 4, 4])
    loss = L.mean(L.batch_norm(L.conv2d(x, 2, 3)))
    main = fx.default_main_program()
    with pytest.raises(
        fx.ProgramError, match=r"program main trains: op batch_norm takes statistics over the batch; .*clone\(for_test=True\)"
    ):
        fx.InferenceTranspiler().transpile(main)
    fx.optimizer.SGD(0.1).minimize(loss)
    test = main.clone(for_test=True)
    with pytest.raises(fx.ProgramError, match=r"trains: op batch_norm takes"):
        fx.InferenceTranspiler().transpile(main)
    with pytest.raises(fx.NotInitializedError, match="'batch_norm_0.w_0' has no value in this scope; run the startup program"):
        fx.InferenceTranspiler().transpile(test)
    fx.Executor().run(fx.default_startup_program())
    fx.InferenceTranspiler().transpile(test)
    assert [op.type for op in test.ops] == ["conv2d", "elementwise_add", "mean"]
    with pytest.raises(fx.ProgramError, match="program must be a Program, got str"):
        fx.InferenceTranspiler().transpile("main")
