"""Importer: from the nodes of a graph to the operators of a program.

What depends on known values alone (shapes, constants, what the host has) is known too, and computed while the program is written. Where a
size or a choice depends on a value that the program computes, the program so far is run for it, if there is somebody to run it: what
follows is written knowing the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from ..executor import Executor
from ..executor.places import CPUPlace
from ..executor.scope import Scope
from ..ir import Builder, Program, Role, TensorType, Variable
from ..ir.dtypes import FLOATS, TINY, as_dtype, np_dtype
from ..ir.errors import FluidxError
from ..ir.types import ANY
from . import limits
from .constants import constant, given_out
from .errors import OnnxError
from .faces import COMPUTED, COMPUTES, FACES, HOSTS, load_all
from .limits import room
from .node import Node
from .normalize import domain_of, opsets_of
from .schema_functions import function_of, names_outside, with_attributes
from .symbolic_sizes import Open, with_open
from .values import Later, Weight, are_texts, array_of, each, in_programs, leaves

_ODD = re.compile(r"[^A-Za-z0-9_.@/\-]")

Evaluate = Callable[[Program, Sequence[Variable]], list[np.ndarray]]


class Check(NamedTuple):
    """A value that was asked for on the way: the program is right for feeds with which it recurs."""

    of: Any
    was: Any


class Mark(NamedTuple):
    """How far a block was written: operators, names, blocks of the program, and the variables of values."""

    ops: int
    names: frozenset[str]
    blocks: int
    made: dict[int, tuple[Any, Variable]]


class HostCall(NamedTuple):
    """What the host computes in each run: `work` makes the results of the operands, of both of which variables and Laters are filled in."""

    work: Callable[[list[Any]], list[Any]]
    operands: list[Any]
    results: list[Any]


class Importer:
    """Writes `main` and `startup`. `evaluate` runs the program so far for some of its variables; None where nobody can.

    `trail` has, in their order, the checks of a run and what the host computes in it; `fed` are the values of variables that are fed. With
    `constants_train` what nodes hold is a weight as initializers are, where it is more than one float: some exporters write all weights so.
    Of what would be weights `constants` are none, by name, and what is `trained` is one, single numbers too.
    `from_front` says that no computed position counts from the end of an axis, as in models that fluidx wrote: its operators refuse such
    positions.
    """

    def __init__(
        self,
        main: Program,
        startup: Program,
        opsets: Mapping[str, int],
        evaluate: Evaluate | None = None,
        constants_train: bool = False,
        from_front: bool = False,
        constants: Collection[str] = (),
        trained: Collection[str] = (),
    ):
        load_all()
        self.main, self.startup, self.opsets, self.evaluate = main, startup, opsets, evaluate
        self.b = Builder(main.global_block(), role=Role.FORWARD)
        self.constants_train, self.from_front = constants_train, from_front
        self.constants, self.trained = constants, trained
        self.env: dict[str, Any] = {}
        self.inputs: list[Variable] = []  # tensors that are fed
        self.trail: list[Check | HostCall] = []
        self.fed: dict[str, np.ndarray] = {}
        self.kept: dict[int, tuple[Any, Any]] = {}  # by id of a node, which is kept alive: what was made of its attributes
        self.opened: dict[int, tuple[Variable, int]] = {}  # of a number that stands for an open size: an axis that has it
        self._numbers: dict[str, int] = {}  # of the last name that `fresh` made of one that was taken
        self._made: dict[int, tuple[Any, Variable]] = {}  # by id of what it was made of, which is kept alive
        self._fixed: set[str] = set()  # variables that are held elsewhere than in `env`, so that their names stay

    # -- graphs -----------------------------------------------------------------------------------------------------------------

    def take_weights(self, graph: Any) -> None:
        """Enter the initializers of a graph."""
        self.env.update(self.weights(graph))

    def run_nodes(self, nodes: Sequence[Any]) -> None:
        """Write nodes, which stand in an order that computes what they read first."""
        for proto in nodes:
            self._write(proto)

    def inline(self, graph: Any, feeds: Sequence[Any], own: Mapping[str, Any] | None = None) -> list[Any]:
        """Write the nodes of a sub-graph; names of its own hide those around it. `own` are its weights, if it is written several times."""
        outer = self.env
        self.env = {**outer, **(self.weights(graph) if own is None else own)}
        try:
            self.env.update(zip((i.name for i in graph.input), feeds))
            self.run_nodes(graph.node)
            return [self.sure(self.found(o.name)) for o in graph.output]
        finally:
            self.env = outer

    def inline_in_block(self, graph: Any, feeds: Sequence[Any], n: Node, own: Mapping[str, Any] | None = None, plain: int = 0) -> list[Any]:
        """Write the nodes of a sub-graph into the block that is being written, which may run or not; its outputs as variables, but for the
        first `plain` of them where they are known."""
        b, made = self.b, self._made
        self.b, self._made = Builder(self.main.current_block(), role=Role.FORWARD), dict(made)
        self.b.sizes = b.sizes.inside(self.b.block)
        try:
            found = self.inline(graph, feeds, own)
            infos = zip(found, graph.output)
            results = [v if k < plain and self._is_known(v) else given_out(self, v, info) for k, (v, info) in enumerate(infos)]
        finally:
            inside, self.b, self._made = self._made, b, made
        made.update((k, v) for k, v in inside.items() if v[1].persistable)  # weights are everybody's, what operators made is not
        self.fix([v for v in results if isinstance(v, Variable)])
        return results

    def found(self, name: str) -> Any:
        """The value of that name."""
        if name not in self.env:
            raise OnnxError(f"a node reads {name!r}, which no node before it computes; the nodes of a graph must be in execution order")
        return self.env[name]

    def _write(self, proto: Any) -> None:
        operands = [self.found(n) if n else None for n in proto.input]
        start, blocks = len(self.b.block.oplist), self.main.num_blocks
        made = self._sure_outputs(Node(self, proto, operands))
        made = several(made)
        if self.main.num_blocks == blocks:  # what sub-blocks hand out is named in attributes too
            made = self.named(proto.output, made, start)
        if len(self.b.block.oplist) > limits.OPERATORS:
            raise Node(self, proto, operands).wrong(
                f"the program has more than {limits.OPERATORS} operators here, because loops and functions are unrolled; the limit is "
                "fluidx.onnx.limits.OPERATORS"
            )
        for name, value in zip(proto.output, made):
            if name:
                self.env[name] = np.asarray(value) if isinstance(value, np.generic) else value  # NumPy makes scalars of arrays without axes

    def named(self, wanted: Sequence[str], made: list[Any], start: int) -> list[Any]:
        """What a node made, variables called as the model calls them where operators from `start` on make them."""
        block = self.b.block
        written = {n for op in block.oplist[start:] for n in op.output_arg_names} - self._fixed
        names: dict[str, str] = {}
        for name, value in zip(wanted, made):
            if name and isinstance(value, Variable) and value.name in written and value.name not in names:
                names[value.name] = name if name == value.name else self.fresh(name)
        if not names:
            return made
        block.oplist[start:] = [op.renamed(names, outputs=True) for op in block.oplist[start:]]
        for old, new in names.items():
            block.descs[new] = block.descs.pop(old).changed(name=new)
        self._fixed.update(names.values())  # a list may hold it by now, and a name that a node gave stays
        self.b.sizes.renamed(names)
        return [block.var(names.get(v.name, v.name)) if isinstance(v, Variable) else v for v in made]

    def fix(self, variables: Sequence[Variable]) -> None:
        """Let variables keep their names, whatever the model calls what they hold."""
        self._fixed.update(v.name for v in variables)

    def mark(self) -> Mark:
        """What `undo` goes back to: nothing written since then is left in the block that is being written, and no block within."""
        block = self.b.block
        return Mark(len(block.oplist), frozenset(block.descs), self.main.num_blocks, dict(self._made))

    def undo(self, mark: Mark) -> None:
        """Take back what was written since `mark`, but for state, such as weights, which others may read by now."""
        block = self.b.block
        del block.oplist[mark.ops :]
        self.main.drop_blocks(mark.blocks)
        gone = [n for n, d in block.descs.items() if n not in mark.names and not d.persistable]
        for n in gone:
            del block.descs[n]
        self.b.sizes.forget(gone)
        self._made = mark.made | {k: v for k, v in self._made.items() if v[1].persistable}

    # -- one node ---------------------------------------------------------------------------------------------------------------

    def _sure_outputs(self, n: Node) -> Any:
        """What a node gives, every error told as one of the node: models are not to be trusted, and faces take them at their word."""
        start = len(self.b.block.oplist)

        def work() -> Any:
            made = self.outputs_of(n)
            self.check_sizes(start)
            return made

        return self._told(n, work)

    @staticmethod
    def _told(n: Node, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OnnxError:
            raise
        except FluidxError as e:
            raise n.wrong(str(e)) from None
        except Exception as e:
            raise n.wrong(f"{type(e).__name__}: {e}; the operands are {', '.join(map(_said, n.operands)) or 'none'}") from e

    def check_sizes(self, start: int = 0) -> None:
        """Refuse what operators from `start` on make, if no memory holds it."""
        block = self.b.block
        for op in block.oplist[start:]:
            for t in (block.descs[name].type for name in op.output_arg_names if name in block.descs):
                if isinstance(t, TensorType):
                    room([1 if d == ANY else d for d in t.shape], np_dtype(t.dtype).itemsize)

    def outputs_of(self, n: Node) -> Any:
        """What a node gives: by its face, on the host, or by the body that its schema has."""
        key = domain_of(n.proto.domain), n.op_type
        if key[0]:
            n.operands = [self.variable(v) if isinstance(v, Open) else v for v in n.operands]
        found = with_open(n) if not key[0] else None
        if found is not None:
            return found
        asked, by_values = COMPUTED.get(key, ((), None))
        if by_values is not None and self.evaluate is None and any(n.has(k) and isinstance(n.operands[k], Variable) for k in asked):
            return by_values(n)
        face, on_host = FACES.get(key), HOSTS.get(key)
        later = any(isinstance(v, Later) for v in n.operands)
        if on_host is not None and key in COMPUTES and self.evaluate is not None:
            if later or (face is None and any(isinstance(v, Variable) for v in n.operands)):
                return self._called(n, on_host)
        if later:
            n.operands = [self.sure(v, n) for v in n.operands]
        known = bool(n.operands) and all(v is None or self._is_known(v) for v in n.operands)
        if on_host is not None and (face is None or known or any(self._stays_on_host(v) for v in n.operands)):
            return on_host(n)
        if face is None:
            return self.by_body(n)
        if known:
            return self._folded(n, face)
        return face(n)

    def _called(self, n: Node, on_host: Any) -> Any:
        """What the host makes of values that are others in each run: data of the program where that can hold them."""

        def work(values: list[Any]) -> list[Any]:
            made = self._told(n, lambda: on_host(Node(self, n.proto, values)))
            return [np.asarray(v) if isinstance(v, np.generic) else v for v in several(made)]

        values = self._now(n.operands)
        results = []
        for name, value in zip(n.outputs, work(values)):
            self.enter(name, value, bool(name) and in_programs(value) and value.size > 0)
            results.append(self.env[name])
        self.trail.append(HostCall(work, [self.settled(v) for v in n.operands], results))
        return Outputs(results)

    @staticmethod
    def _is_known(value: Any) -> bool:
        return not any(isinstance(v, (Variable, Weight)) for v in leaves(value))

    def _stays_on_host(self, value: Any) -> bool:
        if isinstance(value, Variable) and self.evaluate is not None:
            return value.dtype in TINY
        if value is None or isinstance(value, (Variable, Weight)) or in_programs(value):
            return False
        return self.evaluate is not None or not are_texts(value)  # a program that nobody runs meanwhile has operators on strings

    def _folded(self, n: Node, face: Any) -> Any:
        """What a face makes of known values is known: a program of its own computes it."""
        inner = Importer(Program("folded"), Program("folded_startup"), self.opsets)
        inner.evaluate = run_once(inner)
        made = face(Node(inner, n.proto, n.operands))
        several = isinstance(made, (tuple, Outputs))
        made = list(made) if several else [made]
        computed = [v for v in made if isinstance(v, Variable)]
        values = iter(inner.evaluate(inner.main, computed) if computed else [])
        out = [next(values) if isinstance(v, Variable) else v for v in made]
        return Outputs(out) if several else out[0]

    def by_body(self, n: Node) -> Any:
        """Write the nodes of the function that the schema of an operator defines."""
        function, schema = function_of(self, n)
        names = names_outside(function, n.outputs)
        outer, self.env = self.env, dict(zip(function.input, [*n.operands, *[None] * len(function.input)]))
        outer_opsets, self.opsets = self.opsets, {**self.opsets, **opsets_of(function)}
        try:
            self.run_nodes([with_attributes(p, n, schema, names) for p in function.node])
            # a body may not make what nobody asks for
            return Outputs([self.found(names.get(name, name)) if n.wants(k) else None for k, name in enumerate(function.output)])
        finally:
            self.env, self.opsets = outer, outer_opsets

    # -- values -----------------------------------------------------------------------------------------------------------------

    def array(self, value: Any) -> Any:
        """What is known of a value on the host: an array, a list; the array of a Weight or of open sizes."""
        return each(self.settled(value), lambda v: v.value if isinstance(v, Later) else v)

    @staticmethod
    def settled(value: Any) -> Any:
        """A value of which variables and what comes later may be a part, all else being known."""
        return each(value, lambda v: v.array if isinstance(v, (Weight, Open)) else v)

    def sure(self, value: Any, n: Node | None = None) -> Any:
        """A value that may be relied on while the program is written: no Later."""
        return self.value(value, n) if isinstance(value, Later) else value

    def value(self, value: Any, n: Node | None = None) -> Any:
        """A value on the host; of a list, all its elements. Raises OnnxError where it has to be computed and nobody can."""
        wanted = [v for v in leaves(value) if isinstance(v, (Variable, Later))]
        now = self._now(wanted, n)
        self.trail.extend(map(Check, wanted, deepcopy(now)))  # what was fed may be changed by who fed it
        known = iter(now)
        return each(value, lambda v: next(known) if isinstance(v, (Variable, Later)) else self.array(v))

    def _now(self, values: list[Any], n: Node | None = None) -> list[Any]:
        """Values as they are in the run for which the program is written."""
        wanted = [v for v in leaves(values) if isinstance(v, Variable)]
        if not wanted:
            return list(self.array(values))
        if self.evaluate is None:
            who = f"node {n.proto.name or n.op_type!r} ({n.op_type})" if n is not None else "the model"
            raise OnnxError(
                f"{who} needs the value of {wanted[0].name!r} to know sizes or control flow, but this value depends on the feeds. If "
                "sizes determine it, give them: load(shapes=...). fx.onnx.session runs such models"
            )
        computed = iter(self.evaluate(self.main, wanted))
        self._fixed.update(v.name for v in wanted)
        return list(each(values, lambda v: next(computed) if isinstance(v, Variable) else self.array(v)))

    def variable(self, value: Any) -> Variable:
        """A value as a variable of the program: operators that make sizes or a small constant, a parameter, or what startup fills."""
        if isinstance(value, Variable):
            return value
        known = self._made.get(id(value))
        if known is None:
            known = self._made[id(value)] = value, value.write() if isinstance(value, Open) else constant(self, value)
            self._fixed.add(known[1].name)
        return known[1]

    def held(self, name: str, array: np.ndarray) -> Any:
        """What a node holds under a name."""
        trains = self.constants_train and array.ndim > 0 and array.size > 1
        return self._weight(name, array, trains)

    def weights(self, graph: Any) -> dict[str, Any]:
        """The initializers of a graph: weights where they are floats and no single numbers, and known values where not."""
        arrays = {t.name: array_of(t) for t in graph.initializer}
        return {name: self._weight(name, a, a.ndim > 0 and name not in self.constants) for name, a in arrays.items()}

    def _weight(self, name: str, array: np.ndarray, trains: bool) -> Any:
        return Weight(name, array) if array.dtype.name in FLOATS and (trains or name in self.trained) else array

    def fresh(self, name: str) -> str:
        """A name of the program for a name of the model."""
        base = _ODD.sub("_", name) or "value"
        if not self.main.declares(base):
            return base
        k = self._numbers.get(base, 0)  # a name that recurs, as in rounds that are written out, is not searched for from 1 on
        k = k + 1 if k and self.main.declares(f"{base}_{k}") else 1
        while self.main.declares(f"{base}_{k}"):
            k += 1
        self._numbers[base] = k
        return f"{base}_{k}"

    def data(self, name: str, shape: Sequence[int | str] = (), dtype: str = "float32", type: Any = None) -> Variable:
        """An input that is fed: a tensor, or a value of a type."""
        made = self.main.global_block().create_var(self.fresh(name), tuple(shape), dtype, is_data=True, stop_gradient=True, type=type)
        self.env[name] = made
        if type is None:
            self.inputs.append(made)
        return made

    def enter(self, name: str, value: Any, as_data: bool) -> Any:
        """A value that is another one in each run: data of the program, of which the name is handed back, or a Later."""
        if not as_data:
            self.env[name] = Later(value)
            return self.env[name]
        made = self.data(name, value.shape, as_dtype(value.dtype))
        self._fixed.add(made.name)
        self.fed[made.name] = value
        return made.name


class Outputs(list):
    """Several outputs of a node; a plain list is one output that is a sequence."""


def several(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, Outputs)) else [made]


def run_once(importer: Importer) -> Evaluate:
    """Runs what an importer wrote so far, from the start."""

    def evaluate(main: Program, wanted: Sequence[Variable]) -> list[np.ndarray]:
        importer.check_sizes()
        executor, scope = Executor(CPUPlace()), Scope()
        if importer.startup.global_block().oplist:
            executor.run(importer.startup, scope=scope)
        fed = {n: a for n, a in importer.fed.items() if main.global_block().has_var(n)}
        return [np.array(v) for v in executor.run(main, feed=fed, fetch_list=list(wanted), scope=scope)]

    return evaluate


def _said(value: Any) -> str:
    """An operand, in an error."""
    if isinstance(value, Variable) and not isinstance(value.desc.type, TensorType):
        return str(value.desc.type)
    t = value.desc.type if isinstance(value, Variable) else value.array if isinstance(value, Weight) else value
    return f"{t.dtype}{list(t.shape)}" if hasattr(t, "dtype") else "none" if t is None else type(t).__name__
