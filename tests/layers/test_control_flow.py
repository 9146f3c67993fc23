"""Loops and branches: the blocks that they write, what they compute, and what they refuse."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers


@pytest.fixture(autouse=True)
def program():
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program("startup")), fx.unique_name.guard():
        yield main


def run(program, fetch, **feed):
    with fx.scope_guard(fx.Scope()):
        return [v.tolist() for v in fx.Executor().run(program, feed=feed, fetch_list=fetch)]


def f(*values):
    return np.array(values, "float32")


def test_a_while_writes_its_variables_in_place(program):
    i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 5)
    total = L.fill_constant([1], "float32", 0.0)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(total + L.cast(i, "float32"), output=total)
        L.increment(i)
        L.less_than(i, n, cond=more)
    op = program.ops[-1]
    assert (op.type, op.input("Condition"), op.attr("sub_block").idx) == ("while", (more.name,), 1)
    assert op.output("Out") == (total.name, i.name, more.name)
    assert set(op.input("X")) == {total.name, i.name, more.name, n.name}
    assert run(program, [total, i]) == [[10.0], [5]]


def test_a_while_that_never_writes_its_condition_is_refused():
    more = L.less_than(L.ones([1], "int64"), L.zeros([1], "int64"))
    with pytest.raises(fx.ProgramError, match="the body never writes the condition 'less_than_0.tmp_0'"):
        with L.While(more).block():
            L.ones([1], "int64")


def test_while_loop_returns_the_last_values_and_leaves_the_first_alone(program):
    i, a, b = (L.fill_constant([1], "float32", v) for v in (0, 0, 1))
    # the pair is swapped: both old values are read before either is overwritten
    last = L.while_loop(lambda i, p: i < 10.0, lambda i, p: (i + 1.0, [p[1], p[0] + p[1]]), [i, [a, b]])
    assert run(program, [last[0], last[1][0], last[1][1], a, b]) == [[10.0], [55.0], [89.0], [0.0], [1.0]]


def test_while_loop_takes_a_single_result_without_a_list(program):
    (x,) = L.while_loop(lambda x: x < 100.0, lambda x: x * 2.0, [L.fill_constant([1], "float32", 3.0)])
    assert run(program, [x]) == [[192.0]]


def test_a_loop_variable_may_not_change_its_type_or_number():
    x = L.zeros([1], "float32")
    with pytest.raises(fx.ProgramError, match=r"body returned i64\[1\] for a loop variable that is f32\[1\]; its type must not change"):
        L.while_loop(lambda x: x < 1.0, lambda x: [L.cast(x, "int64")], [x])
    with pytest.raises(fx.ProgramError, match="body must return 1 variable like loop_vars, it returned 2 variables"):
        L.while_loop(lambda x: x < 1.0, lambda x: [x, x], [x])
    with pytest.raises(fx.ProgramError, match="the result of cond must be a bool variable of one element"):
        L.while_loop(lambda x: x, lambda x: x, [x])


def test_cond_runs_one_branch(program):
    x = fx.data("x", [1], "float32")
    y, (z,) = L.cond(x > 0.0, lambda: (x * 2.0, [x]), lambda: (-x, [L.ones([1], "float32")]))
    op = program.ops[-1]
    assert (op.type, op.output("Out")) == ("cond", (y.name, z.name))
    assert op.attr("true_out")[1] == "x"  # a branch may hand through a variable from outside
    assert run(program, [y, z], x=f(3)) == [[6.0], [3.0]]
    assert run(program, [y, z], x=f(-3)) == [[3.0], [1.0]]


def test_a_branch_may_write_a_variable_from_outside(program):
    x, flag = fx.data("x", [1], "float32"), L.fill_constant([1], "float32", 0.0)

    def raise_flag():
        L.assign(L.ones([1], "float32"), output=flag)

    assert L.cond(x > 0.0, raise_flag) is None
    assert run(program, [flag], x=f(1)) == [[1.0]]
    assert run(program, [flag], x=f(-1)) == [[0.0]]


def test_branches_must_agree():
    x = fx.data("x", [1], "float32")
    with pytest.raises(fx.ProgramError, match="both functions must return the same structure; true_fn gives 1 variable, false_fn nothing"):
        L.cond(x > 0.0, lambda: x)
    with pytest.raises(fx.ProgramError, match=r"result 0 is f32\[1\] in true_fn and i64\[1\] in false_fn; give both one type"):
        L.cond(x > 0.0, lambda: x, lambda: L.cast(x, "int64"))


def test_branches_of_different_sizes_are_refused():
    a, b, x = fx.data("a", [2, 3], "float32"), fx.data("b", [4, 3], "float32"), fx.data("x", [1], "float32")
    with pytest.raises(fx.ProgramError, match=r"result 0 is f32\[2,3\] in true_fn and f32\[4,3\] in false_fn"):
        L.cond(x > 0.0, lambda: a, lambda: b)


def test_case_takes_the_first_that_holds_and_else_the_default(program):
    x = fx.data("x", [1], "float32")
    one, two, three = (lambda v=v: L.fill_constant([1], "float32", v) for v in (1.0, 2.0, 3.0))
    y = L.case([(x < 0.0, one), (x < 10.0, two)], default=three)
    assert [run(program, [y], x=f(v))[0] for v in (-1, 5, 50)] == [[1.0], [2.0], [3.0]]


def test_switch_case_picks_by_index_and_falls_back_to_the_largest(program):
    i = fx.data("i", [1], "int64")
    fns = {k: (lambda k=k: L.fill_constant([1], "float32", k * 10.0)) for k in (1, 4, 2)}
    y = L.switch_case(i, fns)
    assert [run(program, [y], i=np.array([v]))[0] for v in (1, 2, 4, 7)] == [[10.0], [20.0], [40.0], [40.0]]


def test_switch_is_case_for_statements(program):
    step, rate = fx.data("step", [1], "float32"), L.fill_constant([1], "float32", -1.0)
    with L.Switch() as switch:
        for limit, value in ((10.0, 0.3), (20.0, 0.2)):
            with switch.case(step < limit):
                L.assign(L.fill_constant([1], "float32", value), output=rate)
        with switch.default():
            L.assign(L.fill_constant([1], "float32", 0.1), output=rate)
    for value, expected in ((5, 0.3), (15, 0.2), (25, 0.1)):
        assert run(program, [rate], step=f(value))[0] == pytest.approx([expected])
    with pytest.raises(fx.ProgramError, match="nothing may follow default"):
        with switch.case(step < 1.0):
            pass


def test_a_cond_inside_a_loop(program):
    i, odd = L.fill_constant([1], "int64", 0), L.fill_constant([1], "float32", 0.0)
    two = L.fill_constant([1], "int64", 2)

    def body(i, odd):
        is_odd = L.equal(L.elementwise_mod(i, two), L.ones([1], "int64"))
        return [L.increment(i, in_place=False), L.cond(is_odd, lambda: odd + 1.0, lambda: odd)]

    _, odd = L.while_loop(lambda i, _: L.less_than(i, L.fill_constant([1], "int64", 7)), body, [i, odd])
    assert run(program, [odd]) == [[3.0]]


def test_print_shows_the_value_and_passes_it_on(program, capsys):
    y = L.Print(fx.data("x", [2], "float32"), message="here", summarize=1) * 2.0
    assert run(program, [y], x=f(1, 2)) == [[2.0, 4.0]]
    assert capsys.readouterr().out == "here x f32[2] [1.0, ...]\n"


def test_a_program_with_control_flow_reads_back_from_its_text(program):
    x = fx.data("x", [1], "float32")
    L.cond(x > 0.0, lambda: x * 2.0, lambda: -x)
    L.while_loop(lambda v: v < 9.0, lambda v: v + 1.0, [x])
    assert fx.Program.parse_from_string(str(program)) == program
