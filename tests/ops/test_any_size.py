"""Ops that declare `native_any_size` have C kernels for all sizes above 1, or for none."""

import random

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import ProgramError, TensorType
from fluidx.ir.dtypes import np_dtype
from fluidx.ir.opdef import OPS
from tests.each import each

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

SIZES = (2, 3, 7, 31, 32, 33, 257)  # on both sides of the size where the vector machine starts to process rows one by one
SAID = sorted(name for name, op in OPS.items() if op.native.any_size and op.native.calls is not None)


def plain(t):
    return None if t is None else [plain(v) for v in t] if isinstance(t, list) else np.empty(t.shape, np_dtype(t.dtype))


def types_of(definition, sample):
    return [
        None if a is None else [TensorType(v.dtype.name, v.shape) for v in a] if isinstance(a, list) else TensorType(a.dtype.name, a.shape)
        for a in sample.args
    ]


def flat(entries):
    return [v for e in entries for v in (e if isinstance(e, list) else [e])]


def results(definition, ins, attrs):
    found = definition.infer(*ins, **attrs)
    return [found] if len(definition.out_slots) == 1 else list(found)


def covered(definition, ins, attrs):
    arrays = [plain(t) for t in ins]
    return definition.native.calls(arrays, [plain(t) for t in results(definition, ins, attrs)], attrs, dry=True) is not None


def resized(definition, ins, attrs, rng):
    """The operand types with other sizes of the factors that may be sharded, and of all factors of an op without a pattern, except for axes
    with several; 0 and 1 stay."""
    pattern = definition.pattern_of(flat(ins), flat(results(definition, ins, attrs)), attrs)
    several = {f for axes in pattern.ins for factors in axes or () if len(factors) > 1 for f in factors}
    fixed = several if definition.pattern is None else several | pattern.whole
    new = {f: rng.choice(SIZES) for f, size in pattern.sizes.items() if size > 1 and f not in fixed}
    shapes = iter(
        t if t is None or axes is None else t.with_shape([new.get(f[0], d) if f else d for d, f in zip(t.shape, axes, strict=True)])
        for t, axes in zip(flat(ins), pattern.ins, strict=True)
    )
    return [[next(shapes) for _ in t] if isinstance(t, list) else next(shapes) for t in ins]


def test_the_ops_of_deep_models_declare_it():
    assert {"matmul", "conv2d", "conv2d_grad", "batch_norm", "layer_norm", "adam", "momentum", "relu_grad", "reduce_to"} <= {*SAID}
    assert not any(OPS[name].native_takes_ctx for name in SAID)  # every plan must ask an op that depends on the rank


@each("name", SAID)
def test_other_sizes_above_1_are_supported_too(name):
    definition, tried = OPS[name], 0
    for k, sample in enumerate(definition.samples()):
        ins, attrs, rng = types_of(definition, sample), definition.complete_attrs(sample.attrs), random.Random(k)
        if callable(said := definition.native.any_size) and not said(attrs):
            continue
        want = covered(definition, ins, attrs)
        for _ in range(8):
            other = resized(definition, ins, attrs, rng)
            if any(t is not None and t.nbytes > 1 << 28 for t in flat(other)):
                continue
            try:
                found = covered(definition, other, attrs)
            except (ProgramError, ValueError):
                continue  # attributes or a type rule that need exactly these sizes
            tried += other != ins
            assert found is want, f"{ins} -> {want}, {other} -> {found} with {dict(attrs)}"
    assert tried


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name, more", [("conv2d", 1), ("conv2d_grad", 2), ("batch_norm", 0), ("pool2d", 0), ("pool2d_grad", 2)])
def test_images_of_other_sizes_are_supported_too(name, more, layout):
    definition = OPS[name]
    attrs = definition.complete_attrs({("data_format" if "data_format" in definition.attrs else "data_layout"): layout})

    def operands(n, c, size):
        x = TensorType("float32", (n, c, size, size) if layout == "NCHW" else (n, size, size, c))
        if name == "batch_norm":
            return [x, *[TensorType("float32", (c,))] * 4]
        return [x, *([TensorType("float32", (c, c, 1, 1)), x][:more] if "conv" in name else [x] * more)]

    found = {covered(definition, operands(n, c, size), attrs) for n in SIZES for c in (2, 15, 16, 17) for size in (2, 3, 31, 32)}
    assert found == {True}


def test_only_pooling_with_even_cells_has_a_kernel():
    pool = OPS["pool2d"]
    attrs = pool.complete_attrs({"pooling_type": "avg", "ksize": (2, 2), "adaptive": True})
    assert [covered(pool, [TensorType("float32", (1, 1, n, n))], attrs) for n in (4, 5)] == [True, False]
    assert not pool.native.any_size(attrs) and pool.native.any_size(pool.complete_attrs({}))
