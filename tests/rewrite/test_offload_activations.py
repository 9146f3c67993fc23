"""The rewrite OffloadActivations: what is copied to the host and when it comes back, what the two memories hold, and the same bits."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import ProgramPair, Role
from fluidx.ir.parser import parse_pair
from fluidx.ir.pass_base import Job
from fluidx.rewrite import OffloadActivations
from fluidx.verify import verify_ranks
from tests.transpiler.models import same_answers

L = fx.layers


def deep(layers=8, width=16, act="tanh", optimizer=None):
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    main.random_seed = startup.random_seed = 3
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, width], "float32")
        for _ in range(layers):
            h = L.fc(h, width, act=act, bias_attr=False)
        loss = L.mean(h)
        (optimizer or fx.optimizer.SGD(0.5)).minimize(loss)
    return main, startup, loss


def copies(program, kind):
    return [(k, op) for k, op in enumerate(program.ops) if op.type == kind]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_value_goes_after_its_last_reader_and_comes_back_sections_before_its_first(ahead):
    """The gradient of tanh reads its result, the last one first. The result of layer k is then read by the product of layer k + 1."""
    main, _, _ = deep(6)
    made = OffloadActivations(least_mb=0, ahead=ahead).run(main)
    there, back = copies(made, "memcpy_d2h"), copies(made, "memcpy_h2d")
    outs = [f"fc_{k}.tmp_1" for k in range(6)]
    assert [op.input_arg_names[0] for _, op in there] == outs[: 6 - ahead]
    assert [op.input_arg_names[0] for _, op in back] == [f"{n}.host" for n in outs[: 6 - ahead][::-1]]
    for k, op in there:
        assert op.role is Role.FORWARD and op.input_arg_names[0] in made.ops[k - 1].input_arg_names
        assert not any(op.input_arg_names[0] in later.input_arg_names for later in made.ops[k + 1 :])
    gradients = [k for k, op in enumerate(made.ops) if op.type == "tanh_grad"]
    for j, (k, op) in enumerate(back):  # section j + ahead comes back in front of the first reader of section j
        assert op.role is Role.BACKWARD and gradients[j] > k and (not j or gradients[j - 1] < k)
        assert op.output_arg_names[0] in made.ops[gradients[j + ahead]].input_arg_names
    descs = made.global_block().descs
    assert all(descs[op.output_arg_names[0]].on_host for _, op in there)
    assert not any(descs[op.output_arg_names[0]].on_host for _, op in back)


def test_the_device_holds_few_activations_and_the_host_the_others():
    """16 results of 1024 rows; while backward runs, some of them are on the device: two sections and gradients."""
    main, _, _ = deep(16, 64)
    value = 1024 * 64 * 4
    before, after = (dry_plan(p, {"x": (1024, 64)}, fetch=[]) for p in (main, OffloadActivations(least_mb=0.1).run(main)))
    assert before.host_bytes == 0 and before.arena_bytes > 16 * value
    assert after.arena_bytes < 7 * value and 14 * value <= after.host_bytes <= 15.1 * value


def test_a_view_is_taken_again_and_copied_with_its_value():
    main, startup = fx.Program("views"), fx.Program("views_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, 8], "float32")
        h = L.tanh(L.fc(h, 8, bias_attr=False))
        for _ in range(3):
            h = L.tanh(L.matmul(L.reshape(h, [-1, 2, 4]), L.create_parameter([4, 4], "float32")))
            h = L.reshape(h, [-1, 8])
        fx.optimizer.SGD(0.5).minimize(L.mean(h))
    made = OffloadActivations(least_mb=0).run(main)
    sent = [op.input_arg_names[0] for _, op in copies(made, "memcpy_d2h")]
    assert sent and not any("reshape" in n for n in sent)
    again = [op for op in made.ops if op.type == "reshape" and op.role is Role.BACKWARD and op.input_arg_names[0].endswith(".device")]
    assert len(again) >= 1


def test_values_below_the_size_stay_and_the_log_says_so():
    main, startup, _ = deep(4, 16)
    t = fx.DistributeTranspiler("zero1,offload_activations{least_mb=5}").transpile(program=main, startup_program=startup, trainers=2)
    assert not copies(t.main, "memcpy_d2h")
    assert any("OffloadActivations changed nothing" in str(line) for line in t.explain())


WRONG = [
    ({"least_mb": -1}, "least_mb is a number of MiB, 0 or more, got -1"),
    ({"least_mb": float("nan")}, "least_mb is a number of MiB, 0 or more, got nan"),
    ({"ahead": 0}, "ahead is a number of sections, 1 or more, got 0"),
]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_options_are_checked(wrong, message):
    with pytest.raises(fx.ProgramError, match=message):
        OffloadActivations(**wrong)


def test_a_program_without_gradients_stays_as_it_is():
    main, job = fx.Program("forward"), Job()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        L.fc(fx.data("x", [-1, 4], "float32"), 4)
    assert str(OffloadActivations(least_mb=0).run(main, job)) == str(main)
    assert job.log == ["OffloadActivations changed nothing: program forward computes no gradients; call minimize first"]
    with pytest.raises(fx.TranspileError, match=r"pass OffloadActivations\(\): run takes a Program or a ProgramPair, got int: 3"):
        OffloadActivations().run(3)


def test_values_are_sent_once():
    main, _, _ = deep(4)
    once = OffloadActivations(least_mb=0).run(main)
    assert str(OffloadActivations(least_mb=0).run(once)) == str(once)


def test_a_step_is_the_same_bit_by_bit_on_one_device():
    feed, found = {"x": np.random.default_rng(0).standard_normal((5, 16)).astype("float32")}, []
    for rewrite in (False, True):
        main, startup, loss = deep(6, optimizer=fx.optimizer.Adam(0.1))
        program = OffloadActivations(least_mb=0).run(main) if rewrite else main
        exe, scope = fx.Executor(), fx.executor.Scope()
        exe.run(startup, scope=scope)
        found.append([exe.run(program, feed=feed, fetch_list=[loss], scope=scope)[0] for _ in range(3)])
    assert np.array_equal(*found)


STRATEGIES = ["data_parallel", "zero1", "zero2{cpu_offload=true}", "fsdp{units=0.001,cpu_offload=true}", "zero3", "ring_optimizer"]


@pytest.mark.parametrize("name", ["gpt", "conv", "branch", "masked"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_keep_their_answers_on_ranks(name, strategy):
    same_answers(name, fx.strategies.get(f"{strategy},offload_activations{{least_mb=0}}"), 3)


AFTER_OTHERS = ["recompute,offload_activations{least_mb=0}", "amp{dtype=bfloat16},offload_activations{least_mb=0,ahead=2}"]


@pytest.mark.parametrize("text", AFTER_OTHERS)
def test_other_rewrites_come_before_it(text, monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    main, startup, _ = deep(12, 16)
    t = fx.DistributeTranspiler(f"zero1,{text}").transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    assert copies(t.main, "memcpy_d2h")


def test_the_copies_are_bytes_of_traffic_and_take_time():
    main, startup, _ = deep(8, 16)
    t = fx.DistributeTranspiler("data_parallel,offload_activations{least_mb=0}")
    t.transpile(program=main, startup_program=startup, trainers=2)
    assert t.traffic(0, 64).copied == 2 * 7 * 32 * 16 * 4 and "to and from the host" in str(t.traffic(0, 64))
    plain = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    assert plain.traffic(0, 64).copied == 0 and plain.traffic(0, 64).total == t.traffic(0, 64).total


def test_a_wrong_copy_is_refused():
    """Rank 0 fetches for one layer what it kept for another."""
    main, startup, _ = deep(4)
    t = fx.DistributeTranspiler("data_parallel,offload_activations{least_mb=0}")
    t.transpile(program=main, startup_program=startup, trainers=2).verify()
    pairs = [parse_pair(str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))) for r in range(2)]
    (_, one), (_, other) = copies(pairs[0].main, "memcpy_h2d")[:2]
    text = str(pairs[0].main)
    a, b = (f"memcpy_h2d(%{op.input_arg_names[0]})" for op in (one, other))
    assert a in text and b in text
    pairs[0] = ProgramPair(fx.Program.parse_from_string(text.replace(a, b)), pairs[0].startup)
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, [p.main for p in pairs], [p.startup for p in pairs])
