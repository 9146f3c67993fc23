"""Which operators work in 16 bits, and where casts stand."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import OPS, ProgramError, TensorType
from fluidx.mixed_precision import AutoMixedPrecisionLists
from fluidx.rewrite.amp import TRAINING, cast_program

L = fx.layers


@pytest.fixture
def main():
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        yield main


def forward(main, lists=None, dtype="float16"):
    """The forward operators after the rewrite: (type, what it reads, what it writes with its dtype)."""
    cast_program(main, lists or AutoMixedPrecisionLists(), dtype)
    descs = main.global_block().descs
    return [(op.type, op.input_arg_names, tuple(f"{n} {descs[n].type.dtype}" for n in op.output_arg_names)) for op in main.ops]


def weight(name, *shape):
    return L.create_parameter(list(shape), "float32", name=name)


def test_a_product_reads_casts_and_what_follows_it_stays_in_16_bits(main):
    x = fx.data("x", [-1, 4], "float32")
    y = L.relu(L.matmul(x, weight("w", 4, 3)))
    assert forward(main) == [
        ("cast", ("x",), ("x.float16 float16",)),
        ("cast", ("w",), ("w.float16 float16",)),
        ("matmul", ("x.float16", "w.float16"), ("matmul_0.tmp_0 float16",)),
        ("relu", ("matmul_0.tmp_0",), (f"{y.name} float16",)),
    ]
    assert y.dtype == "float16"


def test_a_value_is_cast_once(main):
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    h = L.matmul(L.matmul(x, w), w)
    L.mean(h), L.softmax(h)
    casts = [read for kind, read, _ in forward(main) if kind == "cast"]
    assert casts == [("x",), ("w",), (h.name,)]


def test_what_needs_range_or_digits_works_in_float32(main):
    h = L.matmul(fx.data("x", [-1, 4], "float32"), weight("w", 4, 4))
    made = [L.softmax(h), L.exp(h), L.mean(h), L.reduce_sum(h), L.group_norm(L.reshape(h, [-1, 4, 1, 1]), 2), L.square(h)]
    forward(main)
    assert {v.dtype for v in made} == {"float32"} and h.dtype == "float16"


@pytest.mark.parametrize("norm", [L.layer_norm, L.rms_norm, L.batch_norm])
def test_a_norm_of_16_bits_has_weights_and_statistics_in_float32(main, norm):
    """Its kernel computes in float32, so only what lies in memory has 16 bits."""
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    before, y = norm(x), norm(L.matmul(x, w))
    fx.backward.append_backward(L.mean(L.matmul(y, w)))
    cast_program(main, AutoMixedPrecisionLists(), "bfloat16", TRAINING)
    descs = main.global_block().descs
    ops = [op for op in main.ops if op.type in (norm.__name__, f"{norm.__name__}_grad")]
    _, forward, backward = ({s: descs[names[0]].type.dtype for s, names in {**op.inputs, **op.outputs}.items()} for op in ops)
    assert before.dtype == "float32" and y.dtype == "bfloat16"
    of_image = {"X", "Y", "X@GRAD", "Y@GRAD"}
    assert {d for s, d in (*forward.items(), *backward.items()) if s in of_image} == {"bfloat16"}
    assert {d for s, d in (*forward.items(), *backward.items()) if s not in of_image} == {"float32"}


def test_an_op_that_takes_any_follows_float32_before_16_bits_and_nobody_before_a_product(main):
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    before = L.relu(x)
    half = L.matmul(before, w)
    wide = L.softmax(half)
    joined, biased, lone = L.elementwise_add(half, wide), L.elementwise_add(half, weight("b", 4)), L.elementwise_add(before, x)
    forward(main)
    assert {v.dtype for v in (before, wide, joined, lone)} == {"float32"} and {v.dtype for v in (half, biased)} == {"float16"}


def test_lists_are_exceptions_to_the_declarations(main):
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    a, b = L.matmul(x, w), L.mul(x, w)
    e = L.exp(b)
    forward(main, AutoMixedPrecisionLists(custom_white_list=["exp"], custom_black_list=["matmul"]))
    assert (a.dtype, b.dtype, e.dtype) == ("float32", "float16", "float16")


def test_operators_of_a_black_variable_work_in_float32(main):
    x, w, v = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4), weight("v", 4, 4)
    first = L.matmul(x, w)
    second = L.matmul(first, v)
    third = L.matmul(second, w)
    forward(main, AutoMixedPrecisionLists(custom_black_varnames=["v"]))
    assert (first.dtype, second.dtype, third.dtype) == ("float16", "float32", "float16")


def test_a_black_variable_has_to_exist(main):
    L.matmul(fx.data("x", [-1, 4], "float32"), weight("w", 4, 4))
    with pytest.raises(ProgramError, match="custom_black_varnames: program main has no variable 'ww'; did you mean 'w'?"):
        forward(main, AutoMixedPrecisionLists(custom_black_varnames=["ww"]))


def test_what_the_user_wrote_in_16_bits_stays_so(main):
    x = L.cast(fx.data("x", [-1, 4], "float32"), "float16")
    y = L.softmax(L.relu(L.matmul(x, L.create_parameter([4, 4], "float16", name="w"))))
    before = main.to_string()
    forward(main)
    assert main.to_string() == before and y.dtype == "float16"


def test_rewriting_again_changes_nothing(main):
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    h = L.relu(L.matmul(x, w))
    L.softmax(h + L.matmul(h, w))
    forward(main)
    once = str(main)
    forward(main)
    assert str(main) == once


def test_names_that_have_to_stay_float32_are_cast_back(main):
    """What a loop carries, and what is written twice."""
    x, w = fx.data("x", [-1, 4], "float32"), weight("w", 4, 4)
    carried, twice = L.matmul(x, w), L.matmul(x, w)
    L.assign(L.softmax(twice), twice)
    k = L.fill_constant([1], "int64", 0)
    rounds = L.fill_constant([1], "int64", 2)
    go = L.less_than(k, rounds)
    loop = L.While(go)
    with loop.block():
        L.assign(L.matmul(carried, w), carried)
        L.increment(k)
        L.less_than(k, rounds, cond=go)
    ops = forward(main)
    assert (carried.dtype, twice.dtype) == ("float32", "float32")
    assert ("cast", (f"{carried.name}.float16",), (f"{carried.name} float32",)) in ops
    assert ("softmax", (twice.name,), ("softmax_0.tmp_0 float32",)) in ops
    exe, x = fx.Executor(), np.ones((2, 4), "float32")
    exe.run(fx.default_startup_program())
    exe.run(main, feed={"x": x}, fetch_list=[carried, twice])


def test_integers_and_float64_are_left_alone(main):
    ids, wide = fx.data("ids", [-1, 3], "int64"), fx.data("wide", [-1, 4], "float64")
    table = L.embedding(ids, [10, 4])
    product = L.matmul(wide, L.create_parameter([4, 4], "float64", name="w"))
    assert [kind for kind, _, _ in forward(main)] == ["lookup_table_v2", "matmul"]
    assert (table.dtype, product.dtype) == ("float32", "float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_op_that_may_work_in_16_bits_does_so_over_its_samples(dtype):
    """Types and gradients are ready for it: the rule of each op says 16 bits where float32 operands become 16 bits."""
    lists = AutoMixedPrecisionLists()
    for name in sorted(lists.white_list | lists.gray_list):
        for sample in OPS[name].samples():
            wide = [_type(a) for a in sample.args]
            if not any(t is not None and t.dtype == "float32" for t in _flat(wide)) or OPS[name].control.bodies:
                continue
            slots = [s.name for s in OPS[name].in_slots]
            half = [t if s in OPS[name].autocast.wide else _as(t, dtype) for s, t in zip(slots, wide, strict=False)]
            attrs = OPS[name].complete_attrs(sample.attrs)
            made = OPS[name].infer(*half, **attrs)
            assert all(isinstance(t, TensorType) for t in _flat(made if isinstance(made, tuple) else [made])), name


def _type(a):
    if isinstance(a, list):
        return [_type(x) for x in a]
    return None if a is None else TensorType(a.dtype.name, a.shape)


def _as(t, dtype):
    if isinstance(t, list):
        return [_as(x, dtype) for x in t]
    return t.with_dtype(dtype) if t is not None and t.dtype == "float32" else t


def _flat(types):
    return [x for t in types for x in (t if isinstance(t, list) else [t])]


def test_an_operator_that_cannot_is_named_and_the_program_left_as_it_was(main, monkeypatch):
    h = L.mul(fx.data("x", [-1, 4], "float32"), weight("v", 4, 4))
    loss = L.mean(L.matmul(h, weight("w", 4, 2)))
    text = str(main)
    monkeypatch.setitem(OPS, "matmul", _OnlyFloat32)
    with pytest.raises(ProgramError, match="mixed precision in float16: matmul takes float32; put 'matmul' into custom_black_list"):
        fx.mixed_precision.decorate(fx.optimizer.SGD(0.1)).minimize(loss)
    assert str(main) == text and h.dtype == "float32"


class _OnlyFloat32(OPS["matmul"]):
    name = ""

    @staticmethod
    def infer(x, y, **attrs):
        raise ProgramError("matmul takes float32")


@pytest.mark.parametrize(
    "lists, message",
    [
        ({"custom_white_list": ["matmull"]}, "custom_white_list: there is no op 'matmull'; did you mean 'matmul'?"),
        ({"custom_black_list": "exp"}, r"custom_black_list is a list of op types, got 'exp'; write \['exp'\]"),
        ({"custom_white_list": ["exp"], "custom_black_list": ["exp"]}, "'exp' in custom_white_list and in custom_black_list"),
        ({"custom_white_list": ["cond"]}, "cond runs blocks, and the ops inside choose their own precision"),
    ],
)
def test_lists_are_checked(lists, message):
    with pytest.raises(ProgramError, match=message):
        AutoMixedPrecisionLists(**lists)
