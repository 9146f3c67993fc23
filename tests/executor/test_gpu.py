"""The GPU path, on machines that have a GPU. None of this has run yet: the project has had no GPU so far."""

import json
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import classifier, train_single
from tests.test_run import SCRIPT, command, one_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["mlp", "norm", "conv", "dropout", "batch_norm", "sub_batches"])
def test_one_gpu_trains_as_numpy_does(kind):
    model = classifier(kind=kind)
    feeds = [model.feed(8, k) for k in range(3)]
    want, _ = train_single(model, feeds, [model.loss])
    exe, scope = fx.Executor(fx.CUDAPlace(0)), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    got = [exe.run(model.main, feed=f, fetch_list=[model.loss], scope=scope) for f in feeds]
    np.testing.assert_allclose(got, want, rtol=1e-4)  # another BLAS, another order of additions


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer"])
def test_every_gpu_is_a_rank(strategy):
    places = fx.cuda_places()
    model = classifier()
    feeds = [model.feed(8, k) for k in range(3)]
    want, _ = train_single(model, feeds, [model.loss])
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=model.main, startup_program=model.startup, trainers=len(places))
    with fx.ParallelExecutor(t, places=places, timeout=60) as exe:
        exe.run_startup()
        got = [exe.run(feed=f, fetch_list=[model.loss]) for f in feeds]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer", "zero3"])
def test_every_gpu_is_a_process(tmp_path, strategy):
    done = command("-n", len(fx.cuda_places()), "--backend", "nccl", SCRIPT, strategy, tmp_path, "save")
    assert done.returncode == 0, done.stderr
    found, (steps, w) = json.loads((tmp_path / "0.json").read_text()), one_device(np.ones((4, 2)))
    assert found["steps"] == steps and found["w"] == found["loaded"] == w and found["restored"] == [{"next": 3}, w]


def test_updates_on_the_host_train_as_numpy_does():
    places = fx.cuda_places()
    model = classifier(fx.optimizer.Adam(0.01))
    feeds = [model.feed(8, k) for k in range(3)]
    want, _ = train_single(model, feeds, [model.loss])
    t = fx.DistributeTranspiler(fx.strategies.fsdp(cpu_offload=True))
    t.transpile(program=model.main, startup_program=model.startup, trainers=len(places))
    with fx.ParallelExecutor(t, places=places, timeout=60) as exe:
        exe.run_startup()
        got = [exe.run(feed=f, fetch_list=[model.loss]) for f in feeds]
        descs = t.main.global_block().descs
        assert all((type(a) is np.ndarray) is descs[n].on_host for n, a in exe.scopes[0].arrays.items())
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("make", [fx.optimizer.SGD, fx.optimizer.Adam, fx.optimizer.Adagrad, fx.optimizer.RMSProp, fx.optimizer.Lamb])
def test_every_kind_of_update(make):
    model = classifier(make(0.01), kind="norm")
    feeds = [model.feed(8, k) for k in range(3)]
    want, _ = train_single(model, feeds, [model.loss])
    exe, scope = fx.Executor(fx.CUDAPlace(0)), fx.Scope()
    exe.run(model.startup, scope=scope)
    got = [exe.run(model.main, feed=f, fetch_list=[model.loss], scope=scope) for f in feeds]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("dtype, near", [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_mixed_precision(dtype, near):
    model = classifier(fx.mixed_precision.decorate(fx.optimizer.Adam(0.01), dtype=dtype))
    feeds = [model.feed(8, k) for k in range(3)]
    want, _ = train_single(model, feeds, [model.loss])
    exe, scope = fx.Executor(fx.CUDAPlace(0)), fx.Scope()
    exe.run(model.startup, scope=scope)
    got = [exe.run(model.main, feed=f, fetch_list=[model.loss], scope=scope) for f in feeds]
    np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=near)


def test_a_loop_whose_length_depends_on_values():
    main, startup = fx.Program("loop"), fx.Program("loop_startup")
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        limit = fx.data("limit", [1], "float32")
        total, k = fx.layers.reduce_sum(x), fx.layers.fill_constant([1], "int64", 0)
        going = fx.layers.less_than(total, limit)
        loop = fx.layers.While(going)
        with loop.block():
            fx.layers.assign(total * 2.0, total)
            fx.layers.increment(k)
            fx.layers.less_than(total, limit, cond=going)
    feed = {"x": np.ones((2, 3), "float32"), "limit": np.float32([100])}
    want, got = (fx.Executor(place).run(main, feed=feed, fetch_list=[total, k]) for place in (fx.CPUPlace(), fx.CUDAPlace(0)))
    assert [np.ravel(v).tolist() for v in want] == [np.ravel(v).tolist() for v in got] == [[192.0], [5]]


def test_what_a_gpu_saved_a_cpu_loads(tmp_path):
    model = classifier(fx.optimizer.Adam(0.01))
    gpu, cpu = fx.Executor(fx.CUDAPlace(0)), fx.Executor(fx.CPUPlace())
    with fx.scope_guard(fx.Scope()):
        gpu.run(model.startup)
        gpu.run(model.main, feed=model.feed(8, 0), fetch_list=[model.loss])
        fx.io.save(model.main, str(tmp_path / "model"))
        next_loss = gpu.run(model.main, feed=model.feed(8, 1), fetch_list=[model.loss])
    with fx.scope_guard(fx.Scope()):
        cpu.run(model.startup)
        fx.io.load(model.main, str(tmp_path / "model"), cpu)
        np.testing.assert_allclose(cpu.run(model.main, feed=model.feed(8, 1), fetch_list=[model.loss]), next_loss, rtol=1e-4)


def test_an_operator_that_fails_is_named():
    x = fx.data("x", [-1, 3], "int64")
    y = fx.layers.embedding(x, [5, 2])
    exe = fx.Executor(fx.CUDAPlace(0))
    exe.run(fx.default_startup_program())
    with pytest.raises(fx.FluidxError, match="embedding|lookup_table"):
        exe.run(feed={"x": np.full((1, 3), 7)}, fetch_list=[y])


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer", "zero1", "zero3", "reduce_broadcast"])
def test_two_processes_that_share_a_gpu(tmp_path, monkeypatch, strategy):
    """NCCL takes two ranks on one GPU if each says that it is on a host of its own; they then send through sockets."""
    monkeypatch.setenv("NCCL_HOSTID", "shared")  # which the launcher passes on; the script makes it differ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys\n"
        "os.environ['NCCL_HOSTID'] = 'rank' + os.environ['FLUIDX_RANK']\n"
        f"sys.path.insert(0, {str(Path(SCRIPT).parents[1])!r})\n"
        f"sys.argv[0] = {SCRIPT!r}\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    )
    done = command("-n", 2, "--backend", "nccl", script, strategy, tmp_path, "save")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found, (steps, w) = json.loads((tmp_path / f"{rank}.json").read_text()), one_device(np.ones((4, 2)))
        assert found["steps"] == steps and found["w"] == found["loaded"] == w and found["restored"] == [{"next": 3}, w]
