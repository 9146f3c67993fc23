"""RecomputeOptimizer: the same bits from less memory, with given checkpoints and with chosen ones."""

from math import ceil, sqrt

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramError
from fluidx.recompute_segments import automatic

L = fx.layers
ROWS, WIDTH = 1024, 8
VALUE = ROWS * WIDTH * 4  # bytes of what a layer hands on


class Deep:
    """A perceptron of equal layers, trained with or without recompute. `marks` are what the layers hand on."""

    def __init__(self, depth, optimizer, checkpoints=None, dropout=0.0):
        self.main, self.startup, self.marks = fx.Program("deep"), fx.Program("deep_startup"), []
        with fx.unique_name.guard(), fx.program_guard(self.main, self.startup):
            h = fx.data("x", [-1, WIDTH], "float32")
            for _ in range(depth):
                h = L.fc(h, WIDTH, act="tanh")
                h = L.dropout(h, dropout, dropout_implementation="upscale_in_train") if dropout else h
                self.marks.append(h)
            self.loss = L.mean(L.square(h))
            if callable(checkpoints):
                checkpoints = checkpoints(self.marks)
            optimizer.minimize(self.loss, **({} if checkpoints is None else {"checkpoints": checkpoints}))

    def run(self, steps=2):
        """What the steps fetch, the parameters behind them, and the bytes that the plan lays out."""
        scope, exe = fx.executor.Scope(), fx.Executor()
        fx.Executor().run(self.startup, scope=scope)
        x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype("float32")
        losses = [exe.run(self.main, feed={"x": x}, fetch_list=[self.loss], scope=scope)[0] for _ in range(steps)]
        (bound,) = {id(b): b for b, _, _ in exe._ready.values()}.values()
        return losses, [scope.get(p.name).copy() for p in self.main.all_parameters()], bound.plan.arena_bytes


def every(n):
    return lambda marks: marks[n - 1 :: n]


def sgd():
    return fx.optimizer.SGD(0.1)


@pytest.mark.parametrize("checkpoints", [every(1), every(2), every(5), "auto"], ids=["every", "every 2nd", "every 5th", "auto"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_changes_no_bit(checkpoints, dropout):
    losses, parameters, _ = Deep(9, sgd(), dropout=dropout).run()
    again, same, _ = Deep(9, fx.optimizer.RecomputeOptimizer(sgd()), checkpoints, dropout).run()
    assert np.array_equal(losses, again)
    assert all(np.array_equal(a, b) for a, b in zip(parameters, same, strict=True))


GRADIENTS = 16 * (WIDTH * WIDTH + WIDTH) * 4 + 16 * 128  # of 16 layers' parameters, each value rounded up to 64 bytes


def test_memory_is_that_of_the_checkpoints_and_one_segment():
    """16 layers in segments of 4: 3 checkpoints (behind the last one nothing is dropped), a segment of 4, and 2 gradients at work."""
    _, _, all_kept = Deep(16, sgd()).run(1)
    _, _, some = Deep(16, fx.optimizer.RecomputeOptimizer(sgd()), lambda marks: marks[3:-1:4]).run(1)
    assert all_kept >= 16 * VALUE
    assert some <= (3 + 4 + 2) * VALUE + GRADIENTS


@pytest.mark.parametrize("depth", [9, 16, 36])
def test_automatic_checkpoints_take_about_the_root_of_what_all_values_take(depth):
    """By the rule k = sqrt(M/c) segments, here sqrt(3 * depth), as a layer is three operators that make as many bytes as a cut costs."""
    k = round(sqrt(3 * depth))
    _, _, all_kept = Deep(depth, sgd()).run(1)
    _, _, some = Deep(depth, fx.optimizer.RecomputeOptimizer(sgd()), "auto").run(1)
    parameters = depth * (WIDTH * WIDTH + WIDTH) * 4 + depth * 128
    assert all_kept >= depth * VALUE
    # the checkpoints, a segment that may be half a part longer on both sides, and 2 gradients at work
    assert some <= (k - 1 + 2 * ceil(depth / k) + 2) * VALUE + parameters


def cuts_of(write):
    """The variables that stay, for the program that a function writes."""
    main = fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        write()
    block = main.global_block()
    keep, at = automatic(block, list(main.ops), [True] * len(main.ops))
    return keep, [main.ops[k].type for k in at]


def test_automatic_cuts_are_where_few_bytes_are_alive():
    """Blocks that widen eight times inside: every cut is between blocks, where one narrow value is alive."""

    def write():
        h = fx.data("x", [-1, 8], "float32")
        for _ in range(8):
            h = h + L.fc(L.fc(h, 64, act="relu"), 8)
        L.mean(h)

    keep, kinds = cuts_of(write)
    assert set(kinds) <= {"elementwise_add"} and len(kinds) >= 3
    assert len(keep) == len(kinds)  # one value each: the sum of a block


def test_a_cut_keeps_all_that_is_read_behind_it():
    def write():
        x = fx.data("x", [-1, 8], "float32")
        left, right = L.tanh(x), L.sigmoid(x)
        for _ in range(6):
            left, right = L.tanh(left), L.sigmoid(right)
        L.mean(left + right)

    keep, kinds = cuts_of(write)
    assert kinds and len(keep) == 2 * len(kinds)


def test_a_program_without_layers_has_nothing_to_cut():
    keep, kinds = cuts_of(lambda: fx.data("x", [-1, 8], "float32"))
    assert (keep, kinds) == (set(), [])


def test_checkpoints_are_given_in_three_ways():
    given = Deep(6, fx.optimizer.RecomputeOptimizer(sgd(), ["fc_1.tmp_2", "fc_3.tmp_2"])).main
    wrapped = fx.optimizer.RecomputeOptimizer(sgd())
    wrapped._set_checkpoints(["fc_1.tmp_2", "fc_3.tmp_2"])
    assert str(Deep(6, wrapped).main) == str(given)
    assert str(Deep(6, fx.optimizer.RecomputeOptimizer(sgd()), ["fc_1.tmp_2", "fc_3.tmp_2"]).main) == str(given)
    assert str(Deep(6, sgd(), ["fc_1.tmp_2", "fc_3.tmp_2"]).main) == str(given)


def test_what_cannot_be_is_refused():
    with pytest.raises(ProgramError, match=r'call _set_checkpoints\(\[...\]\) before minimize, or _set_checkpoints\("auto"\)'):
        Deep(2, fx.optimizer.RecomputeOptimizer(sgd()))
    with pytest.raises(ProgramError, match='checkpoints must be a list of variables or their names, or "auto"; got'):
        fx.optimizer.RecomputeOptimizer(sgd())._set_checkpoints("fc_0.tmp_0")
    with pytest.raises(ProgramError, match="optimizer must be an optimizer, got NoneType: None"):
        fx.optimizer.RecomputeOptimizer(None)
