"""The operators into which batch_norm in training is expanded give the same values."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramError, opdef
from fluidx.ir.decomposition import decomposed
from fluidx.ir.parts import Part
from fluidx.testing.reference import interpret


def expanded(program):
    """The program with every operator replaced by its expansion."""
    program = program.clone()
    block, names = program.global_block(), iter(range(1000))
    kept = []
    for op in block.oplist:
        kept += decomposed(op, lambda name: f"{name}.{next(names)}", lambda name: block.desc(name).type) or [op]
    block.oplist[:] = kept
    return program


def trained(shape, layout, **attrs):
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, *shape[1:]], "float32")
        x.stop_gradient = False
        y = fx.layers.batch_norm(x, data_layout=layout, momentum=0.7, **attrs)
        loss = fx.layers.mean(y * fx.layers.tanh(y))
        fx.append_backward(loss)
    return main, startup


@pytest.mark.parametrize("shape, layout", [((5, 3, 2, 4), "NCHW"), ((5, 2, 4, 3), "NHWC"), ((7, 3), "NCHW"), ((4, 3, 6), "NCHW")])
def test_the_expanded_operators_give_the_values_of_the_fused_ones(shape, layout):
    main, startup = trained(shape, layout)
    parts = expanded(main)
    types = [op.type for op in parts.global_block().oplist]
    assert [t for t in types if t.startswith("b")] == ["bn_mean", "bn_variance", "bn_apply", "bn_grad_sums", "bn_grad_apply"]
    state = interpret(startup, {})
    r = np.random.default_rng(3)
    for name in ("batch_norm_0.w_0", "batch_norm_0.b_0", "batch_norm_0.w_1", "batch_norm_0.w_2"):
        state[name] = r.uniform(0.5, 2, 3).astype("float32")
    # far from 0: a difference of E[x^2] and E[x]^2 would keep no digits of the variance
    feed = {"x": (r.standard_normal(shape) * 0.5 + 100).astype("float32")}
    want, got = interpret(main, feed, state), interpret(parts, feed, state)
    compared = [n for n in want if n not in feed]
    assert {"batch_norm_0.w_1", "batch_norm_0.w_2", "batch_norm_0.w_0@GRAD", "batch_norm_0.b_0@GRAD", "x@GRAD"} <= set(compared)
    for name in compared:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_inference_and_global_statistics_are_a_factor_and_a_term_for_each_channel():
    """(x - 3) / sqrt(4) * 5 + 7 at x = 9 is 22."""
    for attrs in ({"is_test": True}, {"use_global_stats": True}):
        main, startup = trained((5, 3, 2, 4), "NCHW", epsilon=0.0, **attrs)
        parts, state = expanded(main), interpret(startup, {})
        assert not [op for op in parts.global_block().oplist if op.type in ("bn_mean", "bn_variance", "bn_apply", "reduce_mean")]
        norm = next(op for op in main.global_block().oplist if op.type == "batch_norm")
        values = (("Scale", 5), ("Bias", 7), ("Mean", 3), ("Variance", 4))
        state.update({norm.inputs[slot][0]: np.full(3, v, "float32") for slot, v in values})
        found = interpret(parts, {"x": np.full((5, 3, 2, 4), 9, "float32")}, state)
        kept = [found[norm.outputs[slot][0]] for slot in ("Y", "MeanOut", "VarianceOut")]
        assert [sorted(set(a.ravel())) for a in kept] == [[22], [3], [4]]


def test_parts_of_the_batch_give_the_statistics_of_the_whole():
    x = np.random.default_rng(0).standard_normal((7, 3, 2)).astype("float64") + 1000
    mean = sum(run_kernel("bn_mean", x[a:b], part=Part(count=14)) for a, b in ((0, 1), (1, 5), (5, 7)))
    variance = sum(run_kernel("bn_variance", x[a:b], mean, part=Part(count=14)) for a, b in ((0, 1), (1, 5), (5, 7)))
    np.testing.assert_allclose(mean, x.mean((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(variance, x.var((0, 2)), rtol=1e-11)


def run_kernel(name, *arrays, part):
    out = np.empty(3)
    opdef(name).kernel(np, *arrays, out=out, data_layout="NCHW", part=part)
    return out


def test_an_empty_batch_has_no_statistics():
    with pytest.raises(ProgramError, match="cannot take statistics over an empty batch"):
        opdef("bn_mean").kernel(np, np.empty((0, 3)), out=np.empty(3), data_layout="NCHW")
