"""What `fx.onnx.save` writes: every operator's samples, and models as they are trained, with ONNX Runtime as the judge."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fluidx.ir.opdef import OPS  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing.one_operator import program_of_sample  # noqa: E402

from .written import LACKS, WRITTEN, built, close, judged_samples, lenet, run, session_of, transformer  # noqa: E402


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operator_means_the_same_in_onnx(name):
    assert judged_samples(name, 21)


@pytest.mark.parametrize("name", ["accuracy", "huber_loss", "smooth_l1_loss", "margin_rank_loss", "lrn"])
def test_all_results_of_an_operator_are_those_of_onnx(name):
    judged = 0
    for sample in OPS[name].samples():
        program, _, feed = program_of_sample(name, sample)
        outs = [program.global_block().var(n) for n in program.ops[-1].output_arg_names]
        expected = fx.Executor(fx.CPUPlace()).run(program, feed=feed, fetch_list=outs)
        try:
            session = session_of(to_onnx(program, None, outs))
        except LACKS:
            continue  # an even number of channels for lrn
        judged += 1
        for a, b in zip(run(session, feed), expected, strict=True):
            close(a, b)
    assert judged


def test_a_result_that_alone_is_fetched_is_written():
    for sample in OPS["layer_norm"].samples():
        program, _, feed = program_of_sample("layer_norm", sample)
        variance = program.global_block().var(program.ops[-1].outputs["Variance"][0])
        (expected,) = fx.Executor(fx.CPUPlace()).run(program, feed=feed, fetch_list=[variance])
        close(run(session_of(to_onnx(program, None, [variance])), feed)[0], expected)


def test_a_slice_backwards_from_before_the_first_element_is_empty():
    with fx.program_guard(fx.Program("cut"), fx.Program()), fx.unique_name.guard():
        x, rows = fx.data("x", [5], "float32"), fx.data("rows", [-1], "float32")
        b, back = Builder(x.block), {"axes": (0,), "starts": (-9,), "ends": (-20,), "strides": (-1,)}
        y, z = b.strided_slice(x, **back), b.strided_slice(rows, **back)
    assert run(session_of(to_onnx(x.block.program, None, [y])), {"x": np.zeros(5, "float32")})[0].shape == (0,)
    with pytest.raises(fx.onnx.OnnxError, match="axis 0 is open, and the slice goes backwards from -9"):
        to_onnx(x.block.program, None, [z])


# -- programs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [lenet, transformer])
def test_a_trained_program_runs_alike_in_onnx_runtime_and_read_again(net, tmp_path):
    main, y, exe, scope, feed = built(net)
    (expected,) = exe.run(main.clone(for_test=True), feed=feed, fetch_list=[y], scope=scope)
    fx.onnx.save(main, tmp_path / "net.onnx", fetches=[y], scope=scope)
    close(run(session_of(onnx.load(tmp_path / "net.onnx")), feed)[0], expected)
    again = fx.onnx.load(tmp_path / "net.onnx")
    own = fx.Scope()
    exe.run(again.startup, scope=own)
    close(exe.run(again.program, feed=feed, fetch_list=[again[y.name]], scope=own)[0], expected)


def test_a_folded_program_is_written_as_it_is(tmp_path):
    main, y, exe, scope, feed = built(lenet, train=False)
    (expected,) = exe.run(main.clone(for_test=True), feed=feed, fetch_list=[y], scope=scope)
    folded = main.clone(for_test=True)
    fx.InferenceTranspiler().transpile(folded, fx.CPUPlace(), scope)
    model = to_onnx(folded, None, [y], scope=scope)
    assert "BatchNormalization" not in {n.op_type for n in model.graph.node}
    close(run(session_of(model), feed)[0], expected)


def test_every_operator_that_onnx_has_not_is_listed():
    with fx.program_guard(fx.Program("odd"), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [4, 4], "float32")
        y = fx.layers.reduce_sum(fx.layers.gaussian_random([4, 4])) + fx.layers.reduce_sum(x)
        message = r"one operator of program odd cannot be written as ONNX of opset 21:\n  %gaussian_random_0.tmp_0 = "
        with pytest.raises(fx.onnx.OnnxError, match=message):
            to_onnx(y.block.program, None, [y])


def test_a_parameter_without_a_value_and_no_fetches_are_refused(tmp_path):
    main, y, *_ = built(lenet, train=False)
    with pytest.raises(fx.NotInitializedError, match="cannot save 'conv2d_0.w_0': it has no value in this scope"):
        fx.onnx.save(main, tmp_path / "no.onnx", fetches=[y], scope=fx.Scope())
    assert not list(tmp_path.iterdir())
    with pytest.raises(fx.onnx.OnnxError, match="save: name at least one variable to compute in `fetches`"):
        fx.onnx.save(main, tmp_path / "no.onnx")
    with pytest.raises(fx.onnx.OnnxError, match=f"save: {y.name!r} is fetched twice, but outputs of a model must have different names"):
        fx.onnx.save(main, tmp_path / "no.onnx", fetches=[y, y])


def test_a_loaded_model_is_saved_by_its_program(tmp_path):
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Relu (x) }'
    loaded = fx.onnx.load(onnx.parser.parse_model(text))
    with pytest.raises(fx.onnx.OnnxError, match="save: expected a Program, got OnnxModel; give its .program"):
        fx.onnx.save(loaded, tmp_path / "no.onnx", fetches=loaded.fetches)
