"""`merge` adds adapters to the weights of a model file; nodes and names of the file stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ir.dtypes import FLOATS
from ..ir.errors import nearest
from ..ir.unique_name import unused
from .adapter_files import AdapterFile, Weights, read_adapters
from .errors import OnnxError
from .lora import unique_modules, weight_modules
from .normalize import domain_of
from .program_writer import valid_name
from .read import parse_model
from .roles import Read, Roles
from .stored_values import write_model
from .values import array_of, numpy_dtype

# operators that multiply by operand 1 -> the attribute that transposes it
_PRODUCTS = {("", "MatMul"): "", ("", "Gemm"): "transB", ("com.microsoft", "FusedMatMul"): "transB"}


class _Use(NamedTuple):
    """A node that multiplies by a weight: how it reads it, whether it multiplies by the transpose, and its own factor."""

    read: Read
    transposed: bool
    alpha: float


def merge(model: Any, adapters: Any, output: Any) -> int:
    """Write a model with the adapters of a folder added to its weights: `W + (alpha / rank) * A B`. It has the nodes of `model`, and runs
    as fast. Returns the number of weights that changed.

    `model` is a path, bytes or a ModelProto; `adapters` is a folder that `save_adapters` or PEFT wrote. A weight that other nodes read too,
    such as an embedding that the output layer shares, is copied first. Raises OnnxError if the model lacks a module of the adapters, or if
    shapes do not match.
    """
    file = read_adapters(adapters)
    write_model(merged(parse_model(model), file), output)
    return len(file.adapters) + len(file.others)


def merged(source: Any, file: AdapterFile, modules: Mapping[str, str] | None = None) -> Any:
    """A copy of a ModelProto with the adapters added. `modules` has the modules of weights, if the names in the model do not say them."""
    model = type(source)()
    model.CopyFrom(source)
    graph, roles = model.graph, Roles(model.graph)
    uses = {weight: list(_products(roles, weight)) for weight in roles.reads}
    if modules is None:
        modules = unique_modules({w: m for w, m in weight_modules(graph).items() if uses[w] and _can_be_adapted(roles, w)})
    for module, weight in file.weights(modules).items():
        _add(graph, roles, weight, uses[weight], file.adapters[module])
    known = {valid_name(n): t for n, t in {**roles.tensors, **roles.held}.items()}
    for name, value in file.others.items():
        if name not in known:
            raise OnnxError(f"{file.path} has a value of {name!r}, which the model lacks; {nearest(name, known, 'it has')}")
        _put(known[name], value, name)
    return model


def _can_be_adapted(roles: Roles, weight: str) -> bool:
    """Has a weight two axes of floats, as those of products that can be adapted?"""
    tensor = roles.tensors.get(weight) or roles.held[weight]
    return len(tensor.dims) == 2 and numpy_dtype(tensor.data_type).name in FLOATS


def _products(roles: Roles, weight: str) -> Iterator[_Use]:
    """The products with a weight, also those of its transpose."""
    for read in roles.reads[weight]:
        key, node = (domain_of(read.node.domain), read.node.op_type), read.node
        attrs = {a.name: a for a in node.attribute}
        if key == ("", "Transpose") and list(attrs["perm"].ints if "perm" in attrs else (1, 0)) == [1, 0]:
            for other in roles.readers(node.output[0]):
                if (use := _product(other)) is not None:
                    yield use._replace(read=read, transposed=not use.transposed)
        elif (use := _product(read)) is not None:
            yield use


def _product(read: Read) -> _Use | None:
    key = domain_of(read.node.domain), read.node.op_type
    if key not in _PRODUCTS or read.slot != 1:
        return None
    attrs = {a.name: a for a in read.node.attribute}
    return _Use(read, bool(attrs[_PRODUCTS[key]].i) if _PRODUCTS[key] in attrs else False, attrs["alpha"].f if "alpha" in attrs else 1.0)


def _add(graph: Any, roles: Roles, weight: str, uses: Sequence[_Use], adapter: Weights) -> None:
    """Add an adapter to a weight. If other nodes read it too, the products get a copy."""
    tensor = roles.tensors.get(weight) or roles.held[weight]
    if len({(use.transposed, use.alpha) for use in uses}) > 1:
        raise OnnxError(f"weight {weight!r} is read by products of two kinds, so no single weight has its adapter; load with untie=True")
    if not uses[0].alpha:
        raise OnnxError(f"weight {weight!r} is multiplied with alpha=0 (node {_label(uses[0].read.node)}), so no weight has the effect of "
                        "its adapter; leave the module out of targets, or set alpha to 1 in the model")  # fmt: skip
    delta = adapter.delta / uses[0].alpha
    delta = delta.T if uses[0].transposed else delta
    value = array_of(tensor)
    if value.shape != delta.shape or value.dtype.kind not in "fV":
        raise OnnxError(f"an adapter is for a weight of {list(delta.shape)}, but {weight!r} is {value.dtype}{list(value.shape)}")
    if len({(id(use.read.node), use.read.slot) for use in uses}) < len(roles.reads[weight]):
        taken = set(roles.reads) | {name for node in graph.node for name in (*node.input, *node.output)}
        own, copy = unused(f"{weight}.merged", taken, "_{}".format), graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name, tensor = own, copy
        for use in uses:
            use.read.node.input[use.read.slot] = own
    _put(tensor, value.astype(np.float64) + delta, weight)


def _label(node: Any) -> str:
    return node.name or f"{node.op_type} of {node.output[0]}"


def _put(tensor: Any, value: np.ndarray, name: str) -> None:
    """Give a tensor another value of its type and shape."""
    from onnx import numpy_helper

    old = array_of(tensor)
    if old.shape != value.shape:
        raise OnnxError(f"the value of {name!r} is {list(value.shape)}, and the model's is {list(old.shape)}")
    tensor.CopyFrom(numpy_helper.from_array(value.astype(old.dtype), tensor.name))
