"""Saving and loading: everything comes back, files are replaced whole, and damaged or foreign files are named."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fluidx as fx
from fluidx.io import CheckpointError

X = np.arange(12, dtype="float32").reshape(3, 4)
Y = np.array([[0], [1], [0]])


class Model:
    """A small trained program in a scope of its own."""

    def __init__(self):
        self.main, self.startup, self.exe = fx.Program("main"), fx.Program("startup"), fx.Executor()
        with fx.program_guard(self.main, self.startup), fx.unique_name.guard():
            x, y = fx.data("x", [-1, 4], "float32"), fx.data("y", [-1, 1], "int64")
            hidden = fx.layers.dropout(fx.layers.fc(x, 3, act="tanh"), 0.5)
            self.probability = fx.layers.softmax(fx.layers.fc(hidden, 2))
            self.loss = fx.layers.mean(fx.layers.cross_entropy(self.probability, y))
            fx.optimizer.Momentum(0.1, 0.9).minimize(self.loss)
        self.exe.run(self.startup)

    def step(self):
        return self.exe.run(self.main, feed={"x": X, "y": Y}, fetch_list=[self.loss])[0]

    def values(self):
        return {v.name: fx.global_scope().get(v.name) for v in self.main.list_vars() if v.persistable}


@pytest.fixture
def model():
    with fx.scope_guard(fx.Scope()):
        model = Model()
        model.step()
        yield model


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_a_saved_program_comes_back_with_its_state(model, tmp_path):
    fx.save(model.main, tmp_path / "deep" / "model")
    before = model.values()
    model.step()
    assert not equal(model.values(), before)
    fx.load(model.main, tmp_path / "deep" / "model")
    assert equal(model.values(), before)
    assert os.listdir(tmp_path / "deep") == ["model.safetensors"]
    assert fx.io.load_program(tmp_path / "deep" / "model") == model.main
    with fx.scope_guard(fx.Scope()):
        fx.load(fx.io.load_program(tmp_path / "deep" / "model"), tmp_path / "deep" / "model")
        assert equal({n: fx.global_scope().get(n) for n in before}, before)


def test_the_file_is_an_ordinary_safetensors_file(model, tmp_path):
    fx.save(model.main, tmp_path / "m")
    assert equal(load_file(tmp_path / "m.safetensors"), model.values())
    save_file(model.values(), tmp_path / "other.safetensors")
    fx.load(model.main, tmp_path / "other")
    with pytest.raises(CheckpointError, match="holds variables but no program"):
        fx.io.load_program(tmp_path / "other")


@pytest.mark.parametrize("filename", [None, "all.safetensors"])
def test_variables_come_back_from_one_file_or_many(model, tmp_path, filename):
    fx.io.save_persistables(model.exe, tmp_path, model.main, filename)
    before = model.values()
    model.step()
    fx.io.load_params(model.exe, tmp_path, model.main, filename)
    after = model.values()
    assert np.array_equal(after["fc_0.w_0"], before["fc_0.w_0"])
    assert not np.array_equal(after["fc_0.w_0_velocity_0"], before["fc_0.w_0_velocity_0"])
    fx.io.load_persistables(model.exe, tmp_path, model.main, filename)
    assert equal(model.values(), before)
    if filename is None:
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "__manifest__.json"])


def test_save_vars_picks_by_list_or_predicate(model, tmp_path):
    fx.io.save_vars(model.exe, tmp_path / "a", model.main, vars=[model.main.global_block().var("fc_0.b_0")])
    fx.io.save_vars(model.exe, tmp_path / "b", model.main, predicate=lambda v: v.name.endswith("w_0"))
    assert sorted(os.listdir(tmp_path / "a")) == ["__manifest__.json", "fc_0.b_0"]
    assert sorted(os.listdir(tmp_path / "b")) == ["__manifest__.json", "fc_0.w_0", "fc_1.w_0"]
    before = model.values()
    model.step()
    # as fluid's users pick what is there
    fx.io.load_vars(model.exe, tmp_path / "b", model.main, predicate=lambda v: os.path.exists(os.path.join(tmp_path / "b", v.name)))
    after = model.values()
    assert [n for n in before if np.array_equal(before[n], after[n])] == ["fc_0.w_0", "fc_1.w_0", "learning_rate_0"]
    with pytest.warns(UserWarning, match="load_vars: the predicate picks no variable of program main"):
        fx.io.load_vars(model.exe, tmp_path, model.main, predicate=lambda v: os.path.exists(os.path.join(tmp_path, v.name)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    main = fx.Program()
    main.global_block().create_var("v", shape, dtype, persistable=True)
    value = np.ones(shape, fx.ir.np_dtype(dtype))
    with fx.scope_guard(fx.Scope()):
        fx.global_scope().set("v", value)
        fx.save(main, tmp_path / "m")
    state = fx.io.load_program_state(tmp_path / "m")
    assert state["v"].dtype == value.dtype and state["v"].shape == shape and np.array_equal(state["v"], value)


def test_a_state_dict_is_checked_before_any_of_it_is_set(model):
    before = model.values()
    with pytest.raises(CheckpointError, match=r"variable 'fc_0.b_0' should be f32\[3\], the file holds f32\[5\]"):
        fx.io.set_program_state(model.main, {"fc_0.w_0": np.zeros((4, 3), "float32"), "fc_0.b_0": np.zeros(5, "float32")})
    assert equal(model.values(), before)
    fx.io.set_program_state(model.main, {"fc_0.b_0": np.zeros(3, "float32")})
    assert not model.values()["fc_0.b_0"].any()


# -- inference ---------------------------------------------------------------------------------------------------------------


def test_an_inference_model_holds_what_the_target_needs_and_no_more(model, tmp_path):
    (expected,) = model.exe.run(model.main.clone(for_test=True), feed={"x": X}, fetch_list=[model.probability])
    names = fx.io.save_inference_model(tmp_path, ["x"], [model.probability], model.exe, model.main)
    assert names == [model.probability.name]
    assert sorted(os.listdir(tmp_path)) == ["__manifest__.json", "__model__", "__params__.safetensors"]
    with fx.scope_guard(fx.Scope()):
        program, feeds, fetches = fx.io.load_inference_model(tmp_path, model.exe)
        assert feeds == ["x"]
        assert [op.type for op in program.ops] == ["mul", "elementwise_add", "tanh", "dropout", "mul", "elementwise_add", "softmax"]
        assert {v.name for v in program.list_vars() if v.persistable} == {"fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"}
        assert np.array_equal(model.exe.run(program, feed={"x": X}, fetch_list=fetches)[0], expected)


def test_a_model_may_start_from_a_value_in_the_middle(model, tmp_path):
    fx.io.save_inference_model(tmp_path, ["fc_0.tmp_2"], [model.probability], model.exe, model.main)
    program, feeds, _ = fx.io.load_inference_model(tmp_path, model.exe)
    assert feeds == ["fc_0.tmp_2"] and [op.type for op in program.ops][0] == "dropout"


def test_a_missing_feed_is_named(model, tmp_path):
    with pytest.raises(fx.ProgramError, match="data variable 'y' is needed, which is not among the feeds"):
        fx.io.save_inference_model(tmp_path, ["x"], [model.loss], model.exe, model.main)
    assert os.listdir(tmp_path) == []


def test_pruning_keeps_and_renumbers_the_blocks_that_are_needed():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [1], "float32")
        fx.layers.cond(x > 5.0, lambda: x, lambda: -x)
        y = fx.layers.cond(x > 0.0, lambda: x * 2.0, lambda: -x)
    pruned = fx.io.prune(main, ["x"], [y.name])
    assert pruned.num_blocks == 3 and pruned.ops[-1].attr("true_block").idx == 1
    with fx.scope_guard(fx.Scope()):
        assert fx.Executor().run(pruned, feed={"x": np.float32([-3])}, fetch_list=[y.name])[0].tolist() == [3.0]


# -- what goes wrong ------------------------------------------------------------------------------------------------------------


def test_a_variable_without_a_value_is_named(model, tmp_path):
    with fx.scope_guard(fx.Scope()):
        with pytest.raises(fx.NotInitializedError, match="cannot save variable 'fc_0.w_0': it has no value in this scope"):
            fx.save(model.main, tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file_whole(model, tmp_path, monkeypatch):
    fx.save(model.main, tmp_path / "m")
    old = (tmp_path / "m.safetensors").read_bytes()
    model.step()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot write .*m.safetensors: No space left on device"):
        fx.save(model.main, tmp_path / "m")
    assert os.listdir(tmp_path) == ["m.safetensors"] and (tmp_path / "m.safetensors").read_bytes() == old


def test_a_missing_or_misshapen_variable_is_named_and_nothing_is_set(model, tmp_path):
    values = model.values()
    save_file({**values, "fc_1.b_0": np.zeros(7, "float32")}, tmp_path / "shape.safetensors")
    save_file({n: v for n, v in values.items() if n != "fc_1.b_0"}, tmp_path / "less.safetensors")
    model.step()
    before = model.values()
    with pytest.raises(CheckpointError, match=r"shape.safetensors: variable 'fc_1.b_0' should be f32\[2\], the file holds f32\[7\]"):
        fx.load(model.main, tmp_path / "shape")
    with pytest.raises(CheckpointError, match="less.safetensors holds no variable 'fc_1.b_0'; did you mean"):
        fx.load(model.main, tmp_path / "less")
    with pytest.raises(CheckpointError, match="cannot read .*none.safetensors: No such file or directory"):
        fx.load(model.main, tmp_path / "none")
    assert equal(model.values(), before)


def test_names_cannot_lead_out_of_the_directory(tmp_path):
    main = fx.Program()
    main.global_block().create_var("../../evil/w", [1], "float32", persistable=True)
    with fx.scope_guard(fx.Scope()):
        fx.global_scope().set("../../evil/w", np.zeros(1, "float32"))
        fx.io.save_persistables(None, tmp_path / "d", main)
        files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert files == ["d/%2E.%2F..%2Fevil%2Fw", "d/__manifest__.json"]
        fx.io.load_persistables(None, tmp_path / "d", main)
        for name in ("../x", "/tmp/x", "..", "", "a/b", "a\0b"):
            with pytest.raises(CheckpointError, match="is not a file name"):
                fx.io.save_persistables(None, tmp_path / "d", main, filename=name)


def header(entries, data=b"", **metadata):
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it has only 0 bytes"),
        (b"\xff" * 8, "its header should have 18446744073709551615 bytes, the file has 8"),
        ((3).to_bytes(8, "little") + b"{]}", "its header is not JSON"),
        ((3).to_bytes(8, "little") + b"\xff\xff\xff", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a table"),
        ((200000).to_bytes(8, "little") + b"[" * 200000, "its header is not JSON"),
        (header({"a": entry(0, 8, [2])}, b"1234"), "its arrays need 8 bytes, found 4"),
        (header({"a": entry(0, 8, [3])}, b"12345678"), r"array 'a' of float32\[3\] needs 12 bytes, its entry gives 8"),
        (header({"a": entry(4, 8, [1])}, b"12345678"), "array 'a' starts at byte 4, expected 0"),
        (header({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, b"12345678"), "array 'b' starts at byte 4, expected 8"),
        (header({"a": entry(0, -4, [-1])}), "the shape or offsets of array 'a' are not a list of sizes"),
        (header({"a": entry(0, 0, [True])}), "the shape or offsets of array 'a' are not a list of sizes"),
        (header({"a": entry(0, 0, [0, 1 << 70])}), "the shape or offsets of array 'a' are not a list of sizes"),
        (header({"a": entry(0, 4, [1], "F99")}, b"1234"), "array 'a' has dtype 'F99'"),
        (header({"a": entry(0, 4, [1], ["F32"])}, b"1234"), r"array 'a' has dtype \['F32'\]"),
        (header({"a": entry(0, 4, [1], {})}, b"1234"), "array 'a' has dtype {}"),
        (header({"a": entry(0, 0, [0, 2**61])}), "the shape or offsets of array 'a' are not a list of sizes"),
        (header({"a": {"dtype": "F32"}}), "the entry of array 'a' is incomplete"),
        (header({"a": 3}), "the entry of array 'a' is incomplete"),
        (header({"a": entry(0, 1, [1], "BOOL")}, b"\x07"), "array 'a' is bool and holds a byte that is neither 0 nor 1"),
        ((26).to_bytes(8, "little") + b'{"a": {}, "a": {}, "b":1 }', "a name occurs twice"),
        (header({}, b"", format=3), "its __metadata__ is not a table of strings"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, content, message):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        fx.io.load_program_state(tmp_path / "m")
    assert "m.safetensors is not a complete safetensors file: " in str(error.value)


def test_files_of_different_saves_are_not_mixed(model, tmp_path):
    fx.io.save_inference_model(tmp_path, ["x"], [model.probability], model.exe, model.main)
    text = (tmp_path / "__model__").read_text()
    (tmp_path / "__model__").write_text(text.replace("program main", "program other"))
    with pytest.raises(CheckpointError, match="__model__ is not what was saved: it has [0-9]+ bytes, expected"):
        fx.io.load_inference_model(tmp_path, model.exe)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is no model that save_inference_model wrote: line 2 should list its feeds"),
        ("# fluidx inference model\n# feeds: [1]\n# fetches: []\n", "line 2 should list its feeds"),
        ('# fluidx inference model\n# feeds: []\n# fetches: ["y"]\nprogram p {\n', "the program in it cannot be read"),
        ('# fluidx inference model\n# feeds: []\n# fetches: ["y"]\nprogram p {\n}\n', "its program has no variable 'y'"),
    ],
)
def test_a_damaged_model_text_is_refused(tmp_path, text, message):
    (tmp_path / "__model__").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        fx.io.load_inference_model(tmp_path, None)


def test_a_file_does_not_depend_on_the_number_of_ranks(tmp_path):
    with fx.scope_guard(fx.Scope()):
        model = Model()
        one = model.values()
    t = fx.DistributeTranspiler(fx.strategies.ring_optimizer())
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        fx.save(model.main, tmp_path / "m", exe)
        assert equal(fx.io.load_program_state(tmp_path / "m"), one)
        exe.run(feed={"x": X, "y": Y}, fetch_list=[model.loss])
        fx.load(model.main, tmp_path / "m", exe)
        assert all(np.array_equal(exe.state(n), v) for n, v in one.items())


# -- constants beside a text ----------------------------------------------------------------------------------------------------------

TABLE = np.arange(200, dtype="float32").reshape(4, 50)


@pytest.fixture
def looked_up():
    """A program that adds a large constant, and its startup, which sets a parameter to another; the result of the first."""
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.scope_guard(fx.Scope()), fx.program_guard(main, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.NumpyArrayInitializer(-TABLE))
        y = fx.layers.fc(fx.data("x", [-1, 4]), 50, param_attr=attr) + fx.layers.reduce_sum(fx.layers.assign(TABLE), 0)
        fx.Executor().run(startup)
        yield main, startup, y


def changed(path, old, new):
    """The file with some of its bytes replaced by as many others."""
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def test_a_text_is_kept_with_its_large_constants_and_without_them_alone(looked_up, model, tmp_path):
    main, startup, _ = looked_up
    pair = fx.ir.ProgramPair(main, startup)
    for kept in (main, pair):
        fx.io.save_text(kept, tmp_path / "p.txt")
        assert (tmp_path / "p.txt").read_text() == str(kept)
        held = load_file(tmp_path / "p.txt.constants.safetensors")
        assert equal(held, {digest: a.values for digest, a in kept.constants().items()}) and len(held) == (1 if kept is main else 2)
        again = fx.io.load_text(tmp_path / "p.txt")
        assert again == kept
    fx.io.save_text(model.main, tmp_path / "small.txt")
    assert fx.io.load_text(tmp_path / "small.txt") == model.main
    assert not (tmp_path / "small.txt.constants.safetensors").exists()


def test_a_text_without_its_constants_says_which_file_to_pass(looked_up, tmp_path):
    fx.io.save_text(looked_up[0], tmp_path / "p.txt")
    (tmp_path / "p.txt.constants.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(fx.ParseError, match=r"p.txt: line .* put it there, or pass constants=fx.io.load_constants\(FILE\)"):
        fx.io.load_text(tmp_path / "p.txt")
    given = fx.io.load_constants(tmp_path / "elsewhere")
    assert fx.Program.parse_from_string((tmp_path / "p.txt").read_text(), constants=given) == looked_up[0]


def test_a_saved_program_holds_its_constants_and_its_state_apart(looked_up, tmp_path):
    main, _, _ = looked_up
    fx.save(main, tmp_path / "m")
    again = fx.io.load_program(tmp_path / "m")
    assert again == main
    assert fx.io.load_program_state(tmp_path / "m").keys() == {"w", "fc_0.b_0"}
    fx.load(again, tmp_path / "m")


def test_an_inference_model_computes_with_its_constants(looked_up, tmp_path):
    main, _, y = looked_up
    exe, x = fx.Executor(), np.ones((2, 4), "float32")
    (want,) = exe.run(main, feed={"x": x}, fetch_list=[y])
    fx.io.save_inference_model(tmp_path, ["x"], [y], exe, main)
    with fx.scope_guard(fx.Scope()):
        program, feeds, fetches = fx.io.load_inference_model(tmp_path, exe)
        assert np.array_equal(exe.run(program, feed={feeds[0]: x}, fetch_list=fetches)[0], want)


@pytest.mark.parametrize("kind", ["text", "program", "model"])
def test_constants_that_were_changed_are_refused(looked_up, tmp_path, kind):
    main, _, y = looked_up
    if kind == "text":
        fx.io.save_text(main, tmp_path / "p.txt")
        path, read = tmp_path / "p.txt.constants.safetensors", lambda: fx.io.load_text(tmp_path / "p.txt")
    elif kind == "program":
        fx.save(main, tmp_path / "m")
        path, read = tmp_path / "m.safetensors", lambda: fx.io.load_program(tmp_path / "m")
    else:
        fx.io.save_inference_model(tmp_path, ["x"], [y], fx.Executor(), main)
        path, read = tmp_path / "__model__.constants.safetensors", lambda: fx.io.load_inference_model(tmp_path, None)
    changed(path, TABLE[0].tobytes(), (TABLE[0] + 1).tobytes())
    with pytest.raises(CheckpointError) as error:
        read()
    assert str(error.value).startswith(str(path)) and "checksum" in str(error.value)


def test_a_constant_that_is_not_what_its_digest_says_is_refused(looked_up, tmp_path):
    fx.io.save_text(looked_up[0], tmp_path / "p.txt")
    path, (digest,) = tmp_path / "p.txt.constants.safetensors", looked_up[0].constants()
    save_file({digest: TABLE + 1}, path)  # by another tool, which writes no checksums
    with pytest.raises(CheckpointError) as error:
        fx.io.load_text(tmp_path / "p.txt")
    assert str(error.value).startswith(f"{path} was changed since it was written: what it holds as constant {digest} has the digest ")


def test_a_variable_that_is_called_like_a_constant_is_not_saved_beside_it(tmp_path):
    main = fx.Program("main")
    with fx.scope_guard(fx.Scope()):
        main.global_block().create_var("sha256:" + "0" * 64, [1], "float32", persistable=True)
        fx.global_scope().set("sha256:" + "0" * 64, np.zeros(1, "float32"))
        with pytest.raises(CheckpointError, match="which is that of a constant; rename it"):
            fx.save(main, tmp_path / "m")
