"""Import of a whole model for inputs of declared shapes, whose open axes stay open."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..ir import Program, ProgramError, TensorType, Variable, flow, unique_name
from ..ir.data_dependent_ops import cutting
from ..ir.dtypes import np_dtype
from ..ir.errors import nearest
from ..ir.types import ANY, WORD, Dim
from .errors import OnnxError
from .importer import Importer
from .normalize import opsets_of
from .types import dtype_of, value_type


class WholeModel(NamedTuple):
    """The programs of a model for all sizes of its open axes. `feeds`: input -> its variable; `outputs` are variables or known values."""

    main: Program
    startup: Program
    feeds: Mapping[str, str]
    outputs: Sequence[Any]

    @classmethod
    def of(cls, importer: Importer, inputs: Sequence[str], outputs: Sequence[str]) -> WholeModel:
        """The programs that an importer wrote, copied: their user may change them."""
        made = [importer.unwrapped(importer.lookup(n)) for n in outputs]
        return cls(importer.main.copy(), importer.startup.copy(), {n: importer.lookup(n).name for n in inputs}, made)

    def is_plain(self) -> bool:
        """Does it give the same for each run of the same tensors, without control flow and sizes that depend on values?"""
        main = self.main
        types = [main.global_block().desc(n).type for n in self.feeds.values()]
        types += [v.desc.type if isinstance(v, Variable) else None for v in self.outputs]
        if not all(isinstance(t, TensorType) for t in types) or main.num_blocks > 1:
            return False
        return not any(cutting(main)) and not any(flow.draws(main, op) for op in main.ops)

    def fits(self, fed: Mapping[str, Any]) -> bool:
        """Do the fed values have the declared shapes?"""
        block = self.main.global_block()
        if any(not isinstance(v, np.ndarray) or n not in self.feeds for n, v in fed.items()):
            return False
        return all(_fits(block.desc(v).type.shape, fed[n].shape) for n, v in self.feeds.items())


    def takes(self, fed: Mapping[str, np.ndarray]) -> bool:
        """Are the fed arrays all inputs, of the declared types?"""
        if fed.keys() != self.feeds.keys():
            return False
        descs = self.main.global_block().descs
        for n, v in self.feeds.items():
            (t, array) = descs[v].type, fed[n]
            if array.dtype != np_dtype(t.dtype) or not _fits(t.shape, array.shape):
                return False
        return True


@lru_cache(maxsize=1024)
def _fits(declared: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Has an array a declared shape? An open axis is not empty."""
    return len(declared) == len(found) and all(d == size or d == ANY and size for d, size in zip(declared, found, strict=True))


def import_model(proto: Any, shapes: Mapping[str, Sequence[int | str]], own: bool, **options: Any) -> Importer:
    """An importer that wrote the program of a model. `shapes` and `options` are those of `load` and Importer; `own`: fluidx exported it."""
    name = program_name(proto.graph)
    importer = Importer(Program(name), Program(f"{name}_startup"), opsets_of(proto), from_front=own, **options)
    importer.take_weights(proto.graph)
    _declare(importer, proto.graph, dict(shapes), named=own)
    importer.run_nodes(proto.graph.node)
    if importer.rounding is not None:
        importer.rounding.drop_unread(importer, [o.name for o in proto.graph.output])
    return importer


def program_name(graph: Any) -> str:
    """The name of a program for a graph."""
    return re.sub(r"\W", "_", graph.name) or "model"


def _declare(importer: Importer, graph: Any, shapes: dict[str, Sequence[int | str]], named: bool) -> None:
    """Declare the inputs as data variables. Axes of sequences, optionals and maps keep the model's names if `named`."""
    inputs = [i for i in graph.input if i.name not in importer.env]
    for name in shapes:
        if all(i.name != name for i in inputs):
            raise OnnxError(f"shapes names {name!r}; {nearest(name, [i.name for i in inputs], 'the inputs are')}")
        if isinstance(shapes[name], str) or not isinstance(shapes[name], Sequence):
            raise OnnxError(f"shapes gives input {name!r} {shapes[name]!r}; a shape is a list of sizes and names: [-1, 3, 224, 224]")
    names = _AxisNames([i for i in inputs if i.name not in shapes])
    for i in inputs:
        declared, given = i.type.tensor_type, shapes.get(i.name)
        if i.type.WhichOneof("value") != "tensor_type":
            _declare_no_tensor(importer, i, given, named)
            continue
        if given is None and not declared.HasField("shape"):
            raise OnnxError(f'input {i.name!r} has no shape; give it: load(shapes={{"{i.name}": [-1, 3, 224, 224]}})')
        sizes = [names.size(i, k) for k in range(len(declared.shape.dim))]
        if given is not None and declared.HasField("shape") and len(given) != len(sizes):
            raise OnnxError(f"shapes gives input {i.name!r} {len(given)} axes, {list(given)}; the model has {len(sizes)}, {sizes}")
        try:
            importer.data(i.name, sizes if given is None else given, dtype_of(declared.elem_type))
        except (ProgramError, TypeError, ValueError) as e:
            raise OnnxError(f"input {i.name!r}: {e}") from None


def _declare_no_tensor(importer: Importer, i: Any, given: Sequence[int | str] | None, named: bool) -> None:
    """Declare a sequence, an optional or a map as a data variable."""
    try:
        declared = value_type(i.type, named)
        if given is not None:
            raise OnnxError(f"shapes gives it the sizes {list(given)}, but it is {declared}; leave it out of shapes")
        importer.data(i.name, type=declared)
    except ProgramError as e:
        raise OnnxError(f"input {i.name!r}: {e}") from None


class _AxisNames:
    """Names of open axes of a model, in the form that a program can write.

    A program takes an unnamed axis 0 of each input for one batch. A model does not say whether two unnamed ones are equal, so each gets a
    name.
    """

    def __init__(self, inputs: Sequence[Any]):
        declared = [_declared(i, k) for i in inputs for k in range(len(i.type.tensor_type.shape.dim))]
        self._given = {s: Dim(s) for s in declared if isinstance(s, str) and re.fullmatch(WORD, s)}
        self._many = sum(bool(i.type.tensor_type.shape.dim) and _declared(i, 0) == "" for i in inputs) > 1

    def size(self, i: Any, axis: int) -> int:
        said = _declared(i, axis)
        if isinstance(said, int):
            return said
        if said:
            return self._given.get(said) or self._new(said, said)
        return self._new(f"{i.name} {axis}", f"{i.name}_{axis}") if axis == 0 and self._many else ANY

    def _new(self, key: str, name: str) -> Dim:
        base = re.sub(r"[^A-Za-z0-9_.\-]+|^(?=[^A-Za-z_])", "_", name)
        taken = {d.name for d in self._given.values()}
        return self._given.setdefault(key, Dim(unique_name.unused(base, taken, "_{}".format)))


def _declared(i: Any, axis: int) -> int | str:
    """The size of an axis of an input, the name of an open axis, or "" for an open axis without a name; some exporters call these `?`."""
    d = i.type.tensor_type.shape.dim[axis]
    if d.HasField("dim_value") and d.dim_value >= 0:
        return d.dim_value
    return d.dim_param if re.search(r"\w", d.dim_param) else ""
