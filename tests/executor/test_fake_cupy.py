"""Kernels and plans with an array module that is not NumPy: what a GPU would run, as far as that shows without one."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.ir import Effect, all_ops, np_dtype
from fluidx.ops import kernels
from fluidx.testing.models import classifier, train_single
from fluidx.testing.reference import run_op, type_of
from tests.each import each
from tests.executor.fake_cupy import DeviceArray, device, fake

OPS = [
    d
    for d in all_ops()
    if not d.name.startswith("t_")
    and d.effect not in (Effect.COLLECTIVE, Effect.P2P)
    and d.control.run_reference is None
    and not d.control.sized_by_values  # they run on the host, between plans
]


def _empty(t):
    return [_empty(v) for v in t] if isinstance(t, list) else device(np.full(t.shape, 77, np_dtype(t.dtype)))


def _to_device(a):
    return [_to_device(v) for v in a] if isinstance(a, list) else None if a is None else device(np.array(a))


def _flat(values):
    return [v for a in values if a is not None for v in (a if isinstance(a, list) else [a])]


@each("definition", OPS)
def test_a_kernel_gives_numpys_values(definition):
    for sample in definition.samples():
        attrs = definition.complete_attrs(sample.attrs)
        args = [*sample.args, *[None] * (len(definition.in_slots) - len(sample.args))]
        want = run_op(definition, args, attrs, RunContext())
        types = definition.infer(*map(type_of, args), **attrs)
        outs = [_empty(t) for t in ([types] if len(definition.out_slots) == 1 else types)]
        given, memory = kernels.wide(definition, fake, [_to_device(a) for a in args], outs)
        step = kernels.bind(definition, fake, given, memory, attrs, RunContext())
        with np.errstate(all="ignore"):
            step()
        outs = kernels.narrow(fake, outs, memory)
        for a, b in zip(_flat(want), _flat(outs), strict=True):
            assert isinstance(b, DeviceArray)
            rough = 1e-2 if a.dtype.itemsize == 2 else 2e-6
            if type_of(a).is_float:
                np.testing.assert_allclose(b.get().astype("float64"), a.astype("float64"), rough, rough)
            else:
                assert np.array_equal(b.get(), a)


def device_executor():
    exe = fx.Executor()
    exe._xp = fake
    return exe


@pytest.mark.parametrize("kind", ["mlp", "dropout", "norm", "batch_norm", "sub_batches", "conv"])
@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
def test_a_model_trains_as_on_numpy(kind, optimizer):
    m = classifier(fx.optimizer.Adam(0.01) if optimizer == "Adam" else None, kind=kind)
    feeds = [m.feed(12, k) for k in range(4)]
    want, state = train_single(m, feeds, [m.loss])
    exe, scope = device_executor(), fx.Scope()
    exe.run(m.startup, scope=scope)
    assert all(isinstance(a, DeviceArray) for a in scope.arrays.values())
    for feed, (loss,) in zip(feeds, want, strict=True):
        (found,) = exe.run(m.main, feed=feed, fetch_list=[m.loss], scope=scope)
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    for name in state.local_var_names():
        np.testing.assert_allclose(scope.get(name), state.get(name), rtol=1e-4, atol=1e-6)


def test_values_stay_on_the_device_when_asked():
    x = fx.data("x", [2, 3], "float32")
    y = fx.layers.transpose(x, [1, 0]) * 2.0
    feed = {"x": np.arange(6, dtype="float32").reshape(2, 3)}
    (found,) = device_executor().run(feed=feed, fetch_list=[y], return_numpy=False)
    assert isinstance(found, DeviceArray) and np.array_equal(found.get(), 2 * feed["x"].T)


def test_loops_and_branches_read_their_condition_from_the_device():
    x = fx.data("x", [1], "float32")
    (y,) = fx.layers.while_loop(lambda v: v < 10.0, lambda v: v * 2.0, [x])
    z = fx.layers.cond(y > 15.0, lambda: y + 1.0, lambda: y - 1.0)
    for start, want in [(1, 17), (3, 11)]:
        assert device_executor().run(feed={"x": np.float32([start])}, fetch_list=[z])[0].tolist() == [want]


def test_nan_is_found_on_the_device(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    x = fx.data("x", [1], "float32")
    with np.errstate(all="ignore"), pytest.raises(fx.ExecutionError, match="op log made a NaN"):
        device_executor().run(feed={"x": np.float32([-1])}, fetch_list=[fx.layers.log(x)])


def test_a_scope_takes_and_gives_host_arrays():
    scope = fx.Scope()
    scope.bind("w", device(np.zeros(3, "float32")))
    scope.set("w", np.float32([1, 2, 3]))
    assert scope.get("w").tolist() == [1, 2, 3] and type(scope.get("w")) is np.ndarray
    scope.bind("s", device(np.zeros((), "float32")))
    scope.set("s", np.float32(4))
    assert scope.get("s").tolist() == 4 and scope.get("s").shape == ()


def test_a_value_moves_to_where_the_program_runs():
    w = fx.layers.create_global_var([2], 1.0, "float32", persistable=True, name="w")
    fx.layers.increment(w[0:1])
    y = fx.layers.scale(w, 2.0)
    scope = fx.Scope()
    scope.set("w", np.float32([3, 4]))
    for exe, kind in [(device_executor(), DeviceArray), (fx.Executor(), np.ndarray), (device_executor(), DeviceArray)]:
        assert exe.run(fetch_list=[y], scope=scope)[0].tolist() == [6, 8]
        assert type(scope.arrays["w"]) is kind
