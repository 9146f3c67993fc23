"""Integer labels of losses: valid and ignored labels, and the losses of rows by label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import ExecutionError, ProgramError, TensorType
from ...ir.parts import Part
from ..shared.call_sequence import in_order
from ..shared.types import meet

LABELS = ("int32", "int64", "int8", "int16", "uint8")


def check_label(op: str, slot: str, x: TensorType, label: TensorType, axis: int, soft: bool) -> None:
    if not x.shape[axis]:
        raise ProgramError(f"op {op}: axis {axis} of {slot} {x} holds the classes: expected 1 or more, found 0")
    if soft:
        if label.dtype != x.dtype or label.ndim != x.ndim or not all(map(meet, label.shape, x.shape)):
            raise ProgramError(f"op {op}: with soft_label, Label must be like {slot} {x}, got {label}")
        return
    want = tuple(1 if k == axis else d for k, d in enumerate(x.shape))
    if label.dtype not in LABELS:
        raise ProgramError(f"op {op}: Label must hold integers, got {label}; for a distribution over classes set soft_label=True")
    if label.ndim != len(want) or not all(map(meet, label.shape, want)):
        raise ProgramError(f"op {op}: Label must have shape {list(want)} for {slot} {x}, got {list(label.shape)}")


def loss_type(x: TensorType, axis: int) -> TensorType:
    return x.with_shape(1 if k == axis else d for k, d in enumerate(x.shape))


def folded(a: Any, axis: int) -> Any:
    """The array as [before, along, after] the axis."""
    return a.reshape(prod(a.shape[:axis]), a.shape[axis], prod(a.shape[axis + 1 :]))


def wrong_label(op: str, label: Any, classes: int, ignore_index: int) -> ExecutionError:
    bad = label[((label < 0) | (label >= classes)) & (label != ignore_index)]
    return ExecutionError(wrong_label_text(op, int(bad[0]), classes, ignore_index))


def wrong_label_text(op: str, label: Any, classes: int, ignore_index: int) -> str:
    ignored = f", or {ignore_index} to ignore an example" if not 0 <= ignore_index < classes else ""
    return f"op {op}: label {label} is out of range for {classes} classes; a label is 0 to {classes - 1}{ignored}"


def ignored_of(op: str, label: np.ndarray, classes: int, ignore_index: int) -> Any:
    """The mask of the ignored examples, None if there are none. Raises ExecutionError for a label out of range. On a GPU this is not
    checked, to avoid a wait: there `losses` returns NaN.
    """
    if not label.size:
        return None
    may_hide = 0 <= ignore_index < classes  # then the range of the labels does not tell whether some are ignored
    if not may_hide and np.minimum.reduce(label, None) >= 0 and np.maximum.reduce(label, None) < classes:
        return None
    mask = label == ignore_index
    if (((label < 0) | (label >= classes)) & ~mask).any():
        raise wrong_label(op, label, classes, ignore_index)
    return mask if mask.any() else None


def after_check(
    op: str, kernel: Callable[..., Any], label: Any, ins: Sequence[Any], out: Any, attrs: Mapping[str, Any], part: Part | None
) -> Callable[[], Any]:
    """A call of a NumPy kernel that raises ExecutionError first if a label is out of range."""
    run = partial(kernel, np, *ins, out=out, part=part, **attrs)
    if attrs["soft_label"]:
        return run
    _, classes = class_range(ins[0].shape[attrs.get("axis", -1)], part)
    return in_order([partial(ignored_of, op, label, classes, attrs["ignore_index"]), run])


def class_range(columns: int, part: Part | None) -> tuple[int, int]:
    """(the class of the first column, the number of classes), for columns that may be a part of the classes."""
    return (0, columns) if part is None else (part.start, part.size)


def losses(xp: Any, label: Any, columns: int, ignore_index: int, loss_of: Callable[[Any], Any], part: Part | None = None) -> Any:
    """The losses of rows: `loss_of` gets valid column indices. The loss is 0 for an ignored example and for a label with a column in
    another part, NaN for a label out of range.
    """
    first, classes = class_range(columns, part)
    ignored, column = label == ignore_index, label.astype("int64", copy=False) - first
    known = (label >= 0) & (label < classes) & ~ignored
    here = known & (column >= 0) & (column < columns)
    return xp.where(here, loss_of(xp.where(here, column, 0)), xp.where(known | ignored, 0.0, xp.nan))
