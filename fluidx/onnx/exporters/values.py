"""Export of operators on sequences, optionals, maps and strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.types import TensorType
from ...ir.valuetypes import AnyRankType, MapType, OptionalType, as_type
from ...ops.shared.texts import texts
from ..types import open_sizes, type_proto_of
from . import exports
from .selection import single

if TYPE_CHECKING:
    from ..export_graph import Op


def _position(op: Op) -> list[str]:
    """The position operand, if there is one. In ONNX it is a number of 32 or 64 bits without axes."""
    if not op.has("Position"):
        return []
    return [single(op, "Position", "int32" if op.dtype("Position") == "int32" else "int64")]


# -- sequences --------------------------------------------------------------------------------------------------------------------


@exports("sequence_construct")
def sequence_construct(op: Op) -> str:
    return op.emit("SequenceConstruct", *op.many("X"))


@exports("sequence_empty")
def sequence_empty(op: Op) -> str:
    elem = as_type(op.attrs["elem"])
    if not isinstance(elem, (TensorType, AnyRankType)):
        raise op.wrong(f"SequenceEmpty takes tensors, not {elem}")
    return op.emit("SequenceEmpty", dtype=op.code(elem.dtype))


@exports("sequence_at")
def sequence_at(op: Op) -> str:
    return op.emit("SequenceAt", op["S"], *_position(op))


@exports("sequence_insert")
def sequence_insert(op: Op) -> str:
    return op.emit("SequenceInsert", op["S"], op["X"], *_position(op))


@exports("sequence_erase")
def sequence_erase(op: Op) -> str:
    return op.emit("SequenceErase", op["S"], *_position(op))


@exports("sequence_length")
def sequence_length(op: Op) -> str:
    return op.emit("SequenceLength", op["S"])


@exports("split_to_sequence")
def split_to_sequence(op: Op) -> str:
    keep = {} if op.has("Split") else {"keepdims": int(op.attrs["keepdims"])}
    return op.emit("SplitToSequence", op["X"], *_sizes(op), axis=op.attrs["axis"], **keep)


def _sizes(op: Op) -> list[str]:
    if not op.has("Split"):
        return []
    known = op.dtype("Split") in ("int32", "int64")
    return [op["Split"] if known else op.emit("Cast", op["Split"], to=op.code("int64"))]


@exports("concat_from_sequence")
def concat_from_sequence(op: Op) -> str:
    return op.emit("ConcatFromSequence", op["S"], axis=op.attrs["axis"], new_axis=int(op.attrs["new_axis"]))


# -- optionals --------------------------------------------------------------------------------------------------------------------


@exports("optional")
def optional(op: Op) -> str:
    if op.has("X"):
        return op.emit("Optional", op["X"])
    return op.emit("Optional", type=type_proto_of(as_type(op.attrs["elem"]), open_sizes))


@exports("optional_has_element")
def optional_has_element(op: Op) -> str:
    if not op.has("X") or not isinstance(op.type_of("X"), OptionalType):
        return op.const(np.array(op.has("X")))
    return op.emit("OptionalHasElement", op["X"])


@exports("optional_get_element")
def optional_get_element(op: Op) -> str:
    return op.emit("OptionalGetElement", op["X"]) if isinstance(op.type_of("X"), OptionalType) else op["X"]


# -- maps -------------------------------------------------------------------------------------------------------------------------

_CASTS = {"float32": "TO_FLOAT", "int64": "TO_INT64", "string": "TO_STRING"}
_LISTS = {"string": "strings", "int64": "int64s", "float32": "floats"}
_ML = "ai.onnx.ml"


def _keys_attribute(op: Op, texts: str, numbers: str) -> dict[str, Any]:
    """The attribute that lists the keys."""
    keys = list(op.attrs["keys"])
    return {texts if isinstance(keys[0], str) else numbers: keys, "domain": _ML}


@exports("zip_map")
def zip_map(op: Op) -> str:
    if op.dtype("X") != "float32":
        raise op.wrong(f"ZipMap takes float32, X is {op.dtype('X')}")
    return op.emit("ZipMap", op["X"], **_keys_attribute(op, "classlabels_strings", "classlabels_int64s"))


@exports("dict_vectorizer")
def dict_vectorizer(op: Op) -> str:
    if not isinstance(op.type_of("X"), MapType):
        raise op.wrong(f"DictVectorizer takes one map, X is {op.type_of('X')}")
    return op.emit("DictVectorizer", op["X"], **_keys_attribute(op, "string_vocabulary", "int64_vocabulary"))


@exports("cast_map")
def cast_map(op: Op) -> str:
    size = op.attrs["size"]
    places = {"map_form": "SPARSE", "max_map": size} if size else {"map_form": "DENSE"}
    return op.emit("CastMap", op["X"], domain=_ML, cast_to=_CASTS[op.attrs["dtype"]], **places)


@exports("look_up")
def look_up(op: Op) -> str:
    sides = ("keys", op.dtype("X")), ("values", op.attrs["dtype"]), ("default", op.attrs["dtype"])
    attrs: dict[str, Any] = {}
    for what, dtype in sides:
        if dtype not in _LISTS:
            raise op.wrong(f"LabelEncoder has tables of {', '.join(_LISTS)}, and {what} are {dtype}")
        found = op.attrs[what]
        attrs[f"{what}_{_LISTS[dtype].removesuffix('s' if what == 'default' else '')}"] = list(found) if isinstance(found, tuple) else found
    return op.emit("LabelEncoder", op["X"], domain=_ML, **attrs)


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
def string_concat(op: Op) -> str:
    return op.emit("StringConcat", op["X"], op["Y"])


@exports("string_split")
def string_split(op: Op) -> dict[str, Any]:
    attrs = {"delimiter": op.attrs["delimiter"]} if op.attrs["delimiter"] else {}
    if op.attrs["maxsplit"] >= 0:
        attrs["maxsplit"] = op.attrs["maxsplit"]
    return dict(zip(("Out", "Count"), op.emit_many("StringSplit", 2, op["X"], **attrs), strict=True))


@exports("string_normalizer")
def string_normalizer(op: Op) -> str:
    stopwords = {"stopwords": list(op.attrs["stopwords"])} if op.attrs["stopwords"] else {}
    case, sensitive = op.attrs["case"], int(op.attrs["case_sensitive"])
    return op.emit("StringNormalizer", op["X"], case_change_action=case, is_case_sensitive=sensitive, **stopwords)


@exports("regex_full_match")
def regex_full_match(op: Op) -> str:
    return op.emit("RegexFullMatch", op["X"], pattern=op.attrs["pattern"])
