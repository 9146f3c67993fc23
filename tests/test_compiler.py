"""CompiledProgram and fluid's ParallelExecutor: a program that was started on one device goes on over ranks, and back."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import classifier, integer_mlp


def one_device(model, feeds, fetch):
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    return [exe.run(model.main, feed=f, fetch_list=fetch, scope=scope) for f in feeds], scope


def compiled(model, ranks=2, **options):
    return fx.CompiledProgram(model.main).with_data_parallel(loss_name=model.loss, places=fx.cpu_places(ranks), **options)


def reduced():
    strategy = fx.BuildStrategy()
    strategy.reduce_strategy = fx.BuildStrategy.ReduceStrategy.Reduce
    return strategy


@pytest.mark.parametrize("options", [None, reduced], ids=["AllReduce", "Reduce"])
def test_ranks_go_on_from_the_scope_and_leave_their_values_there(options):
    model = integer_mlp("sum")
    feeds = [model.feed(8)]
    wanted, alone = one_device(model, feeds, [model.loss])
    exe, scope = fx.Executor(), fx.Scope()
    with fx.scope_guard(scope):
        exe.run(model.startup)
        program = compiled(model, build_strategy=options and options())
        assert np.array_equal(exe.run(program, feed=feeds[0], fetch_list=[model.loss])[0], wanted[0][0])
    for p in model.main.all_parameters():
        assert np.array_equal(scope.get(p.name), alone.get(p.name)), p.name


def test_training_may_change_between_one_device_and_ranks():
    model = classifier()
    feeds = [model.feed(8, k) for k in range(6)]
    wanted, alone = one_device(model, feeds, [model.loss])
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    program = compiled(model)
    found = [exe.run(model.main if k in (2, 5) else program, feed=f, fetch_list=[model.loss], scope=scope) for k, f in enumerate(feeds)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # the order of additions
    for d in model.main.global_block().vars.values():
        if d.persistable:
            np.testing.assert_allclose(scope.get(d.name), alone.get(d.name), rtol=1e-4, atol=1e-6)


def test_dropout_draws_what_one_device_draws():
    model = classifier(kind="dropout")
    feeds = [model.feed(8, k) for k in range(3)]
    wanted, _ = one_device(model, feeds, [model.loss])
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    program = compiled(model)
    np.testing.assert_allclose([exe.run(program, feed=f, fetch_list=[model.loss], scope=scope) for f in feeds], wanted, rtol=1e-5)


def test_what_only_reads_does_not_send_the_values_to_the_ranks_again(monkeypatch):
    model = classifier()
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    program, test = compiled(model), model.main.clone(for_test=True)
    exe.run(program, feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    given = []
    monkeypatch.setattr(fx.ParallelExecutor, "set_state", lambda self, name, value: given.append(name))
    exe.run(test, feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    scope.get(model.main.all_parameters()[0].name)
    exe.run(program, feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    assert given == []
    scope.set(model.main.all_parameters()[0].name, scope.get(model.main.all_parameters()[0].name))
    exe.run(program, feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    assert given != []


def test_a_program_that_is_written_further_is_compiled_again():
    model = integer_mlp("sum")
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    program = compiled(model)
    (first,) = exe.run(program, feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    with fx.program_guard(model.main, model.startup):
        double = fx.layers.scale(model.loss, 2.0)
    loss, twice = exe.run(program, feed=model.feed(8), fetch_list=[model.loss, double], scope=scope)
    assert np.array_equal(twice, 2 * loss) and not np.array_equal(loss, first)


def test_a_run_may_be_several_steps():
    model = integer_mlp("sum")
    wanted, _ = one_device(model, [model.feed(8)] * 3, [model.loss])
    execution = fx.ExecutionStrategy()
    execution.num_iteration_per_run = 3
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    (value,) = exe.run(compiled(model, exec_strategy=execution), feed=model.feed(8), fetch_list=[model.loss], scope=scope)
    assert np.array_equal(value, wanted[2][0])


def test_without_data_parallel_and_with_one_place_it_is_the_program(monkeypatch):
    model = integer_mlp("sum")
    wanted, _ = one_device(model, [model.feed(8)], [model.loss])
    exe = fx.Executor()
    monkeypatch.setattr(fx.DistributeTranspiler, "transpile", lambda *args, **kwargs: pytest.fail("nothing is to be transpiled"))
    for program in (fx.CompiledProgram(model.main), compiled(model, 1)):
        scope = fx.Scope()
        exe.run(model.startup, scope=scope)
        assert np.array_equal(exe.run(program, feed=model.feed(8), fetch_list=[model.loss], scope=scope)[0], wanted[0][0])


def test_fluids_parallel_executor_trains_and_tests_with_one_scope(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "2")
    model = classifier()
    feeds = [model.feed(8, k) for k in range(3)]
    wanted, _ = one_device(model, feeds, [model.loss])
    test = model.main.clone(for_test=True)
    with fx.scope_guard(fx.Scope()):
        fx.Executor().run(model.startup)
        train = fx.ParallelExecutor(False, model.loss, model.main)
        check = fx.ParallelExecutor(use_cuda=False, main_program=test, share_vars_from=train)
        assert train.device_count == 2
        for f, one in zip(feeds, wanted):
            before = check.run([model.loss], feed=f)
            (value,) = train.run([model.loss], feed=f)
            np.testing.assert_allclose(value, one[0], rtol=1e-5)  # the order of additions
            np.testing.assert_allclose(before[0], value, rtol=1e-5)


def misuse():
    model = integer_mlp("sum")
    options = fx.BuildStrategy()
    one, graph, late = fx.BuildStrategy(), fx.BuildStrategy(), fx.BuildStrategy()
    one.gradient_scale_strategy = fx.BuildStrategy.GradientScaleStrategy.One
    graph.async_mode = True
    late.num_trainers = 2
    exe = fx.Executor()

    def run(strategy):
        exe.run(compiled(model, build_strategy=strategy), feed=model.feed(4), fetch_list=[model.loss], scope=fx.Scope())

    return [
        (lambda: setattr(options, "fuse_all_reduce", True), fx.ProgramError, "did you mean 'fuse_all_reduce_ops'?"),
        (lambda: options.fuse_all_reduce, AttributeError, "did you mean 'fuse_all_reduce_ops'?"),
        (lambda: fx.CompiledProgram("main"), fx.ProgramError, "CompiledProgram: expected a Program, got str"),
        (lambda: compiled(model, build_strategy=fx.ExecutionStrategy()), fx.ProgramError, "build_strategy must be a BuildStrategy"),
        (lambda: compiled(model).with_data_parallel(), fx.ProgramError, "with_data_parallel was called before"),
        (lambda: fx.CompiledProgram(model.main).with_data_parallel(places=2), fx.ProgramError, "fluidx.cpu_places(4)"),
        (lambda: run(one), fx.ProgramError, "scale the loss (layers.scale(loss, factor)) and leave the option out"),
        (lambda: run(graph), fx.ProgramError, "async_mode=True is not available"),
        (lambda: run(late), fx.ProgramError, "fluidx run -n 2 --backend processes"),
        (lambda: run(None), fx.NotInitializedError, "has no value in this scope; run the startup program first"),
    ]


@pytest.mark.parametrize("call, error, text", misuse(), ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit_says_what_to_write(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_a_graph_that_would_be_drawn_is_not_and_a_warning_says_what_draws_it():
    model, options = integer_mlp("sum"), fx.BuildStrategy()
    options.debug_graphviz_path = "graph.dot"
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    with pytest.warns(UserWarning, match="fluidx.view.html"):
        exe.run(compiled(model, build_strategy=options), feed=model.feed(4), fetch_list=[model.loss], scope=scope)


def test_a_scope_within_another_sees_its_variables_and_keeps_its_own():
    outer = fx.Scope()
    outer.set("w", np.ones(2, "float32"))
    inner = outer.new_scope()
    inner.set("v", np.zeros(2, "float32"))
    inner.set("w", np.full(2, 5.0, "float32"))
    assert outer.get("w").tolist() == [5.0, 5.0] and outer.find_var("v") is None
    model = integer_mlp("sum")
    exe = fx.Executor()
    exe.run(model.startup, scope=outer)
    assert exe.run(model.main, feed=model.feed(4), fetch_list=[model.loss], scope=outer.new_scope())[0].shape == (1,)
