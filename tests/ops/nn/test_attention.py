"""Attention against the formula in float64, and edge cases: rows that see no position, huge scores, empty operands."""

import ml_dtypes
import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.cost import op_flops
from fluidx.ir import Builder, ProgramError, TensorType, np_dtype
from fluidx.ops.nn.attention import ScaledDotProductAttention as Op
from fluidx.ops.nn.attention import ScaledDotProductAttentionGrad as Grad
from fluidx.testing.models import TestModel, train_single

L = fx.layers


def formula(q, k, v, mask=None, causal=False, scale=1.0):
    """The weights and the result, in float64, with each head of k and v repeated for its group."""
    q, k, v = (x.astype("float64") for x in (q, k, v))
    if q.ndim > 2:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = np.einsum("...sd,...td->...st", q, k) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis=-1, keepdims=True)
    weights = e / np.where(total == 0, 1, total)
    return weights, weights @ v


def forward(q, k, v, mask=None, **attrs):
    out, lse = (np.full(t.shape, 77, t.dtype) for t in Op.infer(*map(typed, (q, k, v)), None, **rest(attrs)))
    Op.kernel(np, q, k, v, mask, out=(out, lse), **rest(attrs))
    return out, lse


def backward(q, k, v, mask, out, lse, g, **attrs):
    made = [np.full_like(x, 77) for x in (q, k, v)]
    Grad.kernel(np, q, k, v, mask, out, lse, g, out=(*made, None), **rest(attrs))
    return made


def typed(x):
    return TensorType(x.dtype.name, x.shape)


def rest(attrs):
    return dict(Op.complete_attrs({"scale": 1.0, **attrs}))


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# roundings of sums of a few products, of exponentials, and of the result
CLOSE = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["", "bool", "numbers"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_the_formula(heads, masked, causal, dtype):
    q = normal(3, heads[0], 5, 8, dtype=dtype)
    k, v = normal(3, heads[1], 7, 8, seed=1, dtype=dtype), normal(3, heads[1], 7, 6, seed=2, dtype=dtype)
    mask = {"": None, "bool": normal(5, 7, seed=3) > -0.5, "numbers": normal(3, 1, 1, 7, seed=4, dtype=dtype)}[masked]
    weights, want = formula(q, k, v, mask, causal, 0.3)
    out, lse = forward(q, k, v, mask, causal=causal, scale=0.3)
    assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.dtype("float32" if dtype == "float16" else dtype))
    np.testing.assert_allclose(out.astype("float64"), want, rtol=0, atol=CLOSE[dtype] * 4)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 2, 3)])
def test_any_number_of_axes_may_precede_the_rows(shape):
    q, k, v = normal(*shape, 5, 4), normal(*shape, 6, 4, seed=1), normal(*shape, 6, 3, seed=2)
    np.testing.assert_allclose(forward(q, k, v)[0], formula(q, k, v)[1], atol=1e-5)  # roundings of float32


def test_equal_scores_give_means_and_a_causal_row_sees_no_later_position():
    v = np.arange(12, dtype="float32").reshape(4, 3)
    q, k = np.zeros((6, 2), "float32"), normal(4, 2)
    assert (forward(q, k, v)[0] == v.mean(axis=0)).all()
    seen = np.stack([v[: min(i + 1, 4)].mean(axis=0) for i in range(6)])  # aligned at the top left: row 0 sees key 0, row 4 all keys
    np.testing.assert_allclose(forward(q, k, v, causal=True)[0], seen, rtol=1e-6)  # a division by 3 is rounded


def test_a_row_that_sees_no_position_gives_zeros_and_no_gradient():
    q, k, v = normal(3, 4), normal(5, 4, seed=1), normal(5, 2, seed=2)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    for m in (mask, np.where(mask, 0, -np.inf).astype("float32")):
        out, lse = forward(q, k, v, m)
        assert (out[1] == 0).all() and lse[1] == -np.inf and np.isfinite(out).all()
        dq, dk, dv = backward(q, k, v, m, out, lse, normal(3, 2, seed=3))
        assert (dq[1] == 0).all() and all(np.isfinite(d).all() for d in (dq, dk, dv))
        others = [0, 2]
        again = backward(q[others], k, v, m[others], out[others], lse[others], normal(3, 2, seed=3)[others])
        for a, b in zip((dq[others], dk, dv), again, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums over three rows, of which one is 0, and over two


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_least_number_of_a_dtype_in_a_mask_is_a_score(dtype, with_lse):
    """Beside other scores it hides a position; a row of nothing else weighs all positions alike; beside -infinity it is all there is."""
    dtype = np_dtype(dtype)
    least = float(ml_dtypes.finfo(dtype).min)
    q, k, v = np.zeros((4, 2), dtype), np.ones((4, 2), dtype), np.arange(8).reshape(4, 2).astype(dtype)
    mask = np.array([[least, 0, least, 0], [least] * 4, [-np.inf, -np.inf, least, -np.inf], [-np.inf] * 4], "float64").astype(dtype)
    out, lse = forward(q, k, v, mask) if with_lse else (np.empty_like(v), None)
    if not with_lse:
        Op.kernel(np, q, k, v, mask, out=(out, None), **rest({}))
    assert (out.astype("float64") == [[4, 5], [3, 4], [4, 5], [0, 0]]).all()
    if with_lse:
        assert lse[1] == lse[2] == least and lse[3] == -np.inf and abs(lse[0] - np.log(2)) < 0.01  # bfloat16 has 8 bits


@pytest.mark.parametrize("hidden", [np.finfo("float32").min, -np.inf])
def test_positions_hidden_by_a_mask_of_numbers_have_no_gradient(hidden):
    """Gradients are those over the positions that are seen; a row with one position has none through its scores."""
    q, k, v, g = normal(2, 4), normal(5, 4, seed=1), normal(5, 3, seed=2), normal(2, 3, seed=3)
    mask = np.array([[0, hidden, 0, hidden, hidden], [hidden, hidden, 0, hidden, hidden]], "float32")
    dq, dk, dv = backward(q, k, v, mask, *forward(q, k, v, mask), g)
    seen = [0, 2]
    short = q[:1], k[seen], v[seen], None
    want = backward(*short, *forward(*short), g[:1])
    np.testing.assert_allclose(dq, [want[0][0], [0] * 4], atol=1e-6)  # roundings of float32, here and below
    np.testing.assert_allclose(dk[seen], want[1], atol=1e-6)
    np.testing.assert_allclose(dv[seen], want[2] + [[0] * 3, g[1]], atol=1e-6)
    assert (dk[[1, 3, 4]] == 0).all() and (dv[[1, 3, 4]] == 0).all()


def test_an_infinite_score_gives_nan_in_its_row():
    q, k, v = normal(2, 4), normal(3, 4, seed=1), normal(3, 2, seed=2)
    out, lse = forward(q, k, v, np.array([[0, np.inf, 0], [0, 0, 0]], "float32"))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]) and np.isfinite(out[1]).all() and np.isfinite(lse[1])


def test_gradients_of_heads_that_are_shared_and_empty():
    q, k, v, g = normal(4, 3, 0), normal(2, 5, 0), normal(2, 5, 6), np.ones((4, 3, 6), "float32")
    dq, dk, dv = backward(q, k, v, None, *forward(q, k, v), g)
    assert dq.shape == q.shape and dk.shape == k.shape
    np.testing.assert_allclose(dv, np.full((2, 5, 6), 6 / 5), rtol=1e-6)  # 2 heads of 3 rows, each with weights of 1/5


def test_huge_scores_do_not_overflow():
    """Each row sees one key only; with small integers in v and its gradient everything else is exactly 0."""
    k, v, g = 1e18 * np.eye(4, dtype="float32"), *np.random.default_rng(0).integers(-4, 5, (2, 4, 3)).astype("float32")
    out, lse = forward(k, k, v)
    assert (out == v).all() and (lse == np.float32(1e18) ** 2).all()
    dq, dk, dv = backward(k, k, v, None, out, lse, g)
    assert (dv == g).all() and (dq == 0).all() and (dk == 0).all()


def test_nan_stays_in_its_row():
    q, k, v = normal(3, 4), normal(5, 4, seed=1), normal(5, 2, seed=2)
    q[1, 2] = np.nan
    out, lse = forward(q, k, v)
    assert np.isnan(out[1]).all() and np.isnan(lse[1]) and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("shapes", [((0, 2, 3, 4), (0, 2, 5, 4)), ((2, 0, 4), (2, 5, 4)), ((2, 3, 4), (2, 0, 4)), ((0, 3, 4), (0, 5, 4))])
def test_empty_operands(shapes):
    q, k = normal(*shapes[0]), normal(*shapes[1])
    for causal in (False, True):
        out, lse = forward(q, k, k, causal=causal)
        assert out.shape == q.shape and (out == 0).all() and (lse == -np.inf).all()
        assert all((d == 0).all() for d in backward(q, k, k, None, out, lse, q, causal=causal))


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_those_of_the_formula_in_separate_operators(masked):
    """In float64, where another order of the same sums changes the last digits only."""

    def model(fused):
        main, startup = fx.Program("attention"), fx.Program("attention_startup")
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            x = fx.data("x", [-1, 5, 8], "float64")
            q, k, v = (L.transpose(L.reshape(L.fc(x, 8, 2, param_attr=n), [0, 0, 2, 4]), [0, 2, 1, 3]) for n in "qkv")
            bias = L.create_parameter([2, 1, 5], "float64", name="bias") if masked else None
            if fused:
                mixed = L.scaled_dot_product_attention(q, k, v, bias, causal=True)
            else:
                scores = L.matmul(q, k, transpose_y=True, alpha=0.5)
                scores = scores if bias is None else L.elementwise_add(scores, bias)
                scores = L.elementwise_add(scores, L.assign(np.triu(np.full((5, 5), -1e30), 1)))
                mixed = L.matmul(L.softmax(scores), v)
            loss = L.mean(L.square(mixed))
            _, pairs = fx.optimizer.SGD(0.5).minimize(loss)
        return TestModel(main, startup, loss, None, [(p.name, g.name) for p, g in pairs])

    feeds = [{"x": normal(3, 5, 8, seed=s, dtype="float64")} for s in range(2)]
    found = []
    for fused in (True, False):
        m = model(fused)
        found.append(train_single(m, feeds, [m.loss, *(g for _, g in m.gradients)])[0])
        assert len(m.gradients) == 6 + masked  # three weights and biases, and the mask that is added to the scores
    for a, b in zip(*found, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-14)


def test_operands_that_do_not_fit_are_refused():
    def t(*shape, dtype="float32"):
        return TensorType(dtype, shape)

    cases = [
        ((t(2, 3, 4), t(2, 5, 6), t(2, 5, 6), None), "Q f32[2,3,4] and K f32[2,5,6] must have the same last axis, found 4 and 6"),
        ((t(2, 3, 4), t(2, 5, 4), t(2, 6, 4), None), "K f32[2,5,4] and V f32[2,6,4] must be equal in all axes but the last"),
        ((t(6, 3, 4), t(4, 5, 4), t(4, 5, 4), None), "the 6 heads of Q f32[6,3,4] must be a multiple of the 4 heads of K f32[4,5,4]"),
        ((t(2, 3, 4), t(5, 4), t(5, 4), None), "the same number of axes, 2 or more, got f32[2,3,4], f32[5,4] and f32[5,4]"),
        ((t(3, 4), t(5, 4), t(5, 4), t(4, 5)), "Mask f32[4,5] does not broadcast to the scores of shape [3, 5]"),
        ((t(3, 4), t(5, 4), t(5, 4), t(3, 5, dtype="int64")), "Mask must be bool or have the dtype of Q, float32, found int64"),
        ((t(3, 4, dtype="int64"),) * 3 + (None,), "needs a float Q, got i64[3,4]"),
    ]  # fmt: skip
    for types, said in cases:
        with pytest.raises(ProgramError) as error:
            Op.infer(*types, scale=1.0, causal=False)
        assert said in str(error.value)


def test_the_gradient_needs_lse_and_is_not_through_it():
    def written(drop):
        program = fx.Program()
        b = Builder(program.global_block())
        q = program.global_block().create_var("q", [3, 4], "float32", is_data=True)
        return q, b.emit(Op.name, q, q, q, None, scale=0.5, out={"Lse": None} if drop else None)

    q, (out, _) = written(True)
    with pytest.raises(ProgramError, match="its gradient needs output 'Lse', which is absent"):
        fx.gradients([out], [q])
    q, (_, lse) = written(False)
    with pytest.raises(ProgramError, match="has a gradient through its first output only; Lse cannot be differentiated"):
        fx.gradients([lse], [q])


def test_causal_counts_half_of_the_operations():
    types = [TensorType("float32", (2, 8, 64, 16))] * 3
    outs = Op.infer(*types, None, scale=1.0, causal=False)

    def flops(causal):
        attrs = rest({"causal": causal})
        return op_flops(Op, Op.pattern_of([*types, None], outs, attrs), [*types, None], outs, attrs)

    assert flops(False) == 2 * flops(True) == 2 * 8 * 64 * 64 * (2 * 16 + 2 * 16 + 5)
