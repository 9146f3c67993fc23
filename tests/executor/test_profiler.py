"""What steps cost, by hand; and what a profiler says of runs whose clock is known."""

import itertools
import json
import threading

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.plan.cost import Cost, op_flops, total
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.run import observers
from fluidx.ir import OPS, TensorType, opdef
from fluidx.profiler import Ceilings, Exposed, ceilings
from fluidx.profiler.profile import CallDescription, RankRun
from fluidx.testing.models import classifier
from tests.each import each

L = fx.layers


def flops(name, *shapes, out, **attrs):
    definition = opdef(name)
    ins, outs = ([None if s is None else TensorType("float32", s) for s in side] for side in (shapes, out))
    attrs = {**definition.defaults, **attrs}
    return op_flops(definition, definition.pattern_of(ins, outs, attrs), ins, outs, attrs)


@pytest.mark.parametrize(
    "count, name, shapes, out, attrs",
    [
        (2 * 3 * 4 * 5, "matmul", [(3, 4), (4, 5)], [(3, 5)], {}),
        (2 * 3 * 4 * 5, "matmul", [(4, 3), (5, 4)], [(3, 5)], {"transpose_x": True, "transpose_y": True}),
        (2 * 7 * 3 * 4 * 5, "matmul", [(7, 3, 4), (4, 5)], [(7, 3, 5)], {}),
        (2 * 4, "matmul", [(4,), (4,)], [(1,)], {}),
        (2 * 6 * 12 * 5, "mul", [(6, 3, 4), (12, 5)], [(6, 5)], {}),
        (2 * 6 * 12 * 5, "mul", [(2, 3, 12), (12, 5)], [(2, 3, 5)], {"x_num_col_dims": 2}),
        (2 * (2 * 8 * 5 * 5) * (3 * 3 * 3), "conv2d", [(2, 3, 7, 7), (8, 3, 3, 3)], [(2, 8, 5, 5)], {}),
        (2 * (2 * 5 * 5 * 8) * (2 * 3 * 3), "conv2d", [(2, 7, 7, 4), (8, 2, 3, 3)], [(2, 5, 5, 8)], {"groups": 2, "data_format": "NHWC"}),
        (2 * (2 * 3 * 5 * 5) * (8 * 3 * 3), "conv2d_transpose", [(2, 3, 5, 5), (3, 8, 3, 3)], [(2, 8, 7, 7)], {}),
        (15, "relu", [(3, 5)], [(3, 5)], {}),
        (15, "elementwise_add", [(3, 5), (5,)], [(3, 5)], {}),
        (15, "scale", [(3, 5)], [(3, 5)], {"scale": 2.0}),
        (30, "scale", [(3, 5)], [(3, 5)], {"scale": 2.0, "bias": 1.0}),
        (15, "reduce_sum", [(3, 5)], [(3,)], {"dim": (1,)}),
        (15, "reduce_max", [(3, 5)], [(1,)], {}),
        (30, "squared_l2_norm", [(3, 5)], [(1,)], {}),
        (30, "sum", [(3, 5), (3, 5), (3, 5)], [(3, 5)], {}),
        (5 * 15, "softmax", [(3, 5)], [(3, 5)], {}),  # the largest, subtract, exp, sum, divide
        (2 * 15, "sgd", [(3, 5), (3, 5), (1,)], [(3, 5)], {}),
        (4 * 15, "momentum", [(3, 5), (3, 5), (3, 5), (1,)], [(3, 5), (3, 5)], {"mu": 0.9}),
        (9 * 2 * 3 * 4, "pool2d", [(2, 3, 4, 4)], [(2, 3, 2, 2)], {"ksize": (3, 3)}),
        (0, "reshape", [(3, 5)], [(15,)], {"shape": (15,)}),
        (0, "concat", [(3, 5), (2, 5)], [(5, 5)], {}),
        (0, "transpose", [(3, 5)], [(5, 3)], {"axis": (1, 0)}),
        (0, "matmul", [(0, 4), (4, 5)], [(0, 5)], {}),
    ],
)  # fmt: skip
def test_operations_of_an_op_as_counted_by_hand(count, name, shapes, out, attrs):
    assert flops(name, *shapes, out=out, **attrs) == count


def test_the_gradient_of_a_convolution_costs_a_convolution_for_each_result():
    x, w, y = (2, 3, 7, 7), (8, 3, 3, 3), (2, 8, 5, 5)
    forward = flops("conv2d", x, w, out=[y])
    assert flops("conv2d_grad", x, w, y, out=[x, w]) == 2 * forward
    assert flops("conv2d_grad", x, w, y, out=[None, w]) == forward


@each("name", sorted(n for n, d in OPS.items() if d.comm.move is None and not d.control.bodies and not d.control.abstract))
def test_every_op_says_its_operations_for_its_samples(name):
    definition = OPS[name]

    def type_of(a):
        if isinstance(a, list):
            return [type_of(x) for x in a]
        return None if a is None else TensorType(np.asarray(a).dtype.name, np.asarray(a).shape)

    for sample in definition.samples():
        grouped = [type_of(a) for a in sample.args]
        ins = [t for s, g in zip(definition.in_slots, grouped) for t in (g if s.many else [g])]
        attrs = {**definition.defaults, **sample.attrs}
        made = definition.infer(*grouped, **attrs)
        made = [made] if len(definition.out_slots) == 1 else list(made)
        outs = [t for s, m in zip(definition.out_slots, made) for t in (m if s.many else [m])]
        count = op_flops(definition, definition.pattern_of(ins, outs, attrs), ins, outs, attrs)
        largest = max((t.numel for t in (*ins, *outs) if t is not None), default=0)
        assert isinstance(count, int) and 0 <= count <= 50 * max(1, largest) ** 2


def steps_of(planned):
    return [(step.op.type, planned.cost(step)) for step in planned.steps]


def test_a_perceptron_costs_what_its_products_and_sums_cost():
    main = fx.Program("mlp")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        h = L.fc(fx.data("x", [-1, 64]), 128, act="relu")
        out = L.softmax(L.fc(h, 10))
    rows = 32
    assert steps_of(dry_plan(main, batch=rows, fetch=[out.name], fuse=False)) == [
        ("mul", Cost(4 * (rows * 64 + 64 * 128), 4 * rows * 128, 2 * rows * 64 * 128)),
        ("elementwise_add", Cost(4 * (rows * 128 + 128), 4 * rows * 128, rows * 128)),
        ("relu", Cost(4 * rows * 128, 4 * rows * 128, rows * 128)),
        ("mul", Cost(4 * (rows * 128 + 128 * 10), 4 * rows * 10, 2 * rows * 128 * 10)),
        ("elementwise_add", Cost(4 * (rows * 10 + 10), 4 * rows * 10, rows * 10)),
        ("softmax", Cost(4 * rows * 10, 4 * rows * 10, 5 * rows * 10)),
    ]


def test_a_small_convolutional_net_costs_what_its_windows_cost():
    main = fx.Program("conv")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        y = L.conv2d(fx.data("x", [-1, 3, 8, 8]), 4, 3, padding=1, act="relu", bias_attr=False)
        flat = L.reshape(L.pool2d(y, 2, "max", 2), [-1, 64])
        out = L.fc(flat, 5, bias_attr=False)
    n = 6
    costs = dict(steps_of(dry_plan(main, batch=n, fetch=[out.name], fuse=False)))
    assert costs["conv2d"] == Cost(4 * (n * 3 * 64 + 4 * 27), 4 * n * 4 * 64, 2 * n * 4 * 64 * 27)
    assert costs["pool2d"] == Cost(4 * n * 4 * 64, 4 * n * 64, n * 4 * 64)
    assert costs["reshape"] == Cost()  # a view
    assert total(list(costs.values())).flops == 2 * n * 4 * 64 * 27 + 2 * n * 4 * 64 + 2 * n * 64 * 5


def test_a_rank_pays_for_its_part_and_communication_counts_bytes_only():
    model = classifier(width=4)
    t = fx.DistributeTranspiler("zero1").transpile(program=model.main, startup_program=model.startup, trainers=2)
    whole, part = dry_plan(model.main, batch=8), dry_plan(t.get_trainer_program(1), batch=8)
    one, half = ([c for name, c in steps_of(p) if name == "mul"][0] for p in (whole, part))
    assert half.flops * 2 == one.flops and half.written * 2 == one.written
    gathered = [c for name, c in steps_of(part) if name == "all_gather"]
    assert gathered and all(c.flops == 0 and c.written == 2 * c.read for c in gathered if c.written % 40 == 0)


def test_of_a_table_only_the_rows_that_are_looked_up_are_read():
    main = fx.Program("table")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        out = fx.embedding(fx.data("ids", [-1, 3], "int64"), [1000, 16])
    ((_, cost),) = steps_of(dry_plan(main, batch=2, fetch=[out.name]))
    assert cost == Cost(6 * 16 * 4 + 6 * 8, 6 * 16 * 4, 0)


# -- runs ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ticks(monkeypatch):
    """A clock that shows 1 us more whenever a thread looks at it."""
    counts = threading.local()

    def clock():
        counts.now = getattr(counts, "now", itertools.count(0, 1000))
        return next(counts.now)

    monkeypatch.setattr(observers, "clock", clock)


def at_best(threads):
    return Ceilings(threads, gflops=1.0, gbs=1.0, call=0.1)


def product():
    """A product of 800 operations on 480 bytes, and relu of 80 and 640 bytes; with the calls of the clock each takes 1 us."""
    main = fx.Program("product")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x, y = fx.data("x", [-1, 5]), fx.data("y", [5, 8])
        out = L.relu(L.matmul(x, y))
    return main, {"x": np.ones((10, 5), "float32"), "y": np.ones((5, 8), "float32")}, out


def test_a_profile_gathers_calls_by_op(ticks, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    main, feed, out = product()
    exe = fx.Executor()
    with fx.profiler.profiler() as profile:
        for _ in range(3):
            exe.run(main, feed=feed, fetch_list=[out], scope=Scope())
    exe.run(main, feed=feed, fetch_list=[out], scope=Scope())  # nobody looks
    by_name = {row.name: row for row in profile.rows(at_best=at_best)}
    matmul, relu = by_name["matmul"], by_name["relu"]
    assert (matmul.calls, matmul.flops, matmul.nbytes) == (3, 3 * 800, 3 * 4 * (50 + 40 + 80))
    assert matmul.total == pytest.approx(3e-6) and matmul.mean == matmul.least == matmul.most == pytest.approx(1e-6)
    assert matmul.share == pytest.approx(0.5) and matmul.gflops == pytest.approx(0.8) and matmul.gbs == pytest.approx(0.68)
    assert (matmul.bound, relu.bound) == ("compute", "memory")
    assert matmul.near == pytest.approx(0.8)


@pytest.mark.skipif(not native.enabled(), reason=native.why_not())
def test_a_product_with_a_tail_is_one_row(ticks):
    main, feed, out = product()
    with fx.profiler.profiler() as profile:
        fx.Executor().run(main, feed=feed, fetch_list=[out], scope=Scope())
    (row,) = profile.rows(at_best=at_best)
    assert (row.name, row.calls, row.flops, row.nbytes) == ("matmul + relu", 1, 800 + 80, 4 * (50 + 40 + 80))


def test_the_table_says_what_bounds_each_operator(ticks, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    main, feed, out = product()
    with fx.profiler.profiler() as profile:
        fx.Executor().run(main, feed=feed, fetch_list=[out], scope=Scope())
    assert profile.table(at_best=at_best).splitlines() == [
        "1 run of product on one device: 0.002 ms in steps, 0.001 ms between them",
        "ceilings, 1 thread: 1 GFLOP/s (a product of 512x512x512), 1 GB/s (a copy of 64 MB), 0.1 us a step",
        "",
        "operator  body   calls  total ms  mean us  best us  share  GFLOP/s  GB/s  of best  bound by",
        "matmul    any        1     0.001      1.0      1.0  50.0%      0.8   0.7      80%  compute",
        "relu      numpy      1     0.001      1.0      1.0  50.0%    0.080   0.6      64%  memory",
    ]
    slow = profile.rows(at_best=lambda threads: Ceilings(threads, 100.0, 100.0, 0.1))
    tiny = profile.rows(at_best=lambda threads: Ceilings(threads, 1.0, 1.0, 0.6))
    assert {row.bound for row in (*slow, *tiny)} == {"overhead"}
    lines = profile.table(by="operator", limit=1, at_best=at_best).splitlines()
    assert lines[4].startswith("matmul %matmul_0.tmp_0 f32[10,8]  any") and f"{__file__}:" in lines[4]
    assert lines[5] == "... and 1 more, 0.001 ms"


def test_rows_come_in_the_order_that_is_asked_for(ticks, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    main, feed, out = product()
    with fx.profiler.profiler() as profile:
        fx.Executor().run(main, feed=feed, fetch_list=[out], scope=Scope())
    assert [row.name for row in profile.rows(sort="default", at_best=at_best)] == ["matmul", "relu"]
    for wrong in ({"by": "line"}, {"sort": "slowest"}):
        with pytest.raises(fx.ExecutionError, match="profiler: "):
            profile.rows(**wrong)


def test_ranks_have_rows_of_their_own_and_communication_beside_them(ticks, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", "0")
    model = classifier(width=4)
    t = fx.DistributeTranspiler("zero1").transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t) as exe, fx.profiler.profiler(profile_path=tmp_path / "t.json") as profile:
        exe.run_startup()
        for _ in range(2):
            exe.run(feed=model.feed(8), fetch_list=[model.loss])
    assert [(run.rank, run.step) for run in sorted(profile.runs, key=lambda run: (run.step, run.rank))] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    row = next(row for row in profile.rows(at_best=at_best) if row.name == "reduce_scatter")
    assert row.bound == "communication" and row.calls == 2 * 2  # all gradients travel in one bucket
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 1000: "rank 0: communication", 1001: "rank 1: communication"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=order.get) == [0, 1000, 1, 1001]
    for kind, rows in (("communication", {1000, 1001}), ("operator", {0, 1}), ("run", {0, 1})):
        assert {e["tid"] for e in events if e.get("cat", "").split(",")[0] == kind} == rows


def test_communication_has_the_names_of_horovods_timeline(ticks, tmp_path):
    """As categories, by which viewers filter, and as an argument."""
    m = classifier(width=4)
    seen = {}
    for strategy in ("zero1", "ring_optimizer", "data_parallel", "reduce_broadcast"):
        t = fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=2)
        with fx.ParallelExecutor(t) as exe:
            exe.run_startup()
            with fx.profiler.profiler(profile_path=tmp_path / "t.json"):
                exe.run(feed=m.feed(8), fetch_list=[m.loss])
        for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
            if e["ph"] == "X" and e["cat"] not in ("run", "wait"):
                seen[e["args"]["op"]] = e["cat"].split(",")[1:], e["args"].get("activity")
    for op, name in [
        ("all_reduce", "ALLREDUCE"), ("reduce_scatter", "REDUCESCATTER"), ("all_gather", "ALLGATHER"),
        ("unpack", "MEMCPY_OUT_FUSION_BUFFER"), ("reduce", "REDUCE"), ("broadcast", "BROADCAST"),
    ]:  # fmt: skip
        assert seen[op] == ([name], name)
    for op in ("momentum", "send"):  # Horovod has no messages from one rank to another
        assert seen[op] == ([], None)


def test_what_horovod_does_otherwise_has_its_names_too():
    names = {"nccl_init": "INIT_NCCL", "barrier": "BARRIER", "adasum_reduce": "ADASUM", "sparse_all_reduce": "ALLGATHER"}
    assert {name: opdef(name).comm.activity for name in names} == names


def seen_by(rank, *calls):
    """A run of one rank: calls as (kind, start, stop), of kinds compute, talk, wait, and talk beside compute."""
    op = classifier().main.global_block().ops[0]
    made = {
        "compute": CallDescription(op, "matmul", "native", False, Cost()),
        "talk": CallDescription(op, "all_reduce", "native", True, Cost()),
        "wait": CallDescription(op, "sgd", "wait", True, Cost()),
        "beside": CallDescription(op, "all_reduce", "native", True, Cost(), overlapped=True),
    }
    times = [(k, start, stop) for k, (_, start, stop) in enumerate(calls)]
    return RankRun(None, [made[kind] for kind, _, _ in calls], rank, 2, 0, times)


def test_exposed_communication_is_what_nothing_is_computed_beside():
    """All in one thread: every call. In two: where compute waits. Times are ns; the run is from the first start to the last stop."""
    profile = fx.profiler.Profile()
    profile.runs = [
        seen_by(0, ("compute", 0, 4), ("talk", 4, 7), ("compute", 7, 10)),
        seen_by(1, ("compute", 0, 8), ("wait", 8, 10), ("compute", 10, 11), ("beside", 3, 10)),
        seen_by(1, ("compute", 20, 28), ("beside", 21, 25)),
        seen_by(None, ("compute", 0, 5)),
    ]
    found = [(e.rank, e.runs, *(round(1e9 * s) for s in (e.communicating, e.exposed, e.total))) for e in profile.exposed()]
    assert found == [(0, 1, 3, 3, 10), (1, 2, 11, 2, 19)]
    assert str(Exposed(1, 2, 11e-3, 2e-3, 20e-3)) == "rank 1: 5.500 ms of communication a run, 1.000 ms exposed (10.0% of the run)"


def test_two_threads_of_a_rank_have_rows_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", "1")
    m = classifier(width=4)
    t = fx.DistributeTranspiler("data_parallel").transpile(program=m.main, startup_program=m.startup, trainers=2)
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        with fx.profiler.profiler(profile_path=tmp_path / "t.json") as profile:
            exe.run(feed=m.feed(8), fetch_list=[m.loss])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for r in (0, 1):
        assert (names[r], names[1000 + r]) == (f"rank {r}", f"rank {r}: communication")
        assert names[2000 + r] == f"rank {r}: waits for communication"
    for run in profile.runs:  # steps of one thread follow each other
        for beside in (False, True):
            times = [(start, stop) for i, start, stop in run.times if run.calls[i].overlapped is beside]
            assert times == sorted(times) and all(a[1] <= b[0] for a, b in itertools.pairwise(times))
    assert [e.rank for e in profile.exposed()] == [0, 1] and "ms exposed (" in profile.table(at_best=at_best)


def test_an_event_carries_what_one_asks_of_it(ticks, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    main, feed, out = product()
    with fx.profiler.profiler() as profile:
        fx.Executor().run(main, feed=feed, fetch_list=[out], scope=Scope())
    profile.save(tmp_path / "t.json")
    run, first, second, *_ = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (run["ts"], run["dur"], run["name"]) == (0, 3, "product, run 0")
    assert (first["ph"], first["name"], first["tid"], first["ts"], first["dur"]) == ("X", "matmul", 0, 0, 1)
    args = first["args"]
    assert args["reads"] == "%x f32[10,5], %y f32[5,8]" and args["makes"] == "%matmul_0.tmp_0 f32[10,8]"
    assert (args["bytes"], args["flops"], args["GFLOP/s"], args["GB/s"]) == (680, 800, 0.8, 0.68)
    assert args["body"] in ("native", "any") and args["role"] == "forward" and args["line"].startswith(__file__)
    assert second["ts"] == 2


def test_fluids_functions_switch_a_profiler_on_and_off(ticks, capsys, tmp_path):
    main, feed, out = product()
    exe = fx.Executor()
    assert fx.profiler.stop_profiler() is None
    fx.profiler.start_profiler("CPU")
    fx.profiler.start_profiler("All", tracer_option="OpDetail")  # it is on already
    exe.run(main, feed=feed, fetch_list=[out], scope=Scope())
    fx.profiler.reset_profiler()
    exe.run(main, feed=feed, fetch_list=[out], scope=Scope())
    profile = fx.profiler.stop_profiler("total", tmp_path / "t.json")
    assert len(profile.runs) == 1 and observers.watchers == []
    assert capsys.readouterr().out.startswith("1 run of product on one device: ") and (tmp_path / "t.json").exists()


def test_wrong_words_are_named():
    with pytest.raises(fx.ExecutionError, match="profiler: unknown state='cpu'; did you mean 'CPU'"):
        fx.profiler.start_profiler("cpu")
    with pytest.raises(fx.ExecutionError, match="unknown sorted_key='totl'; did you mean 'total'"), fx.profiler.profiler("All", "totl"):
        pass
    assert observers.watchers == []


def test_a_profiler_ends_where_a_run_fails():
    with pytest.raises(fx.FeedError), fx.profiler.profiler() as profile:
        fx.Executor().run(product()[0], feed={}, fetch_list=["relu_0.tmp_0"], scope=Scope())
    assert observers.watchers == [] and profile.table() == "nothing ran while the profiler was on"


def test_values_are_the_same_under_a_profiler():
    model = classifier(width=4)
    losses = []
    for watched in (False, True):
        exe, scope = fx.Executor(), Scope()
        exe.run(model.startup, scope=scope)
        if watched:
            fx.profiler.start_profiler()
        losses.append([exe.run(model.main, feed=model.feed(8), fetch_list=[model.loss], scope=scope)[0] for _ in range(3)])
        fx.profiler.stop_profiler()
    assert np.array_equal(*losses)


def test_ceilings_are_measured_once():
    first = ceilings(1)
    assert first is ceilings(1) and first.gflops > 0 and first.gbs > 0 and first.call > 0
