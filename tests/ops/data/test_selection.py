"""Selection by value, from the definitions in the documentation of fluid and ONNX."""

import numpy as np

from fluidx.ir import opdef
from fluidx.testing.reference import run_op


def made(op, *ins, **attrs):
    definition = opdef(op)
    ins = [*ins, *[None] * (len(definition.in_slots) - len(ins))]
    return [v.tolist() for v in run_op(definition, ins, definition.complete_attrs(attrs))]


def test_where_index_has_a_row_for_each_element_that_is_not_zero():
    assert made("where_index", np.array([[True, False], [True, True]])) == [[[0, 0], [1, 0], [1, 1]]]
    assert made("where_index", np.float32([0, np.nan, 0, 2])) == [[[1], [3]]]  # NaN is not zero


def test_unique_as_fluid_documents_it():
    out, first, index, count = made("unique", np.array([2, 3, 3, 1, 5, 3]), dtype="int32")
    assert (out, first, index, count) == ([2, 3, 1, 5], [0, 1, 3, 4], [0, 1, 1, 2, 3, 1], [1, 3, 1, 1])


def test_unique_of_an_empty_value_is_empty():
    assert made("unique", np.zeros(0, "int64")) == [[], [], [], []]
    assert made("unique", np.zeros((0, 3), "float32"), flatten=True) == [[], [], [], []]
    assert made("unique", np.zeros((2, 0), "float32")) == [[[]], [0], [0, 0], [2]]  # rows without elements are equal


def test_a_range_may_be_longer_than_the_range_of_its_dtype():
    assert made("range_between", *np.int16([-30000, 30000, 20000])) == [[-30000, -10000, 10000]]


def test_unique_rows_in_order():
    out, first, index, count = made("unique", np.array([[1, 0], [1, 0], [0, 9]]), sorted=True)
    assert (out, first, index, count) == ([[0, 9], [1, 0]], [2, 0], [1, 1, 0], [1, 2])


def test_masked_select_grad_puts_back_in_order():
    mask = np.array([[True, False], [True, True]])
    assert made("masked_select_grad", np.zeros((2, 2), "float32"), mask, np.float32([1, 2, 3])) == [[[1, 0], [2, 3]]]


BOXES = np.float32([[[0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 5], [20, 20, 30, 30]]])  # they overlap the first by 1, 0.8, 0.5, 0


def test_multiclass_nms_drops_boxes_that_overlap_a_better_one():
    scores = np.float32([[[1, 1, 1, 1], [0.9, 0.8, 0.7, 0.6]]])  # class 0 is the background
    out, index, count = made("multiclass_nms", BOXES, scores, nms_threshold=0.4)
    assert [row[0] for row in out] == [1, 1] and index == [[0], [3]] and count == [2]
    # box 2 overlaps box 1 by 5/8, but box 1 is dropped first; it overlaps box 0 by 0.5, which is not more than 0.5
    assert made("multiclass_nms", BOXES, scores, nms_threshold=0.5)[1] == [[0], [2], [3]]


def test_multiclass_nms_lowers_its_threshold_from_box_to_box():
    scores = np.float32([[[0] * 4, [0.9, 0.8, 0.7, 0.6]]])
    assert made("multiclass_nms", BOXES, scores, nms_threshold=0.85)[1] == [[0], [1], [2], [3]]
    # 0.85 * 0.8 = 0.68 after the first box: box 1, which overlaps it by 0.8, is dropped, box 2 with 0.5 is kept
    assert made("multiclass_nms", BOXES, scores, nms_threshold=0.85, nms_eta=0.8)[1] == [[0], [2], [3]]


def test_multiclass_nms_keeps_the_best_of_all_classes_in_the_order_of_classes():
    scores = np.float32([[[0.0, 0, 0, 0], [0.2, 0, 0, 0.9], [0.8, 0, 0, 0.7]]])
    out, index, count = made("multiclass_nms", BOXES, scores, keep_top_k=2)
    assert [(row[0], round(row[1], 3)) for row in out] == [(1, 0.9), (2, 0.8)] and index == [[3], [0]] and count == [2]


def test_multiclass_nms_considers_only_the_best_of_a_class():
    scores = np.float32([[[0] * 4, [0.9, 0.8, 0.7, 0.6]]])
    assert made("multiclass_nms", BOXES, scores, nms_top_k=2, score_threshold=0.1)[1] == [[0]]


def test_pixels_of_a_box_count_both_ends():
    # two boxes of one pixel by two share one of their three pixels: 1/3; as real numbers they have no area
    boxes, scores = np.float32([[[0, 0, 0, 1], [0, 1, 0, 2]]]), np.float32([[[0, 0], [0.9, 0.8]]])
    assert made("multiclass_nms", boxes, scores, normalized=False, nms_threshold=0.3)[1] == [[0]]
    assert made("multiclass_nms", boxes, scores, normalized=True, nms_threshold=0.3)[1] == [[0], [1]]


def test_no_boxes_give_no_rows():
    out, index, count = made("multiclass_nms", BOXES, np.zeros((1, 2, 4), "float32"), score_threshold=0.5)
    assert (out, index, count) == ([], [], [0])


def test_non_max_suppression_takes_any_two_corners_and_centers():
    scores = np.float32([[[0.9, 0.8, 0.7, 0.6]]])
    turned = BOXES[..., [2, 3, 0, 1]]
    centered = np.concatenate([(BOXES[..., :2] + BOXES[..., 2:]) / 2, BOXES[..., 2:] - BOXES[..., :2]], -1)
    limits = np.array([4]), np.float32([0.6]), np.float32([0.65])
    for boxes, center in (BOXES, False), (turned, False), (centered, True):
        assert made("non_max_suppression", boxes, scores, *limits, center_point_box=center) == [[[0, 0, 0], [0, 0, 2]]]
