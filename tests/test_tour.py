"""A tour: from a program for one device to two ranks, in the order in which a newcomer meets things."""

import numpy as np

import fluidx as fx


def test_tour():
    # A program is written by calling layers. Nothing is computed yet: operators are appended.
    main, startup = fx.Program("tour"), fx.Program("tour_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], "float32")  # -1: the batch axis
        y = fx.data("y", [-1, 1], "float32")
        loss = fx.layers.mean(fx.layers.square_error_cost(fx.layers.fc(x, 1), y))
        fx.optimizer.SGD(learning_rate=0.1).minimize(loss)  # appends the backward and optimizer operators
    assert [op.type for op in main.ops][:2] == ["mul", "elementwise_add"]
    assert main.ops[-1].type == "sgd"

    # It prints as text that parses back to an equal program.
    assert fx.Program.parse_from_string(str(main)) == main

    # One device: run startup once, then main with a batch as often as you like.
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((8, 4), "float32"), "y": rng.standard_normal((8, 1), "float32")}
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    (first,) = exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
    (second,) = exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
    assert second < first

    # Many devices: a strategy rewrites the program. The source stays as it was.
    before = str(main)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    t.transpile(program=main, startup_program=startup, trainers=2)
    assert str(main) == before
    inserted = [op for op in t.get_trainer_program(0).ops if op.type == "all_reduce"]
    assert [op.input_arg_names for op in inserted] == [("fc_0.b_0@GRAD.packed",)]  # both gradients travel in one bucket
    assert "all_reduce" in str(t.diff())

    # Before anything runs, all rank programs are proved to do together what the source does.
    assert "no deadlock" in str(t.verify())

    # Two ranks take the same feed and give the same values.
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        (one,) = ranks.run(feed=feed, fetch_list=[loss])
        (two,) = ranks.run(feed=feed, fetch_list=[loss])
    np.testing.assert_allclose([one, two], [first, second], rtol=1e-6)  # the order of additions differs: the last bits may
