"""Entries of placements against what they mean, with random shapes, group sizes and units."""

import pickle

import numpy as np
import pytest

from fluidx.ir import At, Local, Own, Partial, Pieces, Shard, TensorType
from fluidx.ir.entries import REDUCE, Entry, is_local
from fluidx.ir.errors import ProgramError
from fluidx.ir.parts import check_placement, coords_of, cut, holds, join, local_shape
from fluidx.ir.text import show_entries
from fluidx.ir.types import show_placement

SEEDS = range(40)
KINDS = [Shard(1, "g", 2), Partial("max", "g"), At(1, "g"), Pieces((0, 1, 6), "g"), Own("g"), Local()]
each_kind = pytest.mark.parametrize("entry", KINDS, ids=str)


def random_value(rng):
    shape = tuple(int(d) for d in rng.integers(1, 9, rng.integers(1, 4)))
    return rng.integers(-9, 10, shape).astype("float32")


def random_flat(rng, size, n):
    return Pieces((0, *sorted(int(k) for k in rng.integers(0, size + 1, n - 1)), size), "g")


def terms(rng, value, op, n):
    """n arrays whose sum, maximum or minimum is the value."""
    if op == "sum":
        some = [rng.integers(-9, 10, value.shape).astype(value.dtype) for _ in range(n - 1)]
        return [*some, value - sum(some)]
    away = -1 if op == "max" else 1
    found = [value + away * rng.integers(0, 5, value.shape).astype(value.dtype) for _ in range(n)]
    winner = rng.integers(0, n, value.shape)
    return [np.where(winner == k, value, x) for k, x in enumerate(found)]


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_of_ranks_lie_one_behind_the_other_and_begin_at_multiples_of_the_unit(seed):
    rng = np.random.default_rng(seed)
    size, n, unit = (int(k) for k in rng.integers(1, 30, 3))
    ranges = [Shard(0, "g", unit).range_of(k, n, size) for k in range(n)]
    assert [k for a, b in ranges for k in range(a, b)] == list(range(size))
    assert all(a % unit == 0 or a == size for a, _ in ranges)
    blocks = [-(-(b - a) // unit) for a, b in ranges]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_flat_ranges_and_a_root_make_the_value_again(seed):
    rng = np.random.default_rng(seed)
    value, n = random_value(rng), int(rng.integers(1, 6))
    axis = int(rng.integers(0, value.ndim))
    for entry in (Shard(axis, "g", int(rng.integers(1, 4))), random_flat(rng, value.size, n), At(int(rng.integers(0, n)), "g")):
        size = value.size if entry.axis is None else value.shape[axis]
        ranges = [entry.range_of(k, n, size) for k in range(n)]
        whole = value.ravel() if entry.bounds is not None else value
        parts = [whole.take(range(*r), axis) if entry.axis is not None else whole[slice(*r)] for r in ranges]
        if entry.root is not None:
            parts = [value if entry.holds(k) else None for k in range(n)]
        assert entry.check(TensorType("float32", value.shape), n) == ""
        np.testing.assert_array_equal(entry.join(parts), whole)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", sorted(REDUCE))
def test_terms_of_a_partial_value_reduce_to_it(seed, op):
    rng = np.random.default_rng(seed)
    value = random_value(rng)
    np.testing.assert_array_equal(Partial(op, "g").join(terms(rng, value, op, int(rng.integers(1, 6)))), value)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ranks_of_two_groups_hold_makes_the_value_again(seed):
    rng = np.random.default_rng(seed)
    value, sizes = random_value(rng), rng.integers(1, 4, 2)
    ranks = np.arange(sizes.prod()).reshape(sizes)
    groups = {"g": ranks.T.tolist(), "h": ranks.tolist()}
    axis = int(rng.integers(0, value.ndim))
    choices = [
        Shard(axis, "g", int(rng.integers(1, 3))), Shard(axis, "h"), Shard(0, "h"), Partial("sum", "h"), Partial("sum", "g"),
        At(int(rng.integers(0, sizes[0])), "g"), At(int(rng.integers(0, sizes[1])), "h"),
    ]  # fmt: skip
    over = {g: [e for e in choices if e.group == g] for g in groups}
    placement = tuple(over[g][rng.integers(0, len(over[g]))] for g in groups)
    assert check_placement(TensorType("float32", value.shape), placement, groups, ranks.size) == ""
    parts = []
    for rank in range(ranks.size):
        coords = coords_of(groups, rank)
        parts.append(cut(value, placement, coords) if holds(placement, coords) else None)
        if parts[-1] is not None:
            assert parts[-1].shape == local_shape(value.shape, placement, coords)
    np.testing.assert_array_equal(join(parts, placement, groups, value.shape), value)


def test_ranks_that_hold_something_are_all_or_the_root_alone():
    assert [[e.holds(k) for k in range(2)] for e in KINDS] == [[True, True], [True, True], [False, True]] + [[True, True]] * 3


@pytest.mark.parametrize("entry", [Own("g"), Local()], ids=str)
def test_values_of_each_rank_make_no_single_value(entry):
    with pytest.raises(ProgramError, match="each rank has a value of its own"):
        entry.join([np.ones(2), np.zeros(2)])


@pytest.mark.parametrize(
    "entry, shape, n, wrong",
    [
        (Shard(2, "g"), (4, 4), 2, "shard(2) over g names an axis that f32[4,4] does not have"),
        (Shard(-1, "g"), (4, 4), 2, "shard(-1) over g names an axis that f32[4,4] does not have"),
        (Shard(0, "g", 0), (4, 4), 2, "shard(0, 0) over g has no unit"),
        (Partial("mean", "g"), (4,), 2, "partial(mean) over g is no reduction that a value can wait for"),
        (At(2, "g"), (4,), 2, "at(2) over g names a rank outside of the group's 2"),
        (Pieces((0, 1, 4), "g"), (2, 2), 2, ""),
        (Pieces((0, 1, 3), "g"), (2, 2), 2, "pieces(0, 1, 3) over g does not cut the elements of f32[2,2] among 2 ranks"),
        (Pieces((0, 4), "g"), (4,), 2, "pieces(0, 4) over g does not cut the elements of f32[4] among 2 ranks"),
        (Pieces((0, 3, 1, 4), "g"), (4,), 3, "pieces(0, 3, 1, 4) over g does not cut the elements of f32[4] among 3 ranks"),
        (Pieces((0, 1), "g"), (-1,), 1, "pieces(0, 1) over g does not cut the elements of f32[-1] among 1 ranks"),
    ],
)
def test_what_cannot_be_shared_so_is_refused(entry, shape, n, wrong):
    assert entry.check(TensorType("float32", shape), n) == wrong


@each_kind
def test_an_entry_is_a_constant_that_can_be_a_key_and_be_pickled(entry):
    again = pickle.loads(pickle.dumps(entry))
    assert again == entry and hash(again) == hash(entry) and repr(again) == repr(entry)
    assert not hasattr(entry, "__dict__")
    with pytest.raises(AttributeError):
        entry.group = "h"


def test_each_kind_has_only_what_it_declares():
    have = {type(e).__name__: (e.axis, e.op, e.root, e.bounds, e.is_cut, e.is_own, e.is_local) for e in KINDS}
    assert have == {
        "Shard": (1, "", None, None, True, False, False),
        "Partial": (None, "max", None, None, False, False, False),
        "At": (None, "", 1, None, False, False, False),
        "Pieces": (None, "", None, (0, 1, 6), True, False, False),
        "Own": (None, "", None, None, False, True, False),
        "Local": (None, "", None, None, False, False, True),
    }
    for kind in (Shard, Partial, At, Pieces):
        with pytest.raises(TypeError):
            kind()


def test_an_entry_needs_the_methods_that_have_no_neutral_answer():
    class Halo(Entry):
        """A kind of entry that says nothing of itself."""

    with pytest.raises(TypeError, match="abstract"):
        Halo()


def test_spellings():
    assert show_placement(tuple(KINDS[:-1])) == "shard(1, 2) over g partial(max) over g at(1) over g pieces(0, 1, 6) over g own over g"
    assert [str(Local()), show_placement(()), str(Shard(0, "g"))] == ["local", "replicate", "shard(0) over g"]
    assert [e.label for e in KINDS] == ["shard(1, 2)", "partial(max)", "at(1)", "pieces", "own", "local"]


@each_kind
def test_over_another_group_everything_else_stays(entry):
    other = entry.over("h")
    assert type(other) is type(entry) and other.spelling == entry.spelling
    assert other.group == ("" if entry.is_local else "h")
    assert other.over(entry.group) == entry


def test_blocks_grow_with_the_scale():
    assert Shard(1, "g", 2).over("h", 3) == Shard(1, "h", 6)
    assert Partial("sum", "g").over("h", 3) == Partial("sum", "h")


def test_what_a_placement_rule_that_asks_for_an_entry_takes():
    t, rows = TensorType("float32", (4,)), TensorType("float32", (-1,))
    given = {"replicated": None} | {type(e).__name__: e.over("h") for e in KINDS}
    takes = {type(want).__name__: [name for name, have in given.items() if want.admits(have, t)] for want in KINDS}
    assert takes == {
        "Shard": ["Shard"],
        "Partial": ["replicated", "Partial"],  # the maximum of equal values is the value
        "At": ["replicated", "At"],
        "Pieces": ["Pieces"],
        "Own": ["replicated", "Own"],
        "Local": ["Local"],
    }
    assert not Partial("sum", "g").admits(None, t) and not Partial("sum", "g").admits(Partial("max", "g"), t)
    assert not Shard(0, "g").admits(Shard(1, "g"), t)
    assert not Own("g").admits(None, rows) and Own("g").admits(Own("g"), rows)


def test_stand_ins_are_numbered_for_roots_and_flat_ranges_only():
    assert [KINDS[2].stand_in(3).stands_for, KINDS[3].stand_in(0).stands_for] == [3, 0]
    assert [e.stand_in(3) is e for e in KINDS] == [True, True, False, False, True, True]
    assert all(e.stands_for is None for e in KINDS)


def test_only_a_placement_that_begins_with_local_is_local():
    assert is_local((Local(),)) and not is_local(()) and not is_local((Own("g"),))


def test_text_names_no_group_of_a_local_value():
    assert show_entries((Local("dp"),)) == " local"
