"""Models whose weights stay in their file, and models that are written value by value. The limits are lowered to the size of the test."""

import weakref

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import fluidx as fx  # noqa: E402
from fluidx.files import atomic  # noqa: E402
from fluidx.onnx import export_graph, limits, stored_values  # noqa: E402
from fluidx.onnx.file_parts import skeleton  # noqa: E402
from fluidx.onnx.mapped_tensors import is_mapped  # noqa: E402

N = 16


@pytest.fixture(autouse=True)
def low_limits(monkeypatch):
    """Weights of 512 bytes are large."""
    monkeypatch.setattr(limits, "MAPPED", 1)
    monkeypatch.setattr(limits, "MAPPED_TENSOR", 512)


def weights(dtype="float32"):
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((N, N)).astype(dtype), "b": np.arange(N, dtype=dtype), "v": rng.standard_normal((N, N)).astype(dtype)}


def proto(values=None):
    """relu(x w + b) v"""
    values = weights() if values is None else values
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", N]) for n in "xy")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["q"]),
        helper.make_node("Relu", ["q"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(a, n) for n, a in values.items()]
    graph = helper.make_graph(nodes, "three", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def written(path, beside=True, values=None):
    onnx.save(proto(values), path, save_as_external_data=beside, location="weights.bin", size_threshold=0)
    return path


X = np.linspace(-1, 1, 3 * N, dtype=np.float32).reshape(3, N)


def expected(values=None):
    w = weights() if values is None else values
    return np.maximum(X @ w["w"] + w["b"], 0) @ w["v"]


def trained(model, executor=None, steps=2):
    """The model, after some steps of SGD on one device, and its scope."""
    loss = fx.onnx.set_training(model, loss="square_error_cost")
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.SGD(1e-3).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    for _ in range(steps):
        exe.run(model.program, feed={"x": X, "label": np.zeros_like(X)}, scope=scope)
    return exe, scope, loss


# -- reading ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_large_weights_stay_in_their_file_and_small_ones_are_read(tmp_path, beside):
    model = fx.onnx.load(written(tmp_path / "m.onnx", beside))
    assert [t.name for t in model.proto.graph.initializer if is_mapped(t)] == ["w", "v"]
    arrays = {c.values.shape: c.in_file for c in model.startup.constants().values()}
    assert arrays[N, N] is not None
    np.testing.assert_allclose(model.run([X])[0], expected(), rtol=1e-5, atol=1e-5)


def test_a_parameter_is_a_view_of_the_file_and_training_leaves_the_file_unchanged(tmp_path):
    path = written(tmp_path / "m.onnx")
    before = (tmp_path / "weights.bin").read_bytes()
    model = fx.onnx.load(path)
    exe, scope, _ = trained(model)
    assert (tmp_path / "weights.bin").read_bytes() == before
    assert not np.array_equal(scope.get("w"), weights()["w"])
    exe.run(model.startup, scope=scope)
    np.testing.assert_array_equal(scope.get("w"), weights()["w"])
    np.testing.assert_array_equal(scope.get("v"), weights()["v"])


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp", "zero3"])
@pytest.mark.parametrize("places", ["cpu_places", "process_places"])
def test_ranks_read_their_parts_and_give_what_one_device_gives(tmp_path, strategy, places):
    model = fx.onnx.load(written(tmp_path / "m.onnx"))
    exe, scope, loss = trained(model)
    t = fx.DistributeTranspiler(strategy).transpile(program=model.program, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=getattr(fx, places)(2)) as ranks:
        ranks.run_startup()
        np.testing.assert_array_equal(ranks.held.state("w"), weights()["w"])
        for _ in range(2):
            ranks.run([loss], feed={"x": X, "label": np.zeros_like(X)})
        for name in ("w", "b", "v"):
            np.testing.assert_allclose(ranks.held.state(name), scope.get(name), rtol=1e-5, atol=1e-5)


def test_saving_over_a_model_does_not_change_what_was_loaded(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(proto(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    model = fx.onnx.load(path)
    exe, scope, _ = trained(model)
    fx.onnx.save(model.program, path, fetches=model.fetches, scope=scope, external_data=True)
    np.testing.assert_allclose(model.run([X])[0], expected(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(fx.onnx.load(path).proto.graph.initializer[0].dims, [N, N])
    assert not np.allclose(fx.onnx.load(path).run([X])[0], expected())


def test_a_session_refuses_a_file_that_was_changed_before_it_was_opened(tmp_path):
    found = fx.onnx.read(written(tmp_path / "m.onnx"))
    with open(tmp_path / "weights.bin", "ab") as f:
        f.write(b"more")
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.session(found)
    where = tmp_path / "weights.bin"
    assert str(e.value) == f"tensor 'w' is stored in {where}, which was changed since the model was read; load it again"


def test_a_model_from_elsewhere_cannot_name_files_as_mapped(tmp_path):
    found = fx.onnx.read(written(tmp_path / "m.onnx"))
    forged = onnx.ModelProto()
    forged.CopyFrom(found)
    for e in forged.graph.initializer[0].external_data:
        if e.key == "checksum":
            e.value = "0" * 32 + e.value[32:]
    with pytest.raises(fx.onnx.OnnxError, match="tensor 'w' is stored in another file; load the model by its path"):
        fx.onnx.load(forged)


def test_a_tensor_of_a_wrong_size_inside_a_model_is_named(tmp_path):
    model = proto()
    model.graph.initializer[0].dims[0] = N - 1
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(fx.onnx.OnnxError) as e:
        fx.onnx.load(path)
    said = f"its shape [{N - 1}, {N}] of float32 needs {4 * N * (N - 1)}"
    assert str(e.value) == f"tensor 'w' has {4 * N * N} bytes in {path}, but {said}"


def test_the_skeleton_of_a_model_names_the_bytes_of_its_large_tensors():
    data = proto().SerializeToString()
    found = skeleton(memoryview(data), 512)
    assert len(found.data) < len(data) - 2 * N * N * 4 + 16 and list(found.ranges) == [0, 2]
    for (start, size), name in zip(found.ranges.values(), "wv"):
        assert data[start : start + size] == weights()[name].tobytes()
    model = onnx.ModelProto.FromString(found.data)
    assert [n.op_type for n in model.graph.node] == ["MatMul", "Add", "Relu", "MatMul"] and not model.graph.initializer[0].raw_data


@pytest.mark.parametrize("data", [b"\xff" * 40, proto().SerializeToString()[:700], proto().SerializeToString() * 2])
def test_a_message_that_the_scan_does_not_know_is_left_to_protobuf(data):
    """Damaged bytes, a truncated model, and two models in a row, which protobuf merges."""
    assert skeleton(memoryview(data), 512) is None


def test_the_checker_gets_no_large_tensor(tmp_path, monkeypatch):
    sizes = []
    check = onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda m, **how: (sizes.append(m.ByteSize()), check(m, **how)))
    fx.onnx.load(written(tmp_path / "m.onnx"))
    assert max(sizes) < 600  # the weights have 2 kB


# -- writing ------------------------------------------------------------------------------------------------------------------


def net(width=32):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    startup.random_seed = 3
    with fx.program_guard(main, startup), fx.unique_name.guard():
        y = fx.layers.fc(fx.layers.fc(fx.data("x", [-1, N], "float32"), width, act="relu"), N)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    return main, y, scope, exe.run(main, feed={"x": X}, fetch_list=[y], scope=scope)[0]


@pytest.mark.parametrize("external, files", [("auto", []), (False, []), (True, ["m.onnx.data"]), ("w.bin", ["w.bin"])])
def test_values_are_in_the_model_or_in_a_file_beside_it(tmp_path, external, files):
    main, y, scope, answer = net()
    path = tmp_path / "m.onnx"
    fx.onnx.save(main, path, fetches=[y], scope=scope, external_data=external)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["m.onnx", *files])
    onnx.checker.check_model(str(path), full_check=True)
    np.testing.assert_allclose(fx.onnx.load(path).run([X])[0], answer, rtol=1e-6, atol=1e-6)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    assert {n: a.tobytes() for n, a in found.items()} == {n: scope.get(n).tobytes() for n in found}
    runtime = pytest.importorskip("onnxruntime")
    np.testing.assert_allclose(runtime.InferenceSession(str(path)).run(None, {"x": X})[0], answer, rtol=1e-5, atol=1e-5)


def test_a_model_above_the_limit_of_protobuf_gets_a_file_beside_it(tmp_path, monkeypatch):
    main, y, scope, _ = net()
    monkeypatch.setattr(stored_values, "_LIMIT", 3000)
    fx.onnx.save(main, tmp_path / "m.onnx", fetches=[y], scope=scope)
    assert (tmp_path / "m.onnx.data").stat().st_size >= 2 * N * 32 * 4
    with pytest.raises(fx.onnx.OnnxError, match=r"protobuf writes at most 3000; external_data=True puts weights into a file beside it"):
        fx.onnx.save(main, tmp_path / "m.onnx", fetches=[y], scope=scope, external_data=False)


@pytest.mark.parametrize("name", ["a/w.bin", "", "..", 3, "m.onnx"])
def test_a_name_that_is_no_file_beside_the_model_is_refused(tmp_path, name):
    main, y, scope, _ = net()
    with pytest.raises(fx.onnx.OnnxError, match="external_data"):
        fx.onnx.save(main, tmp_path / "m.onnx", fetches=[y], scope=scope, external_data=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("external", [True, False])
def test_one_value_is_in_memory_at_a_time(tmp_path, external, monkeypatch):
    main, y, scope, _ = net()
    alive, names = [], []
    value = export_graph.ExportGraph.value

    def watched(graph, name):
        assert not any(made() is not None for made in alive), f"the value before {name} is still there"
        made = value(graph, name).copy()
        alive.append(weakref.ref(made))
        names.append(name)
        return made

    monkeypatch.setattr(stored_values, "_LEAST", 0)
    monkeypatch.setattr(export_graph.ExportGraph, "value", watched)
    fx.onnx.save(main, tmp_path / "m.onnx", fetches=[y], scope=scope, external_data=external)
    assert sorted(names) == sorted(scope.local_var_names())


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def saved_anew(tmp_path):
    """A function that saves other weights over a model with a file of weights."""
    path = tmp_path / "m.onnx"
    onnx.save(proto(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    made = stored_values.ModelFile(onnx.load(path, load_external_data=False), path, True)

    def save(model=made.model):
        made.model = model
        made.write(lambda name: np.full_like(weights()[name], 7), writes=True)

    return save


def test_weights_stay_old_if_the_disk_is_full_when_the_model_is_written(tmp_path, saved_anew, monkeypatch):
    before, sync = files(tmp_path), atomic._to_disk

    def full(stream):
        if ".onnx.data." not in stream.name:
            raise OSError(28, "No space left on device")
        sync(stream)

    with monkeypatch.context() as here, pytest.raises(ValueError, match="cannot write .*m.onnx: No space left on device"):
        here.setattr(atomic, "_to_disk", full)
        saved_anew()
    assert files(tmp_path) == before
    saved_anew()
    assert sorted(files(tmp_path)) == sorted(before)
    assert (numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0]) == 7).all()


def test_weights_stay_old_if_the_model_cannot_be_serialized(tmp_path, saved_anew):
    class TooLarge:
        def SerializeToString(self):
            raise ValueError("the message is too large")

    before = files(tmp_path)
    with pytest.raises(ValueError, match="the message is too large"):
        saved_anew(TooLarge())
    assert files(tmp_path) == before


def test_weights_stay_old_if_the_model_cannot_get_its_name(tmp_path, saved_anew):
    (tmp_path / "m.onnx").unlink()
    (tmp_path / "m.onnx").mkdir()
    before = files(tmp_path)
    with pytest.raises(ValueError, match="cannot write .*m.onnx: Is a directory"):
        saved_anew()
    assert files(tmp_path) == before


def test_a_save_that_fails_leaves_the_older_model_and_reads_every_value(tmp_path):
    """Other processes read each value together with the one that writes."""
    main, y, scope, answer = net()
    path = tmp_path / "m.onnx"
    fx.onnx.save(main, path, fetches=[y], scope=scope, external_data=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model = onnx.ModelProto()
    model.graph.initializer.extend(stored_values.placeholder(n, TensorProto.FLOAT, (N, N)) for n in "abc")
    read = []

    def value_of(name):
        read.append(name)
        return np.zeros((N, N + (name == "b")), np.float32)

    with pytest.raises(fx.onnx.OnnxError, match=r"cannot save 'b': it is declared float32\[16, 16\], its value is float32\[16, 17\]"):
        stored_values.ModelFile(model, path, True).write(value_of, writes=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    read.clear()

    def zeros(name):
        read.append(name)
        return np.zeros((N, N), np.float32)

    with pytest.raises(Exception, match="cannot write"):
        stored_values.ModelFile(model, "/proc/none/m.onnx", True).write(zeros, writes=True)
    assert read == ["a", "b", "c"]


def test_ranks_that_are_processes_write_what_they_hold(tmp_path):
    model = fx.onnx.load(written(tmp_path / "m.onnx"))
    exe, scope, loss = trained(model, steps=1)
    t = fx.DistributeTranspiler("fsdp").transpile(program=model.program, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2)) as ranks:
        ranks.run_startup()
        ranks.run([loss], feed={"x": X, "label": np.zeros_like(X)})
        fx.onnx.save(model.program, tmp_path / "out.onnx", fetches=model.fetches, executor=ranks, external_data="out.bin")
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    for name in ("w", "v", "b"):
        np.testing.assert_allclose(found[name], scope.get(name), rtol=1e-5, atol=1e-5)


def test_a_training_step_beside_its_values_is_read_again(tmp_path):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        y = fx.layers.fc(fx.data("x", [-1, N], "float32"), N)
        loss = fx.layers.mean(y)
        fx.optimizer.Adam(0.1).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    values = []
    for external in (True, False):
        fx.onnx.save(main, tmp_path / "m.onnx", fetches=[y], scope=scope, loss=loss, external_data=external)
        values.append(fx.onnx.session(fx.onnx.training_step(tmp_path / "m.onnx")).run({"x": X}))
    for a, b in zip(*values):
        np.testing.assert_array_equal(a, b)

