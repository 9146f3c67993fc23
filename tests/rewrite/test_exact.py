"""The rewrites that leave every bit as it is: what each makes of a program, and what it leaves alone."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind
from fluidx.ir import TensorType
from fluidx.rewrite import DropDead, DropIdentities, FoldConstants, MergeEqual, rewritten, simplified
from fluidx.testing import check_rewrite

L = fx.layers
X = "data %x: f32[-1,4]; data %n: f32[3,4]"


# -- constants ------------------------------------------------------------------------------------------------------------------


def test_what_follows_from_constants_is_filled_in():
    check_rewrite(FoldConstants(), given=X,
        before="""
          %a: f32[3] = range() {dtype="float32", end=3.0}
          %b: f32[3] = scale(%a) {bias=1.0, scale=2.0}
          %y: f32[-1,4] = scale(%x) {scale=2.0}
        """,
        after="""
          %a: f32[3] = range() {dtype="float32", end=3.0}
          %b: f32[3] = assign_value() {dtype="float32", shape=[3], values=[1.0, 3.0, 5.0]}
          %y: f32[-1,4] = scale(%x) {scale=2.0}
        """)  # fmt: skip


def test_equal_elements_are_one_number():
    check_rewrite(FoldConstants(), given=X,
        before="""
          %a: f32[2,2] = fill_constant() {dtype="float32", shape=[2, 2], value=3.0}
          %b: f32[2,2] = square(%a)
        """,
        after="""
          %a: f32[2,2] = fill_constant() {dtype="float32", shape=[2, 2], value=3.0}
          %b: f32[2,2] = fill_constant() {dtype="float32", shape=[2, 2], value=9.0}
        """)  # fmt: skip


def test_sizes_are_constants_where_they_are_known():
    check_rewrite(FoldConstants(), given=X,
        before="""
          %s: i32[2] = shape(%n)
          %t: i32[2] = shape(%x)
          %z: f32[3,4] = fill_zeros_like(%n)
        """,
        after="""
          %s: i32[2] = assign_value() {dtype="int32", shape=[2], values=[3, 4]}
          %t: i32[2] = shape(%x)
          %z: f32[3,4] = fill_constant() {dtype="float32", shape=[3, 4], value=0.0}
        """)  # fmt: skip


def test_a_view_of_a_constant_stays_and_what_reads_it_is_folded():
    check_rewrite(FoldConstants(), given=X,
        before="""
          %a: f32[1,2] = assign_value() {dtype="float32", shape=[1, 2], values=[1.0, 2.0]}
          %b: f32[2,1] = transpose(%a) {axis=[1, 0]}
          %c: f32[2,1] = square(%b)
        """,
        after="""
          %a: f32[1,2] = assign_value() {dtype="float32", shape=[1, 2], values=[1.0, 2.0]}
          %b: f32[2,1] = transpose(%a) {axis=[1, 0]}
          %c: f32[2,1] = assign_value() {dtype="float32", shape=[2, 1], values=[1.0, 4.0]}
        """)  # fmt: skip


@pytest.mark.parametrize(
    "ops",
    [
        "%a: f32[2] = uniform_random() {shape=[2]}\n%b: f32[2] = square(%a)",  # random
        "%b: f32[2] = square(%w)",  # a parameter
        '%w = fill_constant() {dtype="float32", shape=[2], value=1.0}\n%b: f32[2] = square(%w)',  # state that is written
        '%a: f32[128,129] = fill_constant() {dtype="float32", shape=[128, 129]}\n%b: f32[128,129] = square(%a)',  # above 64 KiB
        '%a: f32[1] = fill_constant() {dtype="float32", shape=[1], value=-1.0}\n%b: f32[1] = sqrt(%a)',  # a NaN
        '%a: i64[1] = fill_constant() {dtype="int64", shape=[1], value=7.0}\n%b: f32[1,2] = one_hot_v2(%a) {depth=2}',  # it fails
        '%a: f32[1] = fill_constant() {dtype="float32", shape=[1]}\n%b: f32[1] = print(%a)',  # an effect
        '%a: f32[1] = fill_constant() {dtype="float32", shape=[1]}\n%a = increment(%a)\n%b: f32[1] = square(%a)',  # it changes
    ],
)
def test_what_is_no_constant_is_left(ops):
    check_rewrite(FoldConstants(), given="param %w: f32[2]", before=ops, after=ops)


def test_a_limit_in_kilobytes_is_an_option():
    assert repr(FoldConstants()) == "FoldConstants()" and repr(FoldConstants(kb=1)) == "FoldConstants(kb=1)"
    p = fx.Program.parse_from_string("program p {\n  %a: f32[400] = range() {end=400.0}\n  %b: f32[400] = square(%a)\n}")
    assert rewritten(p, [FoldConstants()]).ops[1].type == "assign_value" and rewritten(p, [FoldConstants(kb=1)]) == p


# -- identities -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        "assign(%h)", 'cast(%h) {dtype="float32"}', "scale(%h)", "pow(%h) {factor=1.0}", "increment(%h) {step=0.0}",
        "reshape(%h) {shape=[-1, 4]}", "transpose(%h) {axis=[0, 1]}", "sum([%h])", "flatten(%h)",
        'dropout(%h) {dropout_implementation="upscale_in_train", dropout_prob=0.5, is_test=true}',
    ],
)  # fmt: skip
def test_a_value_that_is_handed_on_is_read_where_it_is(op):
    check_rewrite(DropIdentities(), given=X, before=f"%h: f32[-1,4] = tanh(%x)\n%y: f32[-1,4] = {op}\n%z: f32[-1,4] = exp(%y)",
        after="%h: f32[-1,4] = tanh(%x)\n%z: f32[-1,4] = exp(%h)")  # fmt: skip


@pytest.mark.parametrize(
    "op",
    [
        "scale(%h) {scale=2.0}", "expand(%h) {expand_times=[2, 1]}", "sum([%h, %h])",
        'dropout(%h) {dropout_implementation="downgrade_in_infer", dropout_prob=0.5, is_test=true}',
    ],
)  # fmt: skip
def test_a_value_that_changes_is_made(op):
    text = f"%h: f32[-1,4] = tanh(%x)\n%y: f32[-1,4] = {op}\n%z: f32[-1,4] = exp(%y)"
    check_rewrite(DropIdentities(), given=X, before=text, after=text)


@pytest.mark.parametrize("op, number, goes", [
    ("elementwise_mul", 1.0, True), ("elementwise_div", 1.0, True), ("elementwise_sub", 0.0, True), ("elementwise_add", -0.0, True),
    ("elementwise_add", 0.0, False), ("elementwise_sub", -0.0, False), ("elementwise_mul", -1.0, False), ("elementwise_mul", 0.0, False),
])  # fmt: skip
def test_products_with_one_go_and_sums_with_zero_only_where_minus_zero_stays(op, number, goes):
    kept = f'%c: f32[1] = fill_constant() {{dtype="float32", shape=[1], value={number}}}\n'
    before = f"{kept}%y: f32[-1,4] = {op}(%x, %c)\n%z: f32[-1,4] = exp(%y)"
    check_rewrite(DropIdentities(), given=X, before=before, after=f"{kept}%z: f32[-1,4] = exp(%x)" if goes else before)
    x = np.array([[0.0, -0.0, 5e-324, np.inf]])
    with np.errstate(all="ignore"):
        made = {"mul": np.multiply, "div": np.divide, "sub": np.subtract, "add": np.add}[op.split("_")[1]](x, number)
    assert (made.tobytes() == x.tobytes()) is goes


def test_two_transposes_are_one_and_may_be_none():
    check_rewrite(DropIdentities(), given="data %x: f32[2,3,4]",
        before="""
          %a: f32[3,4,2] = transpose(%x) {axis=[1, 2, 0]}
          %b: f32[4,2,3] = transpose(%a) {axis=[1, 2, 0]}
          %c: f32[2,3,4] = transpose(%b) {axis=[1, 2, 0]}
          %y: f32[4,2,3] = exp(%b)
          %z: f32[2,3,4] = exp(%c)
        """,
        after="""
          %a: f32[3,4,2] = transpose(%x) {axis=[1, 2, 0]}
          %b: f32[4,2,3] = transpose(%x) {axis=[2, 0, 1]}
          %y: f32[4,2,3] = exp(%b)
          %z: f32[2,3,4] = exp(%x)
        """)  # fmt: skip


def test_two_reshapes_are_one_unless_the_second_copies_a_size():
    check_rewrite(DropIdentities(), given="data %x: f32[2,3,4]",
        before="""
          %a: f32[6,4] = reshape(%x) {shape=[6, 4]}
          %b: f32[24] = reshape(%a) {shape=[-1]}
          %c: f32[6,2,2] = reshape(%a) {shape=[0, 2, 2]}
        """,
        after="""
          %a: f32[6,4] = reshape(%x) {shape=[6, 4]}
          %b: f32[24] = reshape(%x) {shape=[-1]}
          %c: f32[6,2,2] = reshape(%a) {shape=[0, 2, 2]}
        """)  # fmt: skip


def test_copies_of_what_changes_and_copies_that_are_fetched_stay():
    text = """
      %before: f32[2] = assign(%w)
      %w = scale(%w) {scale=2.0}
      %y: f32[2] = elementwise_sub(%w, %before)
      %copy: f32[2] = assign(%y)
      %z: f32[2] = exp(%copy)
    """
    check_rewrite(DropIdentities(), given="param %w: f32[2]", before=text, after=text, fetch=["copy"])


def test_a_copy_of_a_view_stays_because_sums_of_strided_values_may_round_otherwise():
    text = "%t: f32[4,3] = transpose(%n) {axis=[1, 0]}\n%a: f32[4,3] = assign(%t)\n%s: f32[1] = reduce_sum(%a) {dim=[0, 1]}"
    check_rewrite(DropIdentities(), given=X, before=text, after=text)


# -- common subexpressions --------------------------------------------------------------------------------------------------------


def test_what_is_computed_twice_is_computed_once():
    check_rewrite(MergeEqual(), given=X,
        before="""
          %a: f32[-1,4] = tanh(%x)
          %b: f32[-1,4] = tanh(%x)
          %c: f32[-1,4] = softmax(%a)
          %d: f32[-1,4] = softmax(%b)
          %y: f32[-1,4] = elementwise_sub(%c, %d)
        """,
        after="""
          %a: f32[-1,4] = tanh(%x)
          %c: f32[-1,4] = softmax(%a)
          %y: f32[-1,4] = elementwise_sub(%c, %c)
        """)  # fmt: skip


def test_a_double_that_is_fetched_is_a_copy_and_a_cheap_one_stays():
    check_rewrite(MergeEqual(), given=X, fetch=["a", "b", "d"],
        before="""
          %a: f32[-1,4] = softmax(%x)
          %b: f32[-1,4] = softmax(%x)
          %c: f32[-1,4] = exp(%x)
          %d: f32[-1,4] = exp(%x)
        """,
        after="""
          %a: f32[-1,4] = softmax(%x)
          %b: f32[-1,4] = assign(%a)
          %c: f32[-1,4] = exp(%x)
          %d: f32[-1,4] = exp(%x)
        """)  # fmt: skip


@pytest.mark.parametrize(
    "ops",
    [
        "%a: f32[4] = uniform_random() {seed=1, shape=[4]}\n%b: f32[4] = uniform_random() {seed=1, shape=[4]}",  # random
        "%a: f32[-1,4] = scale(%x) {bias=0.0}\n%b: f32[-1,4] = scale(%x) {bias=-0.0}",  # 0.0 == -0.0 in Python
        "%a: f32[-1,4] = elementwise_sub(%x, %n)\n%b: f32[-1,4] = elementwise_sub(%n, %x)",
        "%a: f32[4] = exp(%w)\n%w = scale(%w) {scale=2.0}\n%b: f32[4] = exp(%w)",  # another value of the same name
        "forward:\n%a: f32[-1,4] = exp(%x)\nbackward:\n%b: f32[-1,4] = exp(%x)",  # made again in order not to be kept
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_computed_apart(ops):
    check_rewrite(MergeEqual(), given=f"{X}; param %w: f32[4]", before=ops, after=ops)


def test_state_that_is_read_before_and_behind_its_update_is_two_values():
    check_rewrite(MergeEqual(), given="param %w: f32[4]",
        before="""
          %a: f32[4] = exp(%w)
          %b: f32[4] = exp(%w)
          %w = elementwise_sub(%a, %b)
          %c: f32[4] = exp(%w)
        """,
        after="""
          %a: f32[4] = exp(%w)
          %w = elementwise_sub(%a, %a)
          %c: f32[4] = exp(%w)
        """)  # fmt: skip


# -- dead code, and all of them ---------------------------------------------------------------------------------------------------------


def test_what_nothing_needs_goes_and_state_and_effects_stay():
    check_rewrite(DropDead(), given=f"{X}; param %w: f32[4]", fetch=["y"],
        before="""
          %a: f32[-1,4] = tanh(%x)
          %p: f32[-1,4] = print(%a)
          %b: f32[-1,4] = exp(%a)
          %w = scale(%w) {scale=2.0}
          %y: f32[-1,4] = scale(%x)
        """,
        after="""
          %a: f32[-1,4] = tanh(%x)
          %p: f32[-1,4] = print(%a)
          %w = scale(%w) {scale=2.0}
          %y: f32[-1,4] = scale(%x)
        """)  # fmt: skip


def doubled():
    x = fx.data("x", [-1, 4])
    h = L.softmax(L.scale(x, 1.0))
    again = L.softmax(L.elementwise_mul(x, L.fill_constant([1], "float32", 1.0)))
    return fx.default_main_program(), L.reduce_sum(L.elementwise_sub(h, again))


def test_an_executor_runs_what_is_left_and_the_program_stays_as_it_is(monkeypatch):
    main, y = doubled()
    text, feed = str(main), {"x": np.float32([[1, 2, 3, 4]])}
    assert [op.type for op in simplified(main, [y.name]).ops] == ["softmax", "elementwise_sub", "reduce_sum"]
    assert fx.Executor().run(feed=feed, fetch_list=[y])[0] == 0
    assert len(dry_plan(main, batch=2).steps) == 3 and str(main) == text
    monkeypatch.setenv("FLUIDX_REWRITE", "0")
    assert sum(len(s.ops) for s in dry_plan(main, batch=2).steps) == 7
    assert fx.Executor().run(feed=feed, fetch_list=[y])[0] == 0


def test_a_size_that_is_fed_is_a_constant_of_the_plan():
    x = fx.data("x", [-1, 4])
    n = L.cast(L.slice(L.shape(x), [0], [0], [1]), "float32")
    y = L.elementwise_div(L.reduce_sum(x), n)
    planned = dry_plan(fx.default_main_program(), batch=5, fetch=[y.name])
    assert sorted(op.type for s in planned.steps for op in s.ops) == ["elementwise_div", "fill_constant", "reduce_sum"]
    for rows in (5, 2):
        assert fx.Executor().run(feed={"x": np.ones((rows, 4), "float32")}, fetch_list=[y])[0] == 4


def test_a_fed_value_in_the_middle_is_no_copy_of_anything():
    x = fx.data("x", [-1, 2])
    h = L.assign(x)
    y, z = L.scale(h, 2.0), L.scale(x, 2.0)
    feed = {"x": np.ones((1, 2), "float32"), h.name: np.full((1, 2), 3, "float32")}
    a, b = fx.Executor().run(feed=feed, fetch_list=[y, z])
    assert a.tolist() == [[6, 6]] and b.tolist() == [[2, 2]]


def test_an_error_names_the_line_that_wrote_the_operator():
    ids = fx.data("ids", [-1], "int64")
    L.fc(L.one_hot(L.assign(ids), 3), 2)
    wrong = L.reduce_sum(fx.layers.one_hot(L.unsqueeze(L.assign(ids), [1]), 3))
    with pytest.raises(fx.errors.ExecutionError, match=r'test_exact\.py", line \d+'):
        fx.Executor().run(feed={"ids": np.array([5])}, fetch_list=[wrong])


def test_a_search_for_nan_sees_every_operator_as_it_was_written(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    y = L.exp(L.fill_constant([2], "float32", 1e3))
    with pytest.raises(fx.errors.ExecutionError, match="op exp made an infinity"):
        fx.Executor().run(fetch_list=[L.scale(y, 2.0)])


def test_recomputed_values_are_computed_twice():
    x = fx.data("x", [-1, 4])
    h = L.tanh(L.fc(x, 4))
    for _ in range(2):
        h = L.tanh(L.fc(h, 4))
    fx.append_backward(L.mean(h), checkpoints=[h.block.var("tanh_1.tmp_0")])
    main = fx.default_main_program()
    assert [op.type for op in simplified(main, ["fc_0.w_0@GRAD"]).ops].count("tanh") == [op.type for op in main.ops].count("tanh")


def test_what_bodies_read_keeps_its_name():
    x, go = fx.data("x", [1]), fx.data("go", [1], "bool")
    a, b = L.softmax(x), L.softmax(x)
    c = L.assign(b)
    y = L.cond(go, lambda: L.scale(b, 2.0) + c, lambda: L.scale(a, 3.0))
    main, scope = fx.default_main_program(), Scope()
    feed = {"x": np.ones(1, "float32"), "go": np.array([True])}
    types = {n: TensorType(v.dtype.name, v.shape) for n, v in feed.items()}
    planned = plan(main, types, [y.name], scope.arrays, RunContext())
    assert [op.type for s in planned.steps for op in s.ops][:3] == ["softmax", "assign", "assign"]
    assert bind(planned, scope, RunContext()).run(feed)[0] == 3


def test_errors_of_what_is_asked_for():
    main, _ = doubled()
    with pytest.raises(fx.ProgramError, match="declares no variable 'softmax_0'; did you mean"):
        rewritten(main, fetch=["softmax_0"])


def test_what_is_no_program_no_rewrite_or_no_variable_is_refused():
    program = fx.Program("empty")
    with pytest.raises(fx.ProgramError, match="rewritten takes a Program, got str"):
        fx.rewrite.rewritten("program")
    with pytest.raises(fx.ProgramError, match=r"'DropDead' is not a rewrite; give objects such as fluidx\.rewrite\.DropDead\(\)"):
        fx.rewrite.rewritten(program, ["DropDead"])
    with pytest.raises(fx.ProgramError, match="declares no variable 'y'"):
        fx.rewrite.rewritten(program, fetch=["y"])
