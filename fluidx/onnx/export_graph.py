"""The graph that an export writes: `ExportGraph` turns the operators of a program into nodes, and `Op` is what export functions get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..executor import Scope, global_scope
from ..executor.ranks.state import StateHolder
from ..ir import Block, NotInitializedError, Operator, Program, TensorType
from ..ir.decomposition import decomposed, result_types
from ..ir.dtypes import dtype_name, np_dtype
from ..ir.errors import nearest
from ..ir.opdef import opdef
from ..ir.sizes import StandInShapes
from ..ir.types import ANY, Dim, size_names
from ..ir.unique_name import UnusedNames, unused
from ..ir.var import Var
from .errors import OnnxError
from .expression_nodes import by_expression, has_expression
from .normalize import all_graphs
from .rank_models import opaque_node
from .stored_values import placeholder
from .table import EXPORTERS, load_all
from .types import open_sizes, type_proto_of
from .values import dtype_code

_MOST = 20  # operators listed in a message
_END = (1 << 63) - 1


def state_value(executor: Any, scope: Any, name: str) -> np.ndarray:
    """The value of a state variable on the ranks of `executor`, or in a scope, by default the global one. It may be the array itself."""
    if isinstance(executor, StateHolder):
        return np.asarray(executor.held.state(name))
    if not isinstance(scope := global_scope() if scope is None else scope, Scope):
        raise OnnxError(f"save: scope must be a Scope, got {type(scope).__name__}")
    if name not in scope.arrays:
        raise NotInitializedError(f"cannot save {name!r}: it has no value in this scope; run the startup program first")
    scope.sync()
    found = scope.arrays[name]
    return found if type(found) is np.ndarray else np.asarray(scope.get(name))


class ExportGraph:
    """The graph of one program while it is exported: nodes, and the values of its parameters."""

    def __init__(self, program: Program, executor: Any, scope: Any, opset: int, opaque: bool = False, infers: bool = True):
        load_all()
        self.infers = infers  # is it a graph for inference only, without a training step that reads its float weights?
        self.integers: dict[str, tuple[np.dtype, Callable[[np.ndarray], np.ndarray]]] = {}  # state variables that are stored as integers
        self.opset, self.opaque = opset, opaque
        self.program, self.block = program, program.global_block()
        self.executor, self.scope = executor, scope if scope is not None else global_scope()
        self.nodes: list[Any] = []
        self.current: dict[str, str] = {}  # variable -> its present ONNX value: a variable that is written twice has two values
        self.uses: Counter[str] = Counter()
        self.taken = {n for block in program.blocks for n in block.descs}
        self.sizes = StandInShapes(self.block)
        self.axes: dict[int, str] = {}  # names of open axes, by the number that stands for their size
        types = (d.type for d in self.block.descs.values())
        self.declared_axes = {n for t in types if isinstance(t, TensorType) for n in size_names(t.shape)}
        self.errors: list[OnnxError] = []
        self._unused = UnusedNames(lambda name: name in self.taken, "_{}".format, numbered=True)
        self.constants: dict[tuple[str, tuple[int, ...], Any], str] = {}

    def to_proto(self, feeds: Sequence[str], targets: Sequence[str]) -> Any:
        from onnx import helper

        results = self.write(targets, set())
        stored = [self.stored(n) for n, d in self.block.descs.items() if d.persistable and n not in feeds]
        inputs = [self.info(n, n) for n in feeds]
        outputs = [self.info(n, r) for n, r in zip(targets, results, strict=True)]
        graph = helper.make_graph(self.nodes, self.program.name, inputs, outputs, initializer=stored)
        read = {n for g in all_graphs(graph) for p in g.node for n in p.input} | {o.name for g in all_graphs(graph) for o in g.output}
        unread = [k for k, p in enumerate(graph.node) if p.op_type == "Constant" and p.output[0] not in read]
        for k in reversed(unread):
            del graph.node[k]
        return graph

    def write(self, targets: Sequence[str], made: set[str]) -> list[str]:
        """Write all operators. Returns the final values of the targets. New values do not use names in `made`."""
        self.current.update((n, n) for n in self.block.descs)
        self.uses = Counter(n for op in self.block.oplist for n in op.input_arg_names) + Counter(targets)
        made = set(made)
        self._write_all(self.block.oplist, made)
        if self.errors:
            more = f"\n  and {len(self.errors) - _MOST} more" if len(self.errors) > _MOST else ""
            many = "one operator" if len(self.errors) == 1 else f"{len(self.errors)} operators"
            where = f"{self.program.label()} cannot be written as ONNX of opset {self.opset}"
            raise OnnxError(f"{many} of {where}:\n  " + "\n  ".join(map(str, self.errors[:_MOST])) + more)
        return [self._result(n, made) for n in targets]

    def sub_graph(self, idx: int, feeds: Sequence[str], results: Sequence[str], before: Sequence[Any] = ()) -> Any:
        """The graph of a sub-block. Its inputs are `before` and then values for `feeds`, which are variables that it reads and may write;
        its outputs are the values of `results`."""
        from onnx import helper

        outer = self.block, self.nodes, self.current, self.constants
        self.block, self.nodes, self.current, self.constants = self.program.blocks[idx], [], dict(self.current), dict(self.constants)
        self.current.update((n, n) for n in self.block.descs)
        self.current.update((n, self.fresh(n)) for n in feeds)
        self.uses += Counter(n for op in self.block.oplist for n in op.input_arg_names) + Counter(results)
        try:
            inputs, made = [self.info(n, self.current[n], inner=True) for n in feeds], set[str]()
            self._write_all(self.block.oplist, made)
            found: list[str] = []
            for n in results:
                handed = self.current[n] in made and self.current[n] not in found
                found.append(self.current[n] if handed else self.fresh(n))
                if not handed:
                    self.nodes.append(_node("Identity", [self.current[n]], [found[-1]], {}))
            outputs = [self.info(n, name, inner=True) for n, name in zip(results, found, strict=True)]
            return helper.make_graph(self.nodes, f"block_{idx}", [*before, *inputs], outputs)
        finally:
            self.block, self.nodes, self.current, self.constants = outer

    def _write_all(self, ops: Sequence[Operator], made: set[str]) -> None:
        """Write operators. Errors are collected, to report all of them at once."""
        for op in ops:
            start = len(self.nodes)
            try:
                self._write(op, made)
            except OnnxError as e:
                del self.nodes[start:]
                if self.opaque:
                    self._write_opaque(op, made)
                    continue
                self.errors.append(e)
                made.update(op.output_arg_names)

    def _write(self, op: Operator, made: set[str]) -> None:
        start = len(self.nodes)
        handle = Op(self, op)
        if op.type in EXPORTERS:
            found = EXPORTERS[op.type](handle)
        elif has_expression(op.type):
            found = by_expression(handle)
        elif (parts := self.by_parts(op)) is not None:
            found = parts
        else:
            raise handle.wrong(nearest(op.type, EXPORTERS, "there are"))
        operands = {self.current[n] for n in op.input_arg_names}
        slots = found if isinstance(found, dict) else {opdef(op.type).out_slots[0].name: found}
        for slot, values in slots.items():
            for variable, value in zip(op.outputs.get(slot, ()), [values] if isinstance(values, str) else values):
                self._name_result(variable, value, value in operands, start, made)

    def by_parts(self, op: Operator, only: Sequence[str] = ()) -> dict[str, str] | None:
        """The values of the used outputs, or of those in the slots `only`, by the parts of an operator; None if it is not decomposed."""
        block, before = self.block, set(self.block.descs)
        used = [(slot, n) for slot, (n, *_) in op.outputs.items() if self.uses[n] or len(op.outputs) == 1]
        wanted = [(slot, n) for slot, n in used if not only or slot in only]
        stand_ins = {n: self.fresh(f"{n}.value") for n in op.output_arg_names}
        optional = {s.name for s in opdef(op.type).out_slots if s.optional and not any(self.uses[n] for n in op.outputs.get(s.name, ()))}
        outputs = {slot: tuple([stand_ins[n] for n in names]) for slot, names in op.outputs.items() if slot not in optional}
        to_write = op.replace(outputs=outputs)
        parts = decomposed(to_write, self.fresh, lambda n: block.desc(n).type)
        if parts is None:
            return None
        needed, kept = {stand_ins[n] for _, n in wanted}, []
        for part in reversed(parts):
            if not needed.isdisjoint(part.output_arg_names):
                needed.update(part.input_arg_names)
                kept.append(part)
        self.uses += Counter(n for part in kept for n in part.input_arg_names) + Counter(stand_ins[n] for _, n in wanted)
        try:
            made: set[str] = set()
            for part in reversed(kept):
                types = result_types(part, lambda n: block.desc(n).type)
                block.descs.update((n, Var(n, t)) for n, t in types.items())
                self.current.update((n, n) for n in types)
                self._write(part, made)
        finally:
            for n in set(block.descs) - before:
                del block.descs[n]
        return {slot: self.current[stand_ins[n]] for slot, n in wanted}

    def _write_opaque(self, op: Operator, made: set[str]) -> None:
        """Write an operator without an ONNX form as an opaque node. One without outputs gets an invented output name."""
        start, names = len(self.nodes), [*op.output_arg_names]
        outputs = [self.fresh(n) for n in names] or [self.fresh(op.type)]
        inputs = [self.current[n] if self._exists(n, made) else "" for n in op.input_arg_names]  # a value may exist only at its root
        self.nodes.append(opaque_node(op, inputs, outputs))
        for variable, value in zip(names, outputs):
            self._name_result(variable, value, False, start, made)

    def _exists(self, name: str, made: set[str]) -> bool:
        d = self.block.desc(name)
        return self.current[name] in made or d.is_data or d.persistable

    def _name_result(self, variable: str, value: str, is_operand: bool, start: int, made: set[str]) -> None:
        """Name a value that nodes from `start` on compute after its variable."""
        desc = self.block.descs.get(variable)  # None: it is an outer variable, which has a value there
        name = self.fresh(variable) if variable in made or desc is None or desc.persistable else variable
        if is_operand:  # the operator returns its operand unchanged
            self.nodes.append(_node("Identity", [value], [name], {}))
        else:
            for p in self.nodes[max(start - 1, 0) :]:
                p.input[:], p.output[:] = ([name if v == value else v for v in side] for side in (p.input, p.output))
                p.name = p.output[0]
        self.current[variable] = name
        made.add(name)

    def _result(self, name: str, made: set[str]) -> str:
        """The value of an output of the graph. A node must compute it."""
        if self.current[name] in made:
            return self.current[name]
        maker = next((op for op in self.block.oplist if name in op.output_arg_names), None)
        if maker is not None:
            why = Op(self, maker).wrong(f"its output {name!r} has no ONNX form; fetch another one")
            raise OnnxError(f"{self.program.label()} cannot be written as ONNX:\n  {why}")
        self.nodes.append(_node("Identity", [name], [out := self.fresh(name)], {}))
        return out

    def stored(self, name: str) -> Any:
        """The initializer of a variable; a placeholder if it is large."""
        from onnx import numpy_helper

        t = self.block.desc(name).type
        if isinstance(t, TensorType) and ANY not in t.shape:
            dtype = self.integers[name][0] if name in self.integers else np_dtype(t.dtype)
            if made := placeholder(name, dtype_code(dtype), t.shape):
                return made
        return numpy_helper.from_array(np.asarray(self.value(name), order="C"), name)  # ascontiguousarray would give a scalar an axis

    def value(self, name: str) -> np.ndarray:
        """The present value of a state variable, as it is stored. Raises OnnxError if the dtype of its file has no such number."""
        value, d = state_value(self.executor, self.scope, name), self.block.descs.get(name)
        if name in self.integers:
            return self.integers[name][1](value)
        if d is None or "saved_as" not in d.attrs or dtype_name(value.dtype) == d.type.dtype:  # the training step alone has a state
            return value
        with np.errstate(over="ignore"):
            made = value.astype(np_dtype(d.type.dtype))
        if np.isfinite(value).all() and not np.isfinite(made).all():
            most = np.abs(value).max()
            raise OnnxError(f"cannot save {name!r} in {d.type.dtype}, the dtype of its file: it has the value {most:g}, which is too large")
        return made

    def stored_as(self, name: str, reader: str, dtype: np.dtype, convert: Callable[[np.ndarray], np.ndarray]) -> str:
        """The ONNX value of a state variable that is stored converted; "" if it is none, or if others than one `reader` read it."""
        own = self.block.descs.get(name)
        readers = [op.type for op in self.block.oplist if name in op.input_arg_names]
        if not self.infers or own is None or not own.persistable or readers != [reader]:
            return ""
        self.integers[name] = dtype, convert
        return self.current[name]

    def info(self, variable: str, name: str, inner: bool = False) -> Any:
        """The ValueInfoProto of a value. In a sub-block open axes have no names, and the axis of rounds has no size."""
        from onnx import helper

        t = self.block.desc(variable).type
        if not isinstance(t, TensorType):
            return helper.make_value_info(name, type_proto_of(t, open_sizes))
        dims: list[Any] = [
            None if inner and d in (ANY, 0) else d if d != ANY else self._axis_name(variable, k) for k, d in enumerate(t.shape)
        ]
        return helper.make_tensor_value_info(name, dtype_code(np_dtype(t.dtype)), dims)

    def _axis_name(self, variable: str, axis: int) -> str:
        """The name of an open axis: one name for all axes that are known to be equal."""
        declared, number = self.block.desc(variable), self.sizes.shape(variable)[axis]
        if number not in self.axes:
            size = declared.type.shape[axis]
            name = size.name if isinstance(size, Dim) else "batch" if declared.is_data and axis == 0 else f"{variable}_{axis}"
            taken = [*self.axes.values(), *(() if isinstance(size, Dim) else self.declared_axes)]
            self.axes[number] = unused(name, taken, "_".__mul__)
        return self.axes[number]

    def fresh(self, name: str) -> str:
        """A name that no variable and no earlier value has."""
        found = self._unused(name)
        self.taken.add(found)
        return found

    def constant(self, array: np.ndarray) -> str:
        """A Constant node. A float initializer would be a parameter to readers of the model."""
        key = array.dtype.name, array.shape, tuple(array.flat) if array.dtype.kind == "O" else array.tobytes()
        if key not in self.constants:
            self.constants[key] = self.fresh("constant")
            self.nodes.append(_node("Constant", [], [self.constants[key]], {"value": Op.tensor(array)}))
        return self.constants[key]


def has_nodes(op_type: str) -> bool:
    """Whether operators of a type can be written as nodes, for some operands."""
    return op_type in EXPORTERS or has_expression(op_type) or opdef(op_type).decompose is not None


class Op:
    """One operator of a program during export, as export functions get it."""

    def __init__(self, graph: ExportGraph, op: Operator):
        self.graph, self.op = graph, op
        self.type, self.attrs, self.opset = op.type, op.attrs, graph.opset
        self.block: Block = graph.block

    # -- operands ---------------------------------------------------------------------------------------------------------------

    def has(self, slot: str) -> bool:
        return bool(self.op.inputs.get(slot))

    def many(self, slot: str) -> list[str]:
        """The values of all variables in a slot."""
        return [self.graph.current[n] for n in self.op.inputs.get(slot, ())]

    def __getitem__(self, slot: str) -> str:
        """The value of a slot with one variable."""
        return self.many(slot)[0]

    def type_of(self, slot: str) -> TensorType:
        return self.block.desc(self.op.inputs[slot][0]).type

    def dtype(self, slot: str) -> str:
        return self.block.desc(self.op.inputs[slot][0]).type.dtype

    def out_type(self, slot: str) -> TensorType:
        return self.block.desc(self.op.outputs[slot][0]).type

    def is_used(self, slot: str) -> bool:
        """Whether an operator or a fetch reads an output."""
        return any(self.graph.uses[n] for n in self.op.outputs.get(slot, ()))

    # -- nodes ------------------------------------------------------------------------------------------------------------------

    def emit(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """Write a node with one output. Returns the name of the output."""
        return self.emit_many(op_type, 1, *inputs, **attrs)[0]

    def emit_many(self, op_type: str, many: int, *inputs: str, **attrs: Any) -> list[str]:
        """Write a node with several outputs. Raises OnnxError if the opset lacks it."""
        if not attrs.get("domain") and self.lacks(op_type):
            raise self.wrong(f"its {op_type} is in ONNX from opset {_first_opsets()[op_type]} on")
        outs = [self.graph.fresh(f"{self.op.output_arg_names[0]}.{op_type.lower()}") for _ in range(many)]
        self.graph.nodes.append(_node(op_type, list(inputs), outs, attrs))
        return outs

    def cast(self, slot: str, dtype: str) -> str:
        """The value of a slot in a dtype: the value itself if it has that dtype."""
        return self[slot] if self.dtype(slot) == dtype else self.emit("Cast", self[slot], to=self.code(dtype))

    def lacks(self, op_type: str) -> bool:
        """Whether the target opset is older than an operator."""
        return _first_opsets()[op_type] > self.opset

    def sizes(self, value: str, start: int, stop: int) -> str:
        """The sizes of some axes of a value."""
        if self.opset >= 15:
            return self.emit("Shape", value, start=start, end=stop)
        return self.emit("Slice", self.emit("Shape", value), self.ints([start]), self.ints([stop or _END]))

    def reduced(self, op_type: str, value: str, axes: Sequence[int], keepdims: bool) -> str:
        """A reduction over `axes`, or over all axes if there are none."""
        if not axes:
            return self.emit(op_type, value, keepdims=int(keepdims))
        if self.opset >= 18 or op_type == "ReduceSum":
            return self.emit(op_type, value, self.ints(axes), keepdims=int(keepdims))
        return self.emit(op_type, value, axes=[*axes], keepdims=int(keepdims))

    def fuse_operand(self, slot: str, kinds: Container[str], value: str) -> str | None:
        """Add a third operand to the last node, if it is of one of `kinds` and only this operator reads its result."""
        nodes, name = self.graph.nodes, self.op.inputs[slot][0]
        last = nodes[-1] if nodes else None
        if last is None or last.output[0] != name or last.op_type not in kinds or len(last.input) != 2 or self.graph.uses[name] > 1:
            return None
        last.input.append(value)
        last.output[0] = self.graph.fresh(name)
        return last.output[0]

    def by_parts(self, *only: str) -> dict[str, str]:
        """The values of the used outputs, or of those in the slots `only`, by the operators that this one is decomposed into."""
        found = self.graph.by_parts(self.op, only)
        if found is None:
            raise self.wrong("more than one of the sizes that it needs is open")
        return found

    def shaped(self, value: str, slot: str) -> str:
        """A value in the shape of an output, of which one size may be open."""
        shape = self.out_type(slot).shape
        if shape.count(ANY) > 1:
            raise self.wrong("more than one size of its result is open")
        return self.emit("Reshape", value, self.ints(shape))

    def scalar(self, slot: str, dtype: str) -> str:
        """A single number in a dtype, without axes."""
        found = self.cast(slot, dtype)
        return self.emit("Reshape", found, self.ints([])) if self.type_of(slot).ndim else found

    def const(self, array: np.ndarray) -> str:
        return self.graph.constant(array)

    def known(self, slot: str) -> np.ndarray | None:
        """The value of an operand that is a constant of the program; None for other operands."""
        (name,), graph = self.op.inputs[slot], self.graph
        desc = self.block.desc(name)
        if desc.persistable and desc.stop_gradient:
            return state_value(graph.executor, graph.scope, name)
        maker = next((op for op in self.block.oplist if name in op.output_arg_names), None)
        if maker is None or maker.type not in ("fill_constant", "assign_value"):
            return None
        value = np.empty(desc.type.shape, np_dtype(desc.type.dtype))
        definition: Any = opdef(maker.type)
        definition.kernel(np, out=value, **maker.attrs)
        return value

    def ints(self, values: Any) -> str:
        """A vector of sizes, axes or the like."""
        return self.const(np.array([*values], np.int64))

    @staticmethod
    def tensor(array: np.ndarray) -> Any:
        from onnx import numpy_helper

        return numpy_helper.from_array(array)

    @staticmethod
    def code(dtype: str) -> int:
        """ONNX's code of a dtype."""
        return dtype_code(np_dtype(dtype))

    def wrong(self, why: str) -> OnnxError:
        site = f", written at {self.op.site}" if self.op.site else ""
        return OnnxError(f"{self.op.to_string()}: {why}{site}")


@cache
def _first_opsets() -> dict[str, int]:
    """The opset that introduced each operator."""
    from onnx.defs import get_all_schemas_with_history

    found: dict[str, int] = {}
    for schema in get_all_schemas_with_history():
        if not schema.domain:
            found[schema.name] = min(schema.since_version, found.get(schema.name, schema.since_version))
    return found


def _node(op_type: str, inputs: list[str], outputs: list[str], attrs: dict[str, Any]) -> Any:
    from onnx import helper

    return helper.make_node(op_type, inputs, outputs, name=outputs[0], **attrs)
