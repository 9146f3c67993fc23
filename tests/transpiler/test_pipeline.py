"""Pipelines: the order of slots in closed form, the answers of one device, and how much a stage keeps."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import VerifyError
from fluidx.ir.opdef import OPS, Effect
from fluidx.ir.program import ProgramPair
from fluidx.testing.models import TestModel
from fluidx.transpiler.scheduling.pipeline_schedules import Action, bubble, slots
from fluidx.verify import verify_ranks
from tests.transpiler.models import same_answers
from tests.transpiler.staged import equal, gpt, layers

L, S = fx.layers, fx.strategies
both = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])


def transpiled(model, trainers, strategy):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


# -- slots --------------------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stages, turns", [(1, 3), (2, 2), (3, 1), (4, 2), (4, 8), (3, 7)])
def test_every_stage_does_everything_once_and_after_what_it_needs(schedule, stages, turns):
    found = slots(schedule, stages, turns)
    for s, of in enumerate(found):
        assert set(of) == {Action(b, k) for b in (False, True) for k in range(turns)} and len(set(of.values())) == 2 * turns
        for k in range(turns):
            forward, backward = Action(False, k), Action(True, k)
            assert s == 0 or found[s - 1][forward] < of[forward]
            assert of[forward] < of[backward] and (s == stages - 1 or found[s + 1][backward] < of[backward])


@both
@pytest.mark.parametrize("stages, turns", [(1, 3), (2, 2), (4, 1), (4, 8), (8, 32)])
def test_the_bubble_is_p_minus_1_of_m_plus_p_minus_1(schedule, stages, turns):
    assert bubble(schedule, stages, turns) == pytest.approx((stages - 1) / (turns + stages - 1), abs=1e-12)  # a quotient of two floats


@pytest.mark.parametrize("stages, turns", [(2, 5), (4, 8), (4, 2)])
def test_one_forward_one_backward_keeps_at_most_as_many_as_stages_behind(stages, turns):
    def most(of):
        alive, found = 0, 0
        for action in sorted(of, key=of.__getitem__):
            alive += -1 if action.backward else 1
            found = max(found, alive)
        return found

    assert [most(of) for of in slots("1f1b", stages, turns)] == [min(stages - s, turns) for s in range(stages)]
    assert {most(of) for of in slots("gpipe", stages, turns)} == {turns}


# -- the same answers ---------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gradients_and_parameters_are_bit_equal(stages, turns, schedule):
    equal(layers(stages), S.pipeline(turns, schedule), fx.Mesh(pp=stages), fetch=("fc_0.tmp_1",))


@both
@pytest.mark.parametrize("of", [S.data_parallel, S.zero1, S.ring_optimizer, S.reduce_broadcast], ids=lambda s: s.__name__)
def test_with_data_parallel_stages_that_have_uneven_rows(of, schedule):
    for rows in (7, 3):  # the second time some turns have none
        equal(layers(2), S.pipeline(3, schedule, of()), fx.Mesh(pp=2, dp=2), rows=(rows,))


@both
def test_with_tensor_parallel_and_zero(schedule):
    equal(layers(2, width=6, tp=True), S.pipeline(2, schedule, S.zero1()), fx.Mesh(pp=2, dp=2, tp=2))


@both
def test_a_gpt_whose_first_and_last_stage_share_a_table(schedule):
    """A clip by the norm over all stages, a schedule of the learning rate, dropout, AdamW."""
    same_answers(gpt(3), S.pipeline(4, schedule), fx.Mesh(pp=3), rows=(7, 8, 2), fetch=("table@GRAD", "layer_norm_2.tmp_2"))
    same_answers(gpt(2), S.pipeline(2, schedule, S.zero1()), fx.Mesh(pp=2, dp=2), rows=(5, 4))


# -- the order ----------------------------------------------------------------------------------------------------------------------

KINDS = {"mul": "F", "reduce_to": "B", "send": "S", "recv": "R"}


def order(schedule, stages=3, turns=4):
    """What each rank does: forwards and backwards with their micro-batch, sends and receives; + is between those that start together."""
    t = transpiled(layers(stages), fx.Mesh(pp=stages), S.pipeline(turns, schedule))
    out = []
    for r in range(stages):
        said, last = [], ""
        for op in t.get_trainer_program(r).ops:
            if op.type not in KINDS:
                continue
            name = KINDS[op.type] + (op.output_arg_names or op.input_arg_names)[0][-1]
            batch = op.attrs.get("batch", "")
            said.append(f"+{name}" if batch and batch == last else f" {name}")
            last = batch
        out.append("".join(said).strip())
    return out


def test_gpipe_does_all_forwards_first():
    assert order("gpipe") == [
        "F0 S0 F1 S1 F2 S2 F3 S3 R0 B0 R1 B1 R2 B2 R3 B3",
        "R0 F0 S0+R1 F1 S1+R2 F2 S2+R3 F3 S3 R0 B0 S0+R1 B1 S1+R2 B2 S2+R3 B3 S3",
        "R0 F0 R1 F1 R2 F2 R3 F3 B0 S0 B1 S1 B2 S2 B3 S3",
    ]


def test_one_forward_one_backward_sends_and_receives_together():
    assert order("1f1b") == [
        "F0 S0 F1 S1 F2 S2 R0 B0 F3 R1+S3 B1 R2 B2 R3 B3",
        "R0 F0 S0+R1 F1 S1+R2 R0 B0 S0 F2 R1+S2 B1 S1+R3 F3 R2+S3 B2 S2 R3 B3 S3",
        "R0 F0 R1 B0 S0 F1 B1 S1+R2 F2 B2 S2+R3 F3 B3 S3",
    ]


def test_the_memory_of_a_stage_does_not_grow_with_micro_batches_under_1f1b():
    def arena(schedule, turns, stage):
        t = transpiled(layers(2, width=64), fx.Mesh(pp=2), S.pipeline(turns, schedule))
        return dry_plan(t.get_trainer_program(stage), batch=64 * turns, fetch=[]).nbytes("arena")

    for stage in (0, 1):
        assert arena("1f1b", 4, stage) == arena("1f1b", 16, stage) < arena("gpipe", 4, stage)
    grown = [arena("gpipe", m, 0) for m in (4, 8, 16)]
    assert grown[2] - grown[1] == 2 * (grown[1] - grown[0]) > 0


def test_updates_begin_when_a_stage_has_ended():
    t = transpiled(layers(3), fx.Mesh(pp=3, dp=2), S.pipeline(2))
    last = [op.type for op in t.get_trainer_program(5).ops]  # of the last stage, whose backwards end first
    assert last.index("all_reduce") > len(last) - 1 - last[::-1].index("reduce_to")
    ops = t.main.ops
    first = next(k for k, op in enumerate(ops) if op.role == "optimize")
    assert any(op.role == "backward" for op in ops[first:])


# -- programs that are no straight line ---------------------------------------------------------------------------------------------


def written(build, feed):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = build()
        _, pairs = fx.optimizer.SGD(0.1).minimize(loss)
    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def rows(n, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((n, 4))}


def there_and_back():
    x = fx.data("x", [-1, 4], "float64")
    with fx.device_guard("stage:0"):
        h = skip = L.fc(x, 4, act="tanh")
    with fx.device_guard("stage:1"):
        h = L.fc(h, 4, act="tanh")
    with fx.device_guard("stage:0"):
        return L.mean(L.square(L.fc(h, 2) + L.fc(skip, 2)))


def normed():
    x = fx.data("x", [-1, 4], "float64")
    with fx.device_guard("stage:0"):
        h = L.fc(x, 4, act="tanh")
    with fx.device_guard("stage:1"):
        return L.mean(L.square(L.fc(L.batch_norm(L.fc(h, 4)), 2)))


@both
@pytest.mark.parametrize("build", [there_and_back, normed])
def test_work_that_must_wait_is_right_and_said(build, schedule):
    """A value that goes back to an earlier stage, and statistics of the whole batch, for which all micro-batches are needed."""
    model = written(build, rows)
    same_answers(model, S.pipeline(3, schedule), fx.Mesh(pp=2), rows=(7, 2))
    said = [line for line in transpiled(model, fx.Mesh(pp=2), S.pipeline(3, schedule)).explain() if "of the schedule" in line]
    assert said and "has slot" in said[0] and "but its inputs are ready in slot" in said[0]


def test_a_straight_line_waits_for_nothing():
    t = transpiled(gpt(3), fx.Mesh(pp=3, dp=2), S.pipeline(4))
    assert not [line for line in t.explain() if "of the schedule" in line]


# -- what cannot be -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: S.pipeline(4, "1F1B"), "pipeline: unknown schedule='1F1B'; did you mean '1f1b'?"),
        (lambda: S.pipeline(0), "pipeline: micro_batches must be an integer from 1 to 1024, got 0"),
        (lambda: S.pipeline(2, of=3), "pipeline: of must be a strategy such as strategies.zero1(), got 3"),
        (
            lambda: transpiled(layers(2), 2, S.pipeline(2)),
            "program layers has stages, and Cluster(hosts=1, devices_per_host=2) has no axis 'pp' for them; "
            "give trainers=fx.Mesh(pp=2, dp=...), or take strategies.micro_batches",
        ),
        (
            lambda: S.pipeline(4, of=S.micro_batches(2)),
            "pipeline: of=micro_batches(count=2) already has micro-batches; use it alone, or "
            "pipeline(micro_batches=4)",
        ),
        (lambda: S.pipeline(4, ["1f1b"]), "pipeline: unknown schedule=['1f1b']; did you mean '1f1b'?"),
        (
            lambda: transpiled(layers(2), fx.Mesh(pp=2, dp=2), S.pipeline(2, of=S.rails())),
            "rails goes over the hosts of a Cluster, whose one axis is dp; with Mesh(pp=2, dp=2), take data_parallel in its place",
        ),
        (lambda: S.pipeline(2, of=S.zero1(), strict=True), "pipeline: strict beside of=zero1(); give these options to zero1"),
    ],
    ids=["schedule", "micro_batches", "of", "no stages", "cut twice", "a list", "hosts beside stages", "options of another"],
)
def test_refusals(make, text):
    with pytest.raises(fx.TranspileError) as caught:
        make()
    assert str(caught.value).split("\n")[0] == text


def swapped(mains):
    """Two messages of one rank in the other order."""
    ops = mains[0].global_block().oplist
    sends = [k for k, op in enumerate(ops) if op.type == "send"]
    ops[sends[0]], ops[sends[1]] = (ops[b].replace(inputs=ops[a].inputs) for a, b in ((sends[1], sends[0]), (sends[0], sends[1])))


def late(mains):
    """A backward that uses the activations of another micro-batch."""
    ops = mains[0].global_block().oplist
    k = next(k for k, op in enumerate(ops) if op.type == "relu_grad" and op.output_arg_names[0].endswith("mb1"))
    ops[k] = ops[k].renamed({"fc_0.tmp_2.mb1": "fc_0.tmp_2.mb0"})


@both
def test_messages_that_start_one_after_the_other_come_through_too(schedule):
    """All ranks have them in one order, so a send that waits for its recv waits for no rank that waits for it."""
    model = layers(3)
    t = transpiled(model, fx.Mesh(pp=3), S.pipeline(4, schedule))
    mains = [fx.Program.parse_from_string(str(t.get_trainer_program(r))) for r in range(3)]
    for p in mains:
        ops = p.global_block().oplist
        ops[:] = [op.replace(attrs={**op.attrs, "batch": ""}) if OPS[op.type].effect is Effect.P2P else op for op in ops]
    verify_ranks(ProgramPair(model.main, model.startup), mains, [t.get_startup_program(r) for r in range(3)])


@pytest.mark.parametrize("change, why", [(swapped, "fc_0.tmp_2"), (late, "relu_grad")], ids=lambda x: getattr(x, "__name__", ""))
def test_mutants_are_refused(change, why):
    model = layers(3)
    t = transpiled(model, fx.Mesh(pp=3), S.pipeline(4))
    mains = [fx.Program.parse_from_string(str(t.get_trainer_program(r))) for r in range(3)]
    change(mains)
    with pytest.raises(VerifyError, match=why):
        verify_ranks(ProgramPair(model.main, model.startup), mains, [t.get_startup_program(r) for r in range(3)])
