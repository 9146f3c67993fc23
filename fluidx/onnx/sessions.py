"""Session: a model that runs. A program is written for the shapes that are fed, and kept for when they recur."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..executor import Executor
from ..executor.place import CPUPlace
from ..executor.scope import Scope
from ..ir import Program, Variable
from ..ir.dtypes import as_dtype
from ..ir.errors import FluidxError
from .errors import OnnxError
from .form import initialized, opsets_of
from .importer import Importer, run_once
from .read import read
from .values import ABSENT, each, in_programs, leaves, numpy_dtype

_MAX_PLANS = 16


class _Plan(NamedTuple):
    """A program for feeds of one kind; `names` are those of the variables that are fed. It is right where `checks` recur."""

    main: Program
    scope: Scope
    names: dict[str, str]
    outputs: list[Any]
    checks: list[tuple[Variable, np.ndarray]]


class Session:
    """Runs a ModelProto of the newest opset on what is fed."""

    def __init__(self, model: Any):
        self.model, self.graph = model, model.graph
        self.opsets = opsets_of(model)
        self.optional = initialized(self.graph)
        self.inputs = [i.name for i in self.graph.input if i.name not in self.optional]
        self._types = {i.name: i.type for i in self.graph.input}
        self.outputs = [o.name for o in self.graph.output]
        self._plans: OrderedDict[tuple, list[_Plan]] = OrderedDict()
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._executor = Executor(CPUPlace())

    def run(self, feed: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """The outputs, for inputs by name or in order. Raises OnnxError for inputs that are missing or unknown, and for what fails."""
        try:
            return self._run(feed)
        except FluidxError:
            raise
        except Exception as e:  # a model, and what is fed, may be anything
            raise OnnxError(f"the model cannot be run: {type(e).__name__}: {e}") from e

    def _run(self, feed: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        fed = {n: _host(v) for n, v in self._by_name(feed).items()}
        for name, value in fed.items():
            self._check_type(name, value)
        tensors = {n: v for n, v in fed.items() if in_programs(v) and n not in self.optional}
        rest = {n: v for n, v in fed.items() if n not in tensors}
        key = tuple((n, v.dtype.name, v.shape) for n, v in tensors.items())
        for plan in self._plans.get(key, ()) if not rest else ():
            found = self._tried(plan, tensors)
            if found is not None:
                return found
        plan = self._write(tensors, rest)
        if not rest:
            self._plans.setdefault(key, []).insert(0, plan)
            del self._plans[key][4:]
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return self._outputs(plan, tensors)

    def _by_name(self, feed: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        has = f"the model has: {', '.join(self.inputs) or 'no inputs'}"
        if isinstance(feed, Mapping):
            fed = dict(feed)
        elif not isinstance(feed, (list, tuple)):
            raise OnnxError(f"inputs are fed by name in a dict, or in order in a list, not as {type(feed).__name__}; {has}")
        elif len(feed) > len(self.inputs):
            raise OnnxError(f"{len(feed)} values are fed; {has}")
        else:
            fed = dict(zip(self.inputs, feed, strict=False))
        missing, unknown = [n for n in self.inputs if n not in fed], [n for n in fed if n not in self._types]
        if missing or unknown:
            raise OnnxError(f"{f'input {missing[0]!r} is not fed' if missing else f'{unknown[0]!r} is no input'}; {has}")
        return fed

    def _check_type(self, name: str, value: Any) -> None:
        """Raise OnnxError for an array of another dtype or rank than the input's. Sizes are not looked at: files declare some that are not
        so."""
        t = self._types[name].tensor_type
        if not isinstance(value, np.ndarray) or not t.elem_type:
            return
        if value.dtype != numpy_dtype(t.elem_type):
            raise OnnxError(f"input {name!r} takes {_type(numpy_dtype(t.elem_type))}, found {_type(value.dtype)}; convert it first")
        if t.HasField("shape") and value.ndim != len(t.shape.dim):
            sizes = [d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in t.shape.dim]
            raise OnnxError(f"input {name!r} has {len(sizes)} axes, [{', '.join(map(str, sizes))}]; found {list(value.shape)}")

    def _write(self, tensors: Mapping[str, np.ndarray], rest: Mapping[str, Any]) -> _Plan:
        main, startup = Program(program_name(self.graph)), Program(f"{program_name(self.graph)}_startup")
        importer = Importer(main, startup, self.opsets)
        importer.kept = self._kept
        importer.take_weights(self.graph)
        names = {n: importer.data(n, v.shape, as_dtype(v.dtype)).name for n, v in tensors.items()}
        importer.env.update(rest)
        importer.evaluate = run_once(importer, {names[n]: v for n, v in tensors.items()})
        importer.run_nodes(self.graph.node)
        outputs = [importer.array(importer.found(n)) for n in self.outputs]
        scope = Scope()
        if startup.global_block().oplist:
            self._executor.run(startup, scope=scope)
        return _Plan(main, scope, names, outputs, importer.checks)

    def _fetched(self, plan: _Plan, tensors: Mapping[str, np.ndarray], wanted: Sequence[Variable]) -> list[np.ndarray]:
        block = plan.main.global_block()
        feed = {plan.names[n]: v for n, v in tensors.items() if block.has_var(plan.names[n])}
        return self._executor.run(plan.main, feed=feed, fetch_list=list(wanted), scope=plan.scope) if wanted else []

    def _tried(self, plan: _Plan, tensors: Mapping[str, np.ndarray]) -> list[Any] | None:
        """The outputs by a plan that was made before; None where a value that it was written for is another one now."""
        for (_, was), now in zip(plan.checks, self._fetched(plan, tensors, [v for v, _ in plan.checks]), strict=True):
            if was.shape != now.shape or not np.array_equal(was, now, equal_nan=was.dtype.kind == "f"):
                return None
        return self._outputs(plan, tensors)

    def _outputs(self, plan: _Plan, tensors: Mapping[str, np.ndarray]) -> list[Any]:
        computed = iter(self._fetched(plan, tensors, [v for v in leaves(plan.outputs) if isinstance(v, Variable)]))

        def found(v: Any) -> Any:
            return np.array(next(computed)) if isinstance(v, Variable) else None if v is ABSENT else v

        return [each(v, found) for v in plan.outputs]


def _host(value: Any) -> Any:
    """What is fed, as the host has it: arrays, lists of them, ABSENT."""
    if value is None or value is ABSENT:
        return ABSENT
    if isinstance(value, list):
        return [_host(v) for v in value]
    if isinstance(value, dict):
        return value
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def _type(dtype: np.dtype) -> str:
    return "strings" if dtype.kind == "O" else dtype.name


def program_name(graph: Any) -> str:
    """The name of a program for a graph."""
    return re.sub(r"\W", "_", graph.name) or "model"


def session(source: Any) -> Session:
    """A model of a path, bytes or a ModelProto, ready to run."""
    return Session(read(source))
