"""Which weight an adapter is for: names of modules, weights that products read in several ways, and files that do not fit."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main
from fluidx.files.safetensors import save_arrays

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


def model_of(nodes, shapes, inputs="float[n, 4] x", dtype="float32"):
    """A model with one output y of these nodes, and weights of small integers."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => (float[n, k] y) {{ {nodes} }}""")
    rng = np.random.default_rng(0)
    weights = {n: rng.integers(-2, 3, shape).astype(dtype) for n, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for n, w in weights.items())
    return model, weights


def adapted(source, lora, seed=1):
    """A program with adapters of small integers."""
    model = fx.onnx.load(source)
    fx.onnx.set_training(model, lora=lora)
    scope, rng = fx.Scope(), np.random.default_rng(seed)
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    if isinstance(lora, fx.onnx.Lora):
        for name in [n for n in scope.arrays if ".lora_" in n]:
            scope.set(name, rng.integers(-2, 3, scope.get(name).shape).astype("float32"))
    return model, scope


def outputs(model, scope, x):
    return fx.Executor(fx.CPUPlace()).run(model.program.clone(for_test=True), feed={"x": x}, fetch_list=model.fetches, scope=scope)[0]


def on_runtime(path, x):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


X = np.float32(np.random.default_rng(2).integers(-2, 3, (3, 4)))
X4 = np.float32(np.random.default_rng(3).integers(-2, 3, (4, 4)))


def written(folder, adapters, **config):
    """A folder as PEFT writes it: A and B by module."""
    named = {f"base_model.model.{m}.lora_{k}.weight": v for m, ab in adapters.items() for k, v in zip("AB", ab, strict=True)}
    folder.mkdir(exist_ok=True)
    save_arrays(str(folder / "adapter_model.safetensors"), named, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, **config}))
    return folder


A, B = np.ones((1, 4), "float32"), np.ones((4, 1), "float32")


# -- names -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [("fc_0.w_0", "fc_0.w_1", "fc_0"), ("a.weight", "a.kernel", "a"), ("a/b.weight", "a.b.weight", "b"), ("a.w", "a.W", "a")],
)
def test_each_weight_has_its_own_adapter_wherever_two_would_have_one_name(first, second, target, tmp_path):
    source, w = model_of(f'm = MatMul (x, "{first}") y = MatMul (m, "{second}")', {first: (4, 4), second: (4, 4)})
    model, scope = adapted(source, fx.onnx.Lora(rank=2, alpha=2, targets=target))
    names = [p.name for p in model.parameters if p.trainable]
    assert len(set(names)) == 4 and [n.rpartition(".lora_")[2] for n in names] == ["A.weight", "B.weight"] * 2
    a, b, c, d = (scope.get(n) for n in names)
    expected = (X @ w[first] + X @ a.T @ b.T) @ (w[second] + c.T @ d.T)
    assert (outputs(model, scope, X) == expected).all()  # small integers add up exactly
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    assert fx.onnx.merge(source, tmp_path / "adapters", tmp_path / "merged.onnx") == 2
    assert (on_runtime(tmp_path / "merged.onnx", X) == expected).all()
    assert (outputs(*adapted(source, tmp_path / "adapters"), X) == expected).all()
    fx.onnx.save(model.program, tmp_path / "saved.onnx", fetches=model.fetches, scope=scope, merge=True)
    assert (on_runtime(tmp_path / "saved.onnx", X) == expected).all()


def test_the_name_of_an_adapter_does_not_depend_on_what_else_is_trained(tmp_path):
    source, w = model_of('m = MatMul (x, "a.weight") y = MatMul (m, "a.kernel")', {"a.weight": (4, 4), "a.kernel": (4, 4)})
    model, scope = adapted(source, fx.onnx.Lora(rank=1, alpha=1, targets="a", also_train="a.kernel"))
    assert "a.weight.lora_A.weight" in scope.arrays
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    fx.onnx.merge(source, tmp_path / "adapters", tmp_path / "merged.onnx")
    assert (on_runtime(tmp_path / "merged.onnx", X) == outputs(model, scope, X)).all()


def test_a_name_that_becomes_another_modules_is_changed_too():
    from fluidx.onnx.lora import unique_modules

    # a.weight and a.kernel share "a"; their own names are then a.weight, which the third has already
    modules = {"a.weight": "a", "a.kernel": "a", "a.weight.weight": "a.weight", "b.weight": "b"}
    assert unique_modules(modules) == {w: w for w in modules} | {"b.weight": "b"}


def test_inputs_of_one_layer_have_an_adapter_each():
    main, startup = fx.Program("net"), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.layers.fc([fx.data("a", [-1, 4], "float32"), fx.data("b", [-1, 4], "float32")], 3)
    fx.onnx.set_training(main, startup=startup, lora=fx.onnx.Lora(rank=1, targets="fc_0"))
    assert [p.name for p in main.all_parameters() if p.trainable] == [f"fc_0.w_{k}.lora_{m}.weight" for k in (0, 1) for m in "AB"]


def test_an_adapter_for_a_module_of_two_weights_is_refused_with_both(tmp_path):
    source, _ = model_of('m = MatMul (x, "a.weight") y = MatMul (m, "a.kernel")', {"a.weight": (4, 4), "a.kernel": (4, 4)})
    folder = written(tmp_path / "adapters", {"a": (A, B)})
    message = "adapts module 'a', which has several weights in the model: 'a.weight' and 'a.kernel'"
    with pytest.raises(fx.onnx.OnnxError, match=message):
        fx.onnx.merge(source, folder, tmp_path / "out.onnx")
    with pytest.raises(fx.onnx.OnnxError, match=message):
        adapted(source, folder)


def test_two_adapters_for_one_weight_are_refused(tmp_path):
    source, _ = model_of('y = MatMul (x, "fc.weight")', {"fc.weight": (4, 4)})
    folder = written(tmp_path / "adapters", {"a.fc": (A, B), "b.fc": (A, B)})
    for refused in (lambda: fx.onnx.merge(source, folder, tmp_path / "out.onnx"), lambda: adapted(source, folder)):
        with pytest.raises(fx.onnx.OnnxError, match=r"has adapters 'a\.fc' and 'b\.fc', and both are for the weight 'fc\.weight'"):
            refused()
    assert not (tmp_path / "out.onnx").exists()


# -- weights that products read in several ways ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ('m = MatMul (x, "t.weight") y = Gemm <transB = 1> (m, "t.weight")',
         r"'t.weight' is read in two ways, .*: by the products 'm' \(as it is\) and 'y' \(its transpose\); .*untie='t.weight'"),
        ('m = MatMul (x, "t.weight") y = Gemm <alpha = 0.5> (m, "t.weight")', r"'m' \(as it is\) and 'y' \(as it is, alpha=0.5\)"),
        ('y = Gemm <alpha = 0.0> (x, "t.weight")', "'y' multiplies the weight 't.weight' by alpha=0, so no change of the weight"),
    ],
)  # fmt: skip
def test_weights_that_no_merged_adapter_fits_are_refused_before_training(nodes, message):
    source, _ = model_of(nodes, {"t.weight": (4, 4)})
    with pytest.raises(fx.onnx.OnnxError, match=message):
        adapted(source, fx.onnx.Lora(rank=1, targets="t"))


def test_untied_or_left_out_such_weights_are_no_obstacle():
    source, _ = model_of(
        'm = MatMul (x, "t.weight") k = MatMul (m, "a.weight") y = Gemm <transB = 1> (k, "t.weight")',
        {"t.weight": (4, 6), "a.weight": (6, 6)},
    )  # not square: the adapter of one way would not even have the shape for the other
    assert [n for n in adapted(source, fx.onnx.Lora(rank=1, targets="a"))[1].arrays if "lora_" in n]
    model = fx.onnx.load(source, untie="t.weight")
    fx.onnx.set_training(model, lora=fx.onnx.Lora(rank=1, targets="*"))
    with pytest.raises(fx.onnx.OnnxError, match="the weight 't.weight' is read in two ways"):
        adapted(source, fx.onnx.Lora(rank=1, targets="t"))


def test_an_adapter_of_a_product_with_alpha_0_is_not_merged(tmp_path):
    source, _ = model_of('y = Gemm <alpha = 0.0> (x, "fc.weight")', {"fc.weight": (4, 4)})
    with pytest.raises(fx.onnx.OnnxError, match=r"'fc.weight' is multiplied with alpha=0 \(node Gemm of y\)"):
        fx.onnx.merge(source, written(tmp_path / "adapters", {"fc": (A, B)}), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


# -- files that do not fit -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, found nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number, found 1000"),
        ({"r": True}, "r must be a finite number, found True"),
        ({"alpha_pattern": ["fc"]}, r"alpha_pattern must be an object of names of modules and numbers, found \['fc'\]"),
        ({"alpha_pattern": {"fc": "x"}}, "alpha_pattern must have a finite number for 'fc', found 'x'"),
        ({"alpha_pattern": {"fc": float("inf")}}, "alpha_pattern must have a finite number for 'fc', found inf"),
    ],
)
def test_values_of_configurations_that_are_no_numbers_are_named(config, message, tmp_path):
    source, _ = model_of('y = MatMul (x, "fc.weight")', {"fc.weight": (4, 4)})
    with pytest.raises(fx.onnx.OnnxError, match=rf"adapter_config\.json: {message}"):
        fx.onnx.merge(source, written(tmp_path / "adapters", {"fc": (A, B)}, **config), tmp_path / "out.onnx")


def test_an_adapter_of_rank_0_is_named(tmp_path):
    source, _ = model_of('y = MatMul (x, "fc.weight")', {"fc.weight": (4, 4)})
    folder = written(tmp_path / "adapters", {"fc": (A[:0], B[:, :0])})
    with pytest.raises(fx.onnx.OnnxError, match=r"adapter of 'fc' must have a rank of 1 or more, found lora_A.weight \[0, 4\]"):
        fx.onnx.merge(source, folder, tmp_path / "out.onnx")


# -- weights behind other nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "dtype", "expected"),
    [
        ('w = Cast <to = 1> ("fc.weight") y = MatMul (x, w)', "float16", lambda w, d: X4 @ (w + d)),
        ('t = Transpose ("fc.weight") w = Transpose <perm = [1, 0]> (t) y = MatMul (x, w)', "float32", lambda w, d: X4 @ (w + d)),
        ('t = Transpose ("fc.weight") w = Cast <to = 1> (t) y = Gemm <transB = 1> (x, w)', "float16", lambda w, d: X4 @ (w + d)),
        ('t = Identity ("fc.weight") i = Transpose <perm = [0, 1]> (t) w = Identity (i) y = MatMul (x, w)', "float32",
         lambda w, d: X4 @ (w + d)),
        ('y = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (x, "fc.weight")', "float32", lambda w, d: X4 @ (w.T + d) / 2),
        ('y = Gemm <alpha = 0.5> (x, "fc.weight")', "float32", lambda w, d: X4 @ (w / 2 + d)),
        # others read the weight, or what is converted or transposed, and keep what they had
        ('w = Cast <to = 1> ("fc.weight") m = MatMul (x, w) y = Add (m, w)', "float16", lambda w, d: X4 @ (w + d) + w),
        ('w = Cast <to = 1> ("fc.weight") t = Transpose (w) m = MatMul (x, t) y = Add (m, w)', "float16", lambda w, d: X4 @ (w.T + d) + w),
        ('t = Transpose ("fc.weight") m = MatMul (x, t) n = MatMul (m, t) y = Add (n, t)', "float32",
         lambda w, d: X4 @ (w.T + d) @ (w.T + d) + w.T),
    ],
)  # fmt: skip
def test_what_is_trained_behind_other_nodes_is_merged(nodes, dtype, expected, tmp_path):
    source, weights = model_of(nodes, {"fc.weight": (4, 4)}, inputs="float[4, 4] x", dtype=dtype)
    source.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    x, w = X4, weights["fc.weight"].astype("float32")
    model, scope = adapted(source, fx.onnx.Lora(rank=2, alpha=2, targets="fc"))
    d = scope.get("fc.lora_A.weight").T @ scope.get("fc.lora_B.weight").T
    wanted = expected(w, d)
    assert d.any() and (outputs(model, scope, x) == wanted).all()
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    assert fx.onnx.merge(source, tmp_path / "adapters", tmp_path / "merged.onnx") == 1
    assert (on_runtime(tmp_path / "merged.onnx", x) == wanted).all()
    onnx.checker.check_model(onnx.load(tmp_path / "merged.onnx"))
    fx.onnx.save(model.program, tmp_path / "saved.onnx", fetches=model.fetches, scope=scope, merge=True)
    assert (on_runtime(tmp_path / "saved.onnx", x) == wanted).all()


def test_a_weight_through_integers_is_no_weight_of_its_product():
    source, _ = model_of('i = Cast <to = 6> ("fc.weight") w = Cast <to = 1> (i) y = MatMul (x, w)', {"fc.weight": (4, 4)})
    with pytest.raises(fx.onnx.OnnxError, match="multiplies no computed value by a float weight of two axes"):
        adapted(source, fx.onnx.Lora(rank=1, targets="fc"))


@pytest.mark.parametrize(("shape", "expected"), [([3, 4], lambda w, d: w / 2 + d), ([2, 3, 4], lambda w, d: (w + d) / 2)])
def test_a_product_with_a_factor_is_merged_as_it_was_trained(shape, expected, tmp_path):
    rng, main, startup = np.random.default_rng(0), fx.Program("net"), fx.Program()
    w, x = (np.float32(rng.integers(-2, 3, s)) for s in ((4, 4), shape))
    with fx.program_guard(main, startup), fx.unique_name.guard():
        weight = fx.layers.create_parameter([4, 4], "float32", "p.weight", default_initializer=fx.initializer.NumpyArrayInitializer(w))
        y = fx.layers.matmul(fx.data("x", shape, "float32"), weight, alpha=0.5)
    scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(startup, scope=scope)
    fx.onnx.save(main, tmp_path / "base.onnx", fetches=[y], scope=scope)
    fx.onnx.set_training(main, startup=startup, lora=fx.onnx.Lora(rank=2, alpha=6, targets="p"))
    exe.run(startup, scope=scope)
    a, b = (np.float32(rng.integers(-2, 3, s)) for s in ((2, 4), (4, 2)))
    scope.set("p.lora_A.weight", a)
    scope.set("p.lora_B.weight", b)
    wanted = x @ expected(w, 3 * a.T @ b.T)  # alpha / rank is 3
    assert (exe.run(main, feed={"x": x}, fetch_list=[y], scope=scope)[0] == wanted).all()
    fx.onnx.save_adapters(main, tmp_path / "adapters", scope=scope)
    fx.onnx.merge(tmp_path / "base.onnx", tmp_path / "adapters", tmp_path / "file.onnx")
    fx.onnx.save(main, tmp_path / "program.onnx", fetches=[y], scope=scope, merge=True)
    for name in ("file", "program"):
        assert (on_runtime(tmp_path / f"{name}.onnx", x) == wanted).all()


# -- shared weights, outputs, and names ----------------------------------------------------------------------------------------------


def test_adapters_of_untied_weights_are_merged_into_weights_of_their_own(tmp_path):
    source, _ = model_of('h = MatMul (x, "shared.weight")  y = MatMul (h, "shared.weight")', {"shared.weight": (4, 4)})
    for node, name in zip(source.graph.node, ("/up/MatMul", "/down/MatMul"), strict=True):
        node.name = name
    model = fx.onnx.load(source, untie=True)
    fx.onnx.set_training(model, lora=fx.onnx.Lora(rank=1, targets="*"))
    scope, rng = fx.Scope(), np.random.default_rng(1)
    fx.Executor(fx.CPUPlace()).run(model.startup, scope=scope)
    for name in [n for n in scope.arrays if ".lora_" in n]:
        scope.set(name, np.float32(rng.integers(-2, 3, scope.get(name).shape)))
    fx.onnx.save_adapters(model.program, tmp_path / "adapters", scope=scope)
    onnx.save(source, tmp_path / "source.onnx")
    command = ["onnx", "merge", str(tmp_path / "source.onnx"), str(tmp_path / "adapters"), "-o", str(tmp_path / "m.onnx")]
    assert CliRunner().invoke(main, [*command, "--untie", "*"], catch_exceptions=False).exit_code == 0
    np.testing.assert_array_equal(on_runtime(tmp_path / "m.onnx", X), outputs(model, scope, X))
    assert CliRunner().invoke(main, command).exit_code != 0, "without it there is one weight for two adapters"


@pytest.mark.parametrize(
    "nodes", ['w = Identity ("a.weight")  y = MatMul (x, "a.weight")', 'w = Transpose ("a.weight")  y = MatMul (x, w)']
)
def test_a_weight_that_is_an_output_keeps_its_value_there(nodes, tmp_path):
    source, weights = model_of(nodes, {"a.weight": (4, 4)})
    source.graph.output.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 4]))
    if "Transpose" not in nodes:
        del source.graph.node[0], source.graph.output[1]
        source.graph.output.append(onnx.helper.make_tensor_value_info("a.weight", onnx.TensorProto.FLOAT, [4, 4]))
    fx.onnx.merge(source, written(tmp_path / "a", {"a": (A, B)}), tmp_path / "m.onnx")
    y, w = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]).run(None, {"x": X})
    held = weights["a.weight"].T if "Transpose" in nodes else weights["a.weight"]
    np.testing.assert_array_equal(w, held)
    np.testing.assert_array_equal(y, X @ (held + 1))


def test_an_adapter_without_its_first_half_is_named(tmp_path):
    source, _ = model_of('y = MatMul (x, "a.weight")', {"a.weight": (4, 4)})
    folder = written(tmp_path / "a", {"a": (A, B)})
    save_arrays(str(folder / "adapter_model.safetensors"), {"base_model.model.a.lora_A.weight": A, "base_model.model.a.lora_B.weight": B,
                                                            "base_model.model.c.lora_B.weight": B}, {"format": "pt"})  # fmt: skip
    with pytest.raises(fx.onnx.OnnxError, match="has c.lora_B.weight but no c.lora_A.weight"):
        fx.onnx.merge(source, folder, tmp_path / "m.onnx")


def test_names_that_differ_only_in_replaced_characters_are_refused(tmp_path):
    source, _ = model_of('h = MatMul (x, "a:b.weight")  y = MatMul (h, "a_b.weight")', {"a:b.weight": (4, 4), "a_b.weight": (4, 4)})
    with pytest.raises(fx.onnx.OnnxError, match="adapts modules 'a:b' and 'a_b', whose names differ only in characters"):
        fx.onnx.merge(source, written(tmp_path / "a", {"a:b": (A, B), "a_b": (A, B)}), tmp_path / "m.onnx")
    shapes = {"a.weight": (4, 4), "s:t": (4,), "s_t": (4,)}
    source, _ = model_of('h = MatMul (x, "a.weight")  i = Mul (h, "s:t")  y = Add (i, "s_t")', shapes)
    folder = written(tmp_path / "b", {"a": (A, B)})
    save_arrays(str(folder / "adapter_model.safetensors"), {"base_model.model.a.lora_A.weight": A, "base_model.model.a.lora_B.weight": B,
                                                            "base_model.model.s_t": np.ones(4, "float32")}, {"format": "pt"})  # fmt: skip
    with pytest.raises(fx.onnx.OnnxError, match="has a value of 's_t', which stands for 's:t' and 's_t' of the model"):
        fx.onnx.merge(source, folder, tmp_path / "m.onnx")


def test_a_table_given_as_adapters_is_no_folder(tmp_path):
    source, _ = model_of('y = MatMul (x, "a.weight")', {"a.weight": (4, 4)})
    (tmp_path / "data.csv").write_text("x,label\n1,2\n")
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.merge(source, tmp_path / "data.csv", tmp_path / "m.onnx")
    assert str(e.value) == (
        f"{tmp_path / 'data.csv'} has no adapters: expected a folder with adapter_config.json and adapter_model.safetensors, as "
        "save_adapters, PEFT and fluidx onnx train --lora write it, found a file 'data.csv'"
    )
