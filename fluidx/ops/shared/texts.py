"""Strings as arrays of objects: functions that operators of programs and sessions of ONNX models use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...ir.errors import ProgramError

CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def texts(shape: Sequence[int], values: Iterable[Any]) -> np.ndarray:
    """An array of objects with the given shape; NumPy alone would make axes of nested values."""
    out = np.empty(tuple(shape), object)
    flat = out.reshape(-1)
    for k, value in enumerate(values):
        flat[k] = value
    return out


def concatenated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each string of x followed by the string of y; the shapes broadcast."""
    a, b = np.broadcast_arrays(x, y)
    return texts(a.shape, (p + q for p, q in zip(a.flat, b.flat, strict=True)))


def split(x: np.ndarray, delimiter: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The parts of each string along a new last axis, padded with "", and the number of parts. The delimiter "" splits at whitespace."""
    parts = [text.split(delimiter or None, most) for text in x.flat]
    counts = np.array([len(p) for p in parts], np.int64)
    width = int(counts.max(initial=0))
    padded = (text for p in parts for text in p + [""] * (width - len(p)))
    return texts((*x.shape, width), padded), counts.reshape(x.shape)


def normalized(x: np.ndarray, case: str, sensitive: bool, stopwords: Sequence[str]) -> np.ndarray:
    """The strings of [C] or [1, C] that are not stop words, converted to `case`; one empty string if none remains."""
    same = str if sensitive else str.lower
    stopped = {same(word) for word in stopwords}
    kept = [CASES[case](word) for word in x.flat if same(word) not in stopped] or [""]
    return texts((*x.shape[:-1], len(kept)), kept)


def written(x: np.ndarray) -> np.ndarray:
    """Numbers as text, in the format of ONNX's Cast.

    >>> written(np.float32([0.5, np.inf])).tolist(), written(np.array(True)).tolist()
    (['0.5', 'INF'], '1')
    """
    if x.dtype.kind in "biu":
        return texts(x.shape, (str(int(v)) for v in x.flat))
    special = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}
    return texts(x.shape, (special.get(t, t) for t in map(str, x.flat)))


def parsed(x: np.ndarray, to: np.dtype) -> np.ndarray:
    """Text as numbers in a wide dtype, for a later conversion to `to`: integers if `to` is an integer dtype and the text holds them."""
    whole = to.kind in "iu" or to.name in ("int4", "uint4", "int2", "uint2")
    values: list[Any] = [_number(t, whole) for t in x.flat]
    kind = (np.uint64 if any(v >= 1 << 63 for v in values) else np.int64) if whole else np.float64
    return np.array(values, kind).reshape(x.shape)


def _number(text: str, whole: bool) -> float | int:
    if not whole:
        return float(text)
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def matched(x: np.ndarray, pattern: str) -> np.ndarray:
    """For each string whether an RE2 pattern matches all of it. Raises ProgramError for an invalid pattern."""
    matches = compiled(pattern)
    return np.array([matches.fullmatch(text) is not None for text in x.flat], bool).reshape(x.shape)


def compiled(pattern: str) -> re.Pattern[str]:
    """A compiled RE2 pattern. Raises ProgramError for an invalid one."""
    try:
        return re.compile(_python_pattern(pattern), re.ASCII)
    except re.error as e:
        raise ProgramError(f"cannot use the pattern {pattern!r}: {e}") from None


_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ", "upper": "A-Z",
    "word": r"0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip


def _python_pattern(pattern: str) -> str:
    """An RE2 pattern in the syntax of Python: they differ in named classes, quoted text and the end of the text."""
    pattern = re.sub(r"\\Q(.*?)(\\E|$)", lambda m: re.escape(m[1]), pattern, flags=re.DOTALL)
    pattern = re.sub(r"\[:(\w+):\]", lambda m: _CLASSES.get(m[1], m[0]), pattern)
    return re.sub(r"(?<!\\)((?:\\\\)*)\\z", r"\1\\Z", pattern)
