"""Tensors of which the feed decides how many axes they have: what type rules say of them, and programs that run on any."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ANY, AnyRankType, Builder, Program, ProgramError, TensorType
from fluidx.ir.opdef import all_ops


def typed(value, change):
    if isinstance(value, list):
        return [typed(one, change) for one in value]
    return None if value is None else change(TensorType(str(value.dtype), value.shape))


def unranked(t):
    return AnyRankType(t.dtype)


def open_sizes(t):
    return t.with_shape((ANY,) * len(t.shape))


def flat(types):
    return [one for t in types for one in flat(t)] if isinstance(types, (list, tuple)) else [types]


def holds(general, special):
    """Is every value of the special types one of the general ones?"""
    general, special = flat(general), flat(special)
    return len(general) == len(special) and all(g is None or g.accepts(s) for g, s in zip(general, special, strict=True))


def test_what_rules_say_of_any_rank_holds_for_the_rank_that_comes():
    wrong, count, learned = [], 0, 0
    for op in all_ops():
        for sample in op.samples() if op.__module__.startswith("fluidx.ops.") and not op.control.bodies else ():
            if not all(isinstance(one, np.ndarray) or one is None for one in flat(list(sample.args))):
                continue
            types, attrs = [typed(a, lambda t: t) for a in sample.args], op.complete_attrs(sample.attrs)
            truth = op.typed(*types, **attrs)
            for k, value in enumerate(sample.args):
                try:
                    with_open = op.typed(*types[:k], typed(value, open_sizes), *types[k + 1 :], **attrs)
                except ProgramError:
                    continue  # it wants to know the sizes too
                if value is None or not holds(with_open, truth):
                    continue  # it takes an open size for what others say
                found = op.typed(*types[:k], typed(value, unranked), *types[k + 1 :], **attrs)
                count, learned = count + 1, learned + (AnyRankType not in map(type, flat(found)))
                if not holds(found, truth):
                    wrong.append(f"{op.name}, operand {k}: {found} for {truth}")
    assert not wrong
    assert count > 2000 and learned > 500  # of many the result has one shape, or one number of axes, all the same


@pytest.fixture
def b():
    with fx.program_guard(Program("p"), Program()):
        yield Builder(fx.default_main_program().global_block())


def test_a_rule_that_takes_one_rank_says_which_it_is(b):
    x, y = fx.data("x", type="f32[*]"), fx.data("y", type="f32[*]")
    filters = fx.layers.create_parameter([5, 3, 1, 1], "float32")
    assert str(b.conv2d(x, filters).desc.type) == "f32[-1,5,-1,-1]"
    assert str(b.transpose(x, axis=(1, 0)).desc.type) == "f32[-1,-1]"
    assert str(fx.layers.mean(x).desc.type) == "f32[1]"
    assert str(fx.layers.reshape(x, [-1, 4]).desc.type) == "f32[-1,4]"
    assert str(fx.layers.matmul(x, y).desc.type) == "f32[*]"


def test_what_takes_no_rank_is_refused_with_the_reason(b):
    x, table = fx.data("x", type="f32[*]"), fx.layers.create_parameter([5, 3], "float32")
    with pytest.raises(ProgramError, match=r"op lookup_table.* takes no f32\[\*\] \(.*int64.*\); .* declare as many"):
        b.lookup_table_v2(table, x)


def test_a_layer_that_counts_axes_names_the_variable_and_the_line(b):
    with pytest.raises(ProgramError, match=r"variable 'x': f32\[\*\] has no shape; .* declare as many(.|\n)*written at .*unknown_rank.py"):
        fx.layers.softmax(fx.data("x", type="f32[*]"))


def test_a_program_is_trained_on_what_has_any_number_of_axes():
    main, startup = Program("m"), Program("s")
    with fx.program_guard(main, startup):
        x = fx.data("x", type="f32[*]")
        rows = fx.layers.reshape(fx.layers.relu(x + 1.0), [-1, 4])
        w = fx.layers.create_parameter([4, 2], "float32", name="w", default_initializer=fx.initializer.Constant(1.0))
        loss = fx.layers.reduce_sum(fx.layers.matmul(rows, w))
        fx.optimizer.SGD(1.0).minimize(loss)
    for shape in ((4,), (2, 4), (1, 2, 2, 2)):
        exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        exe.run(startup, scope=scope)
        value = np.arange(np.prod(shape), dtype="float32").reshape(shape) - 3
        (found,) = exe.run(main, feed={"x": value}, fetch_list=[loss], scope=scope)
        rows = np.maximum(value + 1, 0).reshape(-1, 4)
        assert found.item() == rows.sum() * 2
        assert np.array_equal(scope.get("w"), 1 - np.repeat(rows.sum(0)[:, None], 2, 1))
