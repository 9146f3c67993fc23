"""Operators of one signature get the types that one of them got, in all programs of the process; other signatures get their own."""

import pytest

import fluidx as fx
from fluidx.executor.plan import kernel_selection, signatures
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.sizes import RankSizes
from fluidx.ir import Program


@pytest.fixture
def inferred(monkeypatch):
    """The types of the operators whose type rule is asked."""
    seen, ask = [], RankSizes._infer_op

    def asked(self, rule, block, within):
        seen.append(rule.op.type)
        ask(self, rule, block, within)

    monkeypatch.setattr(RankSizes, "_infer_op", asked)
    for cache in (signatures._ANSWERS, signatures._DECLARED, signatures._VALUES, kernel_selection._ANSWERS):
        cache.clear()
    return seen


def two_ranks(body, rank=0):
    p = Program.parse_from_string(f"program p {{ group dp = [0, 1]; data %x: f32[-1,3] shard(0) over dp; {body} }}")
    p.rank = rank
    return p


def types(planned):
    return {n: str(v.type) for n, v in planned.values.items()}


def test_a_layer_like_another_is_not_inferred_again(inferred):
    layers = "".join(f"%h{k + 1}: f32[-1,3] shard(0) over dp = tanh(%h{k}); " for k in range(5)).replace("%h0", "%x")
    planned = dry_plan(two_ranks(layers), batch=8, fuse=False)
    assert inferred == ["tanh"] and types(planned) == dict.fromkeys(("x", "h1", "h2", "h3", "h4", "h5"), "f32[4,3]")


def test_an_equal_program_is_planned_without_a_type_rule(inferred):
    body = "%y: f32[-1,3] shard(0) over dp = relu(%x)"
    first = str(dry_plan(two_ranks(body), batch=8))
    assert inferred == ["relu"]
    assert str(dry_plan(two_ranks(body), batch=8)) == first and inferred == ["relu"]


def test_ranks_with_other_rows_have_other_types(inferred):
    body = "%y: f32[-1,3] shard(0) over dp = relu(%x)"
    # 5 rows on 2 ranks: the first has rows 0 and 1, the second rows 2 to 4
    assert [types(dry_plan(two_ranks(body, r), batch=5))["y"] for r in (0, 1)] == ["f32[2,3]", "f32[3,3]"]
    assert inferred == ["relu", "relu"]


def test_a_placement_is_part_of_the_signature(inferred):
    cut, whole = "%y: f32[-1,1] shard(0) over dp = reduce_max(%x) {dim=[1], keep_dim=true}", "%z: f32[1,3] = fill_constant() {shape=[1, 3]}"
    body = f"{cut}; {whole}; %t: f32[1,3] = tanh(%z); %u: f32[-1,3] shard(0) over dp = tanh(%x)"
    planned = dry_plan(two_ranks(body), batch=2, fuse=False)
    # both tanh work on f32[1,3] on this rank: of %u it is the part, of %t the whole value
    assert types(planned) == {"x": "f32[1,3]", "y": "f32[1,1]", "z": "f32[1,3]", "t": "f32[1,3]", "u": "f32[1,3]"}
    assert inferred.count("tanh") == 2


def test_a_full_cache_starts_again(inferred, monkeypatch):
    monkeypatch.setattr(signatures, "_MOST", 1)
    body = "%y: f32[-1,3] shard(0) over dp = relu(%x); %z: f32[-1,3] shard(0) over dp = tanh(%y)"
    assert [types(dry_plan(two_ranks(body), batch=b, fuse=False))["z"] for b in (8, 6, 8)] == ["f32[4,3]", "f32[3,3]", "f32[4,3]"]
    assert len(signatures._ANSWERS) == 1


def rank_0(strategy, main, startup):
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=2).get_trainer_program(0)


def test_strategies_of_one_source_share_answers(inferred):
    main, startup = fx.Program("p"), fx.Program("s")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, 4], "float32")
        for _ in range(3):
            h = fx.layers.fc(h, 4, act="tanh")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    dry_plan(rank_0("data_parallel", main, startup), batch=8)
    first = len(inferred)
    dry_plan(rank_0("reduce_broadcast", main, startup), batch=8)
    again = {name: inferred[first:].count(name) for name in ("mul", "tanh", "mul_grad_y")}
    assert again == {"mul": 0, "tanh": 0, "mul_grad_y": 0}


def test_the_cost_of_a_step_is_that_of_its_types():
    def costs(rows):
        body = "%y: f32[-1,3] shard(0) over dp = relu(%x); %z: f32[-1,3] shard(0) over dp = elementwise_add(%y, %y)"
        planned = dry_plan(two_ranks(body), batch=2 * rows, fuse=False)
        return [tuple(planned.cost(step)) for step in planned.steps]

    # relu reads and writes 3 numbers a row; the sum reads one operand, which it is given twice
    assert costs(1) == [(12, 12, 3), (12, 12, 3)] and costs(4) == [(48, 48, 12), (48, 48, 12)] and costs(1) == costs(1)
