"""What every State keeps: checks of a held state, which tests/executor/test_state.py runs over each implementation. A launched script runs
them by `python -m tests.executor.state_checks`."""

import numpy as np

import fluidx as fx
from fluidx import FeedError
from fluidx.executor.ranks.state import ScopeState, State, StateHolder

ROWS, COLUMNS = 6, 4


def net():
    """A program with a matrix, a bias and their velocities, and its startup program."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        y = fx.layers.fc(fx.data("x", [-1, ROWS], "float32"), COLUMNS)
        fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(y))
    return main, startup


def on_ranks(places):
    """A State on two ranks under zero1, where each rank holds its part of the velocities, and the executor."""
    main, startup = net()
    t = fx.DistributeTranspiler("zero1").transpile(program=main, startup_program=startup, trainers=2)
    exe = fx.ParallelExecutor(t, places=places, timeout=20)
    exe.run_startup()
    assert isinstance(exe, StateHolder)
    return exe.held, exe


def in_scope():
    main, startup = net()
    scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(startup, scope=scope)
    return ScopeState(main, scope), exe


def names(held: State):
    return sorted(held.layout().global_block().descs)


def value_of(held, name):
    shape = held.layout().global_block().desc(name).type.shape
    return np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape) + 1


def check_the_layout_has_the_variables_and_no_operators(held: State):
    block = held.layout().global_block()
    assert not block.oplist
    assert [n for n in names(held) if "velocity" not in n and "learning_rate" not in n] == ["fc_0.b_0", "fc_0.w_0"]
    assert block.desc("fc_0.w_0").type.shape == (ROWS, COLUMNS) and len([n for n in names(held) if "velocity" in n]) == 2


def check_what_is_set_is_read(held: State):
    for name in names(held):
        value = value_of(held, name)
        held.set_state(name, value)
        assert np.array_equal(held.state(name), value), name


def check_a_value_is_a_copy(held: State):
    held.set_state("fc_0.b_0", np.zeros(COLUMNS, "float32"))
    held.state("fc_0.b_0")[:] = 5
    assert not held.state("fc_0.b_0").any()


def check_a_value_of_another_shape_is_refused(held: State):
    try:
        held.set_state("fc_0.w_0", np.zeros((ROWS, COLUMNS + 1), "float32"))
    except FeedError as e:
        assert "fc_0.w_0" in str(e) and f"[{ROWS}, {COLUMNS}]" in str(e).replace(f"{ROWS},{COLUMNS}", f"{ROWS}, {COLUMNS}")
    else:
        raise AssertionError("it was set")


def all_parts(held):
    """The parts of all processes: {rank: {name: array}}."""
    own = {r: {n: a.tolist() for n, a in of.items()} for r, of in held.parts().items()}
    found = {}
    for one in held.script.gather_each("read parts", lambda: own):
        for rank, of in one.items():
            found.setdefault(int(rank), {}).update({n: np.array(a, "float32") for n, a in of.items()})
    return found


def check_every_part_is_there_once(held: State):
    check_what_is_set_is_read(held)
    parts = all_parts(held)
    assert set(parts) == set(range(held.world_size))
    for name in names(held):
        flat = np.concatenate([of[name].reshape(-1) for _, of in sorted(parts.items()) if name in of])
        assert np.array_equal(flat, value_of(held, name).reshape(-1)), name


def check_parts_are_set_back(held: State):
    check_what_is_set_is_read(held)
    parts = all_parts(held)
    with held.script.loading():
        for name in names(held):
            held.set_state(name, np.zeros_like(value_of(held, name)))
            held.set_parts(name, {r: of[name] for r, of in parts.items() if name in of})
    for name in names(held):
        assert np.array_equal(held.state(name), value_of(held, name)), name


def check_the_number_of_steps_is_set(held: State):
    held.step = 7
    assert held.step == 7


def check_processes_gather_and_one_is_the_first(held: State):
    firsts = held.script.gather_each("look", lambda: held.script.is_first)
    assert sum(firsts) == 1 and firsts[0] and (len(firsts) > 1) == held.script.spans_processes


def check_an_error_of_one_process_is_raised_in_all(held: State):
    def make():
        if held.script.is_first:
            raise FeedError("of all things")

    try:
        held.script.gather_each("fail", make)
    except FeedError as e:
        assert str(e).startswith("of all things")
    else:
        raise AssertionError("it was not raised")


def check_background_threads_have_the_values(held: State):
    check_what_is_set_is_read(held)
    parts = held.parts()
    found = held.background_copies(f"{__name__}:summed", {r: list(of) for r, of in parts.items()}, True)
    for rank, copy in found.items():
        assert copy.ask() == sum(float(a.sum()) for a in parts[rank].values())
        assert all(np.array_equal(copy.values[n], a) for n, a in parts[rank].items())
        copy.close()


def summed(values):
    return sum(float(a.sum()) for a in values.values())


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}

if __name__ == "__main__":
    held, exe = on_ranks(None)
    with exe:
        for check in CHECKS.values():
            check(held)
    print("all checks hold")
