"""The shapes and dtypes that layers give, with an open batch axis."""

import inspect

import numpy as np
import pytest

import fluidx as fx

L = fx.layers


@pytest.fixture(autouse=True)
def program():
    with fx.program_guard(fx.Program(), fx.Program()) as guard, fx.unique_name.guard():
        yield guard


def d(*shape, dtype="float32"):
    return fx.data(fx.unique_name.generate("in"), list(shape), dtype)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: L.fc(d(-1, 3, 4, 5), 7), (-1, 7)),
        (lambda: L.fc(d(-1, 3, 4, 5), 7, num_flatten_dims=2), (-1, 3, 7)),
        (lambda: L.fc(d(-1, 3, 5), 7, num_flatten_dims=-1), (-1, 3, 7)),
        (lambda: L.conv2d(d(-1, 3, 32, 32), 8, 3, padding=1, stride=2), (-1, 8, 16, 16)),
        (lambda: L.conv2d(d(-1, 3, 31, 30), 8, 3, padding="SAME", stride=2), (-1, 8, 16, 15)),
        (lambda: L.conv2d(d(-1, 3, 32, 32), 8, 3, padding="VALID"), (-1, 8, 30, 30)),
        (lambda: L.conv2d(d(-1, 3, 32, 32), 8, 3, padding=[1, 2, 3, 4]), (-1, 8, 33, 37)),
        (lambda: L.conv2d(d(-1, 3, 32, 32), 8, 3, padding=[[0, 0], [0, 0], [1, 2], [3, 4]]), (-1, 8, 33, 37)),
        (lambda: L.conv2d(d(-1, 32, 32, 3), 8, [3, 5], data_format="NHWC"), (-1, 30, 28, 8)),
        (lambda: L.conv2d(d(-1, 4, 8, 8), 8, 3, groups=4), (-1, 8, 6, 6)),
        (lambda: L.conv2d_transpose(d(-1, 4, 8, 8), 6, filter_size=4, stride=2, padding=1), (-1, 6, 16, 16)),
        (lambda: L.conv2d_transpose(d(-1, 4, 8, 8), 6, output_size=[17, 16], stride=2), (-1, 6, 17, 16)),
        (lambda: L.pool2d(d(-1, 4, 9, 9), 2, "max", 2), (-1, 4, 4, 4)),
        (lambda: L.pool2d(d(-1, 4, 9, 9), 2, "avg", 2, ceil_mode=True), (-1, 4, 5, 5)),
        (lambda: L.pool2d(d(-1, 4, 9, 9), global_pooling=True), (-1, 4, 1, 1)),
        (lambda: L.adaptive_pool2d(d(-1, 4, 9, 9), 3, "avg"), (-1, 4, 3, 3)),
        (lambda: L.batch_norm(d(-1, 4)), (-1, 4)),
        (lambda: L.layer_norm(d(-1, 4, 5), begin_norm_axis=2), (-1, 4, 5)),
        (lambda: L.rms_norm(d(-1, 4, 5), begin_norm_axis=2, shift=True, act="relu"), (-1, 4, 5)),
        (lambda: L.group_norm(d(-1, 4, 5, 5), 2), (-1, 4, 5, 5)),
        (lambda: L.instance_norm(d(-1, 4, 5, 5)), (-1, 4, 5, 5)),
        (lambda: L.lrn(d(-1, 4, 5, 5)), (-1, 4, 5, 5)),
        (lambda: L.l2_normalize(d(-1, 4), axis=1), (-1, 4)),
        (lambda: L.dropout(d(-1, 4), 0.5), (-1, 4)),
        (lambda: L.embedding(d(-1, 1, dtype="int64"), [10, 6]), (-1, 6)),
        (lambda: L.embedding(d(-1, 7, dtype="int64"), [10, 6], padding_idx=-1), (-1, 7, 6)),
        (lambda: L.softmax(d(-1, 4)), (-1, 4)),
        (lambda: L.log_softmax(d(-1, 4)), (-1, 4)),
        (lambda: L.one_hot(d(-1, 1, dtype="int64"), 9), (-1, 9)),
        (lambda: L.one_hot(d(-1, 5, dtype="int64"), 9), (-1, 5, 9)),
        (lambda: fx.embedding(d(-1, 1, dtype="int64"), [10, 6]), (-1, 1, 6)),
        (lambda: fx.embedding(d(-1, 7, 1, dtype="int64"), [10, 6]), (-1, 7, 1, 6)),
        (lambda: fx.embedding(d(-1, dtype="int64"), [10, 6]), (-1, 6)),
        (lambda: fx.one_hot(d(-1, 1, dtype="int64"), 9), (-1, 1, 9)),
        (lambda: fx.one_hot(d(4, dtype="int32"), 9), (4, 9)),
        (lambda: L.matmul(d(-1, 2, 3, 4), d(-1, 2, 5, 4), transpose_y=True), (-1, 2, 3, 5)),
        (lambda: L.bmm(d(-1, 3, 4), d(-1, 4, 5)), (-1, 3, 5)),
        (lambda: L.mul(d(-1, 3, 4), d(12, 5)), (-1, 5)),
        (lambda: L.label_smooth(d(-1, 4)), (-1, 4)),
        (lambda: L.pad(d(-1, 4), [0, 0, 1, 2]), (-1, 7)),
        (lambda: L.pad2d(d(-1, 4, 5, 5), [1, 0, 2, 0], "reflect"), (-1, 4, 6, 7)),
        (lambda: L.elementwise_add(d(-1, 3, 4), d(3), axis=1, act="tanh"), (-1, 3, 4)),
        (lambda: L.scale(d(-1, 3), 2.0, 1.0, act="relu"), (-1, 3)),
        (lambda: L.scale(d(-1, 3), L.fill_constant([1], "float32", 2.0), 1.0), (-1, 3)),
        (lambda: L.mean(d(-1, 3)), (1,)),
        (lambda: L.sums([d(-1, 3), d(-1, 3)]), (-1, 3)),
        (lambda: L.reduce_sum(d(-1, 3, 4), dim=[-1]), (-1, 3)),
        (lambda: L.reduce_mean(d(-1, 3, 4), dim=1, keep_dim=True), (-1, 1, 4)),
        (lambda: L.reduce_max(d(-1, 3, 4)), (1,)),
        (lambda: L.clip_by_norm(d(3, 4), 1.0), (3, 4)),
        (lambda: L.cumsum(d(-1, 3)), (-1, 3)),
        (lambda: L.prelu(d(-1, 3, 4), "channel"), (-1, 3, 4)),
        (lambda: L.prelu(d(-1, 3, 4), "element"), (-1, 3, 4)),
        (lambda: L.prelu(d(-1, 3), "all"), (-1, 3)),
        (lambda: L.soft_relu(d(-1, 3)), (-1, 3)),
        (lambda: L.concat([d(-1, 3), d(-1, 4)], axis=-1), (-1, 7)),
        (lambda: L.split(d(-1, 6), 3)[2], (-1, 2)),
        (lambda: L.split(d(-1, 6), [1, -1, 2], dim=1)[1], (-1, 3)),
        (lambda: L.stack([d(-1, 6), d(-1, 6)], axis=-1), (-1, 6, 2)),
        (lambda: L.unstack(d(3, -1), axis=0)[0], (-1,)),
        (lambda: L.reshape(d(-1, 6), [0, 2, 3]), (-1, 2, 3)),
        (lambda: L.transpose(d(-1, 2, 3), [0, 2, 1]), (-1, 3, 2)),
        (lambda: L.squeeze(d(-1, 1, 3), [1]), (-1, 3)),
        (lambda: L.unsqueeze(d(-1, 3), [1, -1]), (-1, 1, 3, 1)),
        (lambda: L.flatten(d(-1, 2, 3)), (-1, 6)),
        (lambda: L.slice(d(-1, 5), [1], [1], [-1]), (-1, 3)),
        (lambda: L.strided_slice(d(-1, 5), [1], [4], [0], [-2]), (-1, 2)),
        (lambda: L.expand(d(-1, 3), [2, 2]), (-1, 6)),
        (lambda: L.expand_as(d(1, 3), d(4, 6)), (4, 6)),
        (lambda: L.gather(d(5, 3), d(-1, dtype="int64")), (-1, 3)),
        (lambda: L.gather_nd(d(5, 3), d(-1, 2, dtype="int64")), (-1,)),
        (lambda: L.scatter(d(5, 3), d(2, dtype="int64"), d(2, 3)), (5, 3)),
        (lambda: L.where(d(-1, 3) > 0.0, d(-1, 3), d(-1, 3)), (-1, 3)),
        (lambda: L.argmax(d(-1, 3), axis=-1), (-1,)),
        (lambda: L.argsort(d(-1, 3))[1], (-1, 3)),
        (lambda: L.topk(d(-1, 5), 2)[0], (-1, 2)),
        (lambda: L.shape(d(-1, 5)), (2,)),
        (lambda: L.rank(d(-1, 5)), (1,)),
        (lambda: L.size(d(-1, 5)), (1,)),
        (lambda: L.eye(3, 4, [2]), (2, 3, 4)),
        (lambda: L.diag(np.ones(3, "float32")), (3, 3)),
        (lambda: L.range(0, 10, 3, "int32"), (4,)),
        (lambda: L.linspace(0.0, 1.0, 5), (5,)),
        (lambda: L.triu(d(-1, 3, 3)), (-1, 3, 3)),
        (lambda: L.reverse(d(-1, 3), 1), (-1, 3)),
        (lambda: L.ones_like(d(-1, 3)), (-1, 3)),
        (lambda: L.fill_constant_batch_size_like(d(-1, 3), [1, 9], "float32", 0.0), (-1, 9)),
        (lambda: L.uniform_random([2, 3]), (2, 3)),
        (lambda: L.isfinite(d(-1, 3)), (1,)),
        (lambda: L.softmax_with_cross_entropy(d(-1, 9), d(-1, 1, dtype="int64")), (-1, 1)),
        (lambda: L.softmax_with_cross_entropy(d(-1, 9), d(-1, 1, dtype="int64"), return_softmax=True)[1], (-1, 9)),
        (lambda: L.cross_entropy(d(-1, 9), d(-1, 1, dtype="int64")), (-1, 1)),
        (lambda: L.square_error_cost(d(-1, 1), d(-1, 1)), (-1, 1)),
        (lambda: L.mse_loss(d(-1, 1), d(-1, 1)), (1,)),
        (lambda: L.sigmoid_cross_entropy_with_logits(d(-1, 3), d(-1, 3)), (-1, 3)),
        (lambda: L.log_loss(d(-1, 1), d(-1, 1)), (-1, 1)),
        (lambda: L.bce_loss(d(-1, 1), d(-1, 1)), (-1, 1)),
        (lambda: L.huber_loss(d(-1, 1), d(-1, 1), 0.5), (-1, 1)),
        (lambda: L.smooth_l1(d(-1, 4), d(-1, 4)), (-1, 1)),
        (lambda: L.kldiv_loss(d(-1, 4), d(-1, 4)), (1,)),
        (lambda: L.margin_rank_loss(d(-1, 1), d(-1, 1), d(-1, 1)), (-1, 1)),
        (lambda: L.accuracy(d(-1, 9), d(-1, 1, dtype="int64"), k=5), (1,)),
        (lambda: L.logical_and(d(-1, 3) > 0.0, d(-1, 3) < 1.0), (-1, 3)),
        (lambda: fx.nets.simple_img_conv_pool(d(-1, 1, 28, 28), 20, 5, 2, 2), (-1, 20, 12, 12)),
        (lambda: fx.nets.img_conv_group(d(-1, 3, 8, 8), [4, 4], 2, pool_stride=2, conv_with_batchnorm=True,
                                        conv_batchnorm_drop_rate=[0.3, 0.0]), (-1, 4, 4, 4)),
        (lambda: fx.nets.glu(d(-1, 8)), (-1, 4)),
        (lambda: fx.nets.scaled_dot_product_attention(d(-1, 5, 8), d(-1, 6, 8), d(-1, 6, 4), 2, 0.1), (-1, 5, 4)),
        (lambda: fx.nets.scaled_dot_product_attention(d(-1, 5, 8), d(-1, 6, 8), d(-1, 6, 4), 2), (-1, 5, 4)),
        (lambda: fx.nets.scaled_dot_product_attention(d(-1, 5, 8), d(-1, 6, 8), d(-1, 6, 4)), (-1, 5, 4)),
        (lambda: L.scaled_dot_product_attention(d(-1, 6, 5, 8), d(-1, 2, 7, 8), d(-1, 2, 7, 3)), (-1, 6, 5, 3)),
        (lambda: L.scaled_dot_product_attention(d(-1, -1, 8), d(-1, 7, 8), d(-1, 7, 3), d(-1, 1, 7, dtype="bool"), True), (-1, -1, 3)),
    ],
)  # fmt: skip
def test_a_layer_gives_the_shape_it_says(layer, shape):
    assert layer().shape == shape


def test_every_activation_keeps_shape_and_dtype():
    from fluidx.layers.helper import ACTIVATIONS

    x = d(-1, 3)
    for act in ACTIVATIONS:
        y = L.scale(x, act=act)
        assert (y.shape, y.dtype) == ((-1, 3), "float32"), act
    unary = [name for name in L.activation.__all__ if list(inspect.signature(getattr(L, name)).parameters) == ["x", "name"]]
    assert {"abs", "erf", "relu", "tanh_shrink"} < set(unary)
    for name in unary:
        assert getattr(L, name)(x).shape == (-1, 3), name


def test_every_public_layer_is_there_and_documented():
    for name in L.__all__:
        assert getattr(L, name).__doc__, name


def test_as_many_groups_as_channels_make_a_depthwise_convolution():
    y = L.conv2d(d(-1, 4, 8, 8), 4, 3, groups=4)
    assert [op.type for op in y.block.ops][0] == "depthwise_conv2d"


def test_data_puts_a_batch_axis_where_fluid_does():
    assert L.data("a", [3]).shape == (-1, 3)
    assert L.data("b", [3], append_batch_size=False).shape == (3,)
    assert L.data("c", [-1, 3]).shape == (-1, 3)
    assert fx.data("d", [None, 3]).shape == (-1, 3)
    assert fx.data("e", [3], "int64").stop_gradient


def test_results_can_be_directed_into_existing_variables():
    i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 9)
    flag = L.less_than(i, n)
    assert L.less_than(i, n, cond=flag).name == flag.name
    assert L.increment(i).name == i.name
    assert L.increment(i, in_place=False).name != i.name
    assert L.assign(np.array([3]), output=i).name == i.name
