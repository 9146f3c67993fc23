"""What was written, read and written again is what it was."""

from collections import Counter

import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing import models  # noqa: E402

from .written import WRITTEN, built, close, exported_samples, lenet, transformer  # noqa: E402

# Operators whose nodes are imported as other operators, and why. All others come back node by node.
OTHERWISE = {
    "accuracy": "the number of rows is a constant for known sizes",
    "argsort": "the count of TopK is a constant for known sizes",
    "axis_size": "the size is a constant for known sizes",
    "assign_value": "a large constant becomes a variable, and an Identity node its output",
    "conv2d_transpose": "output_size becomes a larger window and a slice of the result",
    "expand_as": "the repeats are constants for known sizes",
    "fill_any_like": "it is a constant for known sizes",
    "fill_constant_batch_size_like": "it is a constant for known sizes",
    "fill_zeros_like": "it is a constant for known sizes",
    "gather_nd": "indices along several axes are imported as indices into these axes flattened",
    "kldiv_loss": "numbers that elements are compared with are constants for known sizes",
    "label_smooth": "the share of a class is a constant for known sizes",
    "layer_norm": "without Scale it is exported with one of ones, in the shape of the axes",
    "masked_select": "Compress is imported as positions of true elements and a selection",
    "one_hot": "OneHot allows negative ids, which is imported as several operators",
    "one_hot_v2": "OneHot allows negative ids, which is imported as several operators",
    "pad": "padding of 0 is imported as no operator",
    "pad2d": "repeated borders are imported as positions",
    "pow": "x to the power of 0 is a constant for known sizes",
    "range_like": "it is a constant for known sizes",
    "reduce_to": "the shape is a constant for known sizes",
    "reshape": "an empty tensor is imported as a constant",
    "resize": "the sizes of another value are constants for known sizes",
    "roi_pool": "MaxRoiPool has one operand for images and regions, which are split",
    "scaled_dot_product_attention": "the causal mask is a constant for known sizes",
    "scatter": "an import does not know that the ids of a ScatterND are distinct",
    "scatter_fold": "positions are flattened by the import",
    "scatter_nd_add": "indices along several axes are imported as indices into these axes flattened",
    "shape": "the shape is a constant for known sizes",
    "stash": "its rows are a constant for known sizes",
    "stash_add": "an import does not know that the ids of a ScatterND are distinct",
    "stash_read": "an import does not know that the index of a row is not negative",
    "slice_like": "the bounds are constants for known sizes",
    "squared_l2_norm": "ReduceSumSquare is imported as square and reduce_sum",
    "unique": "int32 positions that no node reads are not cast again",
    "where_index": "NonZero has one column for each element, and fluid one row",
    "sum": "Sum is imported as additions, because its operands may have several shapes",
}


def kinds(model):
    """The number of nodes of each kind, without constants: equal ones are written once, before their first reader."""
    return Counter(node.op_type for node in model.graph.node if node.op_type != "Constant")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operator_is_written_again_as_the_nodes_that_it_was_read_from(name):
    other = False
    for _, _, _, model in exported_samples(name):
        loaded, scope = fx.onnx.load(model), fx.Scope()
        fx.Executor(fx.CPUPlace()).run(loaded.startup, scope=scope)
        again = to_onnx(loaded.program, None, loaded.fetches, scope=scope)
        other = other or kinds(again) != kinds(model)
    assert other == (name in OTHERWISE)


def no_images():
    """Embedding with padding, dropout of both kinds, heads, an entropy: what reads positions, and what is drawn in training."""
    ids = fx.data("ids", [-1, 6], "int64")
    hidden = fx.layers.dropout(fx.embedding(ids, [11, 8], padding_idx=0), 0.5)
    hidden = fx.layers.dropout(fx.layers.relu(hidden), 0.1, dropout_implementation="upscale_in_train")
    return fx.layers.fc(hidden, 3)


@pytest.mark.parametrize("net", [lenet, transformer, no_images])
def test_a_net_that_was_read_comes_back_as_itself(net):
    main, y, exe, scope, _ = built(net, train=False)
    model = to_onnx(main, None, [y], scope=scope)
    first = fx.onnx.load(model)
    exe.run(first.startup, scope=(own := fx.Scope()))
    again = to_onnx(first.program, None, first.fetches, scope=own)
    assert kinds(again) == kinds(model)
    assert str(fx.onnx.load(again).program) == str(first.program)


@pytest.mark.parametrize("kind", ["mlp", "dropout", "norm", "batch_norm", "sub_batches", "conv"])
def test_the_losses_of_models_come_back_too(kind):
    m = models.classifier(kind=kind)
    exe, scope, own = fx.Executor(fx.CPUPlace()), fx.Scope(), fx.Scope()
    exe.run(m.startup, scope=scope)
    model = to_onnx(m.main, None, [m.loss], scope=scope)
    loaded = fx.onnx.load(model)
    exe.run(loaded.startup, scope=own)
    assert kinds(to_onnx(loaded.program, None, loaded.fetches, scope=own)) == kinds(model)
    feed = m.feed(4)
    given = {v.name: feed[v.name] for v in loaded.feeds}
    close(exe.run(loaded.program, feed=given, fetch_list=loaded.fetches, scope=own)[0],
          exe.run(m.main.clone(for_test=True), feed=feed, fetch_list=[m.loss], scope=scope)[0])  # fmt: skip


def test_an_embedding_and_a_lookup_of_classes_come_back_as_one_operator():
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
        rows = fx.embedding(ids := fx.data("ids", [-1, 6], "int64"), [11, 8])
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(fx.default_startup_program(), scope=scope)
        model = to_onnx(ids.block.program, None, [rows], scope=scope)
    assert [op.type for op in fx.onnx.load(model).program.ops] == ["lookup_table_v2"]
    model.producer_name = "another"  # whose positions may count from the end
    assert [op.type for op in fx.onnx.load(model).program.ops][-2:] == ["where", "lookup_table_v2"]
