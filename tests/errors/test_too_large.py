"""What is larger than the memory, or than 64 bits: errors that name the operator, the sizes and the line; and paths that no system has."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
X = {"x": np.ones((4, 4), "float32")}


def image():
    return fx.data("x", [4, 1, 2, 2])


CASES = {
    "fill_constant": (lambda: L.fill_constant([1 << 40], "float32", 1.0), "f32[1099511627776], 4,096.0 GiB"),
    "uniform_random": (lambda: L.uniform_random([1 << 62]), "f32[4611686018427387904], 17,179,869,184.0 GiB"),
    "expand": (lambda: L.expand(fx.data("x", [-1, 4]), [1 << 20, 1 << 20]), "f32[4194304,4194304], 65,536.0 GiB"),
    "one_hot": (lambda: L.one_hot(L.fill_constant([3, 1], "int64", 0), 1 << 45), "f32[3,35184372088832], 393,216.0 GiB"),
}


@pytest.fixture(params=["auto", "numpy"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", request.param)


@pytest.mark.parametrize("op", CASES)
def test_a_result_for_which_there_is_no_memory(op, kernels):
    build, size = CASES[op]
    main = fx.Program("large")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        y = build()
    with pytest.raises(fx.ExecutionError) as e:
        fx.Executor().run(main, feed=X if op == "expand" else {}, fetch_list=[y])
    first, *rest = str(e.value).split("\n")
    assert first == f"op {op}: no memory for the run: its result {y.name!r} is the largest value, {size}"
    assert rest[0].startswith(f"  in %{y.name} = {op}(") and "test_too_large.py" in rest[1]


def test_a_parameter_for_which_there_is_no_memory_names_the_line_of_its_layer():
    startup = fx.Program("start")
    with fx.unique_name.guard(), fx.program_guard(fx.Program(), startup):
        L.fc(fx.data("x", [-1, 4]), 1 << 45)
    with pytest.raises(fx.ExecutionError, match=r"(?s)op uniform_random: no memory .* 'fc_0.w_0' .*524,288.0 GiB.*test_too_large.py"):
        fx.Executor().run(startup)


def test_ranks_name_what_is_too_large_too():
    main, startup = fx.Program("large"), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        w = L.create_parameter([4], "float32")
        x = fx.data("x", [-1, 4])
        loss = L.mean(L.expand(x * w, [1, 1 << 45]))
        fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        with pytest.raises(fx.ExecutionError, match=r"(?s)op expand.*: no memory for the run: its result .*GiB.*test_too_large.py"):
            ranks.run(feed=X, fetch_list=[loss])


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**64])
@pytest.mark.parametrize(
    "build, said",
    [
        (lambda k: L.conv2d(image(), 2, 3, stride=k), "op conv2d: strides must be one or two integers from 1 to 2147483647"),
        (lambda k: L.conv2d(image(), 2, 3, padding=k), "op conv2d: paddings must be 1, 2 or 4 integers from 0 to 2147483647"),
        (lambda k: L.conv2d(image(), 2, 3, dilation=k, padding=k - 1), "op conv2d: dilations must be one or two integers from 1 to"),
        (lambda k: L.pool2d(image(), k, pool_padding=2**30), "op pool2d: ksize must be one or two integers from 1 to 2147483647"),
        (lambda k: L.conv2d_transpose(image(), 2, filter_size=3, stride=k), "op conv2d_transpose: strides must be one or two"),
    ],
)
def test_numbers_of_windows_that_no_image_has(build, said, number):
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError) as e:
        build(number)
    assert str(e.value).startswith(said) and str(number) in str(e.value) and "test_too_large.py" in str(e.value)


@pytest.mark.parametrize("number", [3, 2**31 - 1])
def test_the_largest_stride_makes_one_window(number):
    main = fx.Program("one")
    with fx.program_guard(main, fx.Program()):
        y = L.pool2d(image(), 2, pool_type="max", pool_stride=number)
    assert y.shape == (4, 1, 1, 1)
    x = np.arange(16, dtype="float32").reshape(4, 1, 2, 2)
    assert fx.Executor().run(main, feed={"x": x}, fetch_list=[y])[0].ravel().tolist() == [3, 7, 11, 15]


def test_a_path_with_a_nul_byte_is_refused(tmp_path):
    path, exe, program = str(tmp_path / "a\0b"), fx.Executor(), fx.Program("p")
    with fx.program_guard(program, fx.Program()):
        y = L.relu(fx.data("x", [-1, 4]))
    calls = [
        lambda: fx.io.save(program, path), lambda: fx.io.load(program, path), lambda: fx.io.load_program_state(path),
        lambda: fx.io.save_persistables(exe, path, program), lambda: fx.io.load_persistables(exe, path, program),
        lambda: fx.io.save_inference_model(path, ["x"], [y], exe, program), lambda: fx.io.load_inference_model(path, exe),
        lambda: fx.io.CheckpointManager(path),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(fx.FluidxError, match=r"a\\x00b' has a NUL byte, which is not allowed in a path"):
            call()


def test_an_onnx_file_whose_path_has_a_nul_byte_is_refused(tmp_path):
    pytest.importorskip("onnx")
    program = fx.Program("p")
    with fx.program_guard(program, fx.Program()):
        y = L.relu(fx.data("x", [-1, 4]))
    path = str(tmp_path / "a\0b.onnx")
    with pytest.raises(fx.FluidxError, match="NUL byte"):
        fx.onnx.save(program, path, fetches=[y])
    with pytest.raises(fx.FluidxError, match="null byte|NUL byte"):
        fx.onnx.load(path)
