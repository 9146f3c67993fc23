"""`fluidx onnx info | check | run | train`."""

import re

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx import native
from fluidx.cli import main
from fluidx.native import shared

onnx = pytest.importorskip("onnx")


@pytest.fixture
def file(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        small (float[n, 2] x) => (float[n, 2] y) <float[2] w = {2, 3}> { m = Mul(x, w)  y = Relu(m) }
    """)
    onnx.save(model, tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def fluidx(*args):
    result = CliRunner().invoke(main, ["onnx", *map(str, args)])
    return result.exit_code, result.output


def test_info_lists_what_is_in_a_model(file):
    assert fluidx("info", file) == (
        0,
        "small: IR 9, opset ai.onnx 18, written by an unknown tool\n"
        "  input   x: float32[n,2]\n  output  y: float32[n,2]\n  1 initializers of 2 elements, 2 nodes\n        1  Mul\n        1  Relu\n"
        "  trained: 1 of 1, 2 elements\n    w: float32[2]  Mul\n",
    )


def test_info_says_which_weights_are_trained_and_why_others_are_not(tmp_path):
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        net (float[n, 2] x) => (float[n, 3] y)
        <float[1] scale = {2}, float[4] old = {1, 2, 3, 4}, int64[1] axes = {1}, float half = {0.5}> {
            h = MatMul (x, "a::w")
            m = BatchNormalization (h, gain, shift, mean, var)
            s = Mul (m, scale)
            d = Dropout (s, half)
            r = ReduceSum (d, axes)
            y = Add (r, d)
        }
    """)
    arrays = {"a::w": rng.standard_normal((2, 3)), **{n: rng.uniform(1, 2, 3) for n in ("gain", "shift", "mean", "var")}}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in arrays.items())
    onnx.save(model, tmp_path / "net.onnx")
    code, said = fluidx("info", tmp_path / "net.onnx")
    assert code == 0
    assert said[said.index("  trained") :].splitlines() == [
        "  trained: 3 of 9, 12 elements", "    a::w: float32[2,3]  MatMul", "    gain: float32[3]  BatchNormalization",
        "    shift: float32[3]  BatchNormalization", "  not trained: 6 of 9, 13 elements",
        "    scale: float32[1]  one number that Mul reads; --also-train scale trains it", "    old: float32[4]  no node reads it",
        "    axes: int64[1]  only floats are trained", "    half: float32[]  one number that Dropout reads; --also-train half trains it",
        "    mean: float32[3]  running statistic of BatchNormalization", "    var: float32[3]  running statistic of BatchNormalization",
    ]  # fmt: skip


def test_info_lists_so_many_weights_and_all_on_demand(tmp_path):
    nodes = " ".join(f"v{k + 1} = Add (v{k}, w{k})" for k in range(40))
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[n, 2] v0) => (float[n, 2] v40) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32([k, 1]), f"w{k}") for k in range(40))
    onnx.save(model, tmp_path / "many.onnx")
    assert fluidx("info", tmp_path / "many.onnx")[1].splitlines()[-2:] == ["    w28: float32[2]  Add", "    and 11 more; --all lists them"]
    assert fluidx("info", tmp_path / "many.onnx", "--all")[1].splitlines()[-1] == "    w39: float32[2]  Add"


def test_check_says_whether_a_model_can_be_trained(file):
    assert fluidx("check", file) == (
        0,
        f"{file}: valid, and all operators are supported\n  as a program: 2 operators, 1 parameters; it can be trained\n",
    )
    file.write_bytes(file.read_bytes()[:-20])
    code, said = fluidx("check", file)
    assert code == 1 and said.startswith("Error: ") and "Traceback" not in said


def test_run_computes_outputs_for_arrays_in_files(file, tmp_path):
    np.save(tmp_path / "x.npy", np.float32([[1, -1]]))
    code, said = fluidx("run", file, "-i", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz")
    assert (code, said) == (0, f"y: float32[1, 2]\n[[2. 0.]]\nwrote {tmp_path / 'y.npz'}\n")
    assert np.load(tmp_path / "y.npz")["y"].tolist() == [[2.0, 0.0]]
    assert fluidx("run", file) == (1, "Error: input 'x' is not fed; the model takes x: float32[n,2]: give each as -i NAME=FILE.npy\n")
    assert "'x' is not an input; give NAME=FILE.npy" in fluidx("run", file, "-i", "x")[1]


@pytest.fixture
def feeds(tmp_path):
    np.save(tmp_path / "x.npy", np.float32([[1, -1]]))
    np.savez(tmp_path / "several.npz", x=np.ones(1), z=np.ones(1))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "several.npz").read_bytes()[:60])
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "empty.npy").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["-i", "x={}/none.npy"], 1, "/none.npy: No such file or directory"),
        (["-i", "x={}/text.npy"], 1, "text.npy is not an array written by np.save: it does not begin like a NumPy file"),
        (["-i", "x={}/empty.npy"], 1, "empty.npy is not an array written by np.save"),
        (["-i", "x={}/several.npz"], 1, "several.npz is not an array written by np.save: it holds several, x, z; save only one"),
        (["-i", "x={}/cut.npz"], 1, "cut.npz is not an array written by np.save"),
        (["-i", "q={}/x.npy"], 1, "'q' is not an input; the model takes x: float32[n,2]: give each as -i NAME=FILE.npy"),
        (["-i", "x={}/x.npy", "-i", "x={}/x.npy"], 2, "input 'x' is given twice"),
        (["-i", "x={}/x.npy", "-o", "{}/none/y.npz"], 2, "/none does not exist"),
    ],
)
def test_run_says_what_is_wrong_with_files_and_names(file, feeds, args, code, message):
    found, said = fluidx("run", file, *(a.format(feeds) for a in args))
    assert found == code and message in " ".join(said.split())


@pytest.mark.parametrize(
    ("nodes", "kind", "expected"),
    [
        ("file = Relu (x)", "float[n, 2]", {"file": np.float32([[1, 0]])}),
        ("allow_pickle = Relu (x)", "float[n, 2]", {"allow_pickle": np.float32([[1, 0]])}),
        ('s = Constant <value_strings = ["a", "bc"]> ()', "string[2]", {"s": np.array(["a", "bc"])}),
        ("b = Cast <to = 16> (x)", "bfloat16[n, 2]", {"b": np.float32([[1, -1]])}),
        ("q = SplitToSequence <axis = 1, keepdims = 0> (x)", "seq(float[n])", {"q.0": np.float32([1]), "q.1": np.float32([-1])}),
    ],
)
def test_run_writes_what_numpy_reads_without_pickle(feeds, nodes, kind, expected):
    name = nodes.split()[0]
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[n, 2] x) => ({kind} {name}) {{ {nodes} }}'
    onnx.save(onnx.parser.parse_model(text), feeds / "odd.onnx")
    code, said = fluidx("run", feeds / "odd.onnx", "-i", f"x={feeds / 'x.npy'}", "-o", feeds / "y.npz")
    assert code == 0, said
    with np.load(feeds / "y.npz", allow_pickle=False) as found:
        assert {n: (a.dtype.kind, a.tolist()) for n, a in found.items()} == {n: (a.dtype.kind, a.tolist()) for n, a in expected.items()}


def test_what_files_of_numpy_cannot_hold_is_read_as_it_is_written(feeds):
    text = '<ir_version: 9, opset_import: ["" : 18]> g (bfloat16[n, 2] x) => (bfloat16[n, 2] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), feeds / "short.onnx")
    code, said = fluidx("run", feeds / "short.onnx", "-i", f"x={feeds / 'x.npy'}", "-o", feeds / "y.npz")
    assert code == 0, said
    assert np.load(feeds / "y.npz")["y"].tolist() == [[1, 0]]


def test_errors_of_commands_point_at_no_line_of_a_program(file, tmp_path):
    np.save(tmp_path / "wide.npy", np.ones((1, 3), "float32"))
    code, said = fluidx("run", file, "-i", f"x={tmp_path / 'wide.npy'}")
    assert code == 1 and "node 'Mul' (Mul)" in said and "written at" not in said


def test_info_calls_strings_strings(tmp_path):
    text = '<ir_version: 9, opset_import: ["" : 18]> g (string[n] x) => (string[n] y) { y = Identity (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "text.onnx")
    assert "  input   x: string[n]\n" in fluidx("info", tmp_path / "text.onnx")[1]


@pytest.mark.parametrize("command", [["info"], ["check"], ["run", "-i", "x={}/x.npy"]])
def test_a_type_that_does_not_exist_is_told(feeds, file, command):
    model = onnx.load(file)
    model.graph.input[0].type.tensor_type.elem_type = 99
    onnx.save(model, feeds / "odd.onnx")
    code, said = fluidx(command[0], feeds / "odd.onnx", *(c.format(feeds) for c in command[1:]))
    assert code == 1 and said.startswith("Error: ") and "Traceback" not in said and "99" in said


def test_check_refuses_shapes_that_do_not_fit(file):
    code, said = fluidx("check", file, "--shapes", "z=1x2")
    assert code == 1 and "with these shapes it cannot be converted: shapes names 'z'; the inputs are: x" in said


def test_values_that_are_no_tensors_are_listed_and_run(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 22]>
        small (seq(float[n]) s, optional(seq(string[2])) o, string[2] t) => (seq(float[n]) r, bool has, string[2] u) {
            r = SequenceErase (s)
            has = OptionalHasElement (o)
            u = StringConcat (t, t)
        }
    """)
    path = tmp_path / "values.onnx"
    onnx.save(model, path)
    assert fluidx("info", path)[1].splitlines()[1:7] == [
        "  input   s: sequence of float32[n]", "  input   o: optional sequence of string[2]", "  input   t: string[2]",
        "  output  r: sequence of float32[n]", "  output  has: bool[]", "  output  u: string[2]",
    ]  # fmt: skip
    why = "op sequence_erase works on 's', which is seq<f32[-1]> and for the host alone"
    assert fluidx("check", path)[1].splitlines()[1] == f"  as a program: 3 operators, 0 parameters; on one device, as {why}"
    np.savez(tmp_path / "s.npz", a=np.float32([1]), b=np.float32([2, 3]))
    np.save(tmp_path / "t.npy", np.array(["a", "b"]))
    given = ["-i", f"s={tmp_path / 's.npz'}", "-i", f"t={tmp_path / 't.npy'}"]
    code, said = fluidx("run", path, *given, "-o", tmp_path / "found.npz")
    assert code == 0 and "\nhas: bool[]\nFalse\nu: string[2]\n['aa' 'bb']\n" in said
    found = np.load(tmp_path / "found.npz")
    assert {n: found[n].tolist() for n in found.files} == {"r.0": [1.0], "has": False, "u": ["aa", "bb"]}
    code, said = fluidx("run", path, "-i", f"s={tmp_path / 't.npy'}")
    assert code == 1 and "t.npy is not a file of arrays written by np.savez: it holds one array without a name" in said


# -- train ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path):
    """A small classifier of 3 features, and 24 examples whose class is that of their largest feature."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 12]>
        small (float[n, 3] x) => (float[n, 3] p) <float[3, 4] w, float[4, 3] v> {
          h = MatMul(x, w)
          r = Tanh(h)
          l = MatMul(r, v)
          p = Softmax<axis=1>(l)
        }
    """)
    rng = np.random.default_rng(0)
    del model.graph.initializer[:]
    weights = {"w": rng.standard_normal((3, 4)), "v": rng.standard_normal((4, 3))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in weights.items())
    onnx.save(model, tmp_path / "small.onnx")
    x = rng.standard_normal((24, 3), "float32")
    np.savez(tmp_path / "data.npz", x=x, label=x.argmax(axis=1))
    return tmp_path


def train(folder, *args, data="data.npz", output="trained.onnx"):
    return fluidx("train", folder / "small.onnx", "--data", folder / data, "-o", folder / output, *args)


def test_train_writes_a_model_that_has_learnt(digits):
    code, said = train(digits, "--epochs", 40, "--batch", 10, "--lr", "0.05", "-n", 2, "--strategy", "ring_optimizer")
    assert code == 0, said
    lines = said.splitlines()
    assert lines[0] == f"{digits / 'small.onnx'}: 2 parameters, 2 of them with 24 elements are trained"
    assert "24 examples, 3 batches an epoch, adam at 0.05, cosine; ring_optimizer on 2 ranks" in lines
    assert re.search("epoch 40 of 40: loss [0-9.]+, accuracy [0-9.]+%\n", said)
    assert lines[-1].startswith(f"wrote {digits / 'trained.onnx'}; the loss went from ")
    data = np.load(digits / "data.npz")
    session = pytest.importorskip("onnxruntime").InferenceSession(str(digits / "trained.onnx"))
    (found,) = session.run(None, {"x": data["x"]})
    assert (found.argmax(axis=1) == data["label"]).mean() > 0.9


def test_the_option_seed_counts_before_the_environment(digits, monkeypatch):
    def written(*args, environment):
        monkeypatch.setenv("FLUIDX_SEED", environment)
        code, said = train(digits, "--epochs", 1, "--head", 3, *args)
        assert code == 0, said
        return (digits / "trained.onnx").read_bytes()

    five = written("--seed", "5", environment="5")
    assert written("--seed", "5", environment="9") == five == written(environment="5")
    assert written(environment="9") != five


def test_what_check_says_trains_on_one_device_trains_on_one_device(tmp_path):
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 3] y) {
        h = MatMul (x, w)  some = Greater (x, zero)  places = NonZero (some)  k = ReduceMax <keepdims = 0> (places)
        f = Cast <to = 1> (k)  one = Sub (f, f)  y = Add (h, one)
    }"""
    model = onnx.parser.parse_model(text)
    weights = {"w": np.eye(3, dtype="float32"), "zero": np.float32(0)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items())
    onnx.save(model, tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((24, 3), "float32")
    np.savez(tmp_path / "d.npz", x=x, label=x.argmax(axis=1))
    assert "it can be trained; on one device, as op where_index" in fluidx("check", tmp_path / "m.onnx")[1]
    asked = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "-o", tmp_path / "out.onnx", "--epochs", 5]
    code, said = fluidx(*asked)
    assert code == 0 and "cosine; one device\n" in said
    trained = onnx.numpy_helper.to_array(next(t for t in onnx.load(tmp_path / "out.onnx").graph.initializer if t.name == "w"))
    assert (np.diag(trained) > 1).all()
    code, said = fluidx(*asked, "-n", 2)
    assert code == 1 and "so the model trains on one device alone: leave --ranks out" in said


def test_train_on_ranks_gives_what_one_rank_gives(digits):
    for ranks in (1, 3):
        assert train(digits, "--epochs", 2, "--optimizer", "momentum", "-n", ranks, output=f"{ranks}.onnx")[0] == 0
    one, three = (onnx.load(digits / f"{n}.onnx") for n in (1, 3))
    for a, b in zip(one.graph.initializer, three.graph.initializer, strict=True):
        # float32 sums of 24 rows in another order, through two steps
        np.testing.assert_allclose(onnx.numpy_helper.to_array(b), onnx.numpy_helper.to_array(a), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
def test_train_on_processes_gives_what_threads_give(digits):
    models = []
    for backend in ("threads", "processes"):
        assert train(digits, "--backend", backend, "-n", 2, output=f"{backend}.onnx")[0] == 0
        models.append(onnx.load(digits / f"{backend}.onnx"))
    assert models[0] == models[1]


def accuracy(path, data):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    (found,) = session.run(None, {"x": data["x"]})
    return float((found.argmax(axis=1) == data["label"]).mean())


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3", "reduce_broadcast"])
def test_train_says_how_much_of_what_was_held_back_is_right(digits, strategy):
    x = np.random.default_rng(5).standard_normal((50, 3), "float32")
    np.savez(digits / "val.npz", x=x, label=x.argmax(axis=1))
    code, said = train(digits, "--val", digits / "val.npz", "--epochs", 3, "--batch", 10, "-n", 2, "--strategy", strategy)
    assert code == 0, said
    assert "24 examples, 50 for validation, 3 batches an epoch" in said
    epochs = re.findall(r"epoch . of 3: loss [0-9.]+, accuracy [0-9.]+%; validation: loss [0-9.]+, accuracy ([0-9.]+%)", said)
    share = f"{accuracy(digits / 'trained.onnx', np.load(digits / 'val.npz')):.1%}"
    assert len(epochs) == 3 and epochs[-1] == share and said.rstrip().endswith(f"; {share} of the validation examples are right")


def test_train_holds_back_a_share_of_the_examples(digits):
    code, said = train(digits, "--val-split", 0.25)
    assert code == 0 and "18 examples, 6 for validation, 1 batches an epoch" in said
    assert "--val-split 0.01 of 24 examples leaves 24 to train on and 0 to validate" in train(digits, "--val-split", 0.01)[1]
    assert "give only one of them" in train(digits, "--val-split", 0.1, "--val", digits / "data.npz")[1]


def test_train_of_one_epoch_says_what_became_of_the_loss(digits):
    said = train(digits, "--epochs", 1)[1].splitlines()
    assert re.fullmatch(r"wrote .*; the loss of its one epoch was [0-9.]+; [0-9.]+% of the training examples are right", said[-1])


def test_what_has_no_classes_has_no_accuracy(digits):
    rng = np.random.default_rng(2)
    np.savez(digits / "data.npz", x=rng.standard_normal((8, 3), "float32"), label=rng.standard_normal((8, 3), "float32"))
    code, said = train(digits, "--loss", "square_error_cost", "--epochs", 2, "--val-split", 0.5)
    assert code == 0 and "accuracy" not in said and re.search(r"epoch 2 of 2: loss [0-9.]+; validation: loss [0-9.]+\n", said)


def rates(digits, *options):
    """What each of 8 steps of gradient descent moves a parameter by, whose gradient is 1."""
    import fluidx as fx
    from fluidx.finetune import Training, _append_training, _built

    how = Training(loss="square_error_cost", optimizer="sgd", lr=0.5, epochs=4, **dict(options))
    built = _built(str(digits / "small.onnx"), how)
    _append_training(built, how, 2)
    (op, *_) = [op for op in built.model.program.ops if op.type == "sgd"]
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(built.model.startup, scope=scope)
    feed = {"x": np.ones((1, 3), "float32"), "label": np.ones((1, 3), "float32")}
    rate = op.inputs["LearningRate"][0]
    return [float(exe.run(built.model.program, feed=feed, fetch_list=[rate], scope=scope)[0][0]) for _ in range(8)]


def test_the_rate_follows_the_schedule(digits):
    steps = np.arange(8)
    close = {"rtol": 1e-5, "atol": 1e-7}  # float32
    np.testing.assert_allclose(rates(digits, ("schedule", "constant")), np.full(8, 0.5), **close)
    np.testing.assert_allclose(rates(digits, ("schedule", "linear")), 0.5 * (1 - steps / 8), **close)
    np.testing.assert_allclose(rates(digits), 0.25 * (1 + np.cos(np.pi * steps / 8)), **close)
    np.testing.assert_allclose(rates(digits, ("schedule", "constant"), ("warmup", 4)), [0.1, 0.2, 0.3, 0.4] + [0.5] * 4, **close)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
def test_weight_decay_makes_weights_smaller(digits, optimizer):
    sizes = []
    for decay in (0, 0.5):
        options = ["--weight-decay", decay, "--optimizer", optimizer, "--lr", 0.1, "--epochs", 3]
        assert train(digits, *options)[0] == 0
        arrays = [onnx.numpy_helper.to_array(t) for t in onnx.load(digits / "trained.onnx").graph.initializer]
        sizes.append(sum(float((a**2).sum()) for a in arrays))
    assert sizes[1] < 0.9 * sizes[0]


def test_a_small_network_learns_handwritten_digits_as_train_is_by_default(tmp_path):
    found = pytest.importorskip("sklearn.datasets").load_digits()
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        small (float[n, 1, 8, 8] x) => (float[n, 10] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu (a)
            c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
            d = Flatten (c)
            y = MatMul (d, v)
        }
    """)
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((8, 1, 3, 3)) / 3, "v": rng.standard_normal((128, 10)) / 12}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(a), n) for n, a in weights.items())
    onnx.save(model, tmp_path / "small.onnx")
    np.savez(tmp_path / "data.npz", x=found.images[:, None].astype("float32") / 16, label=found.target)
    code, said = train(tmp_path, "--val-split", 0.2)
    assert code == 0
    share = float(re.search(r"([0-9.]+)% of the validation examples are right", said)[1])
    assert share > 93


def test_train_says_which_weights_are_shared(digits):
    model = onnx.load(digits / "small.onnx")
    model.graph.node[0].input[1], model.graph.node[2].input[1] = "v", "v"
    del model.graph.initializer[0], model.graph.value_info[:]
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.eye(3, dtype="float32"), "v"))
    onnx.save(model, digits / "small.onnx")
    code, said = train(digits)
    assert code == 0, said
    assert "1 weight is read by several nodes, which train it as one: v by 2. Exporters merge equal weights" in said


def test_train_freezes_and_replaces_the_head(digits):
    assert train(digits, "--freeze", "w", "--head", 5)[0] == 0
    written = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(digits / "trained.onnx").graph.initializer}
    before = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(digits / "small.onnx").graph.initializer}
    assert np.array_equal(written.pop("w"), before["w"])
    assert {n: a.shape for n, a in written.items()} == {"head.weight": (4, 5), "head.bias": (5,)}
    assert train(digits, "--head", 4)[0] == 0
    (digits / "small.onnx").write_bytes((digits / "trained.onnx").read_bytes())
    assert train(digits, "--head", 6)[0] == 0
    names = {t.name for t in onnx.load(digits / "trained.onnx").graph.initializer}
    assert names == {"w", "head_1.weight", "head_1.bias"}  # the file has a head.weight of its own, which goes away as this one comes


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # a rate that float32 has not
@pytest.mark.parametrize(
    "arrays, args, message",
    [
        ({"y": np.ones((4, 3)), "label": np.ones(4, int)}, (),
         "has no array 'x', which is float32[?,3]; it has y float64[4, 3], label int64[4]"),
        ({"x": np.ones((4, 2)), "label": np.ones(4, int)}, (),
         "array 'x' has shape [4, 2], and float32[?,3] is expected, one row an example"),
        ({"x": np.ones((4, 3)), "label": np.ones(4)}, (), "array 'label' is float64[4, 1], and int64[?,1] is expected"),
        ({"x": np.ones((4, 3)), "label": np.ones(5, int)}, (), "must have equally many rows (not 0): x has 4, label has 5"),
        ({"x": np.ones((4, 3)), "label": np.arange(4)}, (),
         "labels go from 0 to 3, but the model has 3 classes: 0 to 2; --head 4 gives it"),
        ({"x": np.ones((4, 3)), "label": np.ones(4, int), "z": np.ones(4)}, (), "has an array 'z', but nothing in the model has that name"),
        ({"x": np.ones((4, 3)), "label": np.ones(4, int)}, ("--freeze", "u"), "set_training: freeze names 'u', but nothing has that name"),
        ({"x": np.full((4, 3), np.nan), "label": np.ones(4, int)}, (),
         "the loss is nan in epoch 1, so nothing was written; array 'x' of the data holds NaN"),
        ({"x": np.ones((4, 3)), "label": np.ones(4, int)}, ("--optimizer", "sgd", "--lr", "1e39", "--epochs", 1),
         "is not finite after the last step, so nothing was written; a smaller --lr may help"),
        ({"x": np.ones((4, 3)), "label": -np.ones(4, int)}, (), "labels go from -1 to -1, but the model has 3 classes: 0 to 2\n"),
    ],
)  # fmt: skip
def test_train_says_what_is_expected(digits, arrays, args, message):
    np.savez(digits / "other.npz", **arrays)
    code, said = train(digits, *args, data="other.npz")
    assert code == 1 and said.splitlines()[-1].startswith("Error: ") and message in said
    assert not (digits / "trained.onnx").exists()


@pytest.mark.parametrize("output", ["small.onnx", "data.npz", "held.npz", "../{folder}/data.npz"])
def test_train_does_not_write_over_what_it_reads(digits, output):
    (digits / "held.npz").write_bytes((digits / "data.npz").read_bytes())
    output = output.format(folder=digits.name)
    before = (digits / output).read_bytes()
    code, said = train(digits, "--val", digits / "held.npz", output=output)
    assert code == 2 and "would overwrite" in said and "give the output another name" in said
    assert (digits / output).read_bytes() == before


@pytest.mark.parametrize("output", ["small.onnx", "x.npy"])
def test_run_does_not_write_over_what_it_reads(digits, output):
    np.save(digits / "x.npy", np.ones((2, 3), "float32"))
    code, said = fluidx("run", digits / "small.onnx", "-i", f"x={digits / 'x.npy'}", "-o", digits / output)
    assert code == 2 and "would overwrite" in said


def test_train_on_more_ranks_than_a_step_has_examples_is_refused(digits):
    code, said = train(digits, "--ranks", 9, "--batch", 8)
    assert code == 2 and "--ranks 9 are more than the 8 examples of --batch" in said


@pytest.mark.parametrize("data", ["small.onnx", "x.npy", "cut.npz"])
def test_train_wants_arrays(digits, feeds, data):
    code, said = train(digits, data=data)
    assert code == 1 and "is not a file of arrays written by np.savez" in said


def test_train_says_how_a_batch_is_opened(digits):
    model = onnx.load(digits / "small.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, digits / "small.onnx")
    code, said = train(digits)
    assert code == 1 and "the model fixes the batch: input 'x' is float32[1,3]; --shapes x=?x3 opens it" in said
    assert train(digits, "--shapes", "x=?x3")[0] == 0


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1"])
def test_train_wants_a_rate(digits, rate):
    code, said = train(digits, "--lr", rate)
    assert code == 2 and "Invalid value for '--lr'" in said and not (digits / "trained.onnx").exists()
