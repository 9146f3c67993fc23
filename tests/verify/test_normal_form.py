"""The normal form of expressions: what is the same number, and what must not be."""

import math

import pytest

from fluidx.ir import TensorType
from fluidx.verify.normal_form import ExpressionTable
from fluidx.verify.refusal import Refusal

F = TensorType("float32", (4, 3))


def make(shape=(4, 3), dtype="float32", names="abc"):
    t = ExpressionTable()
    return t, *(t.symbol("data", n, TensorType(dtype, shape)) for n in names)


def test_sums_and_multiples_have_one_form():
    t, a, b, _ = make()
    assert t.lin([(a, 1.0), (b, 2.0)], F) == t.lin([(b, 2.0), (a, 1.0)], F) == t.lin([(t.lin([(b, 4.0), (a, 2.0)], F), 0.5)], F)
    assert t.lin([(t.lin([(a, 1e-17)], F), 1e17)], F) == a
    assert t.lin([(t.lin([(a, 1 / 3)], F), 3.0)], F) == a
    assert t.lin([(a, 1.0), (a, -1.0)], F) == t.constant(0.0, F)
    assert t.lin([(a, 1.0), (b, 1e-17)], F) != a, "a small weight is a weight"
    assert t.lin([(a, 1e-17)], F) != t.lin([(a, -1e-17)], F)
    assert t.lin([(a, 1.00000001)], F) != a


@pytest.mark.parametrize("w", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_no_weight(w):
    t, a, _, _ = make()
    with pytest.raises(Refusal):
        t.lin([(a, w)], F)


def test_whole_numbers_take_whole_weights():
    t, a, b, _ = make(dtype="int64")
    i = t.types[a]
    assert t.lin([(a, 1.0), (b, 2.0)], i) == t.lin([(b, 2.0), (a, 1.0)], i)
    with pytest.raises(Refusal, match="fraction"):
        t.lin([(a, 0.5)], i)
    assert t.constant(2**40 + 1, i) != t.constant(2**40, i)


def test_constants_have_a_shape_and_a_dtype():
    t = ExpressionTable()
    assert t.constant(1.0, F) != t.constant(1.0, TensorType("float32", (12,))) != t.constant(1.0, TensorType("float64", (12,)))
    assert t.shaped(t.constant(3.0, F), (12,)) == t.constant(3.0, TensorType("float32", (12,)))
    assert t.constant_of(t.constant(0.0, F)) == 0.0 and t.constant_of(t.constant(2.5, F)) == 2.5
    assert t.constant(math.nan, F) == t.constant(math.nan, F) != t.constant(math.inf, F)


def test_a_strided_slice_is_one_however_it_was_cut_out():
    t, a, b, _ = make((4, 6))
    box = t.strided.cut(a, [(1, 3), (2, 5)])
    assert box == t.strided.cut(t.strided.cut(a, [(1, 3), (0, 6)]), [(0, 2), (2, 5)])
    assert box == t.strided.cut(t.strided.cut(a, [(0, 4), (2, 5)]), [(1, 3), (0, 3)])
    assert box == t.strided.cut(t.shaped(t.cut(a, 6, 18), (2, 6)), [(0, 2), (2, 5)])
    assert t.strided.cut(a, [(1, 3), (0, 6)]) == t.shaped(t.cut(a, 6, 18), (2, 6))  # rows are a slice
    assert t.strided.cut(a, [(1, 2), (2, 5)]) == t.shaped(t.cut(a, 8, 11), (1, 3))
    assert len({t.strided.cut(a, spans) for spans in ([(1, 3), (2, 5)], [(0, 2), (2, 5)], [(1, 3), (3, 6)], [(1, 3), (2, 4)])}) == 4
    both = TensorType("float32", (4, 6))
    half = t.lin([(a, 2.0), (b, 1.0)], both)
    assert t.strided.cut(half, [(1, 3), (2, 5)]) == t.lin([(box, 2.0), (t.strided.cut(b, [(1, 3), (2, 5)]), 1.0)], both.with_shape((2, 3)))


def test_strided_slices_that_follow_each_other_are_joined():
    t, a, b, _ = make((4, 6))
    for spans in ([(0, 2), (2, 6)], [(0, 1), (1, 2), (2, 6)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]):
        columns = [t.strided.cut(a, [(0, 4), s]) for s in spans]
        assert t.strided.join(columns, 1, (4, 6)) == a
        assert t.strided.join(columns[::-1], 1, (4, 6)) != a
    left, right = ([(0, 4), (0, 2)], [(0, 4), (2, 6)])
    assert t.strided.join([t.strided.cut(a, left), t.strided.cut(b, right)], 1, (4, 6)) is None
    rows = [t.strided.cut(a, [s, (1, 3)]) for s in ((0, 3), (3, 4))]
    assert t.strided.join(rows, 0, (4, 2)) == t.strided.cut(a, [(0, 4), (1, 3)])
    total = t.lin([(a, 2.0), (b, -1.0)], TensorType("float32", (4, 6)))
    assert t.strided.join([t.strided.cut(total, left), t.strided.cut(total, right)], 1, (4, 6)) == total
    one = t.constant(3.0, TensorType("float32", (4, 6)))
    assert t.strided.join([t.strided.cut(one, left), t.strided.cut(one, right)], 1, (4, 6)) == one


def test_the_array_of_a_box_is_found_by_where_it_lies():
    t, a, _, _ = make((4, 6))
    box = t.strided.cut(a, [(1, 3), (2, 5)])
    assert t.strided.array_of(box, [(1, 3), (2, 5)], (4, 6)) == a
    for spans, shape in (([(0, 2), (2, 5)], (4, 6)), ([(1, 3), (3, 6)], (4, 6)), ([(1, 3), (2, 5)], (6, 4)), ([(2, 4), (2, 5)], (4, 6))):
        with pytest.raises(Refusal):
            t.strided.array_of(box, spans, shape)


def test_slices_that_follow_each_other_are_one():
    t, a, b, _ = make()
    x, y = t.cut(a, 0, 5), t.cut(a, 5, 12)
    assert t.join([x, y], (4, 3)) == a
    assert t.join([y, x], (4, 3)) != a
    assert t.join([t.cut(a, 0, 3), t.cut(a, 3, 5)]) == x
    assert t.cut(t.join([t.flat(a), t.flat(b)]), 10, 14) == t.join([t.cut(a, 10, 12), t.cut(b, 0, 2)])
    assert t.rows(t.join([a, b]), [(4, 3), (12,)]) == [a, t.flat(b)]
    both = t.sum([t.join([x, y]), t.join([t.cut(b, 0, 7), t.cut(b, 7, 12)])])
    assert t.shaped(both, (4, 3)) == t.sum([a, b])
    assert t.shaped(t.shaped(a, (2, 6)), (4, 3)) == a
    with pytest.raises(Refusal):
        t.shaped(a, (5,))
    with pytest.raises(Refusal):
        t.cut(a, 5, 13)


def test_long_sums_take_linear_time():
    t, a, b, _ = make()
    for k in range(3000):
        a = t.lin([(a, 1.0), (t.symbol("data", k, F), 1.0)], F)
    assert a != b


def test_attributes_that_are_equal_in_python_only_are_not_the_same():
    t = ExpressionTable()
    numbers = {t.attrs_id({"a": v}) for v in (1, 1.0, True, "1", (1,), (1.0,), (True,), 0.0, -0.0, None)}
    assert len(numbers) == 10
    assert t.attrs_id({"a": 1, "b": 2}) == t.attrs_id({"b": 2, "a": 1})
    assert t.attrs_id({"a": math.nan}) == t.attrs_id({"a": math.nan})


def test_a_constant_is_shown_as_its_number():
    t, a, _, _ = make()
    assert t.show(t.constant(0.1, F)) == "0.1" and t.show(t.constant(1.0, F)) == "1" and t.show(t.constant(0.0, F)) == "0"
    assert t.show(t.lin([(a, 2.0), (t.constant(1.0, F), 0.5)], F)) in ("2 %a + 0.5", "0.5 + 2 %a")
