"""Choosing a strategy: order of the search, ties and refusals with predictions of a fake machine; and plans for real machines."""

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main as command
from fluidx.simulator.candidates import Candidate, candidates
from fluidx.simulator.memory_limit import MemoryLimit, memory_limit, parse_size
from fluidx.simulator.planned import Prediction
from fluidx.simulator.planner import search
from fluidx.transpiler import strategies as s

ONE_LAYER = 64 * 64 * 4  # bytes of a parameter


def deep(width=64, depth=4, rows=-1):
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [rows, width], "float32")
        for _ in range(depth):
            h = fx.layers.fc(h, width, act="relu", bias_attr=False)
        fx.optimizer.Adam(1e-3).minimize(fx.layers.mean(fx.layers.square(h)))
    return main, startup


class Fake:
    """A machine of two ranks whose predictions are said by the call of a strategy. Steps and messages take no time in closed forms, so
    that no bound is above 0, unless `message` says what a collective takes."""

    device, to_host, slowdown = "cpu", float("inf"), 1.0

    def __init__(self, said, usable=10**9, message=0.0, spread=0.0, exact=()):
        self.said, self.batch, self.message, self.spread, self.asked = said, 8, message, spread, []
        self.exact, self.exactly = dict(exact), []  # what exact simulations say, if it differs, and which were asked for
        self.limit = MemoryLimit(usable, usable, "a test")

    def step(self, plan, step):
        return 0.0

    def collective(self, trainers):
        return lambda method, nbytes: self.message

    def simulate(self, t, exact=False):
        (self.exactly if exact else self.asked).append(t.strategy.call)
        seconds, exposed, memory = self.exact.get(t.strategy.call, self.said[t.strategy.call]) if exact else self.said[t.strategy.call]
        return Prediction(
            seconds, seconds * (1 - self.spread), seconds * (1 + self.spread), seconds - exposed, exposed, memory, 0, True
        )  # fmt: skip


def choices(*some):
    return [Candidate(strategy, fx.Cluster(1, 2), (k,)) for k, strategy in enumerate(some)]


def chosen(fake, *some):
    return search(*deep(), choices(*some), fake, "a test")


THREE = s.data_parallel(), s.zero1(), s.zero2(bucket_mb=0.01)


def test_the_fastest_is_chosen_and_the_reason_is_said_against_data_parallel():
    said = {"data_parallel()": (0.5, 0.375, 9000), "zero1()": (0.375, 0.25, 8000), THREE[2].call: (0.25, 0.0625, 6000)}
    found = chosen(Fake(said), *THREE)
    assert found.strategy == THREE[2] and [c.strategy for c in found.candidates] == [THREE[2], THREE[1], THREE[0]]
    assert found.why() == (
        "zero2(bucket_mb=0.01) against data_parallel(): 250 ms faster, 312 ms less exposed, 62.5 ms more compute, 3.0 kB less"
    )
    assert THREE[2].call in str(found.report) and found.transpile().strategy == THREE[2]


def test_of_two_that_take_as_long_the_simpler_one_is_chosen():
    found = chosen(Fake({"data_parallel()": (0.25, 0.0, 1), "zero1()": (0.25, 0.0, 1), THREE[2].call: (0.5, 0.0, 1)}), *THREE)
    assert found.strategy == THREE[0] and [c.strategy.name for c in found.candidates] == ["data_parallel", "zero1", "zero2"]


def test_the_smallest_difference_decides():
    """No slack: a tenth of a percent is enough, whatever the spread of the figures."""
    found = chosen(Fake({"data_parallel()": (0.2501, 0.0, 1), "zero1()": (0.25, 0.0, 1), THREE[2].call: (0.5, 0.0, 1)}, spread=0.2), *THREE)
    assert found.strategy == THREE[1]


def test_the_best_three_are_simulated_exactly_and_the_fastest_of_them_is_chosen():
    """By one rank for all, zero2 is the best; its messages one by one take longer."""
    said = {"data_parallel()": (0.5, 0.0, 1), "zero1()": (0.375, 0.0, 1), THREE[2].call: (0.25, 0.0, 1)}
    fake = Fake(said, exact={THREE[2].call: (0.4375, 0.0, 1)})
    found = chosen(fake, *THREE)
    assert fake.exactly == ["data_parallel()", THREE[2].call, "zero1()"] and found.strategy == THREE[1]
    assert [(c.strategy.name, c.predicted.seconds, c.exact) for c in found.candidates] == [
        ("zero1", 0.375, True), ("zero2", 0.4375, True), ("data_parallel", 0.5, True)
    ]  # fmt: skip
    assert "of these 3 exactly, every rank and every message (=)" in str(found)


def test_others_are_simulated_exactly_until_none_was_predicted_to_be_as_fast():
    """Five candidates: the best three take longer exactly than the fourth was predicted to take, which is simulated too; not the fifth."""
    some = [*THREE, s.zero3(), s.fsdp()]
    said = {c.call: (float(k), 0.0, 1) for c, k in zip(some, (20, 1, 2, 3, 8), strict=True)}
    fake = Fake(said, exact={c.call: (9.0, 0.0, 1) for c in some[1:4]})
    found = chosen(fake, *some)
    assert fake.exactly == [some[k].call for k in (0, 1, 2, 3, 4)] and found.strategy == some[4]


def test_what_does_not_fit_exactly_is_refused():
    """The messages of an exact simulation need memory, too."""
    said = {"data_parallel()": (0.5, 0.0, 1), "zero1()": (0.25, 0.0, 1), THREE[2].call: (1.0, 0.0, 1)}
    found = chosen(Fake(said, usable=10**9, exact={"zero1()": (0.25, 0.0, 10**9 + 1)}), *THREE)
    assert found.strategy == THREE[0] and found.refused[0].refused == "it needs 1.0 GB a device, 1 B more than there are for a plan"


def test_a_candidate_whose_bound_is_no_better_than_the_third_is_not_simulated():
    """With four buckets data_parallel has messages of 8 s, and zero1 of 16 s; three others were predicted to take 0.5 s."""
    some = [s.data_parallel(), s.zero1(), s.zero2(), s.data_parallel(bucket_mb=0), s.zero1(bucket_mb=0)]
    fake = Fake({c.call: (0.5, 0.0, 1) for c in some[:3]}, message=2.0)
    found = chosen(fake, *some)
    left = [c for c in found.considered if c.predicted is None]
    assert len(fake.asked) == 3 and [c.strategy for c in left] == some[3:]
    assert [c.bound for c in left] >= [8.0, 16.0] and "2 not simulated" in str(found)


def test_what_cannot_fit_is_refused_before_it_is_transpiled():
    """Four layers: 4 parameters, gradients and 8 moments on each rank, or 4, 4 and 4."""
    state = 16 * ONE_LAYER
    fake = Fake({"zero1()": (1.0, 0.0, 1)}, usable=state - ONE_LAYER)
    found = chosen(fake, *THREE[:2])
    assert fake.asked == ["zero1()"] and [c.strategy.name for c in found.refused] == ["data_parallel"]
    assert "it needs" in found.refused[0].refused and "more than there are for a plan" in found.refused[0].refused
    assert "and is refused" in found.why()


def test_what_its_plan_needs_counts_in_the_end():
    found = chosen(Fake({"data_parallel()": (1.0, 0.0, 2 * 10**9), "zero1()": (2.0, 0.0, 1), THREE[2].call: (3.0, 0.0, 1)}), *THREE)
    assert found.strategy == THREE[1]
    assert found.refused[0].refused == "it needs 2.0 GB a device, 1.0 GB more than there are for a plan"


def test_where_nothing_fits_the_nearest_is_named_with_what_would_help():
    with pytest.raises(fx.TranspileError) as e:
        chosen(Fake({}, usable=5 * ONE_LAYER), *THREE[:2])
    assert "none of 2 candidates fits" in str(e.value) and "nearest: zero1() needs" in str(e.value)
    assert "too much" in str(e.value) and "what would help: more ranks" in str(e.value)


def test_a_program_that_is_that_of_another_candidate_is_simulated_once():
    fake = Fake({"data_parallel()": (1.0, 0.0, 1)})
    found = chosen(fake, s.data_parallel(), s.data_parallel(bucket_mb=50))  # one bucket has all gradients either way
    assert fake.asked == ["data_parallel()"]
    assert [c.refused for c in found.considered] == ["", "it is the same program as data_parallel()"]


def test_more_micro_batches_than_rows_are_refused():
    found = chosen(Fake({"data_parallel()": (1.0, 0.0, 1)}), s.data_parallel(), s.micro_batches(8))
    assert found.refused[0].refused == "a rank has 4 rows, and 8 micro-batches need as many"


def test_a_candidate_that_cannot_be_transpiled_is_refused_with_the_reason():
    found = chosen(Fake({"data_parallel()": (1.0, 0.0, 1)}), s.data_parallel(), s.rails())
    assert "rails needs several hosts" in found.refused[0].refused


def test_ranks_with_too_many_programs_are_not_simulated_and_the_plan_says_why(monkeypatch):
    """The two ranks of a ring_optimizer have programs of their own, and count as two; those of data_parallel share one."""
    monkeypatch.setattr("fluidx.simulator.planner._MOST_OPERATORS", 10)
    fake = Fake({"data_parallel()": (1.0, 0.0, 1)})
    found = chosen(fake, s.data_parallel(), s.ring_optimizer())
    assert fake.asked == ["data_parallel()"] and found.considered[1].note.startswith("not simulated: each rank has a program of its own, ")
    assert f"ring_optimizer(chunk_mb=4, roots='greedy'): {found.considered[1].note}" in str(found) and "more than 10" in str(found)
    assert "0 not simulated because their lower bound" in str(found)
    with pytest.raises(fx.TranspileError, match="nothing can be taken; the nearest, ring_optimizer.*operators together, more than 10"):
        chosen(fake, s.ring_optimizer())


def test_too_many_messages_keep_the_closed_form_and_the_plan_says_so(monkeypatch):
    monkeypatch.setattr("fluidx.simulator.planner._MOST_MESSAGES", 3)
    fake = Fake({c.call: (float(k), 0.0, 1) for k, c in enumerate((s.data_parallel(), s.zero1(algorithm="ring")), 1)})
    found = chosen(fake, s.data_parallel(), s.zero1(algorithm="ring"))
    assert fake.exactly == ["data_parallel()"] and "of these 1 exactly" in str(found)
    assert found.considered[1].note == "collectives in closed form: 4 messages, more than 3"
    assert "1=" in str(found) and "2=" not in str(found)


# -- recompute ------------------------------------------------------------------------------------------------------------------------


def chain(depth=16, width=4):
    """One small parameter and `depth` equal activations: 16 * rows bytes each."""
    main, startup = fx.Program("chain"), fx.Program("chain_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, width], "float32") * fx.layers.create_parameter([width], "float32", name="w")
        for _ in range(depth):
            h = fx.layers.tanh(h)
        fx.optimizer.SGD(0.5).minimize(fx.layers.reduce_sum(h))
    return main, startup


def planned_chain(usable, said, rows=4096, **options):
    fake = Fake(said, usable=usable)
    fake.batch = 2 * rows
    return fake, search(*chain(), choices(s.data_parallel()), fake, "a test", **options)


AGAIN = "data_parallel().with_rewrites(Recompute())"


def test_recompute_is_taken_where_nothing_else_fits():
    """16 activations of 64 kB are alive without it; with it 3 that are kept, 4 of a segment, and some gradients: 10 fit."""
    value = 4096 * 16
    fake, found = planned_chain(10 * value, {AGAIN: (1.0, 0.0, 9 * value)}, recompute=True)
    assert fake.asked == fake.exactly == [AGAIN] and found.strategy.call == AGAIN
    assert str(found.strategy) == "data_parallel,recompute"
    assert [c.strategy.call for c in found.refused] == ["data_parallel()"]
    assert "and is refused: it needs" in found.why() and AGAIN in str(found.report)


def test_recompute_is_not_tried_where_memory_does_not_bind():
    fake, found = planned_chain(10**9, {"data_parallel()": (1.0, 0.0, 1)}, recompute=True)
    assert fake.asked == ["data_parallel()"] and [c.strategy.call for c in found.considered] == ["data_parallel()"]


def test_recompute_is_tried_if_the_plan_does_not_fit_though_the_closed_form_does():
    _, found = planned_chain(10**8, {"data_parallel()": (1.0, 0.0, 10**9), AGAIN: (1.5, 0.0, 10**6)}, recompute=True)
    assert found.strategy.call == AGAIN and found.refused[0].over == 9 * 10**8


def test_recompute_is_not_taken_where_sharding_fits_and_is_faster():
    said = {"zero1()": (1.0, 0.0, 1), f"zero1{AGAIN[13:]}": (2.0, 0.0, 1), AGAIN: (1.5, 0.0, 1)}
    fake = Fake({**said, "data_parallel()": (0.5, 0.0, 10**10)})
    found = search(*chain(), choices(s.data_parallel(), s.zero1()), fake, "a test", recompute=True)
    assert found.strategy == s.zero1() and {c.strategy.call for c in found.candidates} == {"zero1()", AGAIN}


def test_where_recompute_does_not_help_the_error_does_not_advise_it():
    with pytest.raises(fx.TranspileError) as e:
        planned_chain(4096 * 16, {}, recompute=True)
    assert "none of 2 candidates fits" in str(e.value) and "nearest: data_parallel().with_rewrites(Recompute()) needs" in str(e.value)
    assert "recomputation" not in str(e.value) and "a smaller batch" in str(e.value)
    with pytest.raises(fx.TranspileError, match="recomputation in backward"):
        planned_chain(4096 * 16, {}, recompute=False)


def test_a_real_plan_recomputes_where_activations_do_not_fit():
    """36 activations of 2**20 rows of 64 bytes, 67 MB each: 2.4 GB without recompute."""
    main, startup = chain(36, 16)
    planned = fx.plan(main, startup, "dgx-a100", ranks=2, batch=2 * 2**20, memory="2.4GB", strategies=["data_parallel"])
    assert planned.strategy.name == "data_parallel" and planned.strategy.rewrites == (fx.rewrite.Recompute(),)
    assert planned.predicted.memory < 15 * 2**26 and planned.transpile().world_size == 2
    with pytest.raises(fx.TranspileError, match="fits into"):
        fx.plan(main, startup, "dgx-a100", ranks=2, batch=2 * 2**20, memory="2.4GB", strategies=["data_parallel"], recompute=False)


# -- candidates -------------------------------------------------------------------------------------------------------------------------


def test_candidates_of_64_ranks_are_many_and_the_simplest_is_first():
    main, _ = deep()
    found = candidates(main, fx.Cluster(8, 8))
    assert 90 <= len(found) <= 250 and str(found[0]) == "data_parallel()"
    assert len({str(c) for c in found}) == len(found)
    names = {c.strategy.name for c in found}
    rooted = {"ring_optimizer", "reduce_broadcast"}
    assert names == {"data_parallel", "zero1", "zero2", "zero3", "fsdp", "rails", "micro_batches"} | rooted


def test_an_annotated_program_is_tried_on_the_meshes_of_its_axes():
    main, startup = fx.Program("cut"), fx.Program("cut_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.layers.fc(fx.data("x", [-1, 8], "float32"), 8, param_attr=fx.ParamAttr(placement=fx.ir.Shard(1, "tp")))
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    found = candidates(main, fx.Cluster.load("dgx-a100"), ["zero1"])
    assert {str(c.trainers).partition(".on")[0] for c in found} == {f"Mesh(dp={8 // k}, tp={k})" for k in (1, 2, 4, 8)}
    planned = fx.plan(main, startup, "dgx-a100", batch=16, strategies=["data_parallel", "zero1"])
    assert planned.transpile().world_size == 8 and planned.trainers.world_size == 8


def test_wires_are_tried_if_they_are_asked_for():
    main, _ = deep()
    assert not any("wire" in str(c) for c in candidates(main, fx.Cluster(1, 2)))
    assert any("wire='bfloat16'" in str(c) for c in candidates(main, fx.Cluster(1, 2), wires=["bfloat16"]))


# -- memory -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, nbytes", [("40GB", 40e9), ("40 GiB", 40 * 2**30), ("1.5kB", 1500), ("7", 7), (5e9, 5e9), ("80g", 80e9)])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["40 giga", "much", "-3GB", True, [40], "0GB", float("nan"), float("inf"), "9" * 400])
def test_sizes_that_are_none(text):
    with pytest.raises(fx.FluidxError, match="memory"):
        parse_size(text)


def test_a_program_without_operators_is_planned():
    main, startup = fx.Program("nothing"), fx.Program("nothing_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.data("x", [-1, 4], "float32")
    assert fx.plan(main, startup, cluster="dgx-a100", batch=64, strategies=["data_parallel"]).strategy == fx.strategies.data_parallel()


def test_strategies_that_give_no_candidate_are_refused_with_what_they_need():
    main, startup = fx.Program("line"), fx.Program("line_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2)))
    with pytest.raises(fx.FluidxError, match="rails needs several hosts, and pipeline a program with stages"):
        fx.plan(main, startup, cluster="dgx-a100", batch=64, strategies=["pipeline"])


def test_five_percent_and_the_context_stay_free():
    hardware = fx.Cluster.load("dgx-a100").hardware
    assert memory_limit(hardware, "40GB").usable == 38e9 - hardware.device.context.value
    with pytest.raises(fx.FluidxError, match="leaves nothing for a plan"):
        memory_limit(hardware, "100MB")


# -- real machines ----------------------------------------------------------------------------------------------------------------------


def test_plan_for_a_real_machine_is_never_slower_than_data_parallel_and_the_same_each_time():
    main, startup = deep(width=512, depth=6)
    first, second = (fx.plan(main, startup, "dgx-a100", batch=4096, memory="40GB") for _ in range(2))
    assert str(first) == str(second)
    assert first.baseline.predicted is not None and first.predicted.seconds <= 1.01 * first.baseline.predicted.seconds
    assert fx.strategies.get(str(first.strategy)) == first.strategy
    assert len(str(first).splitlines()) <= 16 and "not calibrated" in str(first)


def test_a_bound_is_not_above_its_simulation():
    main, startup = deep(width=512, depth=6)
    planned = fx.plan(main, startup, "dgx-a100", batch=4096)
    simulated = [c for c in planned.considered if c.predicted is not None]
    assert len(simulated) >= 3
    for c in simulated:
        assert c.bound <= 1.02 * c.predicted.seconds, str(c.candidate)
        assert c.form.memory <= 1.02 * c.predicted.memory, str(c.candidate)


def test_ranks_fill_hosts():
    main, startup = deep()
    assert fx.plan(main, startup, "dgx-a100", batch=64, ranks=4, strategies=["data_parallel"]).trainers.world_size == 4
    assert fx.plan(main, startup, "dgx-a100", batch=64, ranks=16, strategies=["data_parallel"]).trainers.hosts == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cluster": "dgx-a10"}, "did you mean 'dgx-a100'"),
        ({"cluster": None}, "plan needs a cluster"),
        ({"cluster": fx.Cluster(1, 2)}, "needs the figures of a machine"),
        ({"batch": None}, "plan needs the batch"),
        ({"batch": 0}, "batch is a number of rows"),
        ({"memory": "40 gigs"}, "40GB"),
        ({"strategies": ["zero4"]}, "unknown strategy 'zero4'; did you mean 'zero"),
        ({"strategies": ["parameter_server"]}, "plan does not try parameter_server"),
        ({"wire": "bfloat15"}, "unknown wire='bfloat15'; did you mean 'bfloat16'"),
        ({"ranks": 12}, "do not fill hosts of 8 devices; give 8 or 16"),
        ({"ranks": 0}, "ranks is a number of ranks"),
        ({"memory": "800MB", "batch": 10**6}, "what would help"),
    ],
)
def test_bad_arguments_name_what_to_do(options, message):
    main, startup = deep()
    with pytest.raises(fx.FluidxError, match=message):
        fx.plan(main, startup, **{"cluster": "dgx-a100", "batch": 64, **options})


@pytest.mark.parametrize("tried", [True, False])
def test_recomputation_is_advised_where_it_was_not_tried(tried):
    with pytest.raises(fx.TranspileError) as e:
        fx.plan(*deep(), cluster="dgx-a100", batch=10**6, memory="800MB", recompute=tried)
    assert ("recompute=True" in str(e.value)) != tried


def test_fewer_devices_than_ranks():
    main, startup = deep()
    with pytest.raises(fx.TranspileError, match="16 ranks, and .* has 8 devices"):
        fx.plan(main, startup, fx.Cluster.load("dgx-a100", hosts=1), batch=64, ranks=16)


def test_a_program_that_was_transpiled_is_refused():
    main, startup = deep()
    t = fx.DistributeTranspiler("zero1").transpile(program=main, startup_program=startup, trainers=2)
    with pytest.raises(fx.TranspileError, match=r"already the result of zero1\(\)"):
        fx.plan(t.main, startup, "dgx-a100", batch=8)


def test_tune_runs_the_best_of_a_plan():
    main, startup = deep()
    said = {"data_parallel()": (1, 0, 1), "zero1()": (2, 0, 1), THREE[2].call: (3, 0, 1)}
    planned = search(main, startup, choices(*THREE), Fake(said), "a test")
    found = fx.tune(planned, 2, main, startup, {"x": np.ones((8, 64), "float32")}, fx.cpu_places(2), steps=1, warm_up=0)
    assert [one.options["strategy"] for one in found.tried] == [THREE[0], THREE[1]] and found.strategy in THREE[:2]


def test_tune_takes_a_list_of_strategies():
    main, startup = deep()
    found = fx.tune(list(THREE[:2]), None, main, startup, {"x": np.ones((8, 64), "float32")}, fx.cpu_places(2), steps=1, warm_up=0)
    assert [one.options for one in found.tried] == [{"strategy": THREE[0]}, {"strategy": THREE[1]}]
    with pytest.raises(fx.TranspileError, match="a list of strategies with candidates=None"):
        fx.tune(list(THREE), {"bucket_mb": [1]}, main, startup, {}, fx.cpu_places(2))


def test_the_command_plans_a_file_and_tries_the_best(tmp_path):
    main, startup = deep()
    file = tmp_path / "deep.txt"
    fx.io.save_text(fx.ProgramPair(main, startup), str(file))
    run = ["plan", str(file), "--cluster", "dgx-a100", "--strategies", "data_parallel,zero1", "--batch", "64"]
    done = CliRunner().invoke(command, [*run, "-n", "2", "--memory", "40GB", "--try", "1", "--refused"])
    assert done.exit_code == 0, done.output
    assert "plan of program deep on 2 ranks of dgx-a100, batch 64" in done.output and "fastest: " in done.output
    assert "tried: " in done.output
    there = fx.executor.places.cuda_device_count()
    plan = [*run, "-n", str(2 * max(1, there)), "--try", "1", "--on", "cuda"]
    assert f"and this machine has {there} GPUs that CuPy sees; " in CliRunner().invoke(command, plan).output
    assert "did you mean 'dgx-a100'" in CliRunner().invoke(command, [*run[:3], "dgx-a10", "--batch", "8"]).output
