"""Roles of initializers, derived from the nodes that read them: trained weight, constant of arithmetic, running statistic, shared weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import Any, NamedTuple

from ..ir.dtypes import FLOATS
from ..ir.unique_name import unused
from .normalize import all_graphs, domain_of, graphs_of
from .table import FACTORS, STATISTICS, load_all
from .values import numpy_dtype

_SHOWN = 5  # weights named in one line
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


class Read(NamedTuple):
    """A node reads an initializer as operand `slot`."""

    node: Any
    slot: int


class Roles:
    """The nodes that read each initializer of a graph, directly or through the Identity nodes that exporters write for merged initializers.
    """

    def __init__(self, graph: Any):
        load_all()
        graphs = list(all_graphs(graph))
        self.tensors = {t.name: t for g in graphs for t in g.initializer}
        self._makers = {name: p for g in graphs for p in g.node for name in p.output if name}
        self.held = {p.output[0]: a.t for g in graphs for p in g.node for a in p.attribute if p.op_type == "Constant" and a.HasField("t")}
        self.reads: dict[str, list[Read]] = {name: [] for name in (*self.tensors, *self.held)}
        self.graphs = graphs
        for node in (p for g in graphs for p in g.node if not _is_identity(p)):
            for slot, name in enumerate(node.input):
                self.reads.get(self.origin(name), []).append(Read(node, slot))
        self._reached = _reached_by_gradients(graph)

    def readers(self, value: str) -> list[Read]:
        """The reads of a value that a node computes."""
        return [Read(p, slot) for g in self.graphs for p in g.node for slot, name in enumerate(p.input) if name == value]

    def origin(self, name: str) -> str:
        """The first name of a chain of Identity nodes."""
        while (maker := self._makers.get(name)) is not None and _is_identity(maker) and maker.input:
            name = maker.input[0]
        return name

    def constants(self) -> Iterator[str]:
        """Initializers that are no weights: those of one element that only arithmetic reads, such as the scale of an attention, and those
        that are only compared, such as a table of masks."""
        for name, t in self.tensors.items():
            reads = self.reads[name]
            if self.is_only_compared(name) or prod(t.dims) == 1 and reads and all(self._is_factor(r, name) for r in reads):
                yield name

    def is_only_compared(self, name: str) -> bool:
        """Do the outputs depend on an initializer through true and false alone, so that it has no gradient?"""
        return bool(self.reads[name]) and name not in self._reached

    def _is_factor(self, read: Read, name: str) -> bool:
        """Does arithmetic read it? The bias added to a product with a single output does not count."""
        if (domain_of(read.node.domain), read.node.op_type) not in FACTORS:
            return False
        others = [n for n in read.node.input if self.origin(n) != name]
        return read.node.op_type != "Add" or not any(self._has_one_output(self._makers.get(n)) for n in others)

    def _has_one_output(self, node: Any) -> bool:
        """Is it a product with a weight of one column or one filter?"""
        if node is None or node.op_type not in _PRODUCTS or domain_of(node.domain):
            return False
        weight = next((self.tensors[n] for n in map(self._behind_transpose, node.input) if n in self.tensors), None)
        return weight is not None and 1 in weight.dims

    def _behind_transpose(self, name: str) -> str:
        maker = self._makers.get(name)
        return self.origin(maker.input[0] if maker is not None and maker.op_type == "Transpose" else name)

    def shared(self) -> dict[str, int]:
        """Float initializers that several nodes read -> the number of nodes. Constants are left out."""
        constants = set(self.constants())
        weights = [n for n, t in self.tensors.items() if _is_float(t) and n not in constants]
        counts = {n: len({id(r.node) for r in self.reads[n]}) for n in weights}
        return {n: k for n, k in counts.items() if k > 1}

    def floats(self) -> list[str]:
        """The names of float initializers and of float constants in nodes."""
        return [n for n, t in {**self.tensors, **self.held}.items() if _is_float(t)]

    def statistics(self, name: str) -> list[Read]:
        """The reads of an initializer as a running statistic of a normalization."""
        return [r for r in self.reads[name] if r.slot in STATISTICS.get((domain_of(r.node.domain), r.node.op_type), {})]


def sharing(graph: Any, trained: Collection[str]) -> str:
    """A line about trained initializers that several nodes read; "" if there are none."""
    shared = {n: k for n, k in Roles(graph).shared().items() if n in trained}
    if not shared:
        return ""
    some = sorted(shared, key=lambda n: -shared[n])[:_SHOWN]
    listed = ", ".join(f"{n} by {shared[n]}" for n in some) + ", ..." * (len(shared) > len(some))
    many = "1 weight is" if len(shared) == 1 else f"{len(shared)} weights are each"
    return (
        f"{many} read by several nodes, which train it as one: {listed}. Exporters merge equal weights, such as those of a new "
        "model; load(untie=True), or --untie, gives each node its own"
    )


class InitializerRole(NamedTuple):
    """The role of an initializer, or of a constant in a node, in training. `why` names its readers, or the reason why it is not trained."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trained: bool
    why: str


def initializer_roles(graph: Any, parameters: Collection[str] | None) -> list[InitializerRole]:
    """The role of each float weight and initializer of a graph. `parameters` names those that are parameters of its program, and is None
    without a program."""
    roles = Roles(graph)
    constants = set(roles.constants())
    found = []
    for name, t in {**roles.tensors, **{n: t for n, t in roles.held.items() if n in (parameters or ())}}.items():
        why = _why_not(roles, name, t, name in constants) if parameters is None or name not in parameters or roles.statistics(name) else ""
        readers = ", ".join(dict.fromkeys(r.node.op_type for r in roles.reads.get(name, ())))
        nodes = len({id(r.node) for r in roles.reads.get(name, ())})
        readers += f", {nodes} nodes" * (nodes > 1)
        trained = not why and (parameters is None or name in parameters)
        why = why or (readers if trained else f"{readers} needs its value while the program is written")
        found.append(InitializerRole(name, numpy_dtype(t.data_type).name, tuple(t.dims), trained, why))
    return found


def _why_not(roles: Roles, name: str, tensor: Any, is_constant: bool) -> str:
    """Why an initializer is not trained; "" if the graph gives no reason."""
    reads = roles.reads.get(name, [])
    if reads and all(r.node.op_type == "MatMulNBits" and r.slot in (1, 2, 3) for r in reads):
        return "part of a quantized weight; --lora trains adapters beside it"
    if not _is_float(tensor):
        return "only floats are trained"
    if statistics := roles.statistics(name):
        return f"running statistic of {statistics[0].node.op_type}"
    if not reads:
        return "no node reads it"
    if is_constant and roles.is_only_compared(name):
        return f"the outputs depend on it through true and false alone ({reads[0].node.op_type})"
    if is_constant or not tensor.dims:
        return f"one number that {reads[0].node.op_type} reads; --also-train {name} trains it"
    return ""


def _reached_by_gradients(graph: Any) -> set[str]:
    """The values that some output of a graph depends on by other ways than true and false. Sub-graphs use all that they read."""
    reached = {o.name for o in graph.output}
    for node in reversed(graph.node):
        if any(name in reached and not _is_bool(node, k) for k, name in enumerate(node.output)):
            reached.update(node.input)
            inner = [g for outer in graphs_of(node) for g in all_graphs(outer)]
            reached.update(name for g in inner for p in g.node for name in p.input)
            reached.update(o.name for g in inner for o in g.output)
    return reached


def _is_bool(node: Any, k: int) -> bool:
    """Is output k of a node certainly true and false?"""
    from onnx import TensorProto, defs

    if node.op_type == "Cast":
        return any(a.name == "to" and a.i == TensorProto.BOOL for a in node.attribute)
    if not defs.has(node.op_type, domain_of(node.domain)):
        return False
    outputs = defs.get_schema(node.op_type, domain_of(node.domain)).outputs
    return k < len(outputs) and set(outputs[k].types) == {"tensor(bool)"}


def _is_float(tensor: Any) -> bool:
    return numpy_dtype(tensor.data_type).name in FLOATS


def _is_identity(node: Any) -> bool:
    return node.op_type == "Identity" and not domain_of(node.domain)


def with_own_copies(model: Any, untied: Collection[str] = ()) -> Any:
    """The model with separate running statistics for each normalization, where an exporter merged them with equal initializers: training
    updates statistics, which would change the other users. Each node that reads one of `untied` gets its own too.
    """
    roles = Roles(model.graph)
    if not untied and not any(len(reads) > 1 and roles.statistics(name) for name, reads in roles.reads.items()):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    graph, roles = changed.graph, Roles(changed.graph)
    taken = {name for g in all_graphs(graph) for p in g.node for name in (*p.input, *p.output)} | set(roles.tensors)
    for name, reads in roles.reads.items():
        if len(reads) == 1:
            continue
        groups, by_node = [], dict[int, list[Read]]()
        for r in reads:
            word = STATISTICS.get((domain_of(r.node.domain), r.node.op_type), {}).get(r.slot)
            if word is not None:
                groups.append((word, [r]))
            elif name in untied:
                by_node.setdefault(id(r.node), []).append(r)
        groups += [(name, group) for group in list(by_node.values())[1:]]
        for word, group in groups:
            node = group[0].node
            own = graph.initializer.add()
            own.CopyFrom(roles.tensors[name])
            own.name = unused(f"{node.name or node.output[0]}.{word}", taken, "_{}".format)
            taken.add(own.name)
            for r in group:
                r.node.input[r.slot] = own.name
    return changed
