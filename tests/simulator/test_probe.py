"""The probe of a machine's speed: times of rounds at one speed, figures at another speed, and what a check says."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fluidx.cli import main as cli
from fluidx.hardware import files
from fluidx.ir.errors import FluidxError
from fluidx.ir.types import TensorType
from fluidx.profiler.ceilings import Ceilings
from fluidx.simulator.calibration.calibrate import CalibrationScope, calibrate, summary
from fluidx.simulator.calibration.machine import Others
from fluidx.simulator.calibration.probe import Probe, Speed, at_speed, check_speed, summed_up
from fluidx.simulator.calibration.records import CurvePoint, Measured, ProbedSpeed
from fluidx.simulator.calibration.steps import EmptyTurns, steps_in_turns
from fluidx.simulator.calibration.traces import PlaceTimes
from fluidx.simulator.costs import Costs
from fluidx.simulator.measured_collectives import MeasuredCollectives
from fluidx.simulator.step_table import TimedStep
from fluidx.simulator.work import StepWork

USUAL = Speed(1e-3, 2e-3)
_vector = TensorType("float32", (1000,))
COPY = StepWork("assign", "native", (_vector, _vector), 0, 8000)
_matrix = TensorType("float32", (64, 64))
PRODUCT = StepWork("matmul", "native", (_matrix, _matrix, _matrix), 2 * 64**3, 0)


def tick():
    ticks = count()
    return lambda: 1e-3 * next(ticks)


def machine(speeds=(USUAL,), rounds=2, limit=1e9, clock=None):
    """A calibration without programs on a machine that has these speeds in turn."""
    looks = count()
    probe = lambda clock: lambda: speeds[next(looks) % len(speeds)]  # noqa: E731
    scope = CalibrationScope(0.0, [], (), (256,), lambda n: Ceilings(1, 100.0, 10.0, 1.0), 1.0, lambda x: 5e7, probe, rounds, limit)
    return calibrate((), scope=scope, clock=clock or tick(), busy=lambda: Others(0.0, 0.0))


def with_tables(made, **kw):
    measured = replace(Measured.from_json(made.measured, "m"), **kw)
    return replace(made, measured=measured.as_json())


def event(op, dur, flops, nbytes):
    args = {"body": "native", "reads": "%x f32[4]", "makes": "%y f32[4]", "bytes": nbytes, "flops": flops}
    return {"ph": "X", "cat": "operator", "name": op, "tid": 0, "dur": dur, "args": args}


def turn(*events):
    found = PlaceTimes()
    found.add(events)
    return found


def test_a_look_times_a_product_and_a_copy():
    assert Probe(tick())() == Speed(pytest.approx(1e-3), pytest.approx(1e-3))  # the clock goes on by 1 ms in each


def test_work_is_slower_as_its_operations_and_bytes_are():
    now = Speed(1.5e-3, 6e-3)  # products take 1.5 times as long, copies 3 times
    assert now.over(USUAL, 1e6, 0) == pytest.approx(1.5) and now.over(USUAL, 0, 1e6) == pytest.approx(3.0)
    assert now.over(USUAL) == pytest.approx(1.5)
    # 2 * 512**3 operations take 1 ms, and as many bytes as the copy moves, 2**24, take 2 ms: 3 ms, and now 1.5 + 6 = 7.5
    assert now.over(USUAL, 2 * 512**3, 1 << 24) == pytest.approx(2.5)


def test_times_of_a_slow_turn_are_those_of_the_usual_speed():
    """The middle turn was slow: products took twice as long and copies four times. At the usual speed all turns took 10 and 3 us."""
    quick = turn(event("matmul", 10.0, 100, 0), event("assign", 3.0, 0, 100))
    slow = turn(event("matmul", 20.0, 100, 0), event("assign", 12.0, 0, 100))
    turns = SimpleNamespace(turns=[quick, slow, quick])
    found = {s.work.ops: s for s in steps_in_turns([(turns, [USUAL, Speed(2e-3, 8e-3), USUAL])], USUAL, min)}
    assert (found["matmul"].seconds, found["assign"].seconds) == (pytest.approx(10e-6), pytest.approx(3e-6))
    assert found["matmul"].spread == pytest.approx(0.0)


def test_an_empty_run_goes_with_products():
    one = EmptyTurns()
    try:
        one.turn(tick())
        one.turn(tick())
    finally:
        one.close()
    assert one.point([USUAL, Speed(2e-3, 2e-3)], USUAL, min).seconds == pytest.approx(0.5e-3)


def test_the_spread_of_the_machine_is_that_of_the_probe_and_is_said_if_it_is_large():
    # quartiles of 1, 1, 1, 2, 2 are 1 and 2, so half of their distance is a half of the median
    assert summed_up([Speed(1.0, 1.0)] * 3 + [Speed(2.0, 1.0)] * 2).spread == pytest.approx(0.5)
    lines = list(summary(with_tables(machine(), probe=ProbedSpeed(1e-3, 2e-3, 0.17))))
    assert any("speed of this machine varied by 17%, which is much" in line and "--check" in line for line in lines)
    assert not any("which is much" in line for line in summary(machine()))


def test_intervals_are_wider_by_the_spread_of_the_machine():
    steps = {1: (TimedStep(COPY, 1e-6, 0.05),)}
    curves = {"threads": {2: {"all_reduce": (CurvePoint(256, 1e-6, 0.1), CurvePoint(512, 2e-6, 0.1))}}}
    made = with_tables(machine(), steps=steps, curves=curves, probe=ProbedSpeed(1e-3, 2e-3, 0.2))
    assert Costs(made).of(COPY).spread == pytest.approx(0.25)
    found = MeasuredCollectives(Measured.from_json(made.measured, "m"), "m", "threads").estimate("all_reduce", 2, 256)
    assert (found.seconds, found.spread) == (1e-6, pytest.approx(0.3))


def test_rounds_end_when_the_time_is_over():
    for rounds, limit, expected in ((2, 1e9, 2), (50, 0.0, 2), (3, 1e9, 3)):
        looks = count()
        probe = lambda clock, looks=looks: lambda: (next(looks), USUAL)[1]  # noqa: E731
        scope = CalibrationScope(0.0, [], (), (256,), lambda n: Ceilings(1, 100.0, 10.0, 1.0), 1.0, lambda x: 5e7, probe, rounds, limit)
        calibrate((), scope=scope, clock=tick(), busy=lambda: Others(0.0, 0.0))
        assert next(looks) == 1 + expected  # an empty run alone has turns, with a look after each


def test_figures_at_another_speed():
    steps = {1: (TimedStep(PRODUCT, 10e-6, 0.0), TimedStep(COPY, 3e-6, 0.0))}
    curves = {"threads": {2: {"all_reduce": (CurvePoint(256, 5e-6, 0.0),)}}}
    made = with_tables(machine(), steps=steps, curves=curves)
    now = Speed(2e-3, 6e-3)  # twice and three times as slow
    other = at_speed(made, now)
    assert Costs(other).of(PRODUCT).seconds == pytest.approx(20e-6) and Costs(other).of(COPY).seconds == pytest.approx(9e-6)
    found = Measured.from_json(other.measured, "m")
    assert found.curves["threads"][2]["all_reduce"][0].seconds == pytest.approx(15e-6)
    assert other.device.flops["float32"].value == pytest.approx(made.device.flops["float32"].value / 2)
    assert other.device.bandwidth.value == pytest.approx(made.device.bandwidth.value / 3)
    back = Measured.from_json(at_speed(other, USUAL).measured, "m")
    assert [s.seconds for s in back.steps[1]] == pytest.approx([10e-6, 3e-6])


def test_a_check_says_how_much_slower_the_machine_is():
    said = str(check_speed(machine(), Speed(1.25e-3, 1e-3)))
    assert "this machine is now 1.25 times slower in products and 2.00 times faster in copies than when it was calibrated on 2" in said


def test_a_file_without_a_probe_is_read_and_cannot_be_checked():
    old = with_tables(machine(), probe=None, steps={1: (TimedStep(COPY, 1e-6, 0.05),)})
    assert "probe" not in old.measured
    assert Costs(old).of(COPY).spread == 0.05
    with pytest.raises(FluidxError, match="does not say how fast the machine was; run `fluidx calibrate` again"):
        check_speed(old, USUAL)
    with pytest.raises(FluidxError, match="dgx-a100 is not calibrated, there is no speed to compare with; run `fluidx calibrate"):
        check_speed(files.load("dgx-a100"), USUAL)
    with pytest.raises(FluidxError, match='the section "measured" of m is not that of a calibration'):
        Measured.from_json({**old.measured, "probe": [1e-3, -1.0, 0.0]}, "m")


def test_the_command_checks_and_writes_figures_at_the_speed_of_now(tmp_path, monkeypatch):
    path, now = tmp_path / "machine.json", tmp_path / "now.json"
    files.save(with_tables(machine(), steps={1: (TimedStep(COPY, 3e-6, 0.0),)}), path)
    monkeypatch.setattr("fluidx.simulator.calibration.probe.speed_now", lambda: Speed(1e-3, 6e-3))
    done = CliRunner().invoke(cli, ["calibrate", "--check", str(path), "-o", str(now)])
    assert done.exit_code == 0 and "3.00 times slower in copies" in done.output
    assert Costs(files.load(str(now))).of(COPY).seconds == pytest.approx(9e-6)
    assert CliRunner().invoke(cli, ["calibrate", "--check", str(path)]).exit_code == 0
    before = path.read_bytes()
    assert CliRunner().invoke(cli, ["calibrate", "--check", str(path), "-o", str(path)]).exit_code != 0 and path.read_bytes() == before
    nowhere = str(tmp_path / "no" / "now.json")
    for options, said in ((["-n", "4", "--anyway"], "without -n, --anyway: leave out"), (["-o", nowhere], "does not exist")):
        done = CliRunner().invoke(cli, ["calibrate", "--check", str(path), *options])
        assert done.exit_code == 2 and said in " ".join(done.output.replace("│", "").split())
    assert "give its name, -o machine.json" in CliRunner().invoke(cli, ["calibrate"]).output
