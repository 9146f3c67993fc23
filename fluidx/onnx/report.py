"""The text that the commands `fluidx onnx info`, `ops`, `check` and `run` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..ir.data_dependent_ops import cutting
from ..ir.errors import nearest
from .adapters import product_modules
from .arrays import file_dtype, read_array, read_arrays
from .check import check_names
from .errors import OnnxError
from .lora import listed
from .model import OnnxModel, load
from .normalize import initialized, opsets_of
from .read import parse_model, read
from .registry import known
from .roles import initializer_roles, sharing
from .sessions import session
from .values import numpy_dtype

_MOST = 30  # weights listed under one title


def info(path: str, whole: bool = False) -> str:
    """Inputs, outputs, operators and weights of a model, and which weights are trained. `whole` lists all weights."""
    model = parse_model(path)
    check_names(model)
    graph = model.graph
    given = initialized(graph)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in opsets_of(model).items())
    written = f"{model.producer_name} {model.producer_version}".rstrip() if model.producer_name else "an unknown tool"
    lines = [f"{graph.name or 'a graph without a name'}: IR {model.ir_version}, opset {opsets}, written by {written}"]
    lines += [f"  input   {_value(i)}" for i in graph.input if i.name not in given]
    lines += [f"  output  {_value(o)}" for o in graph.output]
    lines += [f"  classes {p.value}" for p in model.metadata_props if p.key == "classes"]
    elements = sum(int(np.prod(t.dims, dtype=np.int64)) for t in graph.initializer)
    lines += [f"  {len(graph.initializer)} initializers of {elements} elements, {len(graph.node)} nodes"]
    lines += [f"  {count:7d}  {op}" for op, count in sorted(Counter(p.op_type for p in graph.node).items(), key=lambda c: (-c[1], c[0]))]
    return "\n".join([*lines, *_weights(model, whole)])


def _weights(model: Any, whole: bool) -> list[str]:
    """A line for each weight, trained ones first."""
    try:
        loaded = load(model)
        graph, parameters = loaded.proto.graph, set(loaded.trained_names)
        shared = sharing(graph, parameters)
        lines = [f"  {said}" for said in (loaded.precision, shared) if said] + _modules(loaded)
    except OnnxError:
        graph, parameters = model.graph, None
        lines = ["  the model cannot be trained; fluidx onnx check gives the reason"]
    roles = initializer_roles(graph, parameters)
    for trained, title in ((True, "trained"), (False, "not trained")):
        some = [r for r in roles if r.trained == trained and (parameters is not None or not trained)]
        if not some:
            continue
        lines.append(f"  {title}: {len(some)} of {len(roles)}, {sum(prod(r.shape) for r in some)} elements")
        shown = some if whole or len(some) <= _MOST else some[: _MOST - 1]
        lines += [f"    {r.name}: {r.dtype}[{','.join(map(str, r.shape))}]  {r.why}" for r in shown]
        if len(shown) < len(some):
            lines.append(f"    and {len(some) - len(shown)} more; --all lists them")
    return lines


def _modules(model: OnnxModel) -> list[str]:
    """A line with the modules whose weights can have adapters, by the last part of their names."""
    lasts = Counter(module.rpartition(".")[2] for module in product_modules(model.program, model.parameter_modules).values())
    some = [f"{name} ({count})" if count > 1 else name for name, count in lasts.items()]
    return [f"  --lora can adapt {lasts.total()} weights, those of {listed(some)}"] if lasts else []


def operators(domain: str | None = None) -> str:
    """The supported operators, a line each: domain, name, how it is implemented, versions. Raises OnnxError for a domain without any."""
    rows = known(domain)
    if not rows:
        raise OnnxError(f"fluidx supports no operator of domain {domain!r}; there are: {', '.join(sorted({k.domain for k in known()}))}")
    places, names = (max(len(k[i]) for k in rows) for i in (0, 1))
    return "\n".join(f"{k.domain:{places}}  {k.name:{names}}  {k.how:9}  {' '.join(map(str, k.versions)) or '-'}" for k in rows)


def _value(info: Any) -> str:
    return f"{info.name}: {_type(info.type)}"


def _type(t: Any) -> str:
    """A TypeProto in words."""
    kind = t.WhichOneof("value")
    if kind == "tensor_type" and t.tensor_type.elem_type:
        return _tensor(t.tensor_type)
    if kind == "sequence_type":
        return f"sequence of {_type(t.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {_type(t.optional_type.elem_type)}"
    if kind == "map_type":
        return f"map of {_dtype(t.map_type.key_type)} to {_type(t.map_type.value_type)}"
    return "sparse tensor" if kind == "sparse_tensor_type" else "of no type"


def _tensor(t: Any) -> str:
    dims = ",".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in t.shape.dim)
    return f"{_dtype(t.elem_type)}[{dims if t.HasField('shape') else '*'}]"


def _dtype(code: int) -> str:
    found = numpy_dtype(code)
    return "string" if found.kind == "O" else found.name


def check(path: str, shapes: Mapping[str, Sequence[int]] | None = None) -> str:
    """Report whether fluidx can run and train a model; raises OnnxError with the reason if it cannot run it."""
    read(path, strict=True)
    said = "valid, and all operators are supported"
    try:
        model = load(path, shapes)
    except OnnxError as e:
        if shapes:
            raise OnnxError(f"{path}: {said}, but with these shapes it cannot be converted: {e}") from None
        return f"{path}: {said}\n  fx.onnx.session runs it, but it cannot be trained: {e}"
    program, shared = model.program, sharing(model.proto.graph, model.trained_names)
    cut = next((f"; on one device, as op {op.type} {why.does}" for op, why in cutting(program)), "")
    trained = "; it can be trained" if program.all_parameters() else ""
    counts = f"{len(program.ops)} operators, {len(program.all_parameters())} parameters"
    lines = [f"{path}: {said}", f"as a program: {counts}{trained}{cut}", model.precision, shared]
    return "\n  ".join(filter(None, lines))


def run(path: str, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """The outputs of a model by name, for inputs from .npy files. A sequence is an .npz file of its elements, and optionals may be missing.
    """
    ready = session(path)
    types = {i.name: i.type for i in ready.graph.input}
    fed: dict[str, Any] = {n: None for n in ready.inputs if types[n].HasField("optional_type")}
    for name, file in inputs.items():
        if name in types and "sequence of" in _type(types[name]):
            fed[name] = list(read_arrays(file).values())
            continue
        array, own = read_array(file), ready.dtype(name)
        fed[name] = array.astype(own) if own is not None and own != file_dtype(own) == array.dtype else array
    if wrong := [n for n in inputs if n not in types] or [n for n in ready.inputs if n not in fed]:
        takes = ", ".join(_value(i) for i in ready.graph.input if i.name in ready.inputs) or "nothing"
        close = nearest(wrong[0], ready.inputs)
        said = f"input {wrong[0]!r} is not fed" if wrong[0] in types else f"{wrong[0]!r} is not an input"
        said += f"; {close}" if wrong[0] not in types and close.startswith("did you mean") else ""
        raise OnnxError(f"{said}; the model takes {takes}: give each as -i NAME=FILE.npy")
    return dict(zip(ready.outputs, ready.run(fed), strict=True))


def shown(name: str, value: Any) -> str:
    """An output as the command prints it."""
    if not isinstance(value, np.ndarray):
        return f"{name}: {value!r}"
    return f"{name}: {'string' if value.dtype.kind == 'O' else value.dtype.name}{list(value.shape)}\n{value}"
