"""Strings. They are arrays of objects on the host; a program never holds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..importer import Outputs
from ..limits import room
from ..node import Node
from . import host


def _texts(shape: tuple[int, ...], values: Any) -> np.ndarray:
    """An array of objects; NumPy would look into the values for more axes."""
    out = np.empty(shape, object)
    flat = out.reshape(-1)
    for k, value in enumerate(values):
        flat[k] = value
    return out


@host("StringConcat", computes=True)
def string_concat(n: Node) -> object:
    a, b = np.broadcast_arrays(*n.values())
    return _texts(a.shape, (x + y for x, y in zip(a.flat, b.flat)))


@host("StringSplit", computes=True)
def string_split(n: Node) -> object:
    x = n.value(0)
    parts = [text.split(n.attr("delimiter") or None, n.attr("maxsplit", -1)) for text in x.flat]
    counts = np.array([len(p) for p in parts], np.int64)
    width = int(counts.max(initial=0))
    padded = (text for p in parts for text in p + [""] * (width - len(p)))
    return Outputs([_texts((*x.shape, width), padded), counts.reshape(x.shape)])


_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@host("StringNormalizer", computes=True)
def string_normalizer(n: Node) -> object:
    x = n.value(0)
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise n.wrong(f"it takes strings of shape [C] or [1, C], found {list(x.shape)}")
    same = str if n.attr("is_case_sensitive", 0) else str.lower
    stopped = {same(word) for word in n.attr("stopwords", [])}
    changed = _CASES[n.attr("case_change_action", "NONE")]
    kept = [changed(word) for word in x.flat if same(word) not in stopped] or [""]
    return _texts((*x.shape[:-1], len(kept)), kept)


@host("RegexFullMatch", computes=True)
def regex_full_match(n: Node) -> object:
    x, pattern = n.value(0), n.attr("pattern", "")
    try:
        compiled = re.compile(_python_pattern(pattern), re.ASCII)
    except re.error as e:
        raise n.wrong(f"cannot take the pattern {pattern!r}: {e}") from None
    return np.array([compiled.fullmatch(text) is not None for text in x.flat], bool).reshape(x.shape)


_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ", "upper": "A-Z",
    "word": r"0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip


def _python_pattern(pattern: str) -> str:
    """A pattern of RE2 in the words of Python: they differ in named classes, quoted text and the end of the text."""
    pattern = re.sub(r"\\Q(.*?)(\\E|$)", lambda m: re.escape(m[1]), pattern, flags=re.DOTALL)
    pattern = re.sub(r"\[:(\w+):\]", lambda m: _CLASSES.get(m[1], m[0]), pattern)
    return re.sub(r"(?<!\\)((?:\\\\)*)\\z", r"\1\\Z", pattern)


@host("TfIdfVectorizer", computes=True)
def tf_idf_vectorizer(n: Node) -> object:
    """Counts n-grams whose items lie 1, 2, ... max_skip_count + 1 apart; single items are counted once."""
    x = n.value(0)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    grams, places = _pool(n), n.attr("ngram_indexes")
    smallest, largest, skips = n.attr("min_gram_length"), n.attr("max_gram_length"), n.attr("max_skip_count")
    if smallest < 1:
        raise n.wrong(f"min_gram_length is {smallest}, and an n-gram has one item at least")
    counts = np.zeros(room([len(rows), max(places) + 1]), np.float32)
    for row, items in enumerate(rows.tolist()):
        for length in range(smallest, min(largest, len(items)) + 1):
            for step in range(1, 2 if length == 1 else min(skips, len(items)) + 2):
                for start in range(len(items) - step * (length - 1)):
                    found = grams.get(tuple(items[start : start + step * (length - 1) + 1 : step]))
                    if found is not None:
                        counts[row, places[found]] += 1
    mode, scale = n.attr("mode"), np.ones(counts.shape[1], np.float32)
    scale[places] = n.attr("weights", [1.0] * len(places))
    counts = np.minimum(counts, 1) if mode == "IDF" else counts
    counts = counts if mode == "TF" else counts * scale
    return counts[0] if x.ndim < 2 else counts


def _pool(n: Node) -> dict[tuple[Any, ...], int]:
    """The n-grams that are counted, and which one each is."""
    pool = n.attr("pool_strings") or n.attr("pool_int64s") or []
    starts = [*n.attr("ngram_counts"), len(pool)]
    found: dict[tuple[Any, ...], int] = {}
    for length, (start, end) in enumerate(zip(starts, starts[1:]), 1):
        if (end - start) % length:
            raise n.wrong(f"{end - start} items of its pool are no {length}-grams")
        for at in range(start, end, length):
            found[tuple(pool[at : at + length])] = len(found)
    return found
