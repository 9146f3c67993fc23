"""Operators on strings. A session computes with arrays of objects on the host; a loaded program has operators for strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ...ops.shared.texts import concatenated, matched, normalized, split, texts
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, exports, on_numpy
from ..values import Outputs


@on_numpy("StringConcat", pure=True)
def string_concat(n: Node) -> object:
    return concatenated(*n.values())


@dynamic("StringConcat", 0, 1)
def computed_concat(n: Node) -> object:
    return n.b.string_concat(n.x(0), n.x(1))


@on_numpy("StringSplit", pure=True)
def string_split(n: Node) -> object:
    return Outputs(split(n.value(0), n.attr("delimiter", ""), n.attr("maxsplit", -1)))


@dynamic("StringSplit", 0)
def computed_split(n: Node) -> object:
    made: tuple[Variable, Variable] = n.b.string_split(n.x(), delimiter=n.attr("delimiter", ""), maxsplit=n.attr("maxsplit", -1))
    return made


@on_numpy("StringNormalizer", pure=True)
def string_normalizer(n: Node) -> object:
    x = n.value(0)
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise n.wrong(f"it takes strings of shape [C] or [1, C], found {list(x.shape)}")
    return normalized(x, *_normalizer_options(n))


@dynamic("StringNormalizer", 0)
def computed_normalizer(n: Node) -> object:
    case, sensitive, stopwords = _normalizer_options(n)
    return n.b.string_normalizer(n.x(), case=case, case_sensitive=sensitive, stopwords=tuple(stopwords))


def _normalizer_options(n: Node) -> tuple[str, bool, list[str]]:
    """The case to convert to, whether case matters for stop words, and the stop words."""
    return n.attr("case_change_action", "NONE"), bool(n.attr("is_case_sensitive", 0)), n.attr("stopwords", [])


@on_numpy("RegexFullMatch", pure=True)
def regex_full_match(n: Node) -> object:
    return matched(n.value(0), n.attr("pattern", ""))


@dynamic("RegexFullMatch", 0)
def computed_match(n: Node) -> object:
    return n.b.regex_full_match(n.x(), pattern=n.attr("pattern", ""))


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


# -- strings ----------------------------------------------------------------------------------------------------------------------


@exports("fill_string")
def fill_string(op: Op) -> str:
    return op.const(texts(op.attrs["shape"], op.attrs["values"]))


@exports("string_cast")
def string_cast(op: Op) -> str:
    return op.emit("Cast", op["X"], to=op.code(op.attrs["dtype"]))


@exports("string_equal")
def string_equal(op: Op) -> str:
    if op.opset < 19:
        raise op.wrong("Equal takes strings in ONNX from opset 19 on")
    return op.emit("Equal", op["X"], op["Y"])


@exports("string_concat")
def export_string_concat(op: Op) -> str:
    return op.emit("StringConcat", op["X"], op["Y"])


@exports("string_split")
def export_string_split(op: Op) -> dict[str, Any]:
    attrs = {"delimiter": op.attrs["delimiter"]} if op.attrs["delimiter"] else {}
    if op.attrs["maxsplit"] >= 0:
        attrs["maxsplit"] = op.attrs["maxsplit"]
    return dict(zip(("Out", "Count"), op.emit_many("StringSplit", 2, op["X"], **attrs), strict=True))


@exports("string_normalizer")
def export_string_normalizer(op: Op) -> str:
    stopwords = {"stopwords": list(op.attrs["stopwords"])} if op.attrs["stopwords"] else {}
    case, sensitive = op.attrs["case"], int(op.attrs["case_sensitive"])
    return op.emit("StringNormalizer", op["X"], case_change_action=case, is_case_sensitive=sensitive, **stopwords)


@exports("regex_full_match")
def export_regex_full_match(op: Op) -> str:
    return op.emit("RegexFullMatch", op["X"], pattern=op.attrs["pattern"])
