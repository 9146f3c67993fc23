"""Attention that is written out becomes one operator, whichever way it is written, forward and backward."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.executor import Scope
from fluidx.rewrite import DropIdentities, JoinAttention, rewritten
from fluidx.testing import check_rewrite
from tests.rewrite.written_out import attention

L = fx.layers
GIVEN = "data %q: f32[-1,2,5,4]; data %k: f32[-1,2,6,4]; data %v: f32[-1,2,6,3]; data %mask: f32[5,6]"
CHAIN = """
  %s: f32[-1,2,5,6] = matmul(%q, %k) {alpha=0.5, transpose_y=true}
  %n: f32[-1,2,5,6] = elementwise_add(%s, %mask)
  %w: f32[-1,2,5,6] = softmax(%n)
  %out: f32[-1,2,5,3] = matmul(%w, %v)
"""
JOINED = "%out: f32[-1,2,5,3], %out.lse: f32[-1,2,5] = scaled_dot_product_attention(%q, %k, %v, %mask) {scale=0.5}"


def test_the_chain_is_one_operator_with_its_mask():
    assert check_rewrite(JoinAttention(), given=GIVEN, before=CHAIN, after=JOINED, fetch=["out"]) == []
    turned = CHAIN.replace("(%s, %mask)", "(%mask, %s)")
    assert check_rewrite(JoinAttention(), given=GIVEN.replace("[5,6]", "[-1,2,5,6]"), before=turned, after=JOINED, fetch=["out"]) == []


def test_numbers_become_the_scale():
    """Of queries, keys, the product and the scores: 0.25 * 2 * 0.5 * 4."""
    before = """
      %two: f32[1] = fill_constant() {shape=[1], value=2.0}
      %a: f32[-1,2,5,4] = scale(%q) {scale=0.25}
      %b: f32[-1,2,6,4] = elementwise_mul(%k, %two)
      %s: f32[-1,2,5,6] = matmul(%a, %b) {alpha=0.5, transpose_y=true}
      %n: f32[-1,2,5,6] = scale(%s) {scale=4.0}
      %w: f32[-1,2,5,6] = softmax(%n) {axis=3}
      %out: f32[-1,2,5,3] = matmul(%w, %v)
    """
    after = JOINED.replace("%mask", "_").replace("0.5", "1.0")
    assert check_rewrite(JoinAttention(), given=GIVEN, before=before, after=after, fetch=["out"]) == []


def test_scaled_queries_that_others_read_stay_scaled():
    more = "  %a: f32[-1,2,5,4] = scale(%q) {scale=0.25}\n"
    chain = CHAIN.replace("matmul(%q", "matmul(%a") + "  %e: f32[-1,2,5,4] = exp(%a)\n"
    after = f"{more}  {JOINED.replace('%q', '%a')}\n  %e: f32[-1,2,5,4] = exp(%a)\n"
    assert check_rewrite(JoinAttention(), given=GIVEN, before=more + chain, after=after, fetch=["out", "e"]) == []


@pytest.mark.parametrize("order, shape", [([0, 1, 3, 2], "[-1,2,6,4]"), ([0, 2, 3, 1], "[-1,6,2,4]")])
def test_keys_that_are_transposed_before_the_product(order, shape):
    """Rows and columns exchanged, which the operator does itself; or the heads brought forward too, which stays to be done."""
    head = GIVEN.replace("%k: f32[-1,2,6,4]", f"%k: f32{shape}")
    chain = CHAIN.replace("%k) {alpha=0.5, transpose_y=true}", "%t) {alpha=0.5}")
    before = f"  %t: f32[-1,2,4,6] = transpose(%k) {{axis={order}}}\n{chain}"
    same = order == [0, 1, 3, 2]
    turned = "" if same else "  %k.turned: f32[-1,2,6,4] = transpose(%k) {axis=[0, 2, 1, 3]}\n  "
    after = turned + (JOINED if same else JOINED.replace("%k", "%k.turned"))
    assert check_rewrite(JoinAttention(), given=head, before=before, after=after, fetch=["out"]) == []


def causal(rows, columns, never=-1e9):
    return np.triu(np.full((rows, columns), never, "float32"), 1)


@pytest.mark.parametrize("rows, columns", [(5, 5), (3, 6), (6, 3)])
@pytest.mark.parametrize("never", [-1e9, -np.inf])
def test_a_constant_mask_up_to_the_diagonal_is_causal(rows, columns, never):
    main = fx.Program("causal")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        q, k = fx.data("q", [-1, 2, rows, 4]), fx.data("k", [-1, 2, columns, 4])
        out = attention(q, k, k, L.assign(causal(rows, columns, never)))
    joined = rewritten(main, [JoinAttention()], fetch=[out])
    assert [op.type for op in joined.ops] == ["scaled_dot_product_attention"] and joined.ops[0].attrs["causal"]
    rng = np.random.default_rng(0)
    feed = {"q": rng.standard_normal((2, 2, rows, 4), "float32"), "k": rng.standard_normal((2, 2, columns, 4), "float32")}
    before, after = (fx.Executor().run(p, feed=feed, fetch_list=[out.name])[0] for p in (main, joined))
    np.testing.assert_allclose(after, before, 1e-5, 1e-6)  # a sum of six products and an exponential in float32


def test_a_mask_that_is_computed_of_constants_is_known_too():
    main = fx.Program("computed")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        q = fx.data("q", [-1, 2, 4, 4])
        lower = L.assign(np.tril(np.ones((4, 4), "float32")))
        out = attention(q, q, q, L.unsqueeze((lower - 1.0) * 1e10, [0, 1]))
    assert [op.type for op in rewritten(main, [JoinAttention()], fetch=[out]).ops] == ["scaled_dot_product_attention"]


@pytest.mark.parametrize(
    "mask",
    [causal(4, 4, -1e4), causal(4, 4).T, causal(4, 4) + np.float32(1), np.triu(np.full((4, 4), -1e9, "float32"), 2), causal(4, 4)[:1]],
    ids=["small", "upper", "not 0", "one more", "one row"],
)
def test_another_constant_mask_is_added(mask):
    main = fx.Program("other")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        q = fx.data("q", [-1, 2, 4, 4])
        out = attention(q, q, q, L.assign(np.ascontiguousarray(mask)))
    joined = rewritten(main, [JoinAttention()], fetch=[out])
    assert [op.type for op in joined.ops] == ["assign_value", "scaled_dot_product_attention"] and not joined.ops[1].attrs["causal"]


def by_hand(q, k, v, mask):
    """In float64."""
    q, k, v = (a.astype("float64") for a in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + (0 if mask is None else mask.astype("float64"))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


SHAPES = st.sampled_from([
    ((-1, 5, 4), (-1, 6, 4), (-1, 6, 3)), ((-1, 2, 5, 4), (-1, 2, 6, 4), (-1, 2, 6, 3)), ((5, 4), (6, 4), (6, 3)),
    ((-1, 4, 5, 4), (-1, 1, 6, 4), (-1, 1, 6, 3)), ((-1, 3, 2, 5, 4), (-1, 3, 2, 6, 4), (-1, 3, 2, 6, 3)),
])  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SHAPES, st.sampled_from(["alpha", "queries", "keys", "scores"]), st.sampled_from([None, (5, 6), (1, 6), (5, 1), "full"]), st.booleans(),
    st.sampled_from(["float64", "float32"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_way_to_write_it(shapes, scaled, masked, flip, dtype, trains, mask_too):
    """One operator, with the values of the chain and of NumPy, and with the gradients of the chain."""
    main = fx.Program("ways")
    shape = (*shapes[0][:-1], 6) if masked == "full" else masked
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        operands = [fx.data(n, list(s), dtype) for n, s in zip("qkv", shapes, strict=True)]
        mask = None if shape is None else fx.data("mask", list(shape), dtype)
        for x in (*operands, *([mask] if mask is not None and mask_too else [])):
            x.stop_gradient = False
        out = attention(*operands, mask, scaled, flip and masked == "full")
        wanted = [x for x in (*operands, mask) if x is not None and not x.stop_gradient]
        gradients = fx.gradients(L.reduce_sum(L.sin(out)), wanted) if trains else []
    joined = rewritten(main, [JoinAttention()], fetch=[out, *gradients], log=(log := []))
    kinds = Counter(op.type for op in joined.ops)
    assert log == [] and kinds["scaled_dot_product_attention"] == 1 and kinds["scaled_dot_product_attention_grad"] == trains
    assert not {"matmul", "softmax", "softmax_grad"} & kinds.keys()
    assert fx.Program.parse_from_string(str(joined)) == joined
    rng, given_ = np.random.default_rng(0), [*zip("qkv", shapes, strict=True), *([("mask", shape)] if shape else [])]
    feed = {n: rng.standard_normal([3 if d < 0 else d for d in s]).astype(dtype) for n, s in given_}
    fetch = [v.name for v in (out, *gradients)]
    before, after = (fx.Executor().run(p, feed=feed, fetch_list=fetch) for p in (main, joined))
    # sums of six products and exponentials round some twenty times, and so do gradients, which add up two dozen terms
    tolerance = 1e-12 if dtype == "float64" else 2e-5
    np.testing.assert_allclose(after[0], by_hand(*(feed[n] for n in "qkv"), feed.get("mask")), tolerance, tolerance)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, 10 * tolerance, 10 * tolerance)


def test_queries_keys_and_values_may_be_one():
    main = fx.Program("self")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1, 5, 4], "float64")
        x.stop_gradient = False
        out = attention(x, x, x)
        (g,) = fx.gradients(L.reduce_sum(L.sin(out)) + L.reduce_sum(x), x)
    joined = rewritten(main, [JoinAttention()], fetch=[out, g])
    (add,) = (op for op in joined.ops if op.type == "sum")
    assert len(add.inputs["X"]) == 4
    feed = {"x": np.random.default_rng(0).standard_normal((2, 5, 4))}
    before, after = (fx.Executor().run(p, feed=feed, fetch_list=[out.name, g.name]) for p in (main, joined))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, 1e-11, 1e-12)  # some fifty roundings of float64


def changed(old, new, text=CHAIN):
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    "given, text, fetch, reason",
    [
        (GIVEN, CHAIN, ["out", "w"], "%w is fetched"),
        (GIVEN, CHAIN + "  %e: f32[-1,2,5,6] = exp(%n)\n", ["out", "e"], "%n is read elsewhere"),
        (GIVEN, changed("  %w:", "  %n = exp(%n)\n  %w:"), ["out"], "%n is written more than once, or kept from run to run"),
        (GIVEN, changed("  %out:", "  %k = exp(%k)\n  %out:"), ["out"], "%k is written in between"),
        (GIVEN, changed("softmax(%n)", "softmax(%n) {axis=2}"), ["out"], "the softmax is along axis 2, not along the last one"),
        (GIVEN, changed("matmul(%w, %v)", "matmul(%w, %v) {alpha=2.0}"), ["out"],
         "%out is not the product of the untransposed weights and values"),
        (GIVEN, changed("add(%s, %mask)", "sub(%s, %mask)"), ["out"], "%n is not a product of queries and keys, scaled and masked"),
        (GIVEN, changed("add(%s, %mask)", "mul(%s, %mask)"), ["out"], "%n is not a product of queries and keys, scaled and masked"),
        (GIVEN.replace("%mask: f32[5,6]", "%mask: f32[2]"), changed("%mask)", "%mask) {axis=1}"), ["out"],
         "%mask does not align with the last axes of the scores"),
        (GIVEN.replace("%mask: f32[5,6]", "%mask: f32[-1,1,-1,6]"), CHAIN, ["out"], "%mask may be larger than the scores"),
        (GIVEN.replace("%k: f32[-1,2,6,4]", "%k: f32[-1,2,4,6]"), changed("alpha=0.5, transpose_y=true", "alpha=0.5"), ["out"],
         "%k is not transposed, neither by the product nor right before it"),
        (GIVEN.replace("%q: f32[-1,2,5,4]", "%q: f32[-1,2,4,5]"), changed("transpose_y", "transpose_x=true, transpose_y"), ["out"],
         "%q is transposed by the product"),
        (GIVEN.replace("%v: f32[-1,2,6,3]", "%v: f32[6,3]"), CHAIN, ["out"],
         "%q, %k and %v do not have the same number of axes, at least 2"),
        (GIVEN.replace("%v: f32[-1,2,6,3]", "%v: f32[-1,1,6,3]"), CHAIN, ["out"],
         "%q, %k and %v broadcast, or may broadcast, other than by heads"),
    ],
)  # fmt: skip
def test_others_are_left_with_a_reason(given, text, fetch, reason):
    p = fx.Program.parse_from_string(f"program p {{ {given}\n{text} }}")
    assert rewritten(p, [JoinAttention()], fetch=fetch, log=(log := [])) == p
    (said,) = log
    assert said.startswith("JoinAttention kept %w = softmax(%n)") and said.endswith(f": {reason}")


def test_of_values_that_ranks_hold_parts_of_none_is_joined():
    head = "group dp = [0, 1]\n" + ";".join(f"{v} shard(0) over dp" for v in GIVEN.split(";")[:3]) + ";" + GIVEN.split(";")[3]
    p = fx.Program.parse_from_string(f"program p {{ {head}\n{CHAIN} }}")
    assert rewritten(p, [JoinAttention()], fetch=["out"], log=(log := [])) == p
    assert log[0].endswith("ranks hold parts of the values")


def test_a_value_that_is_fed_is_not_joined():
    p = fx.Program.parse_from_string(f"program p {{ {GIVEN}\n{CHAIN} }}")
    assert rewritten(p, [JoinAttention()], fetch=["out"], fed=["w"], log=(log := [])) == p
    assert log[0].endswith("%w is fed")


def test_weights_that_are_dropped_are_kept_unless_the_dropout_is_switched_off():
    main = fx.Program("drops")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        q = fx.data("q", [-1, 2, 4, 4])
        out = fx.nets.scaled_dot_product_attention(L.reshape(q, [0, 8, 4]), L.reshape(q, [0, 8, 4]), L.reshape(q, [0, 8, 4]), 1, 0.5)
    assert "scaled_dot_product_attention" not in [op.type for op in rewritten(main, [JoinAttention()], fetch=[out]).ops]
    off = 'dropout_implementation="upscale_in_train", dropout_prob=0.5, is_test=true'
    dropped = f"%u: f32[-1,2,5,6], %keep: u8[-1,2,5,6] = dropout(%w) {{{off}}}"
    chain = CHAIN.replace("  %out", f"  {dropped}\n  %out").replace("(%w, %v)", "(%u, %v)")
    p = fx.Program.parse_from_string(f"program p {{ {GIVEN}\n{chain} }}")
    both = rewritten(p, [DropIdentities(), fx.rewrite.DropDead(), JoinAttention()], fetch=["out"])
    assert [op.type for op in both.ops] == ["scaled_dot_product_attention"]


def test_a_softmax_that_no_product_follows_is_none_of_its_business():
    p = fx.Program.parse_from_string("program p { data %x: f32[-1,4]\n %y: f32[-1,4] = softmax(%x) }")
    assert rewritten(p, [JoinAttention()], log=(log := [])) is p and log == []


def test_a_row_that_may_look_nowhere_gives_zeros():
    main = fx.Program("nowhere")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        q, mask = fx.data("q", [2, 4], "float64"), fx.data("mask", [2, 2], "float64")
        out = attention(q, q, q, mask)
    scope, feed = Scope(), {"q": np.ones((2, 4)), "mask": np.array([[0, 0], [-np.inf, -np.inf]])}
    joined = rewritten(main, [JoinAttention()], fetch=[out])
    before, after = (fx.Executor().run(p, feed=feed, fetch_list=[out.name], scope=scope)[0] for p in (main, joined))
    assert np.isnan(before[1]).all() and after.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]


NAN = """
  %s: f32[-1,2,5,6] = matmul(%q, %k) {alpha=0.5, transpose_y=true}
  %n: f32[-1,2,5,6] = elementwise_add(%s, %mask)
  %w: f32[-1,2,5,6] = softmax(%n)
  %zero: f32[] = fill_constant() {shape=[], value=0.0}
  %is: bool[-1,2,5,6] = isnan(%w)
  %shown: f32[-1,2,5,6] = where(%is, %zero, %w)
  %out: f32[-1,2,5,3] = matmul(%shown, %v)
"""


def test_weights_of_hidden_rows_that_are_set_to_zero():
    assert check_rewrite(JoinAttention(), given=GIVEN, before=NAN, after=JOINED, fetch=["out"]) == []
    main = fx.Program.parse_from_string(f"program p {{ {GIVEN} {NAN} }}")
    rng, mask = np.random.default_rng(0), np.zeros((5, 6), "float32")
    mask[1], mask[2, :4] = -np.inf, -np.inf
    feed = {n: rng.standard_normal((3, 2, *s), dtype="float32") for n, s in (("q", (5, 4)), ("k", (6, 4)), ("v", (6, 3)))}
    programs = main, rewritten(main, [JoinAttention()], fetch=["out"])
    (want,), (got,) = (fx.Executor().run(p, {**feed, "mask": mask}, ["out"], scope=Scope()) for p in programs)
    assert not want[:, :, 1].any() and want[:, :, 2].all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "old, new", [("value=0.0", "value=1.0"), ("%zero, %w)", "%w, %zero)"), ("isnan(%w)", "isnan(%n)")], ids=["1", "turned", "of another"]
)
def test_other_choices_between_weights_are_kept(old, new):
    changed = NAN.replace(old, new)
    assert check_rewrite(JoinAttention(), given=GIVEN, before=changed, after=changed, fetch=["out"]) == []


def test_a_fetched_test_for_nan_keeps_the_chain():
    found = check_rewrite(JoinAttention(), given=GIVEN, before=NAN, after=NAN, fetch=["out", "is"])
    assert [line.partition(": ")[2] for line in found] == ["%is is fetched"]


KEYS = """
  %flat: f32[6,7,4] = reshape(%k) {shape=[6, 7, 4]}
  %turned: f32[6,4,7] = transpose(%flat) {axis=[0, 2, 1]}
  %t: f32[3,2,4,7] = reshape(%turned) {shape=[3, 2, 4, 7]}
  %half: f32[3,2,4,7] = scale(%t) {scale=0.5}
  %s: f32[3,2,5,7] = matmul(%q, %half)
  %w: f32[3,2,5,7] = softmax(%s)
  %out: f32[3,2,5,3] = matmul(%w, %v)
"""


def test_keys_that_are_transposed_while_batch_and_heads_are_one_axis():
    """As exporters write it; scaled after it. Where the last axes are not the same before and after, nothing is joined."""
    head = "data %q: f32[3,2,5,4]; data %k: f32[3,2,7,4]; data %v: f32[3,2,7,3]"
    after = "%out: f32[3,2,5,3], %out.lse: f32[3,2,5] = scaled_dot_product_attention(%q, %k, %v) {scale=0.5}"
    assert check_rewrite(JoinAttention(), given=head, before=KEYS, after=after, fetch=["out"]) == []
    mixed = head.replace("%k: f32[3,2,7,4]", "%k: f32[3,2,4,7]")
    assert len(check_rewrite(JoinAttention(), given=mixed, before=KEYS, after=KEYS, fetch=["out"])) == 1
