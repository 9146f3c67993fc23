"""What was written, read and written again is what it was."""

from collections import Counter

import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fluidx.ir.opdef import OPS  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing import models  # noqa: E402
from fluidx.testing.alone import alone  # noqa: E402

from .written import WRITTEN, built, close, lenet, transformer  # noqa: E402

# Operators of which an import makes other operators than those that were written, and why. All others come back node by node.
OTHERWISE = {
    "accuracy": "of known sizes the number of rows is known",
    "argsort": "TopK of as many as there are is read as one of a known number",
    "assign_value": "a large constant becomes a variable, which an Identity hands out",
    "conv2d_transpose": "output_size becomes a window that reaches further, and what is cut off it",
    "expand_as": "of known sizes the repeats are known",
    "fill_any_like": "of known sizes it is a constant",
    "fill_constant_batch_size_like": "of known sizes it is a constant",
    "fill_zeros_like": "of known sizes it is a constant",
    "gather_nd": "positions along several axes are read as positions in all of them laid out flat",
    "label_smooth": "of known sizes the share of a class is known",
    "layer_norm": "without Scale it has one of ones, which is laid out as the axes are",
    "masked_select": "Compress is read as the places that are chosen, and what lies there",
    "norm": "a sum of squares is read as squares and their sum",
    "one_hot": "OneHot takes ids that count from the end, which is written out",
    "one_hot_v2": "OneHot takes ids that count from the end, which is written out",
    "pad": "nothing around is no operator",
    "pad2d": "copies of the border are read as positions",
    "pow": "to the power of 0 is a constant where sizes are known",
    "reduce_to": "of known sizes the shape is known",
    "reshape": "nothing is to be done where nothing is in it",
    "roi_pool": "MaxRoiPool has the number of the image beside its regions, which are read apart",
    "scaled_dot_product_attention": "of known sizes what causal rows see is known",
    "scatter": "ScatterND is read as a scatter of which it is not known that no id comes twice",
    "scatter_fold": "positions are laid out flat when they are read",
    "scatter_nd_add": "positions along several axes are read as positions in all of them laid out flat",
    "shape": "of known sizes it is known",
    "stash": "of known sizes its rows are a constant",
    "stash_add": "ScatterND is read as a scatter of which it is not known that no id comes twice",
    "stash_read": "a row is read as one that may count from the end",
    "softmax": "along another axis than fluid's it is written out",
    "squared_l2_norm": "a sum of squares is read as squares and their sum",
    "unique": "positions in 32 bits that nobody reads are not cast again",
    "where_index": "NonZero has a column for each element that it finds, where fluid has a row",
    "sum": "Sum takes operands of several shapes, and is read as one addition after another",
}


def kinds(model):
    """How many nodes there are of each kind; constants stand where they are first read, and equal ones once."""
    return Counter(node.op_type for node in model.graph.node if node.op_type != "Constant")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operator_is_written_again_as_the_nodes_that_it_was_read_from(name):
    other = False
    for sample in OPS[name].samples():
        program, fetches, _ = alone(name, sample)
        try:
            model = to_onnx(program, None, fetches)
        except fx.onnx.OnnxError:
            continue
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
