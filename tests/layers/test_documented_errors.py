"""Each error that the docstring of a layer names, where it says so."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import layers


def x(*shape, dtype="float32"):
    return fx.data(fx.unique_name.generate("x"), list(shape), dtype)


WRONG = {
    "fc, open size": lambda: layers.fc(x(2, -1), 3),
    "fc, no axis": lambda: layers.fc(x(2, 3), 3, num_flatten_dims=2),
    "embedding, dtype": lambda: layers.embedding(x(2, 1), [9, 3]),
    "embedding, padding_idx": lambda: layers.embedding(x(2, 1, dtype="int64"), [9, 3], padding_idx=9),
    "matmul, k": lambda: layers.matmul(x(2, 3), x(4, 2)),
    "matmul, other axes": lambda: layers.matmul(x(2, 3, 3), x(4, 3, 3)),
    "matmul, dtypes": lambda: layers.matmul(x(2, 3), x(3, 2, dtype="float64")),
    "mul": lambda: layers.mul(x(2, 3), x(4, 2)),
    "bmm, axes": lambda: layers.bmm(x(2, 3), x(3, 2)),
    "bmm, sizes": lambda: layers.bmm(x(2, 3, 4), x(2, 3, 4)),
    "dropout": lambda: layers.dropout(x(2, 3), 1.5),
    "softmax": lambda: layers.softmax(x(2, 3), axis=2),
    "log_softmax": lambda: layers.log_softmax(x(2, 3), axis=2),
    "one_hot": lambda: layers.one_hot(x(2, 1), 3),
    "pad": lambda: layers.pad(x(2, 3), [1, 1]),
    "conv2d, axes": lambda: layers.conv2d(x(2, 3, 8), 4, 3),
    "conv2d, channels": lambda: layers.conv2d(x(2, -1, 8, 8), 4, 3),
    "conv2d, groups": lambda: layers.conv2d(x(2, 3, 8, 8), 4, 3, groups=2),
    "conv2d_transpose, no size": lambda: layers.conv2d_transpose(x(2, 3, 8, 8), 4),
    "conv2d_transpose, out of reach": lambda: layers.conv2d_transpose(x(2, 3, 8, 8), 4, output_size=3),
    "pool2d, axes": lambda: layers.pool2d(x(2, 3, 8), 2),
    "pool2d, no size": lambda: layers.pool2d(x(2, 3, 8, 8)),
    "batch_norm, channels": lambda: layers.batch_norm(x(2, -1, 8, 8)),
    "batch_norm, no bias": lambda: layers.batch_norm(x(2, 3, 8, 8), bias_attr=False),
    "layer_norm": lambda: layers.layer_norm(x(2, -1)),
    "group_norm": lambda: layers.group_norm(x(2, 3, 8, 8), 2),
    "cross_entropy, dtype": lambda: layers.cross_entropy(x(2, 3), x(2, 1)),
    "cross_entropy, shape": lambda: layers.cross_entropy(x(2, 3), x(3, 1, dtype="int64")),
    "softmax_with_cross_entropy, dtype": lambda: layers.softmax_with_cross_entropy(x(2, 3), x(2, 1)),
    "softmax_with_cross_entropy, shape": lambda: layers.softmax_with_cross_entropy(x(2, 3), x(3, 1, dtype="int64")),
    "square_error_cost": lambda: layers.square_error_cost(x(2, 3), x(2, 2)),
    "sigmoid_cross_entropy_with_logits": lambda: layers.sigmoid_cross_entropy_with_logits(x(2, 3), x(2, 2)),
    "mean": lambda: layers.mean(x(2, 3, dtype="int32")),
    "elementwise_add, shapes": lambda: layers.elementwise_add(x(2, 3), x(2)),
    "elementwise_add, dtypes": lambda: layers.elementwise_add(x(2, 3), x(3, dtype="float64")),
    "scale": lambda: layers.scale(x(2, 3, dtype="bool"), 2.0),
    "clip": lambda: layers.clip(x(2, 3), 1.0, 0.0),
    "reduce_sum, axis": lambda: layers.reduce_sum(x(2, 3), dim=2),
    "reduce_sum, twice": lambda: layers.reduce_sum(x(2, 3), dim=[1, -1]),
    "concat, sizes": lambda: layers.concat([x(2, 3), x(3, 3)], axis=1),
    "concat, dtypes": lambda: layers.concat([x(2, 3), x(2, 3, dtype="int32")]),
    "split, number": lambda: layers.split(x(2, 6), 4),
    "split, sizes": lambda: layers.split(x(2, 6), [1, 2]),
    "transpose": lambda: layers.transpose(x(2, 6), [0, 0]),
    "squeeze": lambda: layers.squeeze(x(2, 6), [1]),
    "unsqueeze": lambda: layers.unsqueeze(x(2, 6), [4]),
    "stack, shapes": lambda: layers.stack([x(2, 3), x(2, 2)]),
    "stack, dtypes": lambda: layers.stack([x(2, 3), x(2, 3, dtype="int32")]),
    "slice, axis": lambda: layers.slice(x(2, 3), [2], [0], [1]),
    "slice, lengths": lambda: layers.slice(x(2, 3), [0, 1], [0], [1, 1]),
    "gather": lambda: layers.gather(x(2, 3), x(2)),
    "cast": lambda: layers.cast(x(2, 3), "float31"),
    "fill_constant": lambda: layers.fill_constant([2], "float32", None),
    "topk": lambda: layers.topk(x(2, 3), 4),
    "argmax": lambda: layers.argmax(x(2, 3), axis=2),
    "expand": lambda: layers.expand(x(2, 3), [2]),
    "flatten": lambda: layers.flatten(x(2, 3), axis=3),
    "reshape, elements": lambda: layers.reshape(x(2, 3), [4, 2]),
    "reshape, two": lambda: layers.reshape(x(2, 3), [-1, -1]),
    "accuracy": lambda: layers.accuracy(x(2, 3), x(2, 1, dtype="int64"), k=4),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_docstring_says_raises(case):
    assert "Raises ProgramError" in getattr(layers, case.partition(",")[0]).__doc__
    with pytest.raises(fx.ProgramError):
        WRONG[case]()


@pytest.mark.parametrize("layer", [lambda i: layers.one_hot(i, 3), lambda i: layers.gather(x(3, 2), i)], ids=["one_hot", "gather"])
def test_an_index_outside_raises_in_a_run(layer):
    y = layer(fx.data("index", [-1, 1], "int64"))
    feed = {v.name: np.zeros(v.shape, v.dtype) for v in fx.default_main_program().list_vars() if v.is_data and v.name != "index"}
    with pytest.raises(fx.ExecutionError):
        fx.Executor().run(feed={**feed, "index": [[3]]}, fetch_list=[y])
