"""Operators on strings. A session computes with arrays of objects on the host; a loaded program has operators for strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.shared.texts import texts
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import EXPORT, OneToOne, entry, exports, on_numpy

entry("StringConcat", "string_concat", computed=(0, 1))


def _split(made: OneToOne, op: Op) -> Any:
    return (made.without("maxsplit") if op.attrs["maxsplit"] < 0 else made).write(op)  # ONNX has no number for all splits


entry("StringSplit", "string_split", computed=(0,), write=_split, delimiter="", maxsplit=-1)
entry(
    "StringNormalizer",
    "string_normalizer",
    computed=(0,),
    case_change_action=("case", "NONE"),
    is_case_sensitive=("case_sensitive", False),
    stopwords=("stopwords", ()),
)
entry("RegexFullMatch", "regex_full_match", computed=(0,), pattern="")


def _equal(made: OneToOne, op: Op) -> Any:
    if op.opset < 19:
        raise op.wrong("Equal takes strings in ONNX from opset 19 on")
    return made.write(op)


entry("Equal", "string_equal", way=EXPORT, write=_equal)


@on_numpy("TfIdfVectorizer", pure=True)
def tf_idf_vectorizer(n: Node) -> object:
    """Counts n-grams whose items are 1, 2, ... max_skip_count + 1 positions apart; single items are counted once."""
    x = n.value(0)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    grams, places = _ngrams(n), n.attr("ngram_indexes")
    smallest, largest, skips = n.attr("min_gram_length"), n.attr("max_gram_length"), n.attr("max_skip_count")
    if smallest < 1:
        raise n.wrong(f"min_gram_length is {smallest}, but an n-gram has at least one item")
    counts = np.zeros(checked_shape([len(rows), max(places) + 1]), np.float32)
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


def _ngrams(n: Node) -> dict[tuple[Any, ...], int]:
    """N-grams that are counted -> their numbers."""
    pool = n.attr("pool_strings") or n.attr("pool_int64s") or []
    starts = [*n.attr("ngram_counts"), len(pool)]
    found: dict[tuple[Any, ...], int] = {}
    for length, (start, end) in enumerate(zip(starts, starts[1:]), 1):
        if (end - start) % length:
            raise n.wrong(f"{end - start} items of its pool are not {length}-grams")
        for at in range(start, end, length):
            found[tuple(pool[at : at + length])] = len(found)
    return found


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("fill_string")
def fill_string(op: Op) -> str:
    return op.const(texts(op.attrs["shape"], op.attrs["values"]))


@exports("string_cast")
def string_cast(op: Op) -> str:
    return op.emit("Cast", op["X"], to=op.code(op.attrs["dtype"]))
