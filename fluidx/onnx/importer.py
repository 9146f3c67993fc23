"""`Importer` turns the nodes of an ONNX graph into operators of a program.

Values that depend only on known values (shapes, constants, arrays on the host) are computed while the program is written. Where a size or
a branch depends on a value that the program computes, the importer runs the program written so far, if a session gave it a way to, and
writes the rest for that value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..executor import Executor
from ..executor.places import CPUPlace
from ..executor.scope import Scope
from ..ir import Builder, Program, Role, TensorType, Variable
from ..ir.dtypes import FLOATS, TINY, as_dtype
from ..ir.errors import FluidxError
from . import limits
from .constants import block_output
from .errors import OnnxError
from .fake_quantization import FakeQuantization
from .host_builder import HostBuilder, HostTensor
from .node import Node
from .normalize import domain_of, opsets_of
from .open_sized_nodes import open_size_outputs
from .schema_functions import function_of, output_names, with_attributes
from .size_forms import SizeForm
from .symbolic_sizes import OpenSizes
from .table import DYNAMIC_IMPORTERS, IMPORTERS, NUMPY_IMPORTERS, PURE, load_all
from .value_reader import Evaluate, HostCall, ValueReader
from .values import Outputs, RuntimeValue, Weight, array_of, as_outputs, fits_program, is_string_array, leaves, map_leaves


class Importer(ValueReader):
    """Imports the nodes of a graph into `main` and `startup`.

    `opsets` are those of the model; `evaluate` is that of ValueReader; `fed` has the values of fed variables. With `constants_train`, a
    constant of more than one float that a node holds is a weight too: some exporters of other tools write all weights so. `constants` names
    initializers that are not weights, and `trained` names weights even if they are single numbers. With `fake_quantized`, quantized weights
    and values become floats that are rounded, so that they can be trained. `from_front`: no computed index counts
    from the end of an axis. This holds for models that fluidx exported, because its operators refuse such indices. With
    `integers`, for inference alone, products of integers stay such.
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
        fake_quantized: bool = False,
        integers: bool = False,
    ):
        load_all()
        super().__init__(main, startup, evaluate)
        self.opsets = opsets
        self.constants_train, self.from_front = constants_train, from_front
        self.constants, self.trained = constants, trained
        self.rounding = FakeQuantization() if fake_quantized or integers else None
        self.integers = integers
        self.env: dict[str, Any] = {}
        self.inputs: list[Variable] = []  # tensors that are fed
        self.fed: dict[str, np.ndarray] = {}
        self.node_cache: dict[int, tuple[Any, Any]] = {}  # id of a node -> the node, kept alive, and a value made of its attributes
        self._host: _HostImporter | None = None
        # number that stands for an open size, or the form of a computed one -> a variable and its axis of that size
        self.open_axes: dict[int | SizeForm, tuple[Variable, int]] = {}

    # -- graphs -----------------------------------------------------------------------------------------------------------------

    def take_weights(self, graph: Any) -> None:
        """Define the initializers of a graph."""
        self.env.update(self.weights(graph))

    def run_nodes(self, nodes: Sequence[Any]) -> None:
        """Write nodes that are in execution order."""
        for proto in nodes:
            self._write(proto)

    def inline(self, graph: Any, feeds: Sequence[Any], own: Mapping[str, Any] | None = None) -> list[Any]:
        """Write the nodes of a sub-graph and return its outputs.

        Names of the sub-graph shadow outer ones. `own` has its weights, from a caller that writes the sub-graph several times.
        """
        outer = self.env
        self.env = {**outer, **(self.weights(graph) if own is None else own)}
        try:
            self.env.update(zip((i.name for i in graph.input), feeds))
            self.run_nodes(graph.node)
            return [self.resolved(self.lookup(o.name)) for o in graph.output]
        finally:
            self.env = outer

    def inline_in_block(self, graph: Any, feeds: Sequence[Any], n: Node, own: Mapping[str, Any] | None = None, plain: int = 0) -> list[Any]:
        """Write the nodes of a sub-graph into the current block, which may run or not. Outputs are variables, except that the first `plain`
        ones stay known values if they are."""
        b, made = self.b, self._made
        self.b, self._made = Builder(self.main.current_block(), role=Role.FORWARD), dict(made)
        self.b.sizes = b.sizes.inside(self.b.block)
        try:
            found = self.inline(graph, feeds, own)
            infos = zip(found, graph.output)
            results = [v if k < plain and self._is_known(v) else block_output(self, v, info) for k, (v, info) in enumerate(infos)]
        finally:
            inside, self.b, self._made = self._made, b, made
        made.update((k, v) for k, v in inside.items() if v[1].persistable)  # other blocks may read weights, not results
        self.keep_names([v for v in results if isinstance(v, Variable)])
        return results

    def lookup(self, name: str) -> Any:
        """The value of a name. Raises OnnxError if no node before defines it."""
        if name not in self.env:
            raise OnnxError(f"a node reads {name!r}, which no node before it computes; the nodes of a graph must be in execution order")
        return self.env[name]

    def _write(self, proto: Any) -> None:
        operands = [self.lookup(n) if n else None for n in proto.input]
        start, blocks = len(self.b.block.oplist), self.main.num_blocks
        made = as_outputs(self._checked_outputs(Node(self, proto, operands)))
        if self.main.num_blocks == blocks:  # attributes of sub-blocks name their results, so these are not renamed
            made = self.with_model_names(proto.output, made, start)
        if len(self.b.block.oplist) > limits.OPERATORS:
            raise Node(self, proto, operands).wrong(
                f"the program has more than {limits.OPERATORS} operators here, because loops and functions are unrolled; the limit is "
                "fluidx.onnx.limits.OPERATORS"
            )
        for name, value in zip(proto.output, made):
            if name:
                self.env[name] = np.asarray(value) if isinstance(value, np.generic) else value  # NumPy turns 0-d arrays into scalars

    # -- one node ---------------------------------------------------------------------------------------------------------------

    def _checked_outputs(self, n: Node) -> Any:
        """The outputs of a node. Import functions do not validate the model, so every failure becomes an OnnxError that names the node."""
        start = len(self.b.block.oplist)

        def work() -> Any:
            made = self.outputs_of(n)
            self.check_sizes(start)
            return made

        return self._with_node_errors(n, work)

    @staticmethod
    def _with_node_errors(n: Node, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OnnxError:
            raise
        except FluidxError as e:
            raise n.wrong(str(e)) from None
        except Exception as e:
            raise n.wrong(f"{type(e).__name__}: {e}; the operands are {', '.join(map(_describe, n.operands)) or 'none'}") from e

    def outputs_of(self, n: Node) -> Any:
        """The outputs of a node, by its function in the import tables or by the function body of its schema."""
        key = domain_of(n.proto.domain), n.op_type
        if key[0]:
            n.operands = [self.variable(v) if isinstance(v, OpenSizes) else v for v in n.operands]
        found = open_size_outputs(n) if not key[0] else None
        if found is None and self.rounding is not None:
            found = self.rounding.output(n)
        if found is not None:
            return found
        needed, dynamic = DYNAMIC_IMPORTERS.get(key, ((), None))
        if dynamic is not None and self.evaluate is None and any(n.has(k) and isinstance(n.operands[k], Variable) for k in needed):
            return dynamic(n)
        write: Any = IMPORTERS.get(key, dynamic)
        on_host = NUMPY_IMPORTERS.get(key)
        if write is None and on_host is None:
            return self.by_body(n)
        pure = on_host is None or key in PURE
        later, odd = any(isinstance(v, RuntimeValue) for v in n.operands), any(map(self._stays_on_host, n.operands))
        computed = later or any(isinstance(v, Variable) for v in n.operands)
        if pure and computed and self.evaluate is not None and (later or odd or key not in IMPORTERS):
            return self._called(n, on_host or partial(self._on_host, write))
        if later:
            n.operands = [self.resolved(v, n) for v in n.operands]
        known = bool(n.operands) and all(v is None or self._is_known(v) for v in n.operands)
        if on_host is not None and (key not in IMPORTERS or known or odd):
            return on_host(n)
        return self._folded(n, write) if known else write(n)

    def _called(self, n: Node, on_host: Any) -> Any:
        """Outputs that the host computes again in each run. They are data variables if the program can hold them, RuntimeValues if not."""

        def work(values: list[Any]) -> list[Any]:
            made = self._with_node_errors(n, lambda: on_host(Node(self, n.proto, values)))
            return [np.asarray(v) if isinstance(v, np.generic) else v for v in as_outputs(made)]

        values = self._current(n.operands)
        results = []
        for name, value in zip(n.outputs, work(values)):
            self.add_runtime_value(name, value, bool(name) and fits_program(value) and value.size > 0)
            results.append(self.env[name])
        self.host_steps.append(HostCall(work, [self.unwrapped(v) for v in n.operands], results))
        return Outputs(results)

    @staticmethod
    def _is_known(value: Any) -> bool:
        return not any(isinstance(v, (Variable, Weight)) for v in leaves(value))

    def _stays_on_host(self, value: Any) -> bool:
        if isinstance(value, Variable) and self.evaluate is not None:
            return value.dtype in TINY
        if value is None or isinstance(value, (Variable, Weight)) or fits_program(value):
            return False
        return self.evaluate is not None or not is_string_array(value)  # a program that runs later has operators on strings

    def _folded(self, n: Node, write: Any) -> Any:
        """The outputs of a node whose operands are all known."""
        return self._on_host(write, n)

    def _on_host(self, write: Any, n: Node) -> Any:
        """The outputs of a node with known operands, by the function that writes its operators."""
        host = self._host = self._host or _HostImporter(self.opsets, self.node_cache)
        host.opsets = self.opsets
        return host.arrays(write(Node(host, n.proto, n.operands)))

    def by_body(self, n: Node) -> Any:
        """Write the nodes of the function that the schema of an operator defines."""
        function, schema = function_of(self, n)
        names = output_names(function, n.outputs)
        outer, self.env = self.env, dict(zip(function.input, [*n.operands, *[None] * len(function.input)]))
        outer_opsets, self.opsets = self.opsets, {**self.opsets, **opsets_of(function)}
        try:
            self.run_nodes([with_attributes(p, n, schema, names) for p in function.node])
            # a body may leave out outputs that no node reads
            return Outputs([self.lookup(names.get(name, name)) if n.wants(k) else None for k, name in enumerate(function.output)])
        finally:
            self.env, self.opsets = outer, outer_opsets

    # -- inputs and weights ---------------------------------------------------------------------------------------------------------------

    def node_constant(self, name: str, array: np.ndarray) -> Any:
        """An array that a node holds, as a Weight if constants of nodes are trained."""
        trains = self.constants_train and array.ndim > 0 and array.size > 1
        return self._weight(name, array, trains)

    def weights(self, graph: Any) -> dict[str, Any]:
        """The initializers of a graph: float arrays with axes are weights, others are known values."""
        arrays = {t.name: array_of(t) for t in graph.initializer}
        return {name: self._weight(name, a, a.ndim > 0 and name not in self.constants) for name, a in arrays.items()}

    def _weight(self, name: str, array: np.ndarray, trains: bool) -> Any:
        return Weight(name, array) if array.dtype.name in FLOATS and (trains or name in self.trained) else array

    def data(self, name: str, shape: Sequence[int | str] = (), dtype: str = "float32", type: Any = None) -> Variable:
        """A data variable for an input: a tensor, or a value of the given type."""
        made = self.main.global_block().create_var(self.fresh(name), tuple(shape), dtype, is_data=True, stop_gradient=True, type=type)
        self.env[name] = made
        if type is None:
            self.inputs.append(made)
        return made

    def add_runtime_value(self, name: str, value: Any, as_data: bool) -> Any:
        """Define a value that differs from run to run. Returns the name of its data variable, or a RuntimeValue if not `as_data`."""
        if not as_data:
            self.env[name] = RuntimeValue(value)
            return self.env[name]
        made = self.data(name, value.shape, as_dtype(value.dtype))
        self.keep_names([made])
        self.fed[made.name] = value
        return made.name


class _HostImporter(Importer):
    """An importer that computes nodes whose operands are all known."""

    def __init__(self, opsets: Mapping[str, int], node_cache: dict[int, tuple[Any, Any]]):
        super().__init__(Program("known"), Program("known_startup"), opsets)
        self.b, self.node_cache = HostBuilder(), node_cache
        self.evaluate = lambda main, wanted: []  # no value is missing

    def variable(self, value: Any) -> Any:
        return value if isinstance(value, HostTensor) else HostTensor(self.array(value))

    def frozen(self, name: str, array: np.ndarray, shape: Sequence[int]) -> Any:
        return HostTensor(array.reshape(shape))

    def value(self, value: Any, n: Node | None = None) -> Any:
        return map_leaves(value, lambda v: v.array if isinstance(v, HostTensor) else self.array(v))

    def _folded(self, n: Node, write: Any) -> Any:
        return self.arrays(write(n))

    def arrays(self, made: Any) -> Outputs:
        """Outputs with arrays in place of HostTensors."""
        return Outputs(self.value(v) for v in as_outputs(made))


def run_once(importer: Importer) -> Evaluate:
    """A function that runs the program that an importer wrote so far, from the start."""

    def evaluate(main: Program, wanted: Sequence[Variable]) -> list[np.ndarray]:
        importer.check_sizes()
        executor, scope = Executor(CPUPlace()), Scope()
        if importer.startup.global_block().oplist:
            executor.run(importer.startup, scope=scope)
        fed = {n: a for n, a in importer.fed.items() if main.global_block().has_var(n)}
        return [np.array(v) for v in executor.run(main, feed=fed, fetch_list=list(wanted), scope=scope)]

    return evaluate


def _describe(value: Any) -> str:
    """An operand as an error message shows it."""
    if isinstance(value, OpenSizes):
        return f"open sizes {value.dtype}{list(value.array.shape)}"
    if isinstance(value, Variable) and not isinstance(value.desc.type, TensorType):
        return str(value.desc.type)
    t = value.desc.type if isinstance(value, Variable) else value.array if isinstance(value, Weight) else value
    return f"{t.dtype}{list(t.shape)}" if hasattr(t, "dtype") else "none" if t is None else type(t).__name__
