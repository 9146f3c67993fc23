"""What the commands `fluidx onnx info | check | run` say and do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import read_array, wider
from .check import readable
from .errors import OnnxError
from .form import initialized
from .model import load
from .read import parsed, read
from .registry import known
from .sessions import session
from .values import numpy_dtype


def info(path: str) -> str:
    """Inputs, outputs, weights and operators of a model."""
    model = parsed(path)
    readable(model)
    graph = model.graph
    given = initialized(graph)
    opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in model.opset_import)
    written = f" by {model.producer_name} {model.producer_version}".rstrip() if model.producer_name else ""
    lines = [f"{graph.name or 'a graph without name'}: IR {model.ir_version}, opset {opsets}, written{written or ' by nobody who says so'}"]
    lines += [f"  input   {_value(i)}" for i in graph.input if i.name not in given]
    lines += [f"  output  {_value(o)}" for o in graph.output]
    elements = sum(int(np.prod(t.dims, dtype=np.int64)) for t in graph.initializer)
    lines += [f"  {len(graph.initializer)} initializers of {elements} elements, {len(graph.node)} nodes"]
    lines += [f"  {count:7d}  {op}" for op, count in sorted(Counter(p.op_type for p in graph.node).items(), key=lambda c: (-c[1], c[0]))]
    return "\n".join(lines)


def operators(domain: str | None = None) -> str:
    """The operators that fluidx takes, a line each: domain, name, how it is done, versions. Raises OnnxError for a domain without any."""
    rows = known(domain)
    if not rows:
        raise OnnxError(f"fluidx takes no operator of domain {domain!r}; there are: {', '.join(sorted({k.domain for k in known()}))}")
    places, names = (max(len(k[i]) for k in rows) for i in (0, 1))
    return "\n".join(f"{k.domain:{places}}  {k.name:{names}}  {k.how:9}  {' '.join(map(str, k.versions)) or '-'}" for k in rows)


def _value(info: Any) -> str:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        return f"{info.name}: {kind or 'of no type'}"
    t = info.type.tensor_type
    dims = ",".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in t.shape.dim)
    if not t.elem_type:
        return f"{info.name}: of no type"
    dtype = numpy_dtype(t.elem_type)
    return f"{info.name}: {'string' if dtype.kind == 'O' else dtype.name}[{dims}]"


def check(path: str, shapes: Mapping[str, Sequence[int]] | None = None) -> str:
    """Say whether fluidx takes a model; raises OnnxError with the reason where not."""
    read(path, strict=True)
    said = "valid, and fluidx has every operator of it"
    try:
        program = load(path, shapes).program
    except OnnxError as e:
        if shapes:
            raise OnnxError(f"{path}: {said}, and with these shapes it is no program: {e}") from None
        return f"{path}: {said}\n  fx.onnx.session takes it, and it is no program to train: {e}"
    return f"{path}: {said}\n  as a program: {len(program.ops)} operators, {len(program.all_parameters())} parameters; it can be trained"


def run(path: str, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """The outputs of a model by name, for inputs from .npy files."""
    ready = session(path)
    fed = {name: read_array(file) for name, file in inputs.items()}
    for name, array in fed.items():
        own = ready.dtype(name)
        if own is not None and own != wider(own) == array.dtype:
            fed[name] = array.astype(own)
    return dict(zip(ready.outputs, ready.run(fed), strict=True))
