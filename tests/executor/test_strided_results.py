"""Values in strides: cut out of others, and made inside others, where all readers take them so; and right answers however values lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import TensorType
from fluidx.testing import interpret

L = fx.layers
HEADS, WIDTH = 2, 4


def by_head(x):
    return L.transpose(L.reshape(x, [0, 0, HEADS, WIDTH]), [0, 2, 1, 3])


def side_by_side(x):
    return L.reshape(L.transpose(x, [0, 2, 1, 3]), [0, 0, HEADS * WIDTH])


def attend(x):
    """Attention as a model writes it: queries, keys and values are thirds of one value."""
    return side_by_side(L.scaled_dot_product_attention(*map(by_head, L.split(x, 3, dim=2)), causal=True))


def source():
    return L.scale(fx.data("x", [-1, 5, 3 * HEADS * WIDTH]), 1.5)


def fed(batch=2):
    return {"x": np.random.default_rng(0).standard_normal((batch, 5, 3 * HEADS * WIDTH)).astype("float32")}


def planned(fetch, feed=None, **options):
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in (feed or fed()).items()}
    p = plan(fx.default_main_program(), types, [v.name for v in fetch], Scope().arrays, RunContext(), **options)
    check_storage(p)
    return p


def run(p, feed=None):
    return bind(p, Scope(), RunContext()).run(feed or fed())


def kernels(p, *names):
    """What is done for the operators of these types."""
    return [step.kernel for step in p.steps if step.op.type in names]


def close(fetch, p, feed=None):
    feed = feed or fed()
    want = interpret(fx.default_main_program(), feed)
    for v, found in zip(fetch, run(p, feed), strict=True):
        # values of about 1; the sums of a few products may be in another order
        np.testing.assert_allclose(found, want[v.name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_stands_between_products_without_a_copy(batch):
    x = source()
    y = attend(x)
    (g,) = fx.gradients(L.reduce_sum(y * y), [x])
    p = planned([y, g], fed(batch))
    assert set(kernels(p, "split", "reshape", "transpose")) == {"view"} and kernels(p, "concat") == ["joined"]
    close([y, g], p, fed(batch))
    concat = next(op for op in fx.default_main_program().global_block().ops if op.type == "concat")
    lies = {n: v.strided for n, v in p.values.items() if v.strided is not None}
    row = HEADS * WIDTH * 4
    parts = sorted(lies[n].offset for op in fx.default_main_program().global_block().ops for n in op.output_arg_names
                   if op.type.endswith("attention_grad"))  # fmt: skip
    assert parts == [0, row, 2 * row]
    assert len({p.values[n].buffer for n in (*concat.input_arg_names, *concat.output_arg_names)}) == 1
    assert f"+{row} in steps of {5 * 3 * row},{WIDTH * 4},{3 * row},4" in str(p)
    assert p.arena_bytes < planned([y, g], fed(batch), rewrite=False, fuse=False).arena_bytes + 64


def test_what_a_reader_wants_in_one_piece_is_copied_and_the_rest_is_not():
    a, b = L.split(source(), 2, dim=2)
    both = [L.softmax(a), L.transpose(b, [0, 2, 1])]
    p = planned(both)
    assert kernels(p, "split") != ["view"]
    close(both, p)
    rows = L.split(source(), [2, 3], dim=1)
    assert kernels(planned([rows[0]]), "split") == ["view"]  # nothing but the fetch reads it, which copies
    ends = [L.softmax(part) for part in L.split(source(), 2, dim=0)]
    p = planned(ends, fed(4))
    assert kernels(p, "split") == ["view"]  # each part is in one piece
    close(ends, p, fed(4))


def attention_of(x):
    return L.scaled_dot_product_attention(*map(by_head, L.split(x, 3, dim=2)))


def test_a_result_that_something_else_reads_in_one_piece_is_made_in_one_piece():
    out = attention_of(source())
    y, other = side_by_side(out), L.softmax(out)
    p = planned([y, other])
    assert p.values[out.name].strided is None
    close([y, other], p)


def test_a_result_that_is_fetched_may_lie_in_strides():
    out = attention_of(source())
    y = side_by_side(out)
    p = planned([out, y])
    assert p.values[out.name].strided is not None
    close([out, y], p)
    assert run(p)[0].flags.c_contiguous


@pytest.mark.parametrize("others", ["foreign", "twice", "other operator", "overwritten"])
def test_what_is_joined_is_copied_where_its_parts_are_not_one_operators_or_do_not_stay(others):
    x = source()
    y = side_by_side(attention_of(x))
    if others == "foreign":
        joined = L.concat([y, L.reshape(x, [0, 0, 3 * HEADS * WIDTH])], axis=2)
    elif others == "twice":
        joined = L.concat([y, y], axis=2)
    elif others == "other operator":
        joined = L.concat([y, side_by_side(attention_of(L.scale(x, 0.5)))], axis=2)
    else:
        joined = L.concat([y], axis=2)
        fx.default_main_program().global_block().append_op("scale", {"X": joined.name}, {"Out": joined.name}, {"scale": 3.0})
    end = L.scale(joined, 2.0)
    p = planned([end, y])
    assert "joined" not in kernels(p, "concat")
    close([end, y], p)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_part_that_changes_later_is_a_copy(cut):
    x = source()
    parts = L.split(x, 2, dim=2)
    kept = L.transpose(parts[1 - cut], [0, 2, 1])
    fx.default_main_program().global_block().append_op("increment", {"X": parts[cut].name}, {"Out": parts[cut].name}, {"step": 1.0})
    p = planned([x, kept, parts[cut]])
    assert kernels(p, "split") != ["view"]
    close([x, kept, parts[cut]], p)


@st.composite
def programs(draw):
    """Attention, and its gradient, between splits, reshapes, transposes and joins, with other readers here and there."""
    main = fx.Program("random")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        b, s = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        axis = draw(st.sampled_from([1, 2]))
        shape = [b, s, 3 * HEADS * WIDTH] if axis == 2 else [b, 3 * s, HEADS * WIDTH]
        x = fx.data("x", shape)
        x = L.scale(x, 0.5) if draw(st.booleans()) else x
        x.stop_gradient = False
        parts = L.split(x, 3, dim=axis)
        q, k, v = map(by_head, parts)
        seen = [x, *parts, q, k, v]
        out = L.scaled_dot_product_attention(q, k, v, causal=draw(st.booleans()))
        ends = [out]
        orders = st.sampled_from([[0, 2, 1, 3], [3, 0, 1, 2]])
        ends.append(side_by_side(out) if draw(st.booleans()) else L.transpose(out, draw(orders)))
        if draw(st.booleans()):
            ends.append(L.concat([ends[-1], *([L.scale(ends[-1], 2.0)] if draw(st.booleans()) else [])], axis=draw(st.integers(-2, 1))))
        if draw(st.booleans()):
            ends.append(L.softmax(draw(st.sampled_from([out, *seen]))))
        if draw(st.booleans()):
            ends.append(L.reduce_sum(out, dim=1))
        loss = L.reduce_sum(ends[-1] * ends[-1]) + L.reduce_sum(ends[1] * ends[1])
        grads = fx.gradients(loss, draw(st.lists(st.sampled_from([x, q, v, parts[1]]), min_size=1, max_size=2, unique_by=id)))
        pool = [*seen, *ends, loss]
        fetch = [*grads, *draw(st.lists(st.sampled_from(pool), max_size=3, unique_by=lambda v: v.name))]
    return main, {"x": np.random.default_rng(b).standard_normal(shape).astype("float32")}, [v.name for v in fetch]


@settings(max_examples=150, deadline=None)
@given(programs(), st.booleans())
def test_random_layouts_give_the_interpreters_values(case, natively):
    main, feed, fetch = case
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}
    p = plan(main, types, fetch, {}, RunContext(), natively=None if natively else False)
    check_storage(p)
    want = interpret(main, feed)
    for n, found in zip(fetch, bind(p, Scope(), RunContext()).run(feed), strict=True):
        # sums of at most a hundred products of numbers of about 1, in another order
        np.testing.assert_allclose(found, want[n], rtol=2e-5, atol=2e-5 * max(1, np.abs(want[n]).max()))
