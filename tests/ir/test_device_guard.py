"""device_guard: a hint on operators that is printed, kept, and says nothing about ranks."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.jsonform import from_json, to_json


def model(*devices):
    """Two layers, each under the next of `devices`, trained by Momentum."""
    main, startup = fx.Program("net"), fx.Program("net")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h, label = fx.data("x", [-1, 4], "float32"), fx.data("label", [-1, 1], "int64")
        for device in devices:
            with fx.device_guard(device):
                h = fx.layers.fc(h, 3, act="tanh")
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(h, label))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    return main, startup, loss


def test_operators_carry_the_device_and_the_rest_carries_none():
    main, _, _ = model("gpu:0", "gpu:1")
    forward = [(op.type, op.device) for op in main.ops if op.role == "forward"]
    layer = ["mul", "elementwise_add", "tanh"]
    assert forward == [(t, d) for d in ("gpu:0", "gpu:1") for t in layer] + [("softmax_with_cross_entropy", "")]


def test_gradients_and_updates_stay_on_the_device_of_the_layer():
    main, _, _ = model("gpu:0", "gpu:1")
    on = {n: op.device for op in main.ops for n in op.output_arg_names}
    assert {n: on[n] for n in ("fc_0.w_0@GRAD", "fc_0.b_0@GRAD", "fc_0.w_0", "fc_0.b_0", "fc_0.w_0_velocity_0")} == dict.fromkeys(
        ("fc_0.w_0@GRAD", "fc_0.b_0@GRAD", "fc_0.w_0", "fc_0.b_0", "fc_0.w_0_velocity_0"), "gpu:0"
    )
    assert on["fc_1.w_0@GRAD"] == on["fc_1.w_0"] == "gpu:1"


def test_guards_nest_and_none_takes_the_device_away():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        x = fx.data("x", [2], "float32")
        with fx.device_guard("gpu"):
            x = fx.layers.relu(x)
            with fx.device_guard("cpu"):
                x = fx.layers.relu(x)
            with fx.device_guard():
                x = fx.layers.relu(x)
            x = fx.layers.relu(x)
        fx.layers.relu(x)
    assert [op.device for op in main.ops] == ["gpu", "cpu", "", "gpu", ""]


def test_the_device_is_printed_and_comes_back():
    main, _, _ = model("gpu:1", None)
    assert str(main.ops[0]) == "%fc_0.tmp_0 = mul(%x, %fc_0.w_0) device gpu:1"
    assert fx.Program.parse_from_string(str(main)) == main
    assert from_json(to_json(main)) == main
    assert main != model(None, None)[0] and main != model("gpu:2", None)[0]


@pytest.mark.parametrize("device", ["dp:0", "gpu:", "gpu:x", "cpu:0", "", 1])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(fx.ProgramError, match="device_guard takes 'cpu', 'gpu', 'gpu:1', 'stage:1' or None, got"):
        with fx.device_guard(device):
            pass


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer"])
def test_ranks_run_every_operator_whatever_its_device(strategy):
    plain, guarded = model(None, None), model("gpu:0", "gpu:1")
    sizes, losses = [], []
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((4, 4)).astype("float32"), "label": rng.integers(0, 3, (4, 1))}
    for main, startup, loss in (plain, guarded):
        t = fx.DistributeTranspiler(strategy)
        t.transpile(program=main, startup_program=startup, trainers=2)
        t.verify()
        programs = [t.get_trainer_program(r) for r in range(2)]
        sizes.append([len(p.ops) for p in programs])
        with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
            exe.run_startup()
            losses.append([exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(3)])
    assert {op.device for p in programs for op in p.ops} == {"", "gpu:0", "gpu:1"}
    assert sizes[0] == sizes[1] and losses[0] == losses[1]
