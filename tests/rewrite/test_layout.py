"""Channels last inside convolutional segments: what changes, where transposes stand, what is left, and that values stay."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import opdef
from fluidx.rewrite import ChannelsLast, rewritten
from fluidx.rewrite.layout import ImageTransposes
from fluidx.testing import check_rewrite
from fluidx.testing.models import TestModel, train_ranks, train_single
from fluidx.verify.conversions import check_conversions

L = fx.layers
D = "float64"  # so that orders of summation differ by 1e-15 or so, and batch normalization and a few steps magnify that by some hundreds
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
HEAD = "data %x: f32[-1,128,8,8]; param %w: f32[128,128,3,3]; param %b: f32[128]"


def test_a_segment_has_channels_last_and_transposes_at_its_borders():
    check_rewrite(ChannelsLast(), given=HEAD, fetch=["z"],
        before="""
          %y: f32[-1,128,8,8] = conv2d(%x, %w) {paddings=[1, 1]}
          %s: f32[-1,128,8,8] = elementwise_add(%y, %b) {axis=1}
          %r: f32[-1,128,8,8] = relu(%s)
          %p: f32[-1,128,1,1] = pool2d(%r) {global_pooling=true, pooling_type="avg"}
          %z: f32[-1,128] = flatten(%p)
        """,
        after="""
          %x.nhwc.turned: f32[-1,8,8,128] = transpose(%x) {axis=[0, 2, 3, 1]}
          %x.nhwc: f32[-1,8,8,128] = assign(%x.nhwc.turned)
          %y.nhwc: f32[-1,8,8,128] = conv2d(%x.nhwc, %w) {data_format="NHWC", paddings=[1, 1]}
          %s.nhwc: f32[-1,8,8,128] = elementwise_add(%y.nhwc, %b) {axis=3}
          %r.nhwc: f32[-1,8,8,128] = relu(%s.nhwc)
          %p.nhwc: f32[-1,1,1,128] = pool2d(%r.nhwc) {data_format="NHWC", global_pooling=true, pooling_type="avg"}
          %p: f32[-1,128,1,1] = transpose(%p.nhwc) {axis=[0, 3, 1, 2]}
          %z: f32[-1,128] = flatten(%p)
        """)  # fmt: skip


def test_gradients_turn_too_and_filters_stay():
    check_rewrite(ChannelsLast(always=True), given=f"{HEAD}; data %g: f32[-1,128,8,8]", fetch=["w@GRAD", "b@GRAD"],
        before="""
          %s@GRAD: f32[-1,128,8,8] = relu_grad(%g, %g)
          %b@GRAD: f32[128] = reduce_to(%s@GRAD, %b) {axis=1}
          _, %w@GRAD: f32[128,128,3,3] = conv2d_grad(%x, %w, %s@GRAD) {paddings=[1, 1]}
        """,
        after="""
          %g.nhwc.turned: f32[-1,8,8,128] = transpose(%g) {axis=[0, 2, 3, 1]}
          %g.nhwc: f32[-1,8,8,128] = assign(%g.nhwc.turned)
          %s@GRAD.nhwc: f32[-1,8,8,128] = relu_grad(%g.nhwc, %g.nhwc)
          %b@GRAD: f32[128] = reduce_to(%s@GRAD.nhwc, %b) {axis=3}
          %x.nhwc.turned: f32[-1,8,8,128] = transpose(%x) {axis=[0, 2, 3, 1]}
          %x.nhwc: f32[-1,8,8,128] = assign(%x.nhwc.turned)
          _, %w@GRAD: f32[128,128,3,3] = conv2d_grad(%x.nhwc, %w, %s@GRAD.nhwc) {data_format="NHWC", paddings=[1, 1]}
        """)  # fmt: skip


@pytest.mark.parametrize(
    "given, line",
    [
        ("data %x: f32[-1,1,28,28]; param %w: f32[6,1,5,5]", "%y: f32[-1,6,24,24] = conv2d(%x, %w)"),
        ("data %x: f32[-1,32,9,9]; param %w: f32[32,1,3,3]", "%y: f32[-1,32,7,7] = conv2d(%x, %w) {groups=32}"),
    ],
)
def test_narrow_and_grouped_convolutions_stay_with_a_reason(given, line):
    (said,) = check_rewrite(ChannelsLast(), given=given, before=line, after=line)
    assert said.startswith("ChannelsLast kept 1 operators from %y = conv2d(%x, %w)") and "a row gains -" in said


def test_a_convolution_that_gains_less_than_its_borders_cost_stays():
    line = "%y: f32[-1,16,9,9] = conv2d(%x, %w)"
    (said,) = check_rewrite(ChannelsLast(), given="data %x: f32[-1,16,9,9]; param %w: f32[16,16,1,1]",
        before=line, after=line, fetch=["y"])  # fmt: skip
    assert "a row gains 0.0 us and costs 3.1 us at the borders" in said  # 2 * 16 * 81 elements of 1.2 ns


@pytest.mark.parametrize(
    "op",
    [
        "softmax(%y) {axis=1}", "dropout(%y) {dropout_prob=0.5, seed=3}", "transpose(%y) {axis=[0, 1, 3, 2]}", "cumsum(%y) {axis=1}",
        "concat([%y, %y]) {axis=1}", "reverse(%y) {axis=[1]}", "elementwise_add(%y, %row)", "assign(%y)",
        "reshape(%y) {shape=[0, 128, 8, 8]}",
    ],
)  # fmt: skip
def test_what_is_not_element_by_element_reads_its_own_layout(op):
    wide, square = "f32[-1,128,8,8]", "f32[-1,256,8,8]"
    text = f"%y: {wide} = conv2d(%x, %w) {{paddings=[1, 1]}}\n%r: {square if 'concat' in op else wide} = {op}\n%s: f32[1] = mean(%r)"
    p = fx.Program.parse_from_string("program p {\n" + f"{HEAD}; param %row: f32[8]".replace("; ", "\n") + f"\nforward:\n{text}\n}}")
    made = [o.to_string().replace(", _ =", " =") for o in rewritten(p, [ChannelsLast(always=True)], fetch=["s"]).ops]
    assert ("%r.nhwc = assign(%y.nhwc)" in made) is (op == "assign(%y)")
    assert op == "assign(%y)" or f"%r = {op}" in made and "%y = assign(%y.turned)" in made


# -- values ----------------------------------------------------------------------------------------------------------------------


def net(kinds, layout="NCHW", steps=2):
    """A small net of wide convolutions and what `kinds` say, trained by momentum."""
    main, startup = fx.Program("images"), fx.Program("images_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 3, 12, 12], D), fx.data("label", [-1, 1], "int64")
        h = L.conv2d(x, 64, 3, padding=1)
        for kind in kinds:
            if kind == "norm":
                h = L.batch_norm(h, act="relu")
            elif kind == "residual":
                h = h + L.conv2d(L.relu(h), 64, 3, padding=1, bias_attr=False)
            elif kind == "bias":
                h = L.conv2d(h, 64, 3, padding=1, act="tanh")
            elif kind == "max":
                h = L.pool2d(h, 2, "max", 2, pool_padding=1)
            elif kind == "avg":
                h = L.pool2d(h, 2, "avg", 1)
            elif kind == "dropout":
                h = L.dropout(h, 0.3, seed=5)
            elif kind == "scaled":
                h = L.elementwise_mul(h, L.create_parameter([64], D, default_initializer=fx.initializer.Uniform(0.5, 1.5)), axis=1)
            elif kind == "branch":
                h = L.cond(L.mean(h) > 0.01, lambda h=h: L.scale(h, 0.5), lambda h=h: L.tanh(h))
            elif kind == "centred":
                h = h - L.mean(h)
            elif kind == "softmax":
                h = L.softmax(h, axis=1) + h
        h = L.conv2d(h, 64, 3, padding=1)
        logits = L.fc(L.pool2d(h, global_pooling=True, pool_type="avg"), 4)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
        fx.optimizer.Momentum(0.05, 0.9).minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 3, 12, 12)), "label": rng.integers(0, 4, (rows, 1))}

    return TestModel(main, startup, loss, feed, []), h


KINDS = ("norm", "residual", "bias", "max", "avg", "dropout", "scaled", "branch", "centred", "softmax")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(KINDS), max_size=4))
def test_training_is_the_same_to_rounding(kinds):
    model, h = net(kinds)
    feeds, text = [model.feed(2, k) for k in range(2)], str(model.main)
    before, scope = train_single(model, feeds, [model.loss.name, h.name, "conv2d_0.w_0@GRAD"])
    turned = rewritten(model.main, [ChannelsLast(always=True)], fetch=[model.loss, h, "conv2d_0.w_0@GRAD"])
    assert str(model.main) == text and fx.Program.parse_from_string(str(turned)) == turned
    assert {op.attrs["data_format"] for op in turned.ops if op.type == "conv2d"} == {"NHWC"}
    model.main = turned
    after, other = train_single(model, feeds, [model.loss.name, h.name, "conv2d_0.w_0@GRAD"])
    for a, b in zip([v for s in before for v in s], [v for s in after for v in s], strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)
    for n in scope.arrays:
        np.testing.assert_allclose(other.arrays[n], scope.arrays[n], **CLOSE)


def test_a_program_with_channels_last_is_transpiled_like_any():
    model, _ = net(["norm", "residual"])
    feeds = [model.feed(4, k) for k in range(2)]
    before, _ = train_single(model, feeds, [model.loss.name])
    model.main = rewritten(model.main, [ChannelsLast(always=True)], fetch=[model.loss])
    model.loss = model.loss.name
    after, _ = train_ranks(model, "data_parallel", 2, feeds, [model.loss])
    np.testing.assert_allclose(np.ravel(after), np.ravel(before), **CLOSE)


# -- bodies ------------------------------------------------------------------------------------------------------------------------


def integers(rng, *shape):
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-1, 2, shape).astype(D)))


def conv(h, rng):
    return L.conv2d(h, 4, 3, padding=1, param_attr=integers(rng, 4, 4, 3, 3), bias_attr=integers(rng, 4))


def in_a_branch(h, rng):
    return L.cond(L.reduce_sum(h) > 0.0, lambda: L.relu(conv(h, rng)), lambda: conv(L.relu(conv(h, rng)), rng))


def in_a_loop(h, rng):
    """h = relu(conv(h)) - h, twice, by one filter."""
    w, b = (L.create_parameter(list(s), D, attr=integers(rng, *s)) for s in ((4, 4, 3, 3), (4,)))
    k = L.fill_constant([1], "int64", 0)

    def body(k, h):
        made = L.conv2d(h, 4, 3, padding=1, param_attr=fx.ParamAttr(name=w.name), bias_attr=fx.ParamAttr(name=b.name))
        return [k + 1, L.relu(made) - h]

    return L.while_loop(lambda k, h: k < 2, body, [k, h], max_rounds=2)[1]


def beside_a_segment(h, rng):
    h = L.relu(conv(h, rng))
    return conv(L.cond(L.reduce_sum(h) > 0.0, lambda: conv(h, rng) + h, lambda: L.relu(h)), rng)


BODIES = {"branch": in_a_branch, "loop": in_a_loop, "branch beside a segment": beside_a_segment}


def net_of(body):
    """Trained once on small integers: all sums are exact in float64."""
    main, startup = fx.Program("bodies"), fx.Program("bodies_startup")
    rng = np.random.default_rng(2)
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4, 5, 6], D)
        loss = L.reduce_sum(L.square(BODIES[body](x, rng)))
        pairs = fx.optimizer.SGD(0.5).minimize(loss)[1]

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-1, 2, (rows, 4, 5, 6)).astype(D)}

    return TestModel(main, startup, loss.name, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_convolutions_in_bodies_turn_and_answers_have_the_same_bits(body, ranks):
    m = net_of(body)
    feeds, fetch = [m.feed(2)], [m.loss, *(g for _, g in m.gradients)]
    (before,), scope = train_single(m, feeds, fetch)
    main = rewritten(m.main, [ChannelsLast(always=True)], fetch=fetch)
    check_conversions(m.main, main, ImageTransposes(), fetch)
    layouts = [{op.attrs["data_format"] for op in b.oplist if op.type in ("conv2d", "conv2d_grad")} for b in main.blocks]
    assert set().union(*layouts) == {"NHWC"} and any(layouts[1:])
    assert fx.Program.parse_from_string(str(main)) == main
    turned = TestModel(main, m.startup, m.loss, m.feed, m.gradients)
    if ranks is None:
        (after,), other = train_single(turned, feeds, fetch)
        state = other.arrays
    else:
        (after,), state = train_ranks(turned, "data_parallel", ranks, feeds, fetch)
    for name, a, b in zip(fetch, before, after, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in m.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


# -- proof ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [KINDS[:4], KINDS[4:8], KINDS[8:]])
def test_transposes_are_proved(kinds):
    main = net(kinds)[0].main
    check_conversions(main, rewritten(main, [ChannelsLast(always=True)]), ImageTransposes())


SOURCE = """
  %y: f32[-1,128,8,8] = conv2d(%x, %w) {paddings=[1, 1]}
  %s: f32[-1,128,8,8] = elementwise_add(%y, %b) {axis=1}
  %r: f32[-1,128,8,8] = relu(%s)"""
WRONG = {
    "a transpose back is dropped": ("= assign(%r.turned)", "= assign(%s.first)", "ends with another value"),
    "a transpose is another": ("transpose(%x) {axis=[0, 2, 3, 1]}", "transpose(%v) {axis=[0, 2, 3, 1]}", "reads %x.nhwc, which is not"),
    "an operator has its old layout": ("data_format=\"NHWC\", ", "", "reads Input in another layout than its data_format='NCHW' says"),
    "a bias is added along another axis": ("{axis=3}", "{axis=1}", "does something else with channels last"),
}


@pytest.mark.parametrize("old, new, said", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_layout_is_refused(old, new, said):
    """All sizes are 8, so that types say nothing."""
    head = "program p {\n" + HEAD.replace("; ", "\n").replace("128", "8") + "\ndata %v: f32[-1,8,8,8]\nforward:"
    source = fx.Program.parse_from_string(head + SOURCE.replace("128", "8") + "\n}")
    made = str(rewritten(source, [ChannelsLast(always=True)], fetch=["r"]))
    check_conversions(source, fx.Program.parse_from_string(made), ImageTransposes(), ["r"])
    if "%s.first" in new:
        made = made.replace("  %r.turned", "  %s.first: f32[-1,8,8,8] = transpose(%s.nhwc) {axis=[0, 3, 1, 2]}\n  %r.turned")
    assert old in made, made
    with pytest.raises(fx.VerifyError, match=re.escape(said)):
        check_conversions(source, fx.Program.parse_from_string(made.replace(old, new)), ImageTransposes(), ["r"])


def test_layouts_are_declared_of_the_slots_that_hold_images():
    for name in ("conv2d", "depthwise_conv2d", "conv2d_transpose", "conv2d_grad", "pool2d", "pool2d_grad", "batch_norm", "batch_norm_grad"):
        attr, slots = opdef(name).rewrite.layout
        assert opdef(name).attrs[attr] == "NCHW" and set(slots) <= set(opdef(name).slot_of)
        assert not {"Filter", "Filter@GRAD", "Scale", "Bias"} & set(slots)
