"""Reading of model files: parse, check, inline the functions of the model, and convert it to the newest opset."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..ir.mapped_file import MappedFile
from . import limits
from .check import check_names, check_supported, check_valid
from .errors import OnnxError, need_onnx
from .external_data import external_tensors, hold_inner_tensors, load_external_tensors, map_inner_tensors
from .file_kinds import looks_like
from .file_parts import skeleton
from .mapped_tensors import is_mapped
from .normalize import NEWEST, all_graphs, check_signatures, domain_of, opsets_of, with_one_opset, with_runtime_domain
from .upgrade_opset import reveal, upgraded
from .values import dense_of

_BEGINNING = 4096  # bytes that are enough to recognise the kind of a larger file
_DEEPEST = 64  # nested calls of functions
OPSET_8 = "fluidx.opset8"  # the domain given to Scan of opset 8: the converter drops its batch axis, and the data with it


def read(source: Any, strict: bool = False, held: list[np.ndarray] | None = None) -> Any:
    """A `ModelProto` with operators of the newest opset, from a path, bytes or a ModelProto. If there is a list `held`, large initializers
    of a path or bytes are arrays in it, and not in the model.

    External tensors must be in the folder of the file. Raises OnnxError if it is not a model, if fluidx does not support an operator, or if
    the model cannot be converted; if `strict`, also if the standard's checker refuses it.
    """
    model = parse_model(source, held)
    if external := [t for t in external_tensors(model) if not is_mapped(t)]:
        raise OnnxError(f"tensor {external[0].name!r} is stored in another file; load the model by its path")
    check_names(model)
    model = with_runtime_domain(with_one_opset(model))
    check_supported(model)
    check_signatures(model)
    if strict:
        check_valid(model)
    model = _with_dense(model)
    if len(model.functions):
        model = _inlined(model)
    model = _converted(model, own=model is not source)
    check_supported(model)
    return model


def parse_model(source: Any, held: list[np.ndarray] | None = None) -> Any:
    """A `ModelProto` from a path, bytes or a ModelProto, unchanged. `held`: see `read`."""
    need_onnx()
    import onnx
    from google.protobuf.message import DecodeError

    if isinstance(source, onnx.ModelProto):
        return source
    path: Path | None = None
    inner: Mapping[int, tuple[int, int]] = {}
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        data = _content(path, limits.MAPPED if held is None else limits.MAPPED_TENSOR)
        if isinstance(data, memoryview) and len(data) >= limits.MAPPED:
            data, inner = skeleton(data, limits.MAPPED_TENSOR) or (bytes(data), {})
    else:
        raise OnnxError(f"a model is a path, bytes or an onnx.ModelProto, not {type(source).__name__}: {source!r:.80}")
    small = None if held is None or inner or sys.byteorder != "little" else skeleton(memoryview(data), limits.HELD_TENSOR)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(bytes(data) if small is None else small.data)
        why = "" if model.HasField("graph") else "it has no graph"
    except DecodeError as e:
        why = f"it is damaged, truncated or of another kind ({e}); download or export it again"
    if why:
        kind = looks_like(bytes(data), len(data), path)
        raise OnnxError(f"{path or 'the bytes'}: not an ONNX model: {f'it looks like {kind}' if kind else why}")
    if path is not None:
        map_inner_tensors(model, path, inner)
        load_external_tensors(model, path)
    if small is not None and held is not None:
        try:
            held += hold_inner_tensors(model, data, small.ranges)
        except OSError as e:
            raise OnnxError(f"cannot read {path}: {e}") from None
    return model


def _content(path: Path, mapped: int) -> Any:
    """The bytes of a file, mapped if there are at least `mapped`. A model file has at most 2 GB: larger weights are in files beside it."""
    try:
        if path.is_dir():
            inside = sorted(p.name for p in path.glob("*.onnx"))
            has = f"it contains {', '.join(inside[:5])}" if inside else "it contains no .onnx file"
            raise OnnxError(f"{path} is a folder, not a model file; {has}")
        if path.exists() and not path.is_file():
            raise OnnxError(f"{path} is a pipe or a device, not a model file")
        size = path.stat().st_size
        with path.open("rb") as stream:
            if mapped <= size <= limits.PROTOBUF:
                return memoryview(MappedFile.of(stream.fileno()))
            data = stream.read(size if size <= limits.PROTOBUF else _BEGINNING)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        name = str(path).replace("\0", "\\0")
        raise OnnxError(f"cannot read {name}: {e.strerror if isinstance(e, OSError) else e}") from None
    if size > limits.PROTOBUF:
        kind = looks_like(data, size, path)
        what = f"it looks like {kind}" if kind else "its weights must be in files beside it: onnx.save(..., save_as_external_data=True)"
        raise OnnxError(f"{path}: not an ONNX model, which has at most 2 GB: {what}")
    return data


def _with_dense(model: Any) -> Any:
    """The model with dense tensors in place of sparse ones, which the converter does not support."""
    from onnx import helper, numpy_helper

    if not any(_sparse(top) for top in (model.graph, *model.functions)):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    for sparse in (part for top in (changed.graph, *changed.functions) for part in _sparse(top)):
        if isinstance(sparse, type(changed.graph)):
            sparse.initializer.extend(numpy_helper.from_array(dense_of(s), s.values.name) for s in sparse.sparse_initializer)
            del sparse.sparse_initializer[:]
        else:  # the value of a Constant
            sparse.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(dense_of(sparse.sparse_tensor))))
    return changed


def _sparse(top: Any) -> list[Any]:
    """The graphs that have sparse initializers, and the attributes that are sparse tensors, in a graph or a function."""
    graphs = list(all_graphs(top))
    attributes = [a for g in graphs for p in g.node for a in p.attribute if a.HasField("sparse_tensor")]
    return [g for g in graphs if getattr(g, "sparse_initializer", ())] + attributes


def _inlined(model: Any) -> Any:
    from onnx import inliner

    _check_calls(model)
    try:
        return inliner.inline_local_functions(_with_defaults(model), convert_version=True)
    except Exception as e:  # raised in C++, of several types
        raise OnnxError(f"the functions of the model cannot be inlined: {e}") from None


def _check_calls(model: Any) -> None:
    """Refuse functions that would be too many nodes, or more bytes than the machine has, after inlining. Each may call others many times,
    so a small file can be a huge graph."""
    functions = {(domain_of(f.domain), f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], tuple[int, int]] = {}

    def size(top: Any, name: str, open_calls: frozenset[tuple[str, str, str]]) -> tuple[int, int]:
        """Nodes and bytes of a graph or a function, including the functions that it calls."""
        nodes, size_ = 0, top.ByteSize()
        for p in (p for g in all_graphs(top) for p in g.node):
            key = domain_of(p.domain), p.op_type, p.overload
            if key not in functions:
                nodes += 1
                continue
            if key in open_calls or len(open_calls) > _DEEPEST:
                way = f"{name} calls {p.op_type}"
                raise OnnxError(f"the functions of the model are recursive, or nested more than {_DEEPEST} deep: {way}")
            if key not in sizes:
                sizes[key] = size(functions[key], p.op_type, open_calls | {key})
            nodes, size_ = nodes + sizes[key][0], size_ + sizes[key][1]
        return nodes, size_

    nodes, size_ = size(model.graph, "the graph", frozenset())
    most = max(sizes, key=lambda key: sizes[key], default=None)
    where = f"the largest is {most[1]} with {sizes[most][0]}" if most is not None else "none is called"
    if nodes > limits.OPERATORS:
        raise OnnxError(
            f"inlining the functions of the model gives {nodes} nodes ({where}), and "
            f"fluidx.onnx.limits.OPERATORS allows {limits.OPERATORS}; raise it if the model is meant to be so large"
        )
    if size_ > limits.MEMORY:
        raise OnnxError(f"inlining the functions of the model gives {size_ >> 20} MB ({where}), more than this machine has")


def _with_defaults(model: Any) -> Any:
    """The model with default values of attributes added to each call of a function, because the inliner ignores them."""
    if not any(f.attribute_proto for f in model.functions):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    defaults = {(domain_of(f.domain), f.name, f.overload): f.attribute_proto for f in changed.functions}
    for top in (changed.graph, *changed.functions):
        for node in (p for g in all_graphs(top) for p in g.node):
            given = {a.name for a in node.attribute}
            known = defaults.get((domain_of(node.domain), node.op_type, node.overload), ())
            node.attribute.extend(a for a in known if a.name not in given)
    return changed


def _converted(model: Any, own: bool) -> Any:
    """The model in the newest opset. One that nobody else has (`own`) is emptied: the converter would copy its large tensors four times."""
    import onnx

    opset = opsets_of(model).get("")
    target = min(NEWEST, onnx.defs.onnx_opset_version())
    if opset is None or opset >= target:
        return model
    model = upgraded(model, opset)
    if opset == 8:
        model = _with_scans_apart(model, target)
    if _has_equal_operators(model, opset, target):
        return _renumbered(model, target, own)
    aside = _taken_out(model.graph) if own else {}
    try:
        converted = onnx.version_converter.convert_version(model, target)
    except Exception as e:  # raised in C++: RuntimeError, and ValueError if it cannot serialise the model
        raise OnnxError(f"the model is of opset {opset}, and cannot be converted to {target}: {e}") from None
    del model
    for t in converted.graph.initializer:
        if t.name in aside:
            t.ClearField("external_data")
            t.ClearField("data_location")
            t.raw_data = aside.pop(t.name)
    reveal(converted)
    return converted


def _has_equal_operators(model: Any, opset: int, target: int) -> bool:
    """Are all nodes of operators that did not change between two opsets?"""
    from onnx import defs

    used = {p.op_type for g in all_graphs(model.graph) for p in g.node if not domain_of(p.domain)}
    return all(
        defs.has(name, opset) and defs.get_schema(name, opset).since_version == defs.get_schema(name, target).since_version for name in used
    )


def _renumbered(model: Any, target: int, own: bool) -> Any:
    """The model with another opset."""
    if not own:
        other, model = model, type(model)()
        model.CopyFrom(other)
    for o in model.opset_import:
        if not domain_of(o.domain):
            o.version = target
    reveal(model)
    return model


def _taken_out(graph: Any) -> dict[str, bytes]:
    """The bytes of the large initializers of a graph, which are external tensors of no file afterwards."""
    found = {}
    for t in graph.initializer:
        if len(t.raw_data) >= limits.MAPPED_TENSOR and t.data_location != t.EXTERNAL:
            found[t.name] = t.raw_data
            t.ClearField("raw_data")
            t.data_location = t.EXTERNAL
            t.external_data.add(key="location", value="aside")
    return found


def _with_scans_apart(model: Any, target: int) -> Any:
    """The model with its Scans in another domain, so that the converter leaves them, and with their bodies converted to the target."""
    import onnx

    if not any(node.op_type == "Scan" for node in model.graph.node):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.opset_import.append(onnx.helper.make_opsetid(OPSET_8, 1))
    for node in changed.graph.node:
        if node.op_type == "Scan":
            node.domain = OPSET_8
            body = next(a for a in node.attribute if a.name == "body").g
            alone = onnx.helper.make_model(body, opset_imports=model.opset_import)
            body.CopyFrom(onnx.version_converter.convert_version(alone, target).graph)
    return changed
