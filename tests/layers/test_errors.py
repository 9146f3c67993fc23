"""A layer called wrongly says what was expected, what was found, and where it was written."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
HERE = f'written at "{__file__}", line '


@pytest.fixture(autouse=True)
def program():
    with fx.program_guard(fx.Program("main"), fx.Program("startup")), fx.unique_name.guard():
        yield


def x(*shape, dtype="float32"):
    return fx.data("x", list(shape or (-1, 8)), dtype)


CASES = [
    (lambda: L.fc(x(), 4, act="rellu"), "layers.fc: unknown act 'rellu'; did you mean 'relu'?"),
    (lambda: L.fc(x(), 4.0), "layers.fc: size must be an integer, got float: 4.0"),
    (lambda: L.fc(x(), True), "layers.fc: size must be an integer, got bool: True"),
    (lambda: L.fc(x(), 0), "layers.fc: size must be 1 or more, got 0"),
    (lambda: L.fc(np.ones((2, 3)), 4), "layers.fc: input must be a Variable, got ndarray"),
    (lambda: L.fc(x(-1, -1), 4), "layers.fc: axis 1 of input must be known; variable 'x' has shape [-1, -1]"),
    (lambda: L.fc(x(), 4, num_flatten_dims=2), "layers.fc: num_flatten_dims is 2; variable 'x' with shape [-1, 8] allows 1 to 1"),
    (lambda: L.fc(x(), 4, param_attr=False), "layers.fc: param_attr=False leaves no weight"),
    (lambda: L.fc([], 4), "layers.fc: input is an empty list; it needs at least one Variable"),
    (lambda: L.fc(x(), 4, param_attr=3.5), "must be a ParamAttr, a name, an initializer, None or False, got float: 3.5"),
    (lambda: L.fc(L.fc(x(), 4, param_attr="w"), 4, param_attr="w"),
     "layers.fc: parameter 'w' is already declared as f32[8,4], not f32[4,4]; choose another name"),
    (lambda: L.pool2d(x(-1, 1, 4, 4), 2, "mean"), "layers.pool2d: unknown pool_type 'mean'; there are: avg, max"),
    (lambda: L.pool2d(x(-1, 1, 4, 4)), "layers.pool2d: give pool_size, or global_pooling=True for one window over the whole image"),
    (lambda: L.conv2d(x(), 4, 3), "layers.conv2d: input must have 4 axes; variable 'x' has shape [-1, 8]"),
    (lambda: L.conv2d(x(-1, 3, 8, 8), 4, 3, groups=2), "layers.conv2d: 3 channels and 4 filters do not both divide into 2 groups"),
    (lambda: L.conv2d(x(-1, 3, 8, 8), 4, [3, 3, 3]), "layers.conv2d: filter_size must be an integer or 2 integers, got [3, 3, 3]"),
    (lambda: L.conv2d(x(-1, 3, 8, 8), 4, 3, padding="SAM"), "layers.conv2d: unknown padding 'SAM'; did you mean 'SAME'?"),
    (lambda: L.conv2d_transpose(x(-1, 3, 8, 8), 4), "layers.conv2d_transpose: give filter_size or output_size"),
    (lambda: L.adaptive_pool2d(x(-1, 1, 4, 4), 2, require_index=True), "layers.adaptive_pool2d: require_index=True is not supported"),
    (lambda: L.dropout(x(), 1.5), "layers.dropout: dropout_prob must be from 0 to 1, got 1.5"),
    (lambda: L.dropout(x(), 0.5, dropout_implementation="upscale"), "did you mean 'upscale_in_train'?"),
    (lambda: fx.embedding(x(), [10, 4]), "embedding: input must hold int64 or int32 ids; variable 'x' is float32"),
    (lambda: L.embedding(x(), [10, 4]), "layers.embedding: input must hold int64 or int32 ids; variable 'x' is float32"),
    (lambda: L.cross_entropy(x(), x()), "layers.cross_entropy: label must hold int64 or int32 class indices; variable 'x' is float32"),
    (lambda: L.reshape(x(), [-1, -1]), "layers.reshape: shape [-1, -1] has more than one -1"),
    (lambda: L.transpose(x(), [0, 0]), "layers.transpose: perm [0, 0] is not an order of the 2 axes of variable 'x'"),
    (lambda: L.transpose(x(), [0, 2]), "layers.transpose: perm is 2; variable 'x' with shape [-1, 8] allows -2 to 1"),
    (lambda: L.reduce_sum(x(), dim=[1, -1]), "layers.reduce_sum: dim [1, -1] names an axis twice"),
    (lambda: L.split(x(), 3), "layers.split: axis 1 of variable 'x' is 8, which does not divide into 3 parts"),
    (lambda: L.split(x(), [3, 4]), "layers.split: sections [3, 4] add up to 7; axis 1 of variable 'x' is 8"),
    (lambda: L.topk(x(), 9), "layers.top_k: k is 9, the last axis of variable 'x' has 8 elements"),
    (lambda: L.clip(x(), 2, 1), "layers.clip: min is 2.0, above max, which is 1.0"),
    (lambda: L.where(x() > 0.0, x()), "layers.where: give both x and y, or neither of them for the positions of true elements"),
    (lambda: L.data("x", [3], dtype="float33"), "unknown dtype 'float33'; did you mean 'float32'?"),
    (lambda: (x(), fx.data("x", [3])), "variable 'x' is already declared as f32[-1,8], not f32[3]; choose another name"),
    (lambda: fx.data("y", 3), "data: shape must be a list of integers, got int: 3"),
    (lambda: L.data("y", [3], lod_level=1), "layers.data: lod_level=1 is not supported; pad the sequences to one length"),
    (lambda: L.elementwise_add(x(), L.ones([3], "float32")), "in elementwise_add(x, "),
    (lambda: fx.ParamAttr(regularizer=("l3", 1)), "ParamAttr: unknown regularizer 'l3'; there are: l1, l2"),
    (lambda: fx.ParamAttr(initializer=0.5), "ParamAttr: initializer must come from fluidx.initializer, got float: 0.5"),
    (lambda: fx.initializer.Uniform(1, 0), "Uniform: low is 1.0, above high, which is 0.0"),
    (lambda: fx.initializer.Constant("1"), "Constant: value must be a number, got str: '1'"),
    (lambda: L.While(x()), "layers.While: cond must be a bool variable of one element; variable 'x' is f32[-1,8]"),
    (lambda: L.Print(x(), print_phase="front"), "layers.print: unknown print_phase 'front'"),
    (lambda: L.scaled_dot_product_attention(x(), x(), x(), [[0]]), "mask must be a Variable, got list: [[0]]; layers.assign makes one"),
    (lambda: L.scaled_dot_product_attention(*[x(-1, 2, -1)] * 3), "axis -1 of q must be known; variable 'x' has shape [-1, 2, -1]"),
    (lambda: L.scaled_dot_product_attention(*[x(8)] * 3), "q must have 2 axes or more; variable 'x' has shape [8]"),
    (lambda: L.scaled_dot_product_attention(*[x(-1, 2, 6)] * 3, scale="1"), "scale must be a number, got str: '1'"),
    (lambda: fx.nets.scaled_dot_product_attention(x(-1, 2, 6), x(-1, 2, 6), x(-1, 2, 6), 4), "do not both divide into 4 heads"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", CASES, ids=[m[:50] for _, m in CASES])
def test_a_wrong_argument_is_named_with_the_users_line(call, message):
    with pytest.raises(fx.ProgramError) as error:
        call()
    assert message in str(error.value)
    assert HERE in str(error.value)
    assert f"line {call.__code__.co_firstlineno}" in str(error.value) or f"line {call.__code__.co_firstlineno + 1}" in str(error.value)


def test_a_variable_of_another_program_is_refused():
    a = x()
    with fx.program_guard(fx.Program("other"), fx.Program()):
        with pytest.raises(fx.ProgramError, match="variable 'x' belongs to program main, but layers now write into program other"):
            L.fc(a, 4)


def test_a_layer_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="fluidx.layers has no layer 'conv2dd'; did you mean 'conv2d'?"):
        _ = L.conv2dd
    with pytest.raises(AttributeError, match="fluidx has no 'Executer'; did you mean 'Executor'?"):
        _ = fx.Executer
