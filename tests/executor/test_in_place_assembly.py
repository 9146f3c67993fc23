"""New values of variables that are put together of parts: a part is made where the variable has it, once nothing reads the old value."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import Program, TensorType
from fluidx.ir.parser import parse_pair
from fluidx.testing.models import classifier

TEXT = """
program p {
  data %x: f32[4]
  param %w: f32[8]
forward:
  %low: f32[4] = chunk(%w) {start=0, stop=4}
  %high: f32[4] = chunk(%w) {start=4, stop=8}
  %middle: f32[4] = chunk(%w) {start=1, stop=5}
BODY
  [%w] = unpack([%a, %b]) {shapes=[[8]]}
BEHIND
}
"""
# operators, those behind the parts are joined, what is fetched, which parts are made in the variable, and the new value of (w, x)
CASES = {
    "each over itself": ("a = scale(%low) {scale=2.0}\nb = scale(%high) {scale=3.0}", "", "", "ab", lambda w, x: [*2 * w[:4], *3 * w[4:]]),
    "places are changed": ("a = scale(%high) {scale=2.0}\nb = scale(%low) {scale=3.0}", "", "", "b", lambda w, x: [*2 * w[4:], *3 * w[:4]]),
    "nothing reads the old one": ("a = relu(%x)\nb = tanh(%x)", "", "", "ab", lambda w, x: [*np.maximum(x, 0), *np.tanh(x)]),
    "the new one is read": ("a = scale(%low) {scale=2.0}\nb = relu(%x)", "c = scale(%w) {scale=5.0}", "c", "ab",
        lambda w, x: [*2 * w[:4], *np.maximum(x, 0)]),
    "the old one is read at last": ("a = relu(%x)\nb = tanh(%x)\nc = scale(%w) {scale=5.0}", "", "c", "",
        lambda w, x: [*np.maximum(x, 0), *np.tanh(x)]),
    "the old one is read between": ("a = scale(%low) {scale=2.0}\nc = scale(%w) {scale=5.0}\nb = scale(%high) {scale=3.0}", "", "c", "b",
        lambda w, x: [*2 * w[:4], *3 * w[4:]]),
    "a part of the old one is fetched": ("a = relu(%x)\nb = scale(%high) {scale=3.0}", "", "low", "ab",
        lambda w, x: [*np.maximum(x, 0), *3 * w[4:]]),
    "not element by element": ("a = cumsum(%low)\nb = cumsum(%high)", "", "", "", lambda w, x: [*np.cumsum(w[:4]), *np.cumsum(w[4:])]),
    "of both parts": ("a = elementwise_add(%low, %high)\nb = scale(%high) {scale=3.0}", "", "", "ab",
        lambda w, x: [*w[:4] + w[4:], *3 * w[4:]]),
    "one element further on": ("a = relu(%x)\nb = scale(%middle) {scale=3.0}", "", "", "",
        lambda w, x: [*np.maximum(x, 0), *3 * w[1:5]]),
}  # fmt: skip


def parsed(body, behind):
    """The program of a case, in which %c is as large as %w."""
    sizes = {"a": 4, "b": 4, "c": 8}
    body, behind = (
        "\n".join(f"  %{line[0]}: f32[{sizes[line[0]]}]{line[1:]}" for line in part.splitlines()) for part in (body, behind)
    )
    return Program.parse_from_string(TEXT.replace("BODY", body).replace("BEHIND", behind))


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_made_in_the_variable_where_nothing_reads_the_old_value(case, natively):
    body, behind, fetched, inside, meaning = CASES[case]
    program = parsed(body, behind)
    w, x = np.arange(1, 9, dtype="float32"), np.float32([-2, 3, 0, 1])
    scope = Scope()
    scope.set("w", w)
    p = plan(program, {"x": TensorType("float32", (4,))}, ["w", *fetched.split()], scope.arrays, RunContext(), natively=natively)
    check_storage(p)
    assert {n for n in "ab" if p.values[n].buffer == p.values["w"].buffer} == set(inside)
    assert [step.kernel == "joined" for step in p.steps if step.op.type == "unpack"] == [inside == "ab"]
    bound = bind(p, scope, RunContext())
    for _ in range(2):
        old, (new, *rest) = w, bound.run({"x": x})
        w = np.float32(meaning(old, x))
        np.testing.assert_allclose(new, w, rtol=1e-6)  # tanh
        np.testing.assert_array_equal(scope.get("w"), new)
        for name, value in zip(fetched.split(), rest, strict=True):
            np.testing.assert_array_equal(value, old[:4] if name == "low" else 5 * (new if behind else old))


def test_a_plan_that_makes_a_part_elsewhere_than_the_variable_has_it_is_refused():
    program = parsed(CASES["each over itself"][0], "")
    scope = Scope()
    scope.set("w", np.zeros(8, "float32"))
    p = plan(program, {}, [], scope.arrays, RunContext())
    check_storage(p)
    for name, offset in (("a", 4), ("a", 16), ("b", 0)):
        moved = p.values[name]._replace(strided=p.values[name].strided._replace(offset=offset))
        with pytest.raises(fx.ExecutionError, match="this is a bug in fluidx"):
            check_storage(p._replace(values={**p.values, name: moved}))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_ring_updates_parameters_where_they_lie(rank):
    """What is received of a parameter goes to its place, and so does what this rank updates: no parameter is copied."""
    model = classifier(width=512)
    t = fx.DistributeTranspiler(fx.strategies.ring_optimizer()).transpile(program=model.main, startup_program=model.startup, trainers=2)
    p = dry_plan(t.get_trainer_program(rank), batch=16)
    check_storage(p)
    alone = [step for step in p.steps if step.op.type == "unpack" and len(step.op.output_arg_names) == 1]
    assert alone and {step.kernel for step in alone} == {"joined"}
    for step in alone:
        assert {p.buffers[p.values[n].buffer].kind for n in step.op.input_arg_names} == {"state"}


def swap(rank, before):
    """Ranks give each other the first half of a variable, twice that if it is read `before` the messages."""
    sent = "%twice" if before else "%low"
    return parse_pair(f"""
program swap {{
  rank {rank}
  group dp = [0, 1]
  var %w: f32[8] local persistable
startup:
  nccl_init() {{group="dp"}}
  %w = fill_constant() {{dtype="float32", shape=[8], value={rank + 1}.0}}
dist:
  %low: f32[4] local = chunk(%w) {{start=0, stop=4}}
  %high: f32[4] local = chunk(%w) {{start=4, stop=8}}
  %twice: f32[4] local = scale(%low) {{scale=2.0}}
  send({sent}) {{batch="swap", group="dp", peer={1 - rank}}}
  %a: f32[4] local = recv() {{batch="swap", dtype="float32", group="dp", peer={1 - rank}, shape=[4]}}
  %b: f32[4] local = scale(%high) {{scale=10.0}}
  [%w] = unpack([%a, %b]) {{shapes=[[8]]}}
}}
""")


@pytest.mark.parametrize("before", [False, True])
def test_nothing_arrives_where_messages_of_the_same_batch_still_leave(before):
    pairs = [swap(rank, before) for rank in (0, 1)]
    scope = Scope()
    scope.set("w", np.zeros(8, "float32"))
    p = plan(pairs[0].main, {}, [], scope.arrays, RunContext(0, 2, groups={"dp": (0, 1)}))
    check_storage(p)
    assert (p.values["a"].buffer == p.values["w"].buffer) is before
    with fx.ParallelExecutor(pairs, places=fx.cpu_places(2), timeout=10) as exe:
        exe.run_startup()
        exe.run()
        came = [4.0, 2.0] if before else [2.0, 1.0]
        assert [scope.get("w").tolist() for scope in exe.scopes] == [[came[0]] * 4 + [10.0] * 4, [came[1]] * 4 + [20.0] * 4]
