"""The GPU path, on machines that have one. None of this has run yet: the project has had no GPU so far."""

import json

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import classifier, train_single
from tests.test_run import SCRIPT, command, one_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["mlp", "norm", "conv", "dropout"])
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
