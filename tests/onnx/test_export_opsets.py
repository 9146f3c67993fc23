"""Models of every opset that is written: the operators whose nodes differ between opsets, and nets that hold them."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder
from fluidx.ir.opdef import OPS

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing.one_operator import program_of_sample  # noqa: E402

from .written import built, close, judged_samples, lenet, run, session_of, transformer  # noqa: E402

OPSETS = range(13, 27)
# opsets after which a node of these operators changes: axes that become operands, operators that come, weights that are by channel
CHANGED = {
    "reduce_mean": 17, "reduce_max": 17, "reduce_min": 17, "reduce_prod": 17, "logsumexp": 17, "norm": 17, "mean": 17, "layer_norm": 16,
    "group_norm": 20, "instance_norm": 21, "batch_norm": 14, "softmax": 13, "split": 17, "unstack": 17, "pad": 17, "pad2d": 17, "gelu": 19,
    "mish": 17, "cast": 18, "pool2d": 21, "fill_constant_batch_size_like": 14, "scaled_dot_product_attention": 14, "cumsum": 13,
    "hard_swish": 13, "relu": 13, "elementwise_add": 13, "clip": 13, "rms_norm": 22, "resize": 17, "roi_align": 15, "grid_sample": 19,
}  # fmt: skip
FIRST = {"grid_sample": 16}  # the opset that introduced a node, if that is after 13


@pytest.mark.parametrize(("name", "opset"), [(n, k) for n, last in CHANGED.items() for k in {FIRST.get(n, 13), last, last + 1}])
def test_an_operator_means_the_same_on_both_sides_of_a_change(name, opset):
    assert judged_samples(name, opset)


def normalized():
    """A net of what came late: normalizations, gelu, reductions of an axis, even splits."""
    image = fx.data("image", [-1, 1, 12, 12], "float32")
    hidden = fx.layers.group_norm(fx.layers.conv2d(image, 4, 3, padding=1), 2, act="gelu")
    hidden = fx.layers.softplus(fx.layers.pad2d(hidden, [1, 0, 2, 1], "reflect"))
    rows = fx.layers.layer_norm(fx.layers.reduce_max(hidden, dim=[2]), begin_norm_axis=2)
    first, second = fx.layers.split(rows, 2, dim=1)
    return fx.layers.fc(fx.layers.concat([fx.layers.reduce_mean(first, dim=[1]), fx.layers.reduce_min(second, dim=[1])], axis=1), 3)


@pytest.mark.parametrize("net", [lenet, transformer, normalized])
def test_a_net_runs_alike_in_every_opset(net):
    main, y, exe, scope, feed = built(net, train=False)
    (expected,) = exe.run(main.clone(for_test=True), feed=feed, fetch_list=[y], scope=scope)
    for opset in OPSETS:
        model = to_onnx(main, None, [y], scope=scope, opset=opset)
        assert [o.version for o in model.opset_import] == [opset]
        onnx.checker.check_model(model, full_check=True)
        close(run(session_of(model), feed)[0], expected)


def test_what_an_opset_lacks_is_written_out_or_refused():
    with fx.program_guard(fx.Program("low"), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [4, 4], "float32")
        y = fx.layers.reduce_sum(fx.layers.triu(fx.layers.gelu(x))) + fx.layers.reduce_sum(fx.layers.gaussian_random([4, 4]))
        assert "Gelu" not in {n.op_type for n in to_onnx(x.block.program, None, ["gelu_0.tmp_0"], opset=19).graph.node}
        assert "Gelu" in {n.op_type for n in to_onnx(x.block.program, None, ["gelu_0.tmp_0"], opset=20).graph.node}
        with pytest.raises(fx.onnx.OnnxError) as told:
            to_onnx(x.block.program, None, [y], opset=13)
    lines = str(told.value).splitlines()
    assert lines[0] == "2 operators of program low cannot be written as ONNX of opset 13:"
    assert "its Trilu is in ONNX from opset 14 on, written at" in lines[1]
    assert lines[2].startswith("  %gaussian_random_0.tmp_0 = ")


def test_resize_of_some_axes_before_opset_18_names_the_sizes_of_all():
    with fx.program_guard(fx.Program("image"), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [-1, 2, 3, 4], "float32")
        y = Builder(x.block).resize(x, sizes=(6, 8), scales=(), spans=(), mode="nearest", coordinates="asymmetric", nearest="floor")
        smooth = Builder(x.block).resize(x, sizes=(2, 2), scales=(), spans=(), antialias=True)
    feed = {"x": np.arange(48, dtype="float32").reshape(2, 2, 3, 4)}
    for opset in (13, 15, 17, 18):
        found = run(session_of(to_onnx(x.block.program, None, [y], opset=opset)), feed)[0]
        assert found.tolist() == feed["x"].repeat(2, axis=2).repeat(2, axis=3).tolist()
    with pytest.raises(fx.onnx.OnnxError, match="antialias is in ONNX from opset 18 on"):
        to_onnx(x.block.program, None, [smooth], opset=17)


@pytest.mark.parametrize("opset", [13, 21])
def test_a_norm_of_an_open_axis_is_written_by_parts(opset):
    with fx.program_guard(fx.Program("open"), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [2, -1], "float32")
        y = Builder(x.block).layer_norm(x, begin_norm_axis=1)[0]
    model = to_onnx(x.block.program, None, [y], opset=opset)
    for row, expected in (([1, 3], [-1, 1]), ([1, 1, 3, 3], [-1, -1, 1, 1])):
        (found,) = run(session_of(model), {"x": np.float32([row, row])})
        np.testing.assert_allclose(found, [expected, expected], atol=1e-4)


def test_regions_aligned_to_centers_of_pixels_are_refused_before_opset_16():
    sample = next(s for s in OPS["roi_align"].samples() if s.attrs.get("aligned"))
    program, fetches, _ = program_of_sample("roi_align", sample)
    with pytest.raises(fx.onnx.OnnxError, match="aligned regions are in ONNX from opset 16 on"):
        to_onnx(program, None, fetches, opset=15)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"opset": 12}, "opset must be one of 13 to 26, got 12"),
        ({"opset": 27}, "opset must be one of 13 to 26, got 27"),
        ({"ir_version": 6}, r"ir_version must be one of 7 to \d+, got 6"),
    ],
)
def test_versions_that_are_not_written_are_refused(versions, said):
    main, y, _, scope, _ = built(lenet, train=False)
    with pytest.raises(fx.onnx.OnnxError, match=said):
        to_onnx(main, None, [y], scope=scope, **versions)


def test_the_version_of_the_file_is_chosen_apart_from_the_opset():
    main, y, _, scope, _ = built(lenet, train=False)
    assert to_onnx(main, None, [y], scope=scope, opset=26).ir_version == 10
    assert to_onnx(main, None, [y], scope=scope, opset=13, ir_version=7).ir_version == 7
