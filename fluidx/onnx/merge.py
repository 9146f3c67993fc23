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
from .model import with_untied
from .normalize import MICROSOFT, domain_of
from .program_writer import valid_name
from .read import parse_model
from .roles import Read, Roles
from .stored_values import write_model
from .values import array_of, numpy_dtype

# operators that multiply by operand 1 -> the attribute that transposes it
_PRODUCTS = {
    ("", "Conv"): "", ("", "MatMul"): "", ("", "Gemm"): "transB",
    (MICROSOFT, "FusedMatMul"): "transB", (MICROSOFT, "TransposeMatMul"): "transB",
}  # fmt: skip


class _Use(NamedTuple):
    """A node that multiplies by a weight: the reads from the weight to it, through nodes that transpose or convert it, whether it
    multiplies by the transpose, and the factor of the product without that of an adapter."""

    chain: tuple[Read, ...]
    transposed: bool
    alpha: float


def merge(model: Any, adapters: Any, output: Any, untie: bool | str | Sequence[str] = ()) -> int:
    """Write a model with the adapters of a folder added to its weights: `W + (alpha / rank) * A B`. It has the nodes of `model`, and runs
    as fast. Returns the number of weights that changed.

    `model` is a path, bytes or a ModelProto; `adapters` is a folder that `save_adapters` or PEFT wrote. A weight that other nodes read too,
    such as an embedding that the output layer shares, or that is an output, is copied first. `untie` is that of `load`, with which the
    adapters were trained. Raises OnnxError if the model lacks a module of the adapters, or if shapes do not match.
    """
    file, source = read_adapters(adapters), parse_model(model)
    write_model(merged(with_untied(source, untie) if untie else source, file), output)
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
    known = dict[str, list[str]]()
    for n in (*roles.tensors, *roles.held):
        known.setdefault(valid_name(n), []).append(n)
    for name, value in file.others.items():
        like = known.get(name, [])
        if len(like) > 1:
            both = " and ".join(map(repr, like))
            raise OnnxError(f"{file.path} has a value of {name!r}, which stands for {both} of the model: these names differ only in "
                            "characters that names of programs lack; rename one of them")  # fmt: skip
        if not like:
            raise OnnxError(f"{file.path} has a value of {name!r}, which the model lacks; {nearest(name, known, 'it has')}")
        _put(roles.tensors.get(like[0]) or roles.held[like[0]], value, name)
    return model


def _can_be_adapted(roles: Roles, weight: str) -> bool:
    """Has a weight two axes of floats, or four, as those of products and convolutions that can be adapted?"""
    tensor = roles.tensors.get(weight) or roles.held[weight]
    return len(tensor.dims) in (2, 4) and numpy_dtype(tensor.data_type).name in FLOATS


def _products(roles: Roles, weight: str) -> Iterator[_Use]:
    """The products with a weight, also those of its transpose and of its value in another precision."""
    for chain, transposed in _chains(roles, weight):
        node = chain[-1].node
        key, attrs = (domain_of(node.domain), node.op_type), {a.name: a for a in node.attribute}
        if key in _PRODUCTS and chain[-1].slot == 1 and not ("group" in attrs and attrs["group"].i != 1):
            turned = _PRODUCTS[key] in attrs and bool(attrs[_PRODUCTS[key]].i)
            # FusedMatMul applies its alpha to the sum of the product and the adapter
            yield _Use(chain, transposed != turned, attrs["alpha"].f if node.op_type == "Gemm" and "alpha" in attrs else 1.0)


def _chains(roles: Roles, weight: str) -> Iterator[tuple[tuple[Read, ...], bool]]:
    """The reads from a weight to each node that computes with it, and whether this node reads the transpose."""
    todo: list[tuple[tuple[Read, ...], bool]] = [((read,), False) for read in reversed(roles.reads[weight])]
    while todo:
        chain, transposed = todo.pop()
        node = chain[-1].node
        flips = _flips(chain[-1])
        if flips is None:
            yield chain, transposed
            continue
        todo += [((*chain, read), transposed != flips) for read in reversed(roles.readers(node.output[0]))]


def _flips(read: Read) -> bool | None:
    """Does a node only transpose a weight of two axes (True), or only convert or pass it on (False)? None for others."""
    node, attrs = read.node, {a.name: a for a in read.node.attribute}
    if domain_of(node.domain) or read.slot:
        return None
    if node.op_type == "Transpose":
        return list(attrs["perm"].ints if "perm" in attrs else (1, 0)) == [1, 0]
    passes = node.op_type in ("Identity", "CastLike") or node.op_type == "Cast" and numpy_dtype(attrs["to"].i).name in FLOATS
    return False if passes else None


def _add(graph: Any, roles: Roles, weight: str, uses: Sequence[_Use], adapter: Weights) -> None:
    """Add an adapter to a weight. If other nodes read it too, the products get a copy."""
    tensor = roles.tensors.get(weight) or roles.held[weight]
    if len({(use.transposed, use.alpha) for use in uses}) > 1:
        raise OnnxError(f"weight {weight!r} is read by products of two kinds, so no single weight has its adapter; load with untie=True")
    if not uses[0].alpha:
        raise OnnxError(f"weight {weight!r} is multiplied with alpha=0 (node {_label(uses[0].chain[-1].node)}), so no weight has the "
                        "effect of its adapter; leave the module out of targets, or set alpha to 1 in the model")  # fmt: skip
    delta = adapter.delta / uses[0].alpha
    delta = delta.T if uses[0].transposed and delta.ndim == 2 else delta
    value = array_of(tensor)
    if value.shape != delta.shape or value.dtype.kind not in "fV":
        raise OnnxError(f"an adapter is for a weight of {list(delta.shape)}, but {weight!r} is {value.dtype}{list(value.shape)}")
    given = {o.name for o in graph.output}
    shown = given & {weight, *(r.node.output[0] for use in uses for r in use.chain[:-1])}
    if shown or len(uses) < len(list(_chains(roles, weight))):
        taken = set(roles.reads) | {name for node in graph.node for name in (*node.input, *node.output)}
        own, copy = unused(f"{weight}.merged", taken, "_{}".format), graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name, tensor = own, copy
        _read_instead(roles, weight, uses, own, taken | {own}, given)
    _put(tensor, value.astype(np.float64) + delta, weight)


def _read_instead(roles: Roles, weight: str, uses: Sequence[_Use], own: str, taken: set[str], given: set[str]) -> None:
    """Let products read another weight. Nodes that transpose or convert it for others too, or for an output, are written again."""
    others = {id(r.node) for chain, _ in _chains(roles, weight) if chain not in [u.chain for u in uses] for r in chain}
    shown = [max((k for k, r in enumerate(use.chain[:-1]) if r.node.output[0] in given), default=-1) for use in uses]
    others |= {id(r.node) for use, last in zip(uses, shown, strict=True) for r in use.chain[: last + 1]}
    values = dict[int, str]()  # nodes that are written again -> what they give
    for use in uses:
        value, before = own, use.chain[-1]
        for read in use.chain:
            if id(read.node) not in others or read is before:
                read.node.input[read.slot] = value
                break
            if id(read.node) not in values:
                values[id(read.node)] = _again(roles, read, value, taken)
            value = values[id(read.node)]


def _again(roles: Roles, read: Read, value: str, taken: set[str]) -> str:
    """A copy of a node behind it, which reads another value. Returns the name of its output."""
    nodes = next(g.node for g in roles.graphs if any(n is read.node for n in g.node))
    new = type(read.node)()
    new.CopyFrom(read.node)
    new.input[read.slot], new.output[0] = value, unused(f"{new.output[0]}.merged", taken, "_{}".format)
    new.name = new.name and f"{new.name}.merged"
    taken.add(new.output[0])
    nodes.insert(next(k for k, n in enumerate(nodes) if n is read.node) + 1, new)
    return str(new.output[0])


def _label(node: Any) -> str:
    return node.name or f"{node.op_type} of {node.output[0]}"


def _put(tensor: Any, value: np.ndarray, name: str) -> None:
    """Give a tensor another value of its type and shape."""
    from onnx import numpy_helper

    old = array_of(tensor)
    if old.shape != value.shape:
        raise OnnxError(f"the value of {name!r} is {list(value.shape)}, and the model's is {list(old.shape)}")
    tensor.CopyFrom(numpy_helper.from_array(value.astype(old.dtype), tensor.name))
