"""Plans by patching: the numbers of a patched plan are those of a plan that is made for its sizes."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.executor.dynamic.segment_cache import RunBuilder, ScopedCache
from fluidx.executor.plan.selection import Outline
from fluidx.executor.run import patched_plans
from fluidx.executor.run.patched_calls import Polynomials, array_at
from fluidx.executor.run.patched_plans import PatchedPlans, in_layout, positions, sizes_at, step_between
from fluidx.executor.run.plan_memory import with_fetches_apart
from fluidx.ir import TensorType

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
L = fx.layers


def attention_with_cache():
    """One row that asks, and keys and values that grow."""
    q, new = (fx.data(n, [2, 3, 1, 8], "float32") for n in ("q", "new"))
    past = fx.data("past", [2, 3, "past", 8], "float32")
    keys = L.concat([past, new], axis=2)
    weights = L.softmax(L.scale(L.matmul(q, keys, transpose_y=True), scale=0.3))
    return [L.matmul(weights, keys), keys]


def encoder():
    """Rows of text: products, a norm, a softmax over an open axis, and a mean over it."""
    x = fx.data("x", [2, "words", 16], "float32")
    scores = L.softmax(L.matmul(x, x, transpose_y=True))
    y = L.layer_norm(L.gelu(L.fc(L.matmul(scores, x), 24, num_flatten_dims=2)), begin_norm_axis=2)
    return [y, L.reduce_mean(y, dim=1)]


def pixels():
    """A convolution over an image that grows in height, and a pool."""
    x = fx.data("x", [1, 3, "rows", 12], "float32")
    return [L.pool2d(L.conv2d(x, 4, 3, padding=1, act="relu"), 2, "avg", 2)]


def made(model):
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup):
        fetched = model()
    scope = fx.Scope()
    fx.Executor().run(startup, scope=scope)
    return main, fetched, scope


def growing(main, fetched, scope, shapes):
    types = {n: TensorType("float32", s) for n, s in shapes.items()}
    outline = Outline.of(main, types, [v.name for v in fetched])
    return RunBuilder(scope, RunContext(), np, True, ScopedCache(8)).growing(outline, types)


CACHE = {"q": (2, 3, 1, 8), "new": (2, 3, 1, 8), "past": (2, 3, 40, 8)}, ((0,) * 4, (0,) * 4, (0, 0, 1, 0))
TEXT = {"x": (2, 40, 16)}, ((0, 1, 0),)
IMAGE = {"x": (1, 3, 40, 12)}, ((0, 0, 2, 0),)


@pytest.mark.parametrize(("model", "sizes"), [(attention_with_cache, CACHE), (encoder, TEXT), (pixels, IMAGE)])
def test_the_numbers_are_those_of_a_plan_for_the_sizes(model, sizes):
    """All words of all calls in all positions, with the arrays of words that calls refer to in the place of their addresses."""
    (shapes, step), rooms = sizes, []
    grows, start = growing(*made(model), shapes), tuple(shapes.values())
    found = PatchedPlans.of(start, step, grows.planned, lambda plan, room: rooms.append(room) or grows.bound(plan, room))
    assert found is not None and found.last > 40
    largest, still = with_fetches_apart(grows.planned(sizes_at(start, step, found.last))), np.zeros(len(found.memories), np.int64)
    for k in range(found.last + 1):
        bound = grows.bound(in_layout(grows.planned(sizes_at(start, step, k)), largest), rooms[0])
        own = [call for group in bound.compute.groups() for _, step_, _ in group for call in step_.calls]
        (words,) = found.calls
        assert told(*words.at(k, still)) == told(native.packed(own), tuple([call.keeps for call in own])), k
        for (_, a), (_, b) in zip(found.feeds, bound.feeds, strict=True):
            assert place(array_at(a, k, found.memories)) == place(b)
        assert [place(array_at(a, k, found.memories)) for a in found.fetches] == [place(a) for a in bound.fetches]


def place(a):
    return native.address(a), a.dtype, a.shape, [s for n, s in zip(a.shape, a.strides, strict=True) if n > 1]


def told(words, keeps):
    """The words, with the content of an array of a call's own in the place of its address."""
    arrays = [a for one in keeps for a in (one if isinstance(one, tuple) else (one,)) if isinstance(a, np.ndarray)]
    own = {native.address(a): a.tobytes() for a in arrays if a.dtype in (np.int64, np.uint8) and a.ndim == 1}
    return [own.get(int(w), int(w)) for w in np.frombuffer(words, np.int64)]


@pytest.mark.parametrize(("model", "sizes", "follow"), [(attention_with_cache, CACHE, True), (encoder, TEXT, True), (pixels, IMAGE, False)])
def test_runs_give_the_same_bits_as_plans_of_their_own(model, sizes, follow, monkeypatch):
    """An image may grow by one row next, and the rows that a pool makes of it do not follow from the number of its rows by a polynomial."""
    (main, fetched, scope), (shapes, step) = made(model), sizes
    rng, patched, alone = np.random.default_rng(0), fx.Executor(), fx.Executor()
    monkeypatch.setattr(alone, "_patched", lambda *given: None)
    built = []
    of = PatchedPlans.of.__func__
    monkeypatch.setattr(PatchedPlans, "of", classmethod(lambda cls, *given: built.append(of(cls, *given)) or built[-1]))
    for k in (0, 1, 2, 3, 40, 17, 60, 5):
        feed = {n: rng.standard_normal(s, dtype="float32") for n, s in zip(shapes, sizes_at(tuple(shapes.values()), step, k), strict=True)}
        for a, b in zip(*(exe.run(main, feed, fetched, scope=scope) for exe in (patched, alone)), strict=True):
            assert a.shape == b.shape and a.tobytes() == b.tobytes()
    assert built and (built[0] is not None) == follow


def peak():
    """n filters' rows over an image of 230: n times (231 - n) numbers, most for 115 and 116."""
    x, w = fx.data("x", ["n", 1, 230, 1], "float32"), fx.data("w", [1, 1, "n", 1], "float32")
    return [L.scale(L.relu(fx.ir.Builder(fx.default_main_program().global_block()).conv2d(x, w)), scale=2.0)]


def test_no_size_is_larger_than_the_memory_of_the_largest_plan():
    """A value that is largest between the sizes that are planned has a plan of its own size."""
    shapes, step = {"x": (32, 1, 230, 1), "w": (1, 1, 32, 1)}, ((1, 0, 0, 0), (0, 0, 1, 0))
    grows = growing(*made(peak), shapes)
    assert PatchedPlans.of(tuple(shapes.values()), step, grows.planned, grows.bound) is None


def test_a_new_weight_is_seen():
    main, fetched, scope = made(encoder)
    exe, feed = fx.Executor(), lambda words: {"x": np.ones((2, words, 16), "float32")}
    for words in range(40, 45):
        exe.run(main, feed(words), fetched, scope=scope)
    weight = next(n for n, d in main.global_block().descs.items() if d.persistable and len(d.type.shape) == 2)
    scope.set(weight, np.zeros_like(scope.get(weight)))
    assert not exe.run(main, feed(46), fetched, scope=scope)[0].any()


def test_steps_of_sizes():
    assert step_between(((2, 3), (5,)), ((2, 9), (8,))) == ((0, 2), (1,))
    assert step_between(((2, 3),), ((2, 3),)) is None and step_between(((2, 3),), ((1, 4),)) is None
    assert step_between(((2,),), ((2, 3),)) is None
    assert positions(((2, 3), (5,)), ((0, 2), (1,)), ((2, 13), (10,))) == 5
    assert positions(((2, 3), (5,)), ((0, 2), (1,)), ((2, 13), (9,))) is None


def test_numbers_follow_in_polynomials_only():
    at = [0, 1, 20, 10, 7]
    rules = [lambda k: 5, lambda k: 3 * k, lambda k: k * k - k, lambda k: (k + 3) // 4, lambda k: min(k, 19), lambda k: k % 2]
    found, right = Polynomials.through(at, [np.array([r(k) for r in rules]) for k in at])
    assert right.tolist() == [True, True, True, False, False, False]
    assert found.at(13)[:3].tolist() == [5, 39, 156]


# -- feeds in place, and arrays that are handed out -------------------------------------------------------------------------------------


def cached():
    """One row that asks; rows are added to keys and values. Old values, the keys in another order, and a mean are fetched too."""
    q, k, v = (fx.data(n, [1, 2, 1, 8], "float32") for n in ("q", "k", "v"))
    old_keys, old_values = (fx.data(n, [1, 2, "past", 8], "float32") for n in ("keys", "values"))
    mask = fx.data("mask", [1, 1, 1, "all"], "float32")
    keys, values = L.concat([old_keys, k], axis=2), L.concat([old_values, v], axis=2)
    weights = L.softmax(L.elementwise_add(L.matmul(q, keys, transpose_y=True), mask))
    return [L.matmul(weights, values), keys, values, L.transpose(keys, [0, 1, 3, 2]), L.reduce_mean(values, dim=2), old_values, keys]


def computed(feed):
    """The same by NumPy."""
    keys, values = (np.concatenate([feed[old], feed[new]], 2) for old, new in (("keys", "k"), ("values", "v")))
    scores = np.exp(feed["q"] @ keys.swapaxes(2, 3) + feed["mask"])
    y = scores / scores.sum(-1, keepdims=True) @ values
    return [y, keys, values, keys.swapaxes(2, 3), values.mean(2), feed["values"], keys]


def step_of(rng, length, keys=None, values=None):
    new = {n: rng.standard_normal((1, 2, 1, 8), dtype="float32") for n in ("q", "k", "v")}
    old = {n: rng.standard_normal((1, 2, length, 8), dtype="float32") if a is None else a for n, a in (("keys", keys), ("values", values))}
    return {**new, **old, "mask": rng.standard_normal((1, 1, 1, length + 1), dtype="float32")}


@pytest.fixture(params=[0, 4096])
def moved(request, monkeypatch):
    """Small values are moved, or copied."""
    monkeypatch.setattr(patched_plans, "_LEAST_MOVED", request.param)


@pytest.mark.parametrize("lengths", [[40], [7, 40, 3, 300, 127], [126]])
def test_caches_grow_as_one_computation_has_them(moved, lengths):
    """Each result is right, and stays: neither fed arrays nor fetched ones change in later runs, and writing into them changes nothing."""
    (main, fetched, scope), rng, exe, kept = made(cached), np.random.default_rng(0), fx.Executor(), []
    for length in lengths:
        keys = values = None
        for grown in range(6):
            feed = step_of(rng, length + grown, keys, values)
            before, want = {n: a.copy() for n, a in feed.items()}, computed(feed)
            found = exe.run(main, feed, fetched, scope=scope)
            for a, b in zip(found, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            assert all(np.array_equal(feed[n], a) for n, a in before.items())
            kept += [(a, a.copy()) for a in (*found, *feed.values())]
            keys, values = found[1], found[2]
    assert all(np.array_equal(a, b) for a, b in kept)


def test_what_a_user_writes_later_changes_no_result(moved):
    (main, fetched, scope), rng, exe = made(cached), np.random.default_rng(0), fx.Executor()
    feed, found = step_of(rng, 50), None
    for _ in range(4):
        found = exe.run(main, feed, fetched, scope=scope)
        copies = [a.copy() for a in found]
        for a in feed.values():
            a[...] = np.nan
        for a, b in zip(found, copies, strict=True):
            assert np.array_equal(a, b)
        for k, a in enumerate(found):  # each is an array of its own
            a[...] = k
        assert [float(a.ravel()[0]) for a in found] == [*range(len(found))]
        feed = step_of(rng, feed["keys"].shape[2] + 1)
        for a, b in zip(exe.run(main, feed, fetched, scope=scope), computed(feed), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_feeds_may_lie_anywhere(moved):
    """Reversed, in strides, read-only, off the bounds of their numbers, and one array for two inputs."""
    (main, fetched, scope), rng, exe = made(cached), np.random.default_rng(0), fx.Executor()
    raw = np.zeros(1 << 16, np.uint8)
    for length in range(40, 52):
        feed = step_of(rng, length)
        keys = feed["keys"]
        crooked = np.frombuffer(raw, np.float32, keys.size, 1 + 4 * (length % 3)).reshape(keys.shape)
        crooked[...] = keys
        feed["keys"] = [keys[:, :, ::-1], keys.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), crooked, feed["values"]][length % 4]
        feed["values"].flags.writeable = length % 2 == 0
        for a, b in zip(exe.run(main, feed, fetched, scope=scope), computed(feed), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_cache_is_planned_for_from_its_first_run(monkeypatch):
    """Three plans in one memory serve all lengths from 32 to 126."""
    (main, fetched, scope), rng, exe = made(cached), np.random.default_rng(0), fx.Executor()
    planned = []
    of = patched_plans.GrowingSizes.__init__

    def counting(self, plan, *rest):
        of(self, lambda sizes: planned.append(sizes) or plan(sizes), *rest)

    monkeypatch.setattr(patched_plans.GrowingSizes, "__init__", counting)
    for length in (40, 100, 32, 126):
        exe.run(main, step_of(rng, length), fetched, scope=scope)
    assert [sizes[3][2] for sizes in planned] == [32, 33, 126]


def test_sizes_that_do_not_follow_are_tried_twice(monkeypatch):
    (main, fetched, scope), exe, planned = made(pixels), fx.Executor(), []
    of = patched_plans.GrowingSizes.__init__

    def counting(self, plan, *rest):
        of(self, lambda sizes: planned.append(sizes) or plan(sizes), *rest)

    monkeypatch.setattr(patched_plans.GrowingSizes, "__init__", counting)
    for rows in range(40, 60):
        exe.run(main, {"x": np.ones((1, 3, rows, 12), "float32")}, fetched, scope=scope)
    assert 0 < len(planned) <= 6
