"""Every op passes the same checks on the samples in its declaration (fluidx.testing.check_op)."""

import sys
from pathlib import Path

import numpy as np
import pytest

import fluidx.ops
from fluidx import native
from fluidx.ir import OPS, Effect, Native, OpDef, ProgramError, Sample, Storage, all_ops
from fluidx.ops import expr as ex
from fluidx.ops.elementwise.declare import elementwise
from fluidx.ops.expr.native import bind_native
from fluidx.ops.expr.nodes import trace
from fluidx.testing import check_op
from fluidx.testing.reference import run_op
from tests.each import each
from tests.small_factors import small_factors

# other test files declare ops of their own
OURS = [op.name for op in all_ops() if op.__module__.startswith("fluidx.ops.")]


def test_every_module_below_ops_is_imported():
    root = Path(fluidx.ops.__file__).parent
    modules = {".".join(("fluidx.ops", *p.relative_to(root).with_suffix("").parts)).removesuffix(".__init__") for p in root.rglob("*.py")}
    assert modules - set(sys.modules) == set(), "a folder of ops needs an __init__.py"


@pytest.mark.parametrize("name", OURS)
def test_op(name):
    check_op(name)


@each("name", OURS)
def test_the_samples_of_an_op_give_the_reason_for_an_unchecked_gradient(name):
    for k, sample in enumerate(OPS[name].samples()):
        floats = [a for a in sample.args if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
        if sample.grad == () and OPS[name].grad is not None and OPS[name].effect is Effect.PURE and floats:
            assert sample.why, f"sample {k} of {name} switches the gradient check off without saying why"


@each("name", OURS)
def test_samples_exercise_every_factor_of_the_pattern(name):
    assert small_factors(name) == []


class _Double(OpDef):
    """Twice X, correct in every way; the tests below break one property each."""

    inputs = ("X",)

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp, x, *, out):
        xp.multiply(x, 2, out)

    @staticmethod
    def grad(b, op, g):
        return b.scale(g, scale=2.0)

    @staticmethod
    def samples():
        yield Sample.of(np.float32([[1, 2], [3, 4]]))


def wrong(**changes):
    """_Double with one property changed, under a name that is removed from the registry afterwards."""
    op = type("_Wrong", (_Double,), {"name": "wrong_double", "__doc__": "Twice X, wrongly.", "__qualname__": "_Wrong", **changes})
    return op


@pytest.fixture(autouse=True)
def only_declared_ops():
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def _adds_to_its_input(xp, x, *, out):
    xp.multiply(x, 2, out)
    x += 1


def _clears_first(xp, x, *, out):
    out.fill(0)
    xp.add(x, x, out)


def _adds_one(ins, outs, attrs, dry=False):
    call = bind_native([trace(lambda x: x + 1)], {"x": ins[0]}, outs, dry)
    return [call]


NATIVE = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"grad": staticmethod(lambda b, op, g: b.scale(g, scale=2.1))}, "the gradient of X through Out"),
        ({"grad": staticmethod(lambda b, op, g: None)}, "the gradient of X through Out"),
        ({"infer": staticmethod(lambda x: x.with_shape((2, -1)[: x.ndim] if -1 in x.shape else x.shape))}, None),
        ({"infer": staticmethod(lambda x: x.with_shape((5, 2) if -1 in x.shape else x.shape))}, "with an open first axis"),
        ({"kernel": staticmethod(lambda xp, x: (x * 2).astype("float64"))}, "the type of output Out"),
        ({"kernel": staticmethod(_adds_to_its_input)}, "the kernel changes its inputs"),
        ({"native": Native(bind=lambda ins, outs, attrs, ctx: lambda: np.add(ins[0], 1, outs[0]))}, "output Out of the body 'numpy'"),
        pytest.param({"native": Native(calls=_adds_one)}, "output Out of the body 'native'", marks=NATIVE),
        ({"storage": Storage(inplace=(("X", "Out"),))}, None),
        ({"storage": Storage(inplace=(("X", "Out"),)), "kernel": staticmethod(_clears_first)}, "in the memory of X"),
        ({"samples": staticmethod(lambda: iter(()))}, "has no samples"),
        ({"__doc__": ""}, "has no docstring"),
    ],
)
def test_check_op_finds_what_is_wrong(changes, said):
    op = wrong(**changes)
    if said is None:
        check_op(op)
        return
    with pytest.raises(AssertionError, match=f"wrong_double.*{said}"):
        check_op(op)


def _refuse(text):
    def grad(b, op, g):
        raise ProgramError(text)

    return staticmethod(grad)


def _joined(b, op, g):
    return b.concat([b.scale(op[slot], scale=0.0) if v is None else v for slot, v in zip(("Left", "Right"), g)], axis=1)


def _halves(x):
    return np.ascontiguousarray(x[:, :1]), np.ascontiguousarray(x[:, 1:])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"grad": staticmethod(_joined)}, ""),
        ({"grad": staticmethod(lambda b, op, g: None)}, "the gradient of X through Left"),
        ({"grad": _refuse("op wrong_double is not for differentiating")}, "the gradient through Left: expected one, found ProgramError"),
        ({"grad": _refuse("op wrong_double has a gradient through nothing")}, "the gradient: expected one through at least one output"),
    ],
)
def test_check_op_checks_every_gradient_of_an_op_with_two_outputs(changes, said):
    two = {
        "outputs": ("Left", "Right"),
        "infer": staticmethod(lambda x: (x.with_shape((x.shape[0], 1)),) * 2),
        "kernel": staticmethod(lambda xp, x: _halves(x)),
    }
    op = wrong(**two, **changes)
    if not said:
        check_op(op)
        return
    with pytest.raises(AssertionError, match=f"wrong_double.*{said}"):
        check_op(op)


def test_check_op_runs_the_rows_of_the_pattern():
    check_op(wrong(pattern="* -> * | L(0) U(0)"))
    with pytest.raises(AssertionError, match="wrong_double, sample 0 .*row 'monotone in 0"):
        check_op(wrong(pattern="* -> * | D(0)"))


def _celu(xp, x, *, out):
    out[...] = xp.maximum(x, 0) + xp.minimum(xp.expm1(x), 0)


def _slope_by_masks(b, op, g):
    """1 above 0 and exp(X) below it, as a sum of products with masks."""
    x = op["X"]
    zero = b.scale(x, scale=0.0)
    above, below = (b.cast(compared(x, zero), dtype=x.dtype) for compared in (b.greater_than, b.less_equal))
    return b.elementwise_mul(g, b.elementwise_add(above, b.elementwise_mul(below, b.exp(x))))


def _slope_by_choice(b, op, g):
    x = op["X"]
    return b.where(b.greater_than(x, b.scale(x, scale=0.0)), g, b.elementwise_mul(g, b.exp(x)))


def test_a_gradient_that_multiplies_infinity_by_0_is_refused():
    """celu is smooth, and on samples near 0 both gradients are right."""
    samples = staticmethod(lambda: iter([Sample.of(np.float32([[-1, 2], [0.5, -3]]))]))
    check_op(wrong(kernel=staticmethod(_celu), grad=staticmethod(_slope_by_choice), samples=samples))
    with pytest.raises(AssertionError, match=r"the gradient of X through Out where X is \[200.0\] .*: expected 1.0.*, found nan"):
        check_op(wrong(kernel=staticmethod(_celu), grad=staticmethod(_slope_by_masks), samples=samples))


def test_a_derived_gradient_selects_between_branches():
    """The simple celu: exp overflows where the first branch is selected."""
    op = elementwise("obvious_celu", lambda x: ex.max(x, 0) + ex.min(ex.exp(x) - 1, 0), kinks=(0,), doc="max(X, 0) + min(exp(X) - 1, 0).")
    check_op(op)
    x = np.float32([200, -200, 3e38, -3e38, -1])
    (slope,) = run_op(OPS["obvious_celu_grad"], [x, np.ones_like(x)], {})
    np.testing.assert_allclose(slope, np.float32([1, 0, 1, 0, np.exp(-1)]), 1e-6)
