"""Layer normalization that is written out becomes one operator, whichever way it is written, forward and backward."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.executor import Scope
from fluidx.rewrite import JoinLayerNorm, rewritten
from fluidx.testing import check_rewrite
from tests.rewrite.written_out import divided, layer_norm, squared, weight, with_epsilon

L = fx.layers
CHAIN = """
  %m: f32[-1,1] = reduce_mean(%x) {dim=[1], keep_dim=true}
  %d: f32[-1,4] = elementwise_sub(%x, %m)
  %s: f32[-1,4] = square(%d)
  %v: f32[-1,1] = reduce_mean(%s) {dim=[1], keep_dim=true}
  %u: f32[-1,1] = scale(%v) {bias=1e-05}
  %r: f32[-1,1] = sqrt(%u)
  %h: f32[-1,4] = elementwise_div(%d, %r)
"""
WEIGHTS = """
  %t: f32[-1,4] = elementwise_mul(%h, %scale)
  %y: f32[-1,4] = elementwise_add(%t, %shift)
"""
GIVEN = "data %x: f32[-1,4]; param %scale: f32[4]; param %shift: f32[4]"
JOINED = "%y: f32[-1,4], %y.mean: f32[-1], %y.variance: f32[-1] = layer_norm(%x, %scale, %shift)"


def test_the_chain_is_one_operator_with_its_weights():
    assert check_rewrite(JoinLayerNorm(), given=GIVEN, before=CHAIN + WEIGHTS, after=JOINED, fetch=["y"]) == []


def test_a_chain_without_weights():
    after = "%h: f32[-1,4], %h.mean: f32[-1], %h.variance: f32[-1] = layer_norm(%x, _, _)"
    assert check_rewrite(JoinLayerNorm(), given="data %x: f32[-1,4]", before=CHAIN, after=after, fetch=["h"]) == []


def test_what_follows_stays_where_it_is_no_weight():
    """A second factor, and a value of the whole size."""
    more = WEIGHTS + "  %z: f32[-1,4] = elementwise_mul(%y, %scale)\n  %e: f32[-1,4] = elementwise_add(%z, %x)\n"
    after = f"{JOINED}\n" + "\n".join(more.splitlines()[3:])
    check_rewrite(JoinLayerNorm(), given=GIVEN, before=CHAIN + more, after=after, fetch=["e"])


def test_the_quotient_alone_is_joined_where_it_is_read_beside_its_weights():
    after = "%h: f32[-1,4], %h.mean: f32[-1], %h.variance: f32[-1] = layer_norm(%x, _, _)" + WEIGHTS
    check_rewrite(JoinLayerNorm(), given=GIVEN, before=CHAIN + WEIGHTS, after=after, fetch=["y", "h"])


def run(program, startup, feed, fetch):
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    return fx.Executor().run(program, feed=feed, fetch_list=fetch, scope=scope)


def by_hand(x, axes, scale, shift, eps):
    """In float64, as Ba, Kiros and Hinton write it."""
    dims = tuple(range(x.ndim - axes, x.ndim))
    x = x.astype("float64")
    y = (x - x.mean(dims, keepdims=True)) / np.sqrt(x.var(dims, keepdims=True) + eps)
    shape = x.shape[x.ndim - axes :]
    y = y * np.random.default_rng(1).uniform(0.5, 1.5, shape) if scale else y
    return y + np.random.default_rng(2).uniform(0.5, 1.5, shape) if shift else y


WAYS = st.fixed_dictionaries({
    "square": st.sampled_from(["square", "product", "power"]), "epsilon": st.sampled_from(["bias", "operator", "constant"]),
    "root": st.sampled_from(["sqrt", "rsqrt", "rsqrt first", "power", "inverse power", "reciprocal"]), "scale": st.booleans(),
    "shift": st.booleans(), "flip": st.booleans(), "eps": st.sampled_from([1e-5, 1e-2]),
})  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(WAYS, st.sampled_from([((6,), 1), ((3, 6), 1), ((3, 6), 2)]), st.sampled_from(["float64", "float32"]), st.booleans())
def test_every_way_to_write_it(ways, shape, dtype, trains):
    """One operator, with the values of the chain and of NumPy, and with the gradients of the chain."""
    sizes, axes = shape
    main, startup = fx.Program("ways"), fx.Program("ways_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, *sizes], dtype)
        x.stop_gradient = False
        y = layer_norm(x, axes, **ways)
        loss = L.reduce_sum(L.elementwise_mul(y, L.sin(y)))
        gradients = fx.gradients(loss, [x, *main.all_parameters()]) if trains else []
    joined = rewritten(main, [JoinLayerNorm()], fetch=[y, *gradients], log=(log := []))
    kinds = Counter(op.type for op in joined.ops)
    assert log == [] and kinds["layer_norm"] == 1 and kinds["layer_norm_grad"] == trains
    assert not {"reduce_mean", "reduce_mean_grad", "elementwise_div", "rsqrt", "sqrt", "pow", "square", "elementwise_sub"} & kinds.keys()
    assert fx.Program.parse_from_string(str(joined)) == joined
    feed = {"x": (3 * np.random.default_rng(0).standard_normal((4, *sizes)) + 1).astype(dtype)}
    fetch = [v.name for v in (y, *gradients)]
    before, after = (run(p, startup, feed, fetch) for p in (main, joined))
    # the chain, NumPy and layer_norm round some ten times each; gradients add up some twenty terms of one size
    tolerance = 1e-12 if dtype == "float64" else 5e-5
    wanted = by_hand(feed["x"], axes, ways["scale"], ways["shift"], ways["eps"])
    np.testing.assert_allclose(after[0], wanted, tolerance, tolerance)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, 10 * tolerance, 10 * tolerance)


def test_means_with_fewer_axes_that_come_back_where_they_belong():
    """By fluid's axis, and by unsqueeze."""
    main, startup = fx.Program("fewer"), fx.Program("fewer_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3, 3], "float64")
        d = L.elementwise_sub(x, L.reduce_mean(x, -1), axis=0)
        r = L.unsqueeze(L.rsqrt(L.scale(L.reduce_mean(L.square(d), -1), bias=1e-5)), [2])
        y = L.elementwise_mul(d, r)
    joined = rewritten(main, [JoinLayerNorm()], fetch=[y])
    assert [op.type for op in joined.ops] == ["layer_norm"] and joined.ops[0].attrs["begin_norm_axis"] == 2
    feed = {"x": np.random.default_rng(0).standard_normal((3, 3, 3))}
    (found,) = run(joined, startup, feed, [y.name])
    np.testing.assert_allclose(found, by_hand(feed["x"], 1, False, False, 1e-5), 1e-12, 1e-12)  # ten roundings of float64


def test_a_mean_that_meets_another_axis_is_none_of_a_row():
    """A mean of [3] subtracted along the last axis, which has the same size."""
    main = fx.Program("square")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = L.reshape(fx.data("x", [9]), [3, 3])
        d = L.elementwise_sub(x, L.reduce_mean(x, -1))
        y = L.elementwise_div(d, L.sqrt(L.scale(L.reduce_mean(L.square(d), -1), bias=1e-5)))
    assert rewritten(main, [JoinLayerNorm()], fetch=[y]) is main


def wrong(text, old, new):
    assert old in text
    return text.replace(old, new)


ALL = CHAIN + WEIGHTS


NO_ROOT = "%v does not become the root by which %x - %m is divided"


@pytest.mark.parametrize(
    "text, fetch, reason",
    [
        (ALL, ["y", "d"], "%d is fetched"),
        (ALL + "  %e: f32[-1,1] = exp(%v)\n", ["y", "e"], "%v is read elsewhere"),
        (ALL + "  %r = exp(%u)\n", ["y"], "%r is written more than once, or kept from run to run"),
        (wrong(ALL, "  %h:", "  %x = exp(%x)\n  %h:"), ["y"], "%x is written in between"),
        (wrong(ALL, "%y: f32[-1,4] =", "%y: f32[-1,4] = exp(%x)\n  %y ="), ["y"], None),
        (wrong(ALL, "dim=[1]", "dim=[0]").replace("f32[-1,1]", "f32[1,4]"), ["y"],
         "the axes [0] of %x are not its last ones, after at least one other"),
        (wrong(ALL, "bias=1e-05", "bias=0.0"), ["y"], NO_ROOT),
        (wrong(ALL, "bias=1e-05", "bias=-1.0"), ["y"], "epsilon is -1.0"),
        (wrong(ALL, "%u: f32[-1,1] = scale(%v) {bias=1e-05}\n  %r: f32[-1,1] = sqrt(%u)",
               "%u: f32[-1,1] = sqrt(%v)\n  %r: f32[-1,1] = scale(%u) {bias=1e-05}"), ["y"],
         NO_ROOT),
        (wrong(ALL, "= elementwise_div(%d, %r)", "= elementwise_div(%x, %r)"), ["y"], NO_ROOT),
    ],
)  # fmt: skip
def test_others_are_left_with_a_reason(text, fetch, reason):
    p = fx.Program.parse_from_string(f"program p {{ {GIVEN}\n{text} }}")
    log: list[str] = []
    found = rewritten(p, [JoinLayerNorm()], fetch=fetch, log=log)
    if reason is None:  # only the part that can be
        assert "layer_norm" in [op.type for op in found.ops] and found.ops[-1].type == "elementwise_add"
        return
    assert found == p
    (said,) = log
    assert said.startswith("JoinLayerNorm kept %m = reduce_mean(%x) {dim=[") and said.endswith(f": {reason}")


def test_of_values_that_ranks_hold_parts_of_none_is_joined():
    p = fx.Program.parse_from_string(f"program p {{ group dp = [0, 1]\n data %x: f32[-1,4] shard(0) over dp\n {CHAIN} }}")
    assert rewritten(p, [JoinLayerNorm()], fetch=["h"], log=(log := [])) == p
    assert log[0].endswith("ranks hold parts of the values")


def test_a_value_that_is_fed_is_not_joined():
    p = fx.Program.parse_from_string(f"program p {{ {GIVEN}\n{ALL} }}")
    assert rewritten(p, [JoinLayerNorm()], fetch=["y"], fed=["v"], log=(log := [])) == p
    assert log[0].endswith("%v is fed")


def test_another_dtype_in_between_is_another_chain():
    main = fx.Program("wide")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1, 4])
        d = x - L.reduce_mean(x, -1, keep_dim=True)
        v = L.reduce_mean(L.square(L.cast(d, "float64")), -1, keep_dim=True)
        y = L.elementwise_div(d, L.cast(L.sqrt(v + 1e-5), "float32"))
    assert rewritten(main, [JoinLayerNorm()], fetch=[y]) == main


@pytest.mark.parametrize("what", ["stop", "clip"])
def test_a_gradient_that_is_stopped_or_clipped_inside_keeps_the_chain(what):
    main = fx.Program("cut")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = L.fc(fx.data("x", [-1, 4]), 4)
        m = L.reduce_mean(x, -1, keep_dim=True)
        if what == "stop":
            m.stop_gradient = True
        d = x - m
        if what == "clip":
            fx.clip.ErrorClipByValue(0.1).attach(d)
        y = divided(d, with_epsilon(L.reduce_mean(squared(d), -1, keep_dim=True)))
    assert rewritten(main, [JoinLayerNorm()], fetch=[y], log=(log := [])) == main
    assert log[0].endswith(f"%{m.name} stops gradients" if what == "stop" else f"the gradient of %{d.name} is clipped")


def test_a_gradient_that_comes_from_elsewhere_too_keeps_the_chain():
    """The variance is a term of the loss itself."""
    main = fx.Program("more")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = L.fc(fx.data("x", [-1, 4]), 4)
        d = x - L.reduce_mean(x, -1, keep_dim=True)
        v = L.reduce_mean(L.square(d), -1, keep_dim=True)
        loss = L.mean(divided(d, with_epsilon(v))) + L.mean(v)
        fx.optimizer.SGD(0.1).minimize(loss)
    assert rewritten(main, [JoinLayerNorm()], fetch=[loss], log=(log := [])) == main
    assert log[0].endswith(f"%{v.name} is read elsewhere")


@pytest.mark.parametrize("added", [(0, 0), (0,), (1, 1), (0, 1, 1)])
def test_a_sum_that_lacks_a_term_or_has_it_twice_is_another_gradient(added):
    main = fx.Program("terms")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = L.fc(fx.data("x", [-1, 4]), 4)
        loss = L.mean(L.sin(layer_norm(x)))
        fx.optimizer.SGD(0.1).minimize(loss)
    (k,) = (k for k, op in enumerate(main.ops) if op.output_arg_names == (f"{x.name}@GRAD",))
    block = main.global_block()
    terms = block.oplist[k].inputs["X"]
    block.oplist[k] = block.oplist[k].replace(inputs={"X": tuple(terms[j] for j in added)})
    assert rewritten(main, [JoinLayerNorm()], fetch=[loss]) == main


def test_two_norms_of_one_value_share_its_gradient():
    main, startup = fx.Program("two"), fx.Program("two_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = L.fc(fx.data("x", [-1, 4], "float64"), 4)
        loss = L.mean(L.sin(layer_norm(x)) + L.cos(layer_norm(x, scale=False, eps=1e-3)) + x)
        fx.optimizer.SGD(0.1).minimize(loss)
    joined = rewritten(main, [JoinLayerNorm()], fetch=[loss, "fc_0.w_0@GRAD"])
    kinds = Counter(op.type for op in joined.ops)
    assert kinds["layer_norm"] == kinds["layer_norm_grad"] == 2 and kinds["sum"] == 1
    (add,) = (op for op in joined.ops if op.type == "sum")
    assert len(add.inputs["X"]) == 3
    feed = {"x": np.random.default_rng(0).standard_normal((3, 4))}
    before, after = (run(p, startup, feed, [loss.name, "fc_0.w_0@GRAD"]) for p in (main, joined))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, 1e-11, 1e-12)  # some fifty roundings of float64


def test_a_gradient_that_a_parameter_gets_from_the_chain_alone_is_finished_by_the_one_operator():
    main = fx.Program("own")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        loss = L.mean(layer_norm(weight((3, 4), "float32", 0)) * fx.data("g", [3, 4]))
        fx.optimizer.SGD(0.1).minimize(loss)
    joined = rewritten(main, [JoinLayerNorm()], fetch=[loss])
    (g,) = (op for op in joined.ops if op.type == "layer_norm_grad")
    x, scale, shift = (p.name for p in main.all_parameters())
    assert g.output_arg_names == (f"{x}@GRAD", f"{scale}@GRAD", f"{shift}@GRAD")
    assert g.role_var == (x, f"{x}@GRAD", scale, f"{scale}@GRAD", shift, f"{shift}@GRAD")


@pytest.mark.parametrize("write", ["convolution", "batch_norm"])
def test_chains_of_other_kinds_are_untouched(write):
    main = fx.Program("others")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1, 3, 8, 8])
        if write == "convolution":
            y = L.relu(L.elementwise_add(L.conv2d(x, 4, 3, bias_attr=False), weight((4,), "float32", 0), axis=1))
        else:
            y = L.relu(L.elementwise_add(L.batch_norm(x), x))
        fx.optimizer.SGD(0.1).minimize(L.mean(y))
    assert rewritten(main, [JoinLayerNorm(), fx.rewrite.JoinAttention()], fetch=[y], log=(log := [])) is main and log == []
