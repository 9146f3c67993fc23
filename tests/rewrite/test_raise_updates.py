"""The rewrite RaiseUpdates: where updates go, what keeps them at the end, and the same bits on one device and on ranks."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import Role
from fluidx.rewrite import RaiseUpdates

from ..transpiler.models import same_answers

L = fx.layers


def chain(layers=4, width=8, optimizer=None):
    main, startup = fx.Program("chain"), fx.Program("chain_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, width], "float32")
        for _ in range(layers):
            h = L.fc(h, width, bias_attr=False)
        (optimizer or fx.optimizer.SGD(0.5)).minimize(L.mean(h))
    return main, startup


def updates(program):
    """The positions of updates of parameters."""
    return [k for k, op in enumerate(program.ops) if op.role is Role.OPTIMIZE]


def test_an_update_follows_the_last_reader_of_its_parameter():
    """Backward of a layer is two products: the gradient of its weight, and that of its input, which reads the weight. The first layer has
    only the first."""
    main, _ = chain()
    made = RaiseUpdates().run(main)
    assert updates(main) == [len(main.ops) - k for k in (4, 3, 2, 1)]
    first = next(k for k, op in enumerate(made.ops) if op.role is Role.OPTIMIZE) - 2
    kinds = [op.type for op in made.ops[first:]]
    assert kinds == ["matmul", "matmul", "sgd"] * 3 + ["matmul", "sgd"]
    assert sorted(map(str, made.ops)) == sorted(map(str, main.ops))


def test_a_step_holds_one_gradient_and_not_all():
    main, _ = chain(layers=8, width=256)
    gradient = 256 * 256 * 4
    before, after = (dry_plan(p, {"x": (4, 256)}).arena_bytes for p in (main, RaiseUpdates().run(main)))
    assert before > 8 * gradient and after < 2 * gradient


def test_clipping_by_the_global_norm_keeps_all_updates_at_the_end():
    main, _ = chain(optimizer=fx.optimizer.SGD(0.5, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0)))
    made = RaiseUpdates().run(main)
    assert [op.type for op in made.ops][-4:] == ["sgd"] * 4
    assert max(k for k, op in enumerate(made.ops) if op.role is Role.BACKWARD) < len(made.ops) - 4


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_one_device_gives_the_same_bits(optimizer):
    feed, found = {"x": np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)}, []
    for rewrite in (False, True):
        main, startup = chain(optimizer=getattr(fx.optimizer, optimizer)(0.1))
        startup.random_seed = 7
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(startup, scope=scope)
        program = RaiseUpdates().run(main) if rewrite else main
        for _ in range(3):
            exe.run(program, feed=feed, scope=scope)
        found.append([scope.get(p.name) for p in main.all_parameters()])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "fsdp"])
def test_ranks_give_what_one_device_gives(strategy):
    same_answers("mlp", fx.strategies.get(f"{strategy},raise_updates"), 2)
