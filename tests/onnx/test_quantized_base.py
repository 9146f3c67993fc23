"""Adapters beside weights of 8 and 4 bits: those that base= quantizes, and those of files with MatMulNBits."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.mapped_file import owner
from fluidx.onnx.quantized_base import quantized
from fluidx.onnx.report import info
from fluidx.ops.math.matmul_n_bits import dequantized
from tests.onnx.test_lora import adapted, data, fluidx, net, on_runtime, outputs, started

onnx = pytest.importorskip("onnx")

QKV = {name: fx.onnx.Lora(rank=2, alpha=6, targets=["q", "k", "v"], base=name) for name in ("int8", "int4")}
PRODUCTS = {"h.0.attn.q.weight": 0, "h.0.attn.k.weight": 1, "onnx::MatMul_12": 1, "head.weight": 0}  # -> the axis that is summed


# -- base= --------------------------------------------------------------------------------------------------------------------------


def rounded(w, axis, base):
    """Symmetric: one scale for each output, or one for at most 32 elements of it, whose largest becomes -8."""
    if base == "int8":
        largest = np.abs(w).max(axis=axis, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype("float32")
        return np.rint(w / scale) * scale
    at = np.abs(w).argmax(axis=axis, keepdims=True)
    largest = np.take_along_axis(w, at, axis)
    scale = np.where(largest != 0, largest / -8, 1).astype("float32")
    return np.minimum(np.rint(w / scale), 7) * scale


@pytest.mark.parametrize("base", QKV)
def test_a_base_of_integers_computes_with_rounded_weights(base):
    model, _ = adapted(lora=QKV[base])
    scope, x = started(model), data()["x"]
    w = {t.name: onnx.numpy_helper.to_array(t) for t in net().graph.initializer}
    for name, axis in PRODUCTS.items():
        w[name] = rounded(w[name], axis, base)
        own = name.replace(":", "_")
        held, scale = scope.get(own), scope.get(f"{own}.scale")
        assert held.dtype == "uint8" and held.size <= w[name].size * (2 if base == "int8" else 16)
        rows = w[name].shape[axis]
        found = dequantized(np, held, scale, None, 8 if base == "int8" else 4)[:, :rows]
        np.testing.assert_array_equal(found, w[name] if axis else w[name].T)
    k = np.maximum(x @ w["h.0.attn.q.weight"], 0) @ w["h.0.attn.k.weight"].T + w["h.0.attn.k.bias"]
    np.testing.assert_allclose(outputs(model, scope, x), k @ w["onnx::MatMul_12"].T @ w["head.weight"], rtol=1e-5, atol=1e-4)  # float32


@pytest.mark.parametrize("base", QKV)
def test_adapters_train_beside_integers_on_ranks_and_are_merged_into_the_file(base, tmp_path):
    model, loss = adapted(fx.optimizer.Adam(0.01), lora=QKV[base])
    scope, exe = started(model), fx.Executor(fx.CPUPlace())
    expected = [exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)[0].item() for _ in range(3)]
    assert not any(op.type == "matmul" and "@GRAD" in op.inputs["X"][0] and ".lora_" not in str(op) for op in model.program.ops)
    t = fx.DistributeTranspiler(fx.strategies.fsdp())
    t.transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify() and t.get_trainer_program(0).global_block().desc("h.0.attn.q.weight").placement
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=data(), fetch_list=[loss])[0].item() for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # sums in another order, through two steps of Adam
    x = data()["x"]
    fx.onnx.save(model.program, tmp_path / "nodes.onnx", fetches=model.fetches, scope=scope)
    kinds = {t.name: t.data_type for t in onnx.load(tmp_path / "nodes.onnx").graph.initializer}
    assert kinds["h.0.attn.q.weight"] == onnx.TensorProto.UINT8
    np.testing.assert_allclose(on_runtime(tmp_path / "nodes.onnx", x), outputs(model, scope, x), rtol=1e-5, atol=1e-4)
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    assert fx.onnx.merge(net(), tmp_path / "adapters", tmp_path / "merged.onnx") == 3
    with pytest.raises(fx.onnx.OnnxError, match="merge=True needs the float weights, and they are integers here"):
        fx.onnx.save(model.program, tmp_path / "no.onnx", fetches=model.fetches, scope=scope, merge=True)


def test_a_weight_that_other_operators_read_stays_float():
    source = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> tied (int64[n] x) => (float[n, 5] y) {
            h = Gather ("tokens.weight", x)
            g = MatMul (h, "up.weight")
            y = Gemm <transB = 1> (g, "tokens.weight") }""")
    for name, shape in (("tokens.weight", (5, 2)), ("up.weight", (2, 2))):
        source.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, "float32"), name))
    model, _ = adapted(source=source, loss=None, lora=fx.onnx.Lora(rank=1, targets="up", base="int8"))
    block = model.program.global_block()
    assert (block.var("tokens.weight").dtype, block.var("up.weight").dtype) == ("float32", "uint8")


def test_the_startup_program_and_the_parameter_share_the_integers():
    source = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> wide (float[n, 64] x) => (float[n, 64] y) {
        h = MatMul (x, "a.weight")
        y = MatMul (h, "b.weight") }""")
    for name in ("a.weight", "b.weight"):
        source.graph.initializer.append(onnx.numpy_helper.from_array(np.random.default_rng(0).random((64, 64), "float32"), name))
    model, _ = adapted(source=source, loss=None, lora=fx.onnx.Lora(rank=1, base="int8"))
    (begin,) = [op for op in model.startup.ops if list(op.output_arg_names) == ["a.weight"]]
    place = begin.attrs["values"].in_file
    assert place is not None
    value = started(model).get("a.weight")
    assert (value == place.array).all() and owner(value) is not owner(place.array), "a private mapping of the same pages"


@pytest.mark.parametrize(("bits", "size"), [(8, 0), (8, 16), (4, 32), (4, 16), (2, 16)])
def test_the_error_of_quantized_weights_is_at_most_half_a_step(bits, size):
    w = np.random.default_rng(0).standard_normal((7, 75)).astype("float32")
    w[3] = 0
    y, scale = quantized(w, bits, size)
    found = dequantized(np, y, scale, None, bits)[:, :75]
    steps = np.repeat(np.abs(scale), y.shape[2] * 8 // bits, axis=1)[:, :75]
    bound = np.where(np.abs(w / steps) > (1 << (bits - 1)) - 1, 1, 0.5)  # the far end of the range is cut by one step
    assert (np.abs(found - w) <= (bound if bits < 8 else 0.5) * steps * 1.001).all() and not found[3].any()


# -- files with MatMulNBits -----------------------------------------------------------------------------------------------------------


def quantized_net(bits=4, size=16, zero=True, flat=False, depth=40):
    """x [n, 40] -> q [n, 24] -> y [n, 3], as ONNX Runtime's quantizer writes it: the output layer stays float."""
    from onnx import TensorProto, helper

    rng, blocks = np.random.default_rng(3), -(-depth // size)
    held = {
        "h.0.attn.q.weight_Q4": rng.integers(0, 256, (24, blocks, size * bits // 8)).astype("uint8"),
        "h.0.attn.q.weight_scales": rng.uniform(0.01, 0.1, 24 * blocks if flat else (24, blocks)).astype("float32"),
        **({"h.0.attn.q.weight_zero_points": rng.integers(0, 256, (24, -(-blocks * bits // 8))).astype("uint8")} if zero else {}),
    }
    other = {"head.weight": rng.standard_normal((24, 3)).astype("float32")}
    attrs = {"domain": "com.microsoft", "K": depth, "N": 24, "bits": bits, "block_size": size}
    nodes = [
        helper.make_node("MatMulNBits", ["x", *held], ["q"], "/h.0/attn/q/MatMul_Q4", **attrs),
        helper.make_node("MatMul", ["q", "head.weight"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", depth), ("y", 3)))
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in {**held, **other}.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "quantized", [x], [y], tensors), opset_imports=opsets, ir_version=10)


def batch(rows=8, depth=40):
    rng = np.random.default_rng(6)
    return {"x": rng.standard_normal((rows, depth)).astype("float32"), "label": rng.integers(0, 3, (rows, 1))}


@pytest.mark.parametrize("options", [{}, {"bits": 8, "size": 32}, {"zero": False}, {"flat": True}], ids=str)
def test_quantized_weights_are_read_trained_beside_and_written_as_they_were(options, tmp_path):
    source = quantized_net(**options)
    model, loss = adapted(fx.optimizer.Adam(0.01), source=source, lora=fx.onnx.Lora(rank=2, targets="q"))
    assert sorted(p.name for p in model.parameters if p.trainable) == ["h.0.attn.q.lora_A.weight", "h.0.attn.q.lora_B.weight"]
    scope, exe = started(model), fx.Executor(fx.CPUPlace())
    x = batch()["x"]
    np.testing.assert_allclose(outputs(model, scope, x), on_runtime(source, x), rtol=1e-3, atol=1e-3)  # it may round x to 8 bits
    losses = [exe.run(model.program, feed=batch(), fetch_list=[loss], scope=scope)[0].item() for _ in range(5)]
    assert losses[-1] < losses[0]
    fx.onnx.save(model.program, tmp_path / "nodes.onnx", fetches=model.fetches, scope=scope)
    saved = onnx.load(tmp_path / "nodes.onnx")
    (node,) = [n for n in saved.graph.node if n.op_type == "MatMulNBits"]
    (was,) = [n for n in source.graph.node if n.op_type == "MatMulNBits"]
    assert list(node.input) == list(was.input) and sorted(map(str, node.attribute)) == sorted(map(str, was.attribute))
    before, after = ({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (source, saved))
    for name in list(was.input)[1:]:
        np.testing.assert_array_equal(after[name].ravel(), before[name].ravel())
    np.testing.assert_allclose(on_runtime(saved, x), outputs(model, scope, x), rtol=1e-3, atol=1e-3)


def test_ranks_train_beside_quantized_weights_as_one_device_does():
    model, loss = adapted(fx.optimizer.Momentum(0.05, 0.9), source=quantized_net(), lora=fx.onnx.Lora(rank=2, targets="q"))
    scope, exe = started(model), fx.Executor(fx.CPUPlace())
    expected = [exe.run(model.program, feed=batch(), fetch_list=[loss], scope=scope)[0].item() for _ in range(3)]
    t = fx.DistributeTranspiler(fx.strategies.fsdp())
    t.transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify() and t.get_trainer_program(0).global_block().desc("h.0.attn.q.weight_Q4").placement
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=batch(), fetch_list=[loss])[0].item() for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums in another order, in float32


def test_without_adapters_the_float_weights_train_and_the_report_says_so(tmp_path):
    model, loss = adapted(fx.optimizer.SGD(0.1), source=quantized_net())
    assert [p.name for p in model.parameters if p.trainable] == ["head.weight"]
    onnx.save(quantized_net(), tmp_path / "q.onnx")
    said = info(str(tmp_path / "q.onnx"))
    assert said.count("part of a quantized weight; --lora trains adapters beside it") == 3
    assert "--lora can adapt 2 weights, those of q, head" in said


def test_the_command_trains_beside_a_quantized_file_and_beside_a_base_of_4_bits(tmp_path):
    onnx.save(quantized_net(), tmp_path / "q.onnx")
    onnx.save(net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "q.npz", **batch(32))
    np.savez(tmp_path / "net.npz", **data(32))
    common = ["--lora", 2, "--target", "q", "--epochs", 1, "--batch", 16]
    code, said = fluidx("train", tmp_path / "q.onnx", "--data", tmp_path / "q.npz", *common, "-o", tmp_path / "tuned.onnx")
    assert code == 0, said
    kinds = [n.op_type for n in onnx.load(tmp_path / "tuned.onnx").graph.node]
    assert kinds.count("MatMulNBits") == 1 and kinds.count("Add") == 1, kinds
    options = [*common, "--lora-base", "int4", "-o", tmp_path / "adapters"]
    code, said = fluidx("train", tmp_path / "net.onnx", "--data", tmp_path / "net.npz", *options)
    assert code == 0 and fluidx("merge", tmp_path / "net.onnx", tmp_path / "adapters", "-o", tmp_path / "m.onnx")[0] == 0, said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g_idx": True}, "it has g_idx, an order of the rows of its weight, which fluidx does not read"),
        ({"weight_prepacked": 1}, "its weight is packed for one kind of device"),
        ({"bits": 3}, "expected weights of 2, 4 or 8 bits, found 3 bits"),
        ({"N": 23}, "B must have [23, 3, 8] blocks of bytes, found shape [24, 3, 8]"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(change, message):
    source = quantized_net()
    node = source.graph.node[0]
    for name, value in change.items():
        if name == "g_idx":
            source.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(40, "int32"), "order"))
            node.input.append("order")
            continue
        for a in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(a)
        node.attribute.append(onnx.helper.make_attribute(name, value))
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.load(source)
    assert message in str(e.value)
