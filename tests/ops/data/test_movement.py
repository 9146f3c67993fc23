"""reshape, squeeze, concat, split, expand and related ops: results by hand, open sizes."""

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, opdef
from fluidx.ops.data import fill, indexing, movement, reshape, slicing  # noqa: F401


def f32(*shape):
    return TensorType("float32", shape)


@pytest.mark.parametrize(
    "x, shape, want",
    [
        ((2, 6), (3, 4), (3, 4)),
        ((2, 3, 4), (0, -1), (2, 12)),
        ((-1, 3, 4), (0, -1), (-1, 12)),  # the open axis cancels, so the other size is known
        ((-1, 3, 4), (-1, 4), (-1, 4)),
        ((-1, 5, 4), (0, 0, 2, 2), (-1, 5, 2, 2)),
        ((-1, -1, 6), (0, 0, 2, -1), (-1, -1, 2, 3)),
        ((1,), (), ()),
    ],
)
def test_reshape_computes_sizes(x, shape, want):
    assert opdef("reshape").infer(f32(*x), shape=shape) == f32(*want)


@pytest.mark.parametrize(
    "x, shape, message",
    [
        ((2, 6), (5, -1), "op reshape: f32[2,6] has 12 elements to distribute over [5, -1]; 12 does not divide by 5"),
        ((2, 6), (5, 2), "op reshape: f32[2,6] cannot be reshaped to [5, 2]: expected 10 elements, found 12"),
        ((2, 6), (-1, -1), "op reshape: shape [-1, -1] holds -1 more than once; only one size can be computed"),
        ((6,), (2, 0), "op reshape: shape [2, 0] copies axis 1 of X, which has 1 axes: f32[6]"),
        ((6,), (-2, 3), "op reshape: shape [-2, 3] holds -2; sizes are positive, 0 (copy from X) or -1 (computed)"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_the_numbers(x, shape, message):
    with pytest.raises(ProgramError) as error:
        opdef("reshape").infer(f32(*x), shape=shape)
    assert str(error.value) == message


def test_reshape_is_a_view_where_numpy_can_and_a_copy_where_it_cannot(run_op):
    x = np.arange(6, dtype="float32").reshape(2, 3)
    assert np.shares_memory(run_op("reshape", x, shape=(3, 2)), x)
    assert opdef("reshape").storage.view(x.T, shape=(-1,)) is None
    assert run_op("reshape", x.T, shape=(-1,)).tolist() == [0, 3, 1, 4, 2, 5]
    assert opdef("flatten").storage.view(x.T.reshape(3, 2, 1), axis=0) is None
    assert run_op("flatten", x.T.reshape(3, 2, 1), axis=0).tolist() == [[0, 3, 1, 4, 2, 5]]


@pytest.mark.parametrize("name, attrs", [("transpose", {"axis": (1, 0)}), ("squeeze", {}), ("unsqueeze", {"axes": (0,)}),
                                         ("reverse", {"axis": (0,)}), ("flip", {"dims": (1,)})])  # fmt: skip
def test_moving_axes_never_copies(name, attrs, run_op):
    x = np.arange(6, dtype="float32").reshape(2, 3)
    assert np.shares_memory(run_op(name, x, **attrs), x)


def test_unsqueeze_inserts_axes_one_after_another(run_op):
    assert run_op("unsqueeze", np.zeros((2, 3), "float32"), axes=(1, 0)).shape == (1, 2, 1, 3)
    assert run_op("unsqueeze", np.zeros((2, 3), "float32"), axes=(-1, -1)).shape == (2, 3, 1, 1)


def test_squeeze_refuses_an_axis_with_more_than_one_element():
    with pytest.raises(ProgramError, match=r"op squeeze: axis 1 of f32\[2,3\] has size 3; expected 1"):
        opdef("squeeze").infer(f32(2, 3), axes=(1,))
    assert opdef("squeeze").infer(f32(-1, 1), axes=(0,)) == f32(1)


def test_split_by_sections_with_a_rest(run_op):
    a, b = run_op("split", np.arange(5, dtype="float32"), sections=(-1, 2))
    assert (a.tolist(), b.tolist()) == ([0, 1, 2], [3, 4])
    with pytest.raises(ProgramError, match=r"sections \[1, 2\] add up to 3; axis 0 of f32\[5\] has size 5"):
        opdef("split").infer(f32(5), num=0, sections=(1, 2), axis=0)
    with pytest.raises(ProgramError, match="size 5, which does not divide into 2 equal parts"):
        opdef("split").infer(f32(5), num=2, sections=(), axis=0)
    assert opdef("split").infer(f32(-1, 4), num=2, sections=(), axis=0) == [f32(-1, 4)] * 2


def test_concat_adds_known_sizes_and_keeps_open_ones():
    assert opdef("concat").infer([f32(-1, 3), f32(-1, 2)], axis=1) == f32(-1, 5)
    assert opdef("concat").infer([f32(-1, 3), f32(4, 3)], axis=0) == f32(-1, 3)
    assert opdef("concat").infer([f32(-1, 3), f32(4, 2)], axis=1) == f32(4, 5)
    with pytest.raises(ProgramError, match="must be equal, found 3 and 2"):
        opdef("concat").infer([f32(4, 3), f32(4, 2)], axis=0)
    with pytest.raises(ProgramError, match="at least one input X"):
        opdef("concat").infer([], axis=0)


def test_the_gradient_of_concat_takes_its_sizes_from_the_run(run_op):
    g = np.arange(10, dtype="float32").reshape(5, 2)
    a, b = run_op("concat_grad", [np.empty((2, 2), "float32"), np.empty((3, 2), "float32")], g, axis=0)
    assert a.tolist() == [[0, 1], [2, 3]] and b.tolist() == [[4, 5], [6, 7], [8, 9]]


def test_expand_repeats_whole_blocks_and_its_gradient_adds_them(run_op):
    x = np.array([[1, 2]], "float32")
    assert run_op("expand", x, expand_times=(2, 2)).tolist() == [[1, 2, 1, 2], [1, 2, 1, 2]]
    g = np.array([[1, 2, 3, 4], [10, 20, 30, 40]], "float32")
    assert run_op("expand_grad", x, g).tolist() == [[44, 66]]


def test_roll_moves_to_the_other_end(run_op):
    x = np.arange(6).reshape(2, 3)
    assert run_op("roll", x, shifts=(1,), dims=(1,)).tolist() == [[2, 0, 1], [5, 3, 4]]
    assert run_op("roll", x, shifts=(1,)).tolist() == [[5, 0, 1], [2, 3, 4]]


def test_shape_is_read_when_the_program_runs(run_op):
    assert run_op("shape", np.zeros((4, 0, 3), "float32")).tolist() == [4, 0, 3]
    assert opdef("shape").infer(f32(-1, 3), dtype="int64") == TensorType("int64", (2,))
