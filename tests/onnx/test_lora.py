"""Low-rank adapters: the formula, what is trained, ranks, names of modules, files and merged models."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main
from fluidx.files.safetensors import save_arrays

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

WEIGHTS = {
    "h.0.attn.q.weight": (4, 6), "h.0.attn.k.weight": (5, 6), "h.0.attn.k.bias": (5,), "onnx::MatMul_12": (6, 5), "head.weight": (6, 3),
}  # fmt: skip


def net(seed=0):
    """Products as exporters write them: [in, out], [out, in] with transB, and a transposed weight without a name. q is 4 -> 6, k 6 -> 5,
    v 5 -> 6, head 6 -> 3."""
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        net (float[n, 4] x) => (float[n, 3] y) {
            q = MatMul (x, "h.0.attn.q.weight")
            r = Relu (q)
            k = Gemm <transB = 1> (r, "h.0.attn.k.weight", "h.0.attn.k.bias")
            vt = Transpose <perm = [1, 0]> ("onnx::MatMul_12")
            v = MatMul (k, vt)
            y = MatMul (v, "head.weight")
        }
    """)
    model.graph.node[3].name, model.graph.node[4].name = "/h.0/attn/v/Transpose", "/h.0/attn/v/MatMul"
    arrays = {n: rng.integers(-2, 3, shape) for n, shape in WEIGHTS.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in arrays.items())
    return model


def data(rows=8):
    rng = np.random.default_rng(5)
    return {"x": np.float32(rng.integers(-2, 3, (rows, 4))), "label": rng.integers(0, 3, (rows, 1))}


def adapted(optimizer=None, loss="softmax_with_cross_entropy", source=None, **options):
    with fx.unique_name.guard():
        model = fx.onnx.load(source or net())
        found = fx.onnx.set_training(model, loss=loss, **options)
        if optimizer is not None:
            with fx.program_guard(model.program, model.startup):
                optimizer.minimize(found)
    model.startup.random_seed = model.program.random_seed = 7
    return model, found


def started(model):
    scope = fx.Scope()
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    return scope


def outputs(model, scope, x):
    return fx.Executor(fx.CPUPlace()).run(model.program.clone(for_test=True), feed={"x": x}, fetch_list=model.fetches, scope=scope)[0]


def on_runtime(source, x):
    source = source.SerializeToString() if hasattr(source, "graph") else str(source)
    return ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


QKV = fx.onnx.Lora(rank=2, alpha=6, targets=["q", "k", "v"])


def trained(steps=3, **options):
    """A model after some steps, and its scope."""
    model, loss = adapted(fx.optimizer.Adam(0.05), lora=QKV, **options)
    scope, exe = started(model), fx.Executor(fx.CPUPlace())
    for _ in range(steps):
        exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)
    return model, scope


# -- the formula -----------------------------------------------------------------------------------------------------------------------


def test_a_product_gets_alpha_over_rank_times_x_a_b_and_the_gradients_of_a_and_b():
    model, loss = adapted(fx.optimizer.SGD(1.0), loss=fx.layers.reduce_sum, lora=QKV)
    scope, exe, rng, feed = started(model), fx.Executor(fx.CPUPlace()), np.random.default_rng(1), {"x": data()["x"]}
    ab = {n: np.float32(rng.integers(-2, 3, scope.get(n).shape)) for n in scope.arrays if ".lora_" in n}
    for name, value in ab.items():
        scope.set(name, value)
    w = {t.name: onnx.numpy_helper.to_array(t) for t in net().graph.initializer}

    def product(x, module, weight):
        a, b = ab[f"h.0.attn.{module}.lora_A.weight"], ab[f"h.0.attn.{module}.lora_B.weight"]
        return x @ weight + 3 * (x @ a.T) @ b.T  # alpha / rank is 3

    q = product(feed["x"], "q", w["h.0.attn.q.weight"])
    k = product(np.maximum(q, 0), "k", w["h.0.attn.k.weight"].T) + w["h.0.attn.k.bias"]
    v = product(k, "v", w["onnx::MatMul_12"].T)
    (y,) = exe.run(model.program, feed=feed, fetch_list=model.fetches, scope=scope)
    assert (y == v @ w["head.weight"]).all()  # small integers add up exactly
    g = np.ones_like(y) @ w["head.weight"].T  # the gradient of v for a sum of y
    a, b = ab["h.0.attn.v.lora_A.weight"], ab["h.0.attn.v.lora_B.weight"]
    assert (scope.get("h.0.attn.v.lora_B.weight") == b - 3 * g.T @ (k @ a.T)).all()
    assert (scope.get("h.0.attn.v.lora_A.weight") == a - 3 * (g @ b).T @ k).all()


def test_adapters_start_as_in_peft_and_change_nothing_at_first():
    model, _ = adapted(lora=QKV)
    scope = started(model)
    a, b = scope.get("h.0.attn.q.lora_A.weight"), scope.get("h.0.attn.q.lora_B.weight")
    assert a.shape == (2, 4) and b.shape == (6, 2) and not b.any()
    assert np.abs(a).max() <= 0.5 and np.unique(a).size == a.size  # uniform between -1/sqrt(4) and 1/sqrt(4)
    x = data()["x"]
    np.testing.assert_array_equal(outputs(model, scope, x), fx.onnx.load(net()).run([x])[0])


def test_no_gradient_of_a_base_weight_is_computed():
    model, _ = adapted(fx.optimizer.Adam(0.1), lora=QKV)
    names = {n.partition("@GRAD")[0] for op in model.program.ops for n in op.output_arg_names if "@GRAD" in n}
    parameters = {p.name for p in model.parameters}
    assert parameters & names == {f"h.0.attn.{m}.lora_{k}.weight" for m in "qkv" for k in "AB"}
    assert "mul_grad_y" not in str(model.program)
    assert not any("h.0.attn.q.weight" in op.input_arg_names for op in model.program.ops if "@GRAD" in op.output_arg_names[0])


def test_dropout_drops_inputs_of_adapters_in_training_only():
    model, _ = adapted(lora=fx.onnx.Lora(rank=2, targets="q", dropout=0.5))
    drops = [op for op in model.program.ops if op.type == "dropout"]
    assert [(op.attrs["dropout_prob"], op.attrs["is_test"]) for op in drops] == [(0.5, False)]
    assert drops[0].inputs["X"] == ("x",)  # not what the base product reads
    x = data()["x"]
    np.testing.assert_array_equal(outputs(model, started(model), x), fx.onnx.load(net()).run([x])[0])


def test_a_weight_of_16_bits_has_adapters_of_32():
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> g (float16[n, 4] x) => (float16[n, 3] y) { y = MatMul (x, "q.weight") }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float16), "q.weight"))
    made, _ = adapted(source=model, loss=None, lora=fx.onnx.Lora(rank=2, targets="q"))
    block = made.program.global_block()
    assert [block.var(f"q.lora_{k}.weight").dtype for k in "AB"] == ["float32", "float32"] and block.var("y").dtype == "float16"


# -- what is trained -----------------------------------------------------------------------------------------------------------------------


def trained_names(model):
    return [p.name for p in model.parameters if p.trainable]


def test_a_new_head_and_what_also_train_names_are_trained_beside_adapters():
    def head(m):
        return fx.layers.fc(m["v"], 2, param_attr="new.weight", bias_attr="new.bias")

    model, _ = adapted(lora=fx.onnx.Lora(rank=1, targets="q", also_train="*.bias"), head=head)
    q = ["h.0.attn.q.lora_A.weight", "h.0.attn.q.lora_B.weight"]
    assert sorted(trained_names(model)) == ["h.0.attn.k.bias", *q, "new.bias", "new.weight"]


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("all-linear", "qkv"),  # all but the last, the output layer
        ("q", "q"), ("attn.q", "q"), ("h.0.attn.v", "v"), ("h.*.[qk]", "qk"), (["k", "*.v"], "kv"), ("onnx__MatMul_12", "v"),
    ],
)  # fmt: skip
def test_targets_are_ends_of_the_names_of_modules_or_patterns(targets, modules):
    model, _ = adapted(lora=fx.onnx.Lora(rank=1, targets=targets))
    assert trained_names(model) == [f"h.0.attn.{m}.lora_{k}.weight" for m in modules for k in "AB"]


def test_the_module_of_a_weight_without_a_name_is_in_the_metadata_of_its_node():
    source = net()
    entry = source.graph.node[3].metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", "['', 'h.0', 'h.0.attn', 'h.0.attn.value', 'transpose_3']"
    assert fx.onnx.load(source).modules["onnx::MatMul_12"] == "h.0.attn.value"


def test_info_lists_what_can_be_adapted(tmp_path):
    onnx.save(net(), tmp_path / "net.onnx")
    assert "\n  --lora can adapt 4 weights, those of q, k, v, head\n" in fluidx("info", tmp_path / "net.onnx")[1]


def test_a_program_of_layers_is_adapted_too():
    main_, startup = fx.Program("net"), fx.Program()
    with fx.program_guard(main_, startup), fx.unique_name.guard():
        fx.layers.fc(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3, act="relu"), 2)
    fx.onnx.set_training(main_, startup=startup, lora=fx.onnx.Lora(rank=1))
    assert [p.name for p in main_.all_parameters() if p.trainable] == ["fc_0.lora_A.weight", "fc_0.lora_B.weight"]


# -- ranks -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero3", "fsdp"])
def test_four_ranks_train_adapters_as_one_device_does(strategy, tmp_path):
    model, loss = adapted(fx.optimizer.Momentum(0.05, 0.9), lora=QKV)
    scope, exe = started(model), fx.Executor(fx.CPUPlace())
    expected = [exe.run(model.program, feed=data(), fetch_list=[loss], scope=scope)[0].item() for _ in range(3)]
    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=4)
    assert t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=data(), fetch_list=[loss])[0].item() for _ in range(3)]
        fx.onnx.save_adapters(model.program, tmp_path, executor=ranks)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # four parts of a sum in another order, in float32
    name = "h.0.attn.v.lora_B.weight"
    np.testing.assert_allclose(arrays(tmp_path)[name], scope.get(name), rtol=1e-4, atol=1e-6)
    weight = t.get_trainer_program(0).global_block().desc("h.0.attn.q.weight")
    assert bool(weight.placement) == (strategy in ("zero3", "fsdp")), "these two divide the frozen weights as well"


# -- files -------------------------------------------------------------------------------------------------------------------------------


def arrays(folder):
    from safetensors.numpy import load_file

    return {n.removeprefix("base_model.model."): a for n, a in load_file(folder / "adapter_model.safetensors").items()}


def test_adapters_are_written_as_peft_writes_them(tmp_path):
    model, scope = trained()
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope, base="net.onnx")
    found = arrays(tmp_path / "adapters")
    assert {n: a.shape for n, a in found.items()} == {
        "h.0.attn.q.lora_A.weight": (2, 4), "h.0.attn.q.lora_B.weight": (6, 2), "h.0.attn.k.lora_A.weight": (2, 6),
        "h.0.attn.k.lora_B.weight": (5, 2), "h.0.attn.v.lora_A.weight": (2, 5), "h.0.attn.v.lora_B.weight": (6, 2),
    }  # fmt: skip
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    wanted = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["h.0.attn.q", "h.0.attn.k", "h.0.attn.v"], "bias": "none"}
    assert wanted.items() <= config.items() and config["base_model_name_or_path"] == "net.onnx" and config["modules_to_save"] is None


def test_a_merged_model_one_with_adapters_as_nodes_and_the_program_agree(tmp_path):
    model, scope = trained()
    x = data()["x"]
    expected = outputs(model, scope, x)
    assert not np.allclose(expected, fx.onnx.load(net()).run([x])[0], atol=0.1), "training changed nothing"
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    fx.onnx.save(model.program, tmp_path / "nodes.onnx", fetches=model.fetches, scope=scope)
    fx.onnx.save(model.program, tmp_path / "program.onnx", fetches=model.fetches, scope=scope, merge=True)
    assert fx.onnx.merge(net(), tmp_path / "adapters", tmp_path / "file.onnx") == 3
    for name in ("nodes", "program", "file"):
        # sums in another order, and products of merged weights, in float32
        np.testing.assert_allclose(on_runtime(tmp_path / f"{name}.onnx", x), expected, rtol=1e-5, atol=1e-4)
    nodes = [onnx.load(tmp_path / f"{name}.onnx").graph.node for name in ("nodes", "program", "file")]
    assert [sum(n.op_type in ("MatMul", "Gemm") for n in some) for some in nodes] == [10, 4, 4]
    assert [n.SerializeToString() for n in nodes[2]] == [n.SerializeToString() for n in net().graph.node]


def test_adapters_of_a_folder_go_on_from_their_values(tmp_path):
    model, scope = trained(head=lambda m: fx.layers.fc(m["v"], 3, param_attr="new.weight", bias_attr=False))
    fx.onnx.save_adapters(model.program, tmp_path, scope=scope)
    assert "new.weight" in arrays(tmp_path)
    head = {"head": lambda m: fx.layers.fc(m["v"], 3, param_attr="new.weight", bias_attr=False)}
    again, _ = adapted(lora=tmp_path, **head)
    x = data()["x"]
    np.testing.assert_array_equal(outputs(again, started(again), x), outputs(model, scope, x))


def test_a_weight_that_others_read_is_copied_before_it_is_merged(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> tied (int64[n] x) => (float[n, 5] y) {
            h = Gather ("tokens.weight", x)
            y = Gemm <transB = 1> (h, "tokens.weight") }""")
    w, rng = np.float32(np.arange(10).reshape(5, 2)), np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "tokens.weight"))
    a, b = (np.float32(rng.integers(-2, 3, s)) for s in ((1, 2), (5, 1)))
    written(tmp_path, {"tokens": (a, b)}, r=1, lora_alpha=2)
    fx.onnx.merge(model, tmp_path, tmp_path / "merged.onnx")
    x = np.array([0, 3, 4])
    assert (on_runtime(tmp_path / "merged.onnx", x) == w[x] @ (w + 2 * b @ a).T).all()


def written(folder, adapters, others=None, **config):
    """A folder as PEFT writes it: A and B by module."""
    named = {f"{m}.lora_{k}.weight": v for m, ab in adapters.items() for k, v in zip("AB", ab, strict=True)} | (others or {})
    save_arrays(str(folder / "adapter_model.safetensors"), {f"base_model.model.{n}": a for n, a in named.items()}, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 2), ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4),
        ({"r": 2, "lora_alpha": 3, "rank_pattern": {"q": 4}, "alpha_pattern": {"attn.q": 12}}, 3),
    ],
)  # fmt: skip
def test_scales_of_files_of_peft(config, scale, tmp_path):
    a, b = np.ones((4, 4), "float32"), np.ones((6, 4), "float32")
    written(tmp_path, {"model.h.0.attn.q": (a, b)}, {"head.weight": np.zeros((6, 3), "float32")}, **config)
    fx.onnx.merge(net(), tmp_path, tmp_path / "merged.onnx")
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "merged.onnx").graph.initializer}
    before = {t.name: onnx.numpy_helper.to_array(t) for t in net().graph.initializer}
    assert (found["h.0.attn.q.weight"] == before["h.0.attn.q.weight"] + 4 * scale).all()  # rank 4, and A and B are ones
    assert not found["head.weight"].any()


# -- the command ---------------------------------------------------------------------------------------------------------------------------


def fluidx(*args):
    result = CliRunner().invoke(main, ["onnx", *map(str, args)])
    return result.exit_code, result.output


def test_the_command_trains_adapters_and_merges_them(tmp_path):
    onnx.save(net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **data(64))
    options = ("--data", tmp_path / "data.npz", "--lora", 2, "--target", "q,v", "--epochs", 2, "--lr", 0.01)
    code, said = fluidx("train", tmp_path / "net.onnx", *options, "-o", tmp_path / "adapters")
    assert code == 0, said
    assert "adapters of rank 2 for 2 weights: h.0.attn.q, h.0.attn.v" in said and "4 of them with 42 elements are trained" in said
    assert fluidx("merge", tmp_path / "net.onnx", tmp_path / "adapters", "-o", tmp_path / "a.onnx") == (
        0, f"wrote {tmp_path / 'a.onnx'}: 2 weights changed\n",
    )  # fmt: skip
    code, said = fluidx("train", tmp_path / "net.onnx", *options, "-n", 2, "--strategy", "fsdp", "-o", tmp_path / "b.onnx")
    assert code == 0, said
    x = data()["x"]
    np.testing.assert_allclose(on_runtime(tmp_path / "a.onnx", x), on_runtime(tmp_path / "b.onnx", x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "q"], "--target chooses what --lora adapts; give --lora RANK, such as --lora 8"),
        (["--lora", "0"], "Invalid value for '--lora'"),
        (["--lora-base", "int8"], "--lora-base is for training adapters; give --lora RANK too, such as --lora 8"),
        (
            ["--lora", "2", "--standardize"],
            "--standardize changes the model, and -o is a folder of adapters; write -o FILE.onnx, or leave out --standardize",
        ),
        (["--lora", "2", "--target", "queries"], "Lora: targets names 'queries', but no product has a module of that name"),
        (["--lora", "9"], "Lora: rank 9 is more than the 4 that the weight of 'h.0.attn.q', 4 x 6, can have"),
    ],
)
def test_the_command_says_what_is_wrong(options, message, tmp_path):
    onnx.save(net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **data())
    code, said = fluidx("train", tmp_path / "net.onnx", "--data", tmp_path / "data.npz", *options, "-o", tmp_path / "out")
    assert code and message in said, said


def test_what_merges_is_named(tmp_path):
    with pytest.raises(fx.onnx.OnnxError, match="given by its path; got NoneType: None"):
        fx.onnx.merge(net(), None, tmp_path / "out.onnx")
    with pytest.raises(fx.onnx.OnnxError, match="untie must be a name, a pattern or a list of them, got 3"):
        fx.onnx.load(net(), untie=3)


# -- messages ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "Lora: rank must be an integer of 1 or more, got 0"),
        ({"rank": True}, "Lora: rank must be an integer of 1 or more, got True"),
        ({"alpha": 0}, "Lora: alpha must be a number above 0, got 0"),
        ({"dropout": 1}, "Lora: dropout must be a rate of at least 0 and below 1, got 1"),
        ({"targets": []}, 'Lora: targets is empty; name modules, such as ["q", "v"], or leave it at "all-linear"'),
        ({"targets": ["q", 3]}, "Lora: targets must be a name or a list of names, got 3"),
        ({"also_train": 3}, "Lora: also_train must be a name or a list of names, got 3"),
        ({"base": "int3"}, "Lora: base must be None, as the weights are, 'int8' or 'int4', got 'int3'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.Lora(**options)
    assert str(e.value) == message


def test_wrong_targets_list_what_can_be_adapted():
    with pytest.raises(fx.onnx.OnnxError) as e:
        adapted(lora=fx.onnx.Lora(targets="query"))
    assert str(e.value) == (
        "Lora: targets names 'query', but no product has a module of that name; the last parts of their names are: head, k, q, v; "
        "modules: h.0.attn.q, h.0.attn.k, h.0.attn.v, head"
    )
    with pytest.raises(fx.onnx.OnnxError, match=r"also_train names 'no\*', which no parameter is called"):
        adapted(lora=fx.onnx.Lora(rank=1, also_train="no*"))
    with pytest.raises(fx.onnx.OnnxError, match="has adapters already, such as h.0.attn.q.lora_A.weight"):
        fx.onnx.set_training(adapted(loss=None, lora=QKV)[0], lora=QKV)
    with pytest.raises(fx.onnx.OnnxError, match="adapters of a Program need startup="):
        fx.onnx.set_training(fx.onnx.load(net()).program, lora=QKV)
    with pytest.raises(fx.onnx.OnnxError, match=r"lora must be fx.onnx.Lora\(rank=8, targets=...\) or a folder of adapters, got 8"):
        adapted(lora=8)


def test_wrong_files(tmp_path):
    with pytest.raises(fx.onnx.OnnxError, match="adapter_config.json: No such file or directory; adapters are a folder with"):
        fx.onnx.merge(net(), tmp_path, tmp_path / "out.onnx")
    a, b = np.ones((2, 4), "float32"), np.ones((6, 2), "float32")
    for adapters, config, message in (
        ({"h.0.attn.z": (a, b)}, {}, "adapts module 'h.0.attn.z', which the model lacks; did you mean"),
        ({"h.0.attn.k": (a, b)}, {}, r"an adapter is for a weight of \[6, 4\], but 'h.0.attn.k.weight' is float32\[5, 6\]"),
        ({"h.0.attn.q": (a, b[:, :1])}, {}, r"must be floats \[rank, in\] and \[out, rank\], or of a convolution .*, found float32"),
        ({"h.0.attn.q": (a, b)}, {"use_dora": True}, "describes DoRA, which fluidx does not have"),
        ({"h.0.attn.q": (a, b)}, {"peft_type": "IA3"}, "peft_type must be 'LORA', found 'IA3'"),
    ):
        written(tmp_path, adapters, **{"r": 2, "lora_alpha": 2, **config})
        with pytest.raises(fx.onnx.OnnxError, match=message):
            fx.onnx.merge(net(), tmp_path, tmp_path / "out.onnx")
    with pytest.raises(fx.onnx.OnnxError, match="has no adapters; set_training"):
        fx.onnx.save_adapters(fx.onnx.load(net()).program, tmp_path)
