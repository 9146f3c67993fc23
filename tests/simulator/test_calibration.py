"""Calibrations: what is measured, with few programs and a clock of the test; the file; what is refused; and costs from it."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main as cli
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware import files
from fluidx.ir.errors import FluidxError
from fluidx.ir.types import TensorType
from fluidx.profiler.ceilings import Ceilings
from fluidx.simulator.calibrated_steps import CalibratedSteps
from fluidx.simulator.calibration.calibrate import CalibrationScope, calibrate, merge, summary, with_ranks
from fluidx.simulator.calibration.machine import CalibratedMachine, Others, check_idle, check_steady, others
from fluidx.simulator.calibration.probe import Speed
from fluidx.simulator.calibration.programs import CalibrationProgram, copies, networks
from fluidx.simulator.calibration.records import CurvePoint, Measured, TracedProfile
from fluidx.simulator.calibration.samples import sample_programs
from fluidx.simulator.calibration.steps import StepTurns, steps_in_turns
from fluidx.simulator.calibration.traces import read_trace, timed_steps
from fluidx.simulator.collective_times import CollectiveTimes
from fluidx.simulator.costs import CostEstimate, Costs
from fluidx.simulator.machine_prices import Factors, MachinePrices
from fluidx.simulator.step_table import Rates, StepTable, TimedStep
from fluidx.simulator.work import StepWork, work_of

BEST = Ceilings(1, 100.0, 10.0, 1.0)  # 100 GFLOP/s, 10 GB/s, 1 us
IDLE = Others(0.0, 0.0)
RATES = Rates(1e11, 1e10, 0.0)


def tick():
    """A clock that goes on by 1 ms whenever it is read."""
    ticks = count()
    return lambda: 1e-3 * next(ticks)


def steady(clock):
    """A probe of a machine whose speed does not change."""
    return lambda: Speed(1e-3, 2e-3)


def small(backend="threads", ranks=(2,), programs=None, **kw):
    few = [little] if programs is None else programs
    scope = CalibrationScope(0.0, few, ("relu",), (256, 4096), lambda threads: BEST, 1.0, lambda otherwise: 5e7, steady, 2)
    return calibrate(ranks, backend, scope=scope, clock=tick(), busy=lambda: IDLE, **kw)


def little():
    main, startup = fx.Program("little"), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 6], "float32"), 3))
        fx.optimizer.SGD(0.1).minimize(loss)
    return CalibrationProgram(main, startup, {"x": np.ones((4, 6), "float32")}, [loss])


def measured_steps(make, places=None):
    """The steps of a program in one turn."""
    one = StepTurns([make], places, 0.0)
    try:
        one.turn(tick())
    finally:
        one.close()
    return steps_in_turns([(one, [Speed(1.0, 1.0)])], Speed(1.0, 1.0), min)


def elementwise(numel, op="relu", kernel="native"):
    t = TensorType("float32", (numel,))
    return StepWork(op, kernel, (t, t), numel, 8 * numel)


def product(m, k, n, op="matmul", kernel="native"):
    types = tuple(TensorType("float32", s) for s in ((m, k), (k, n), (m, n)))
    return StepWork(op, kernel, types, 2 * m * k * n, 4 * (m * k + k * n + m * n))


def timed(work, factor, spread=0.0):
    """A step that takes `factor` times as long as at the rates."""
    return TimedStep(work, factor * RATES.seconds(work), spread)


def machine_of(steps, profiles=(), cores=2, **kw):
    """A calibrated machine with these tables."""
    here = CalibratedMachine.here()._replace(cores=cores, **kw)
    runs = {"one": {1: CurvePoint(0, 5e-6, 0.0)}, "processes": {2: CurvePoint(0, 20e-6, 0.0)}}
    measured = Measured(here, steps, runs, {}, tuple(profiles))
    found = small(ranks=(), programs=[])
    return files.from_json({**files.as_json(found), "measured": measured.as_json()}, "machine.json"), measured


# -- tables by hand ------------------------------------------------------------------------------------------------------------------------


def test_a_step_of_the_table_takes_its_own_time():
    table = StepTable([TimedStep(elementwise(1000), 7e-6, 0.04), timed(elementwise(2000), 9)], RATES)
    found = table.find(elementwise(1000))
    assert (found.seconds, found.spread, found.distance) == (7e-6, 0.04, 0.0)


def test_between_two_sizes_time_is_that_of_the_line_through_both_in_logarithms():
    # 1 and 4 times the bytes take 10 and 90 us: twice the bytes takes the geometric mean, 30 us
    table = StepTable([TimedStep(elementwise(1000), 10e-6, 0.0), TimedStep(elementwise(4000), 90e-6, 0.0)], RATES)
    assert table.find(elementwise(2000)).seconds == pytest.approx(30e-6)


def test_beyond_the_sizes_the_nearest_factor_holds():
    table = StepTable([timed(elementwise(1000), 3)], RATES)
    work = elementwise(64000)
    assert table.find(work).seconds == pytest.approx(3 * RATES.seconds(work)) and table.find(work).spread > 0.2


def test_a_product_takes_after_those_of_its_shape_and_not_after_those_of_its_operations():
    thin, square = product(4, 4096, 64), product(128, 64, 128)
    assert thin.flops == square.flops
    table = StepTable([timed(thin, 5), timed(square, 1)], RATES)
    work = product(4, 2048, 64)
    assert table.find(work).seconds > 4 * RATES.seconds(work)


def test_a_chain_takes_after_its_product_if_no_such_chain_was_timed():
    table = StepTable([timed(product(64, 64, 64, "mul"), 2), timed(elementwise(64), 50)], RATES)
    chain = product(64, 64, 64, "mul + elementwise_add + tanh", "fused")
    assert table.find(chain).seconds == pytest.approx(2 * RATES.seconds(chain))
    assert table.find(chain, alike=True) is None


def test_half_and_double_the_batch_tell_of_a_step_whatever_else_is_near():
    """Factors 2 and 8 over the rates at half and double the batch: 4 between, on a line in logarithms, and 2 ** 1.5 at the square root of 2
    times the half."""
    steps = [timed(product(32, 96, 64), 2), timed(product(128, 96, 64), 8)]
    table = StepTable([*steps, timed(product(64, 98, 64), 50), timed(product(64, 96, 66), 50)], RATES)
    work = product(64, 96, 64)
    assert table.find(work).seconds == pytest.approx(4 * RATES.seconds(work))
    work = product(45, 96, 64)
    assert table.find(work).seconds == pytest.approx(2.828 * RATES.seconds(work), rel=0.02)
    work = product(256, 96, 64)  # beyond both the nearest
    assert table.find(work).seconds == pytest.approx(8 * RATES.seconds(work))


def test_a_product_takes_after_the_same_product_with_another_tail():
    steps = [timed(product(32, 96, 64, "matmul + relu_grad", "fused"), 3), timed(product(40, 80, 64), 1)]
    work = product(64, 96, 64)
    assert StepTable(steps, RATES).find(work).seconds == pytest.approx(3 * RATES.seconds(work))
    assert StepTable(steps, RATES).find(work, alike=True).seconds == pytest.approx(RATES.seconds(work))


def convolution(batch, channels, filters, stride):
    image, side = (batch, channels, 16, 16), 16 // stride
    types = [TensorType("float32", s) for s in (image, (filters, channels, 3, 3), (batch, filters, side, side))]
    flops = 2 * batch * filters * side * side * channels * 9
    return StepWork("conv2d", "native", tuple(types), flops, sum(t.nbytes for t in types))


def test_convolutions_of_another_stride_are_far():
    """Another algorithm computes them: of two that are as near in all sizes, the one with the stride of the step counts."""
    assert convolution(8, 64, 64, 1).window == (3, 3, 1) and convolution(8, 64, 64, 2).window == (3, 3, -1)
    table = StepTable([timed(convolution(8, 64, 72, 1), 1), timed(convolution(8, 72, 64, 2), 3)], RATES)
    work = convolution(8, 64, 64, 2)
    assert table.find(work).seconds == pytest.approx(3 * RATES.seconds(work), rel=0.01)


def test_an_operator_like_no_other_has_no_time():
    assert StepTable([timed(elementwise(10), 1)], RATES).find(elementwise(10, "my_op")) is None


# -- costs from them -----------------------------------------------------------------------------------------------------------------------


def test_profiles_go_before_measured_steps_and_timed_steps_before_neighbours():
    a, b, c = elementwise(1000), elementwise(1500), elementwise(4000)
    profile = TracedProfile("t.json", 1, (timed(a, 2),))
    hw, measured = machine_of({1: (timed(a, 5), timed(b, 7), timed(c, 8))}, [profile])
    costs = CalibratedSteps(hw, measured, 1)
    rates = costs.rates
    assert (costs.estimate(a).seconds, costs.estimate(a).source) == (pytest.approx(2 * RATES.seconds(a)), "profile")
    assert (costs.estimate(b).seconds, costs.estimate(b).source) == (pytest.approx(7 * RATES.seconds(b)), "measured")
    near, far = elementwise(1100), elementwise(100_000)
    assert costs.estimate(near).source == "profile" and costs.estimate(far).source == "interpolated"
    assert costs.estimate(far).seconds > 4 * rates.seconds(far)  # after the measured ones


def test_ranks_at_once_have_their_own_table_and_slow_down_what_is_only_in_that_of_one():
    a, b = elementwise(1000), elementwise(1000, "tanh")
    hw, measured = machine_of({1: (timed(a, 2), timed(b, 4)), 2: (timed(a, 3),)})
    two = CalibratedSteps(hw, measured, 2)
    assert two.estimate(a).seconds == pytest.approx(3 * RATES.seconds(a))
    slow = CalibratedSteps(hw, measured, 2).estimate(b)
    assert slow.seconds == pytest.approx(4 * RATES.seconds(b) * 1.5) and slow.source == "interpolated"
    hw, measured = machine_of({1: (timed(a, 2), timed(b, 4)), 2: (timed(a, 3), timed(elementwise(980, "tanh"), 8))})
    assert CalibratedSteps(hw, measured, 2).estimate(b).seconds == pytest.approx(8 * RATES.seconds(b), rel=0.05)


def test_a_profile_of_one_rank_is_slowed_down_for_two():
    a = elementwise(1000)
    profile = TracedProfile("t.json", 1, (timed(a, 10),))
    hw, measured = machine_of({1: (timed(a, 2),), 2: (timed(a, 3),)}, [profile])
    found = CalibratedSteps(hw, measured, 2).estimate(a)
    assert (found.seconds, found.source) == (pytest.approx(15 * RATES.seconds(a)), "profile")


def test_a_run_is_its_start_its_copies_and_its_steps():
    main = fx.Program("one")
    with fx.program_guard(main, fx.Program()):
        y = fx.layers.relu(fx.data("x", [250], "float32"))
    plan = dry_plan(main, fetch=[y.name])
    work = work_of(plan.steps[0], plan.values)
    copy = TimedStep(elementwise(250, "assign")._replace(flops=0), 3e-6, 0.0)
    hw, _ = machine_of({1: (TimedStep(work, 11e-6, 0.0), copy)})
    assert Costs(hw).program(plan).seconds == pytest.approx(5e-6 + 2 * 3e-6 + 11e-6)


def test_an_operator_without_cost_says_what_to_do():
    hw, measured = machine_of({1: (timed(elementwise(10), 1),)})
    with pytest.raises(FluidxError, match="op my_op has no cost: neither .* nor a profile beside it has a step like my_op .*--from"):
        CalibratedSteps(hw, measured, 1).estimate(elementwise(10, "my_op"))


def test_a_number_of_ranks_that_was_not_measured_is_refused_and_more_ranks_than_cores_are_not():
    steps = {1: (timed(elementwise(10), 1),), 2: (timed(elementwise(10), 1),)}
    hw, measured = machine_of(steps, cores=8)
    with pytest.raises(FluidxError, match="has steps of 1 and 2 ranks at once, not of 3; run `fluidx calibrate -n 3`"):
        CalibratedSteps(hw, measured, 3)
    hw, measured = machine_of(steps, cores=2)
    assert CalibratedSteps(hw, measured, 4).estimate(elementwise(10)).seconds > 0
    with pytest.raises(FluidxError, match="has no runs of 4 processes; run `fluidx calibrate -n 4 --backend processes`"):
        measured.run("processes", 4, "machine.json")


@pytest.mark.parametrize(
    "change, what",
    [
        ({"cpu": "Z80"}, "its processor is Z80"),
        ({"threads": 99}, "its number of kernel threads is 99"),
        ({"level": "v9"}, "its kernel level is v9"),
        ({"cores": 77}, "its number of cores is 77"),
    ],
)
def test_a_calibration_of_another_machine_is_refused_by_name(change, what):
    here = CalibratedMachine.here()
    with pytest.raises(FluidxError, match=f"is a calibration of another machine: {what}.*fluidx calibrate"):
        here._replace(**change).check(here, "machine.json")
    here._replace(date="1984-01-24", load=3.0, fluidx="0").check(here, "machine.json")


def test_costs_check_the_machine():
    hw, _ = machine_of({1: (timed(elementwise(10), 1),)}, threads=99)
    with pytest.raises(FluidxError, match="another machine: its number of kernel threads is 99"):
        Costs(hw)


def test_collectives_of_a_calibrated_machine_come_from_its_curves():
    small_ = small(ranks=(2,), programs=[])
    measured = Measured.from_json(small_.measured, "m")
    points = tuple(CurvePoint(n, 1e-3 * n, 0.1) for n in (100, 10_000))
    curves = {"threads": {2: {"all_reduce": points, "reduce_scatter": tuple(p._replace(seconds=p.seconds / 2) for p in points)}}}
    hw = files.from_json({**files.as_json(small_), "measured": replace(measured, curves=curves).as_json()}, "m.json")
    times = CollectiveTimes(hw)
    assert times.estimate("all_reduce", (0, 1), 1000) == CostEstimate(pytest.approx(1.0), 0.1, "measured")
    assert times.seconds("reduce", (0, 1), 50) == pytest.approx(0.05) and times.seconds("all_reduce", (0, 1), 20_000) == pytest.approx(20)
    with pytest.raises(FluidxError, match=r"has no times of all_gather among 2 threads.*fluidx calibrate -n 2 --backend threads"):
        times.seconds("spread", (0, 1), 8)
    with pytest.raises(FluidxError, match=r"no times of all_reduce among 3 threads \(numbers .*: 2\); run `fluidx calibrate -n 2,3"):
        CollectiveTimes(hw, 4).seconds("all_reduce", (0, 1, 2), 8)


def test_a_step_of_two_ranks_is_simulated_from_the_file_of_a_calibration(tmp_path):
    path = tmp_path / "machine.json"
    small(output=path)
    main, startup = fx.Program("two"), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 6], "float32"), 3))
        fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    found = fx.simulate(t, cluster=str(path), batch=8)
    assert found.calibrated and found.seconds > 0


# -- measuring -----------------------------------------------------------------------------------------------------------------------------


def test_a_busy_machine_is_refused_unless_anyway():
    with pytest.raises(FluidxError, match="busy: others use 1.0 of 2 cores.*--anyway"):
        check_idle(Others(1.0, 0.0), 2)
    with pytest.raises(FluidxError, match="busy: the hypervisor takes 10% of the time"):
        check_idle(Others(0.0, 0.1), 2)
    check_idle(Others(0.2, 0.01), 2)
    scope = CalibrationScope(0.0, [], (), (256,), lambda threads: BEST)
    with pytest.raises(FluidxError, match="this machine is busy"):
        calibrate((), scope=scope, busy=lambda: Others(8.0, 0.0))
    assert calibrate((), scope=scope, busy=lambda: Others(8.0, 0.0), anyway=True).measured


def test_times_that_vary_are_refused():
    steps = [timed(elementwise(4000), 1, 0.3), timed(elementwise(1000), 1, 0.05)]  # four fifths of the time
    check_steady(steps, 0.9)
    with pytest.raises(FluidxError, match="times vary on this machine: steps with a spread above 10 % take 80% of the time.*--anyway"):
        check_steady(steps, 0.5)


def test_what_others_use_is_what_the_system_counts_while_this_process_sleeps(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 0 100 0 0 0 0 0 0\n")
    monkeypatch.setattr("fluidx.native.cores", lambda: 4)
    # of 100 ticks 50 are idle and 10 stolen: others run on 0.4 of 4 cores
    found = others(1.0, lambda s: stat.write_text("cpu 140 0 0 150 0 0 0 10 0 0\n"), stat)
    assert found == Others(pytest.approx(1.6), pytest.approx(0.1))
    assert others(1.0, lambda s: None, tmp_path / "none") == Others(0.0, 0.0)


def test_steps_of_a_program_are_timed_under_the_keys_of_its_plan():
    found = {s.work.key for s in measured_steps(little)}
    made = little()
    plan = dry_plan(made.main, batch=4, fetch=[v.name for v in made.fetch])
    works = [work_of(s, plan.values) for s in plan.steps if s.kernel not in ("view", "joined", "nothing")]
    assert found == {w.key for w in works}


def test_steps_of_ranks_are_those_of_a_job_that_trains_together():
    """Each computes what one device does, with batch normalization in the parts that ranks have, and what they send is no step."""

    def normalized():
        main, startup = fx.Program("normalized"), fx.Program()
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            loss = fx.layers.mean(fx.layers.batch_norm(fx.layers.fc(fx.data("x", [-1, 6], "float32"), 3)))
            fx.optimizer.SGD(0.1).minimize(loss)
        return CalibrationProgram(main, startup, {"x": np.ones((4, 6), "float32")}, [loss])

    found = [s.work for s in measured_steps(normalized, fx.cpu_places(2))]
    assert {"bn_mean", "bn_variance", "bn_apply", "sgd"} <= {w.first for w in found}
    assert not any("all_reduce" in w.ops for w in found)
    assert {w.types[0].shape for w in found if w.first == "mul"} == {(4, 6)}
    assert {w.first for w in (s.work for s in measured_steps(copies, fx.cpu_places(2)))} == {"assign"}


def test_the_programs_of_a_calibration_can_be_planned_and_have_all_kinds_of_steps():
    kinds = set()
    for make in [*networks(), copies]:
        made = make()
        plan = dry_plan(made.main, {k: v.shape for k, v in made.feed.items()})
        kinds |= {work_of(s, plan.values).first for s in plan.steps}
    assert {"mul", "matmul", "conv2d", "conv2d_grad", "scaled_dot_product_attention_grad", "adam", "momentum", "sgd", "assign"} <= kinds


def test_samples_grow_along_a_free_axis_and_stay_where_sizes_are_in_attributes():
    shapes = {}
    for op in ("softmax", "conv2d_grad", "matmul"):
        made = [make() for make in sample_programs([op])][:3]
        shapes[op] = [None if p is None else [a.shape for a in p.feed.values()] for p in made]
    first, second, third = shapes["softmax"]
    assert second[0][0] == 64 * first[0][0] and third[0][0] == 2048 * first[0][0] and first[0][1:] == third[0][1:]
    x, filters, g = shapes["conv2d_grad"][1]
    assert x[0] == g[0] == 64 * shapes["conv2d_grad"][0][0][0] and filters == shapes["conv2d_grad"][0][1]
    (a, b), (longer, same) = shapes["matmul"][:2]
    assert longer == (64 * a[0], a[1]) and same == b


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_calibration_has_steps_runs_and_curves_and_its_file_reads_back(backend, tmp_path):
    path = tmp_path / "machine.json"
    made = small(backend, output=path)
    found = files.load(str(path))
    assert found == made
    measured = Measured.from_json(found.measured, "machine.json")
    assert measured.as_json() == found.measured == json.loads(path.read_text())["measured"]
    assert set(measured.steps) == {1, 2} and {"mul", "relu"} <= {s.work.first for s in measured.steps[1]}
    assert set(measured.runs) == {"one", backend}
    curves = measured.curves[backend][2]
    assert set(curves) == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "message"}
    assert all([p.nbytes for p in points] == [256, 4096] and all(p.seconds > 0 for p in points) for points in curves.values())
    assert set(found.inside.by_group) == {2} and found.device.kind == "cpu"
    assert any("2 ranks at once" in line for line in summary(found))
    Costs(found, 2, backend)


def test_bad_arguments_and_files_are_refused(tmp_path):
    with pytest.raises(FluidxError, match="unknown backend 'process'; did you mean 'processes'"):
        small("process")
    with pytest.raises(FluidxError, match="ranks are numbers of 2 or more.* got 1"):
        small(ranks=(1,))
    with pytest.raises(FluidxError, match="timeline .* cannot be read"):
        small(profiles=[tmp_path / "none.json"])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(FluidxError, match="other.json is not a timeline of fluidx"):
        read_trace(tmp_path / "other.json")
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    with pytest.raises(FluidxError, match="has no steps that compute"):
        read_trace(tmp_path / "empty.json")
    with pytest.raises(FluidxError, match='the section "measured" of machine.json is not that of a calibration'):
        Measured.from_json({"machine": {}}, "machine.json")


# -- profiles ------------------------------------------------------------------------------------------------------------------------------


def event(name, dur, tid=0, kind="operator", **args):
    given = {"body": "native", "reads": "%x f32[4]", "makes": "%y f32[4]", "bytes": 32, "flops": 4, **args}
    return {"ph": "X", "cat": kind, "name": name, "tid": tid, "dur": dur, "args": given}


def test_places_of_equal_work_are_timed_apart_and_averaged():
    runs = [[event("p, run 1", 9.0, kind="run"), event("relu", 1.0), event("relu", 5.0)],
            [event("p, run 2", 9.0, kind="run"), event("relu", 2.0), event("relu", 9.0)],
            [event("p, run 3", 9.0, kind="run"), event("relu", 3.0), event("relu", 7.0)]]  # fmt: skip
    (step,) = timed_steps([e for run in runs for e in run]).steps
    assert step.seconds == pytest.approx(4.5e-6)  # medians 2 and 7


def test_waits_and_communication_are_no_steps_and_rows_are_ranks():
    events = [event("p, run 1", 9.0, r, "run") for r in (0, 1)]
    events += [event("relu", 1.0, 0), event("relu", 3.0, 1), event("all_reduce", 9.0, 1000, "communication,NCCL_ALLREDUCE")]
    found = timed_steps(events)
    assert found.ranks == 2 and [s.work.ops for s in found.steps] == ["relu"] and found.steps[0].seconds == pytest.approx(2e-6)


def test_a_saved_profile_has_the_steps_of_the_plan(tmp_path):
    made = little()
    exe = fx.Executor()
    exe.run(made.startup)
    with fx.profiler.profiler() as profile:
        exe.run(made.main, feed=made.feed, fetch_list=made.fetch)
    profile.save(tmp_path / "trace.json")
    hw = small(programs=[], ranks=())
    found = merge(merge(hw, [tmp_path / "trace.json"]), [tmp_path / "trace.json"])
    (traced,) = Measured.from_json(found.measured, "machine.json").profiles
    assert traced.ranks == 1
    plan = dry_plan(made.main, batch=4, fetch=[v.name for v in made.fetch])
    sources = {Costs(found).step(plan, s).source for s in plan.steps if s.kernel not in ("view", "joined", "nothing")}
    assert sources == {"profile"}


def test_a_profile_needs_a_calibration():
    with pytest.raises(FluidxError, match="dgx-a100 is not calibrated, a profile holds for one machine only"):
        merge(files.load("dgx-a100"), ["trace.json"])


# -- the command ---------------------------------------------------------------------------------------------------------------------------


def test_the_command_merges_into_a_file_that_is_there(tmp_path, monkeypatch):
    path, trace = tmp_path / "machine.json", tmp_path / "trace.json"
    small(ranks=(), programs=[], output=path)
    trace.write_text(json.dumps({"traceEvents": [event("p, run 1", 9.0, kind="run"), event("relu", 1.0)]}))
    done = CliRunner().invoke(cli, ["calibrate", "--from", str(trace), "-o", str(path)])
    assert done.exit_code == 0 and "trace.json: 1 steps of 1 rank" in done.output
    assert len(Measured.from_json(files.load(str(path)).measured, "").profiles) == 1


def test_the_command_refuses_a_busy_machine_and_counts_of_ranks(tmp_path, monkeypatch):
    path = str(tmp_path / "machine.json")
    monkeypatch.setattr("fluidx.simulator.calibration.calibrate.others", lambda: Others(2.0, 0.0))
    done = CliRunner().invoke(cli, ["calibrate", "-n", "1,2", "-o", path])
    assert done.exit_code == 2 and "'1,2' is not a list of numbers of ranks" in done.output


def test_ranks_of_another_kind_take_the_place_of_those_that_were_measured():
    machine = small("threads")
    curves = {"all_reduce": (CurvePoint(100, 1e-3, 0.0), CurvePoint(10**6, 1.0, 0.0)), "message": (CurvePoint(10**6, 0.5, 0.0),)}
    other = with_ranks(machine, "mpi", {2: (curves, CurvePoint(0, 7e-3, 0.0))})
    assert Measured.from_json(other.measured, "other").steps == Measured.from_json(machine.measured, "machine").steps
    assert Costs(other, 2).empty_run == 7e-3 and other.inside.bandwidth.value == 2e6
    assert CollectiveTimes(other).seconds("all_reduce", (0, 1), 100) == 1e-3


def test_a_limit_that_all_ranks_share_is_added_to_measured_collectives():
    curves = {"all_gather": (CurvePoint(1000, 1e-3, 0.0), CurvePoint(100 << 20, 0.2, 0.0))}
    free = with_ranks(small("threads"), "mpi", {2: (curves, CurvePoint(0, 0.0, 0.0))})
    limited = replace(free, inside=replace(free.inside, shared=files.Figure(100e6, "a token bucket")))
    # each of two ranks sends half of 100 MiB; 199 ms of their own come beside the link's time for two pieces of 0.5 MiB of 100
    assert CollectiveTimes(limited).seconds("spread", (0, 1), 100 << 20) == pytest.approx(1e-3 + 1.048576 + 0.199 * 0.01)
    assert CollectiveTimes(limited).estimate("spread", (0, 1), 100 << 20).source == "measured"


def test_messages_take_what_was_measured_at_their_size():
    points = (CurvePoint(1000, 1e-3, 0.0), CurvePoint(10**5, 5e-3, 0.0), CurvePoint(10**7, 0.1, 0.0))  # the last one: 100 MB a second
    machine = with_ranks(small("threads"), "mpi", {2: ({"message": points}, CurvePoint(0, 0.0, 0.0))})
    for limit, nbytes, wanted in ((None, 10**5, 5e-3), (None, 10**7, 0.1), (None, 10, 1e-3), (10e6, 10**5, 4e-3 + 10e-3)):
        shared = limit and files.Figure(limit, "a token bucket")
        network = MachinePrices(replace(machine, inside=replace(machine.inside, shared=shared)), 2, 2).network
        path = network.path(0, 1)
        assert path.delay(nbytes) + nbytes / min(network.capacity[link] for link in path.links) == pytest.approx(wanted)
    halved = MachinePrices(machine, 2, 2, Factors(latency=0.5)).network.path(0, 1)
    assert halved.delay(10**5) == pytest.approx(2e-3)
