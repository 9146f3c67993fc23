"""`Session` runs a model. It writes a program for the shapes of the first feeds. Other shapes have one program with open axes if there is
one, the same as `load` gives, and else a program for each."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from ..executor import Executor
from ..executor.executor import writes_state
from ..executor.places import CPUPlace
from ..executor.plan.allocation import ALIGN, copied
from ..executor.scope import Scope
from ..ir import Program, unique_name
from ..ir.constants import Array
from ..ir.dtypes import kept
from ..ir.errors import FluidxError, explains_arguments
from ..ir.types import WORD
from ..rewrite import JoinAttention, JoinLayerNorm, rewritten
from ..rewrite.base import simplified, with_ops
from ..rewrite.batch_norm import fold_batch_norms, what_trains
from ..rewrite.fold_weights import fold_weights
from ..rewrite.quantized import join_quantized
from ..rewrite.scales import fold_scales
from .cache_inputs import likely_shapes
from .errors import OnnxError
from .importer import Importer, run_once
from .mapped_tensors import is_mapped
from .normalize import initialized, opsets_of
from .read import read
from .staged_runs import HostSteps, StagedPlan, read_by_host
from .values import ABSENT, array_of, fits_program, numpy_dtype
from .whole_model import WholeModel, import_model, program_name

_MAX_PLANS = 16  # with a program of their own
_MAX_KINDS = 1024  # of feeds
_MAX_ALIKE = 4  # plans for feeds of the same names, types and shapes


class Session:
    """Runs a ModelProto of the newest opset. `whole` is its program for all sizes, if there is one already; False if there is none."""

    def __init__(self, model: Any, whole: WholeModel | Literal[False] | None = None):
        self.model, self.graph = model, model.graph
        self.opsets = opsets_of(model)
        self.optional = initialized(self.graph)
        self.inputs = [i.name for i in self.graph.input if i.name not in self.optional]
        self._types = {i.name: i.type for i in self.graph.input}
        self._dtypes: dict[str, np.dtype | None] = {}
        self.outputs = [o.name for o in self.graph.output]
        self._plans: OrderedDict[tuple, list[tuple[StagedPlan, Mapping[str, Any]]]] = OrderedDict()
        self._whole = whole  # for all sizes; None before it was asked for
        self._partly_open: list[WholeModel] = []
        self._before: Mapping[str, Any] = {}  # the shapes of the feeds for which a plan was last asked for
        self._open: dict[int, StagedPlan] = {}  # by the id of a WholeModel
        self._kept = [array_of(t) for t in self.graph.initializer if is_mapped(t)]  # keeps files open, and arrays that were held
        self._weights: dict[str, np.ndarray] = {}
        self._node_cache: dict[int, tuple[Any, Any]] = {}
        self._executor = Executor(CPUPlace())
        if whole is None:
            self._write_likely()

    @explains_arguments
    def run(self, feed: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """The outputs, for inputs by name or in order. Raises OnnxError for missing or unknown inputs, and for every failure of the model.
        """
        try:
            return self._run(feed)
        except FluidxError:
            raise
        except Exception as e:  # neither the model nor the feeds are trusted
            raise OnnxError(f"the model cannot be run: {type(e).__name__}: {e}") from e

    def _run(self, feed: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        fed: Any = feed
        plain = type(fed) is dict and set(map(type, fed.values())) <= {np.ndarray}
        if plain and (found := self._run_open(fed)) is not None:
            return found
        key = _kind(fed) if plain else ()
        if not plain or key not in self._plans:  # names and types of a known plan were checked before
            fed = {n: self._in_own_dtype(n, host_value(v)) for n, v in self._by_name(feed).items()}
            key = _kind(fed)
        plans = self._plans.get(key)
        if plans is None:
            for name, value in fed.items():
                self._check_type(name, value)
            plans = self._for_all_sizes(fed)
        for plan, given in plans:
            try:
                found = plan.run({v: fed[n] for n, v in given.items()})
            except FluidxError:  # a plan for other values may fail before its checks do
                continue
            if found is not None:
                if key not in self._plans:
                    self._keep(key, plan, given)
                return found
        try:
            plan, given = self._write(fed)
            found = plan.run({v: fed[n] for n, v in given.items()})
        except FluidxError as e:
            if undeclared := self._undeclared_shape(fed):
                raise OnnxError(f"{undeclared}: {e}") from None
            raise
        assert found is not None, "a new plan must fit the values that it was written for"
        self._keep(key, plan, given)
        return found

    def _for_all_sizes(self, fed: Mapping[str, Any]) -> list[tuple[StagedPlan, Mapping[str, Any]]]:
        """The plan of a program with open axes, if these feeds fit one. It is written when feeds of a second kind come."""
        before, self._before = self._before, {n: getattr(v, "shape", None) for n, v in fed.items()}
        whole: WholeModel | Literal[False] | None = next((w for w in (self._whole, *self._partly_open) if w and w.fits(fed)), None)
        if whole is None and self._whole is None and self._plans:
            self._whole = self._import_whole({})
            whole = self._whole if self._whole and self._whole.fits(fed) else None
        if whole is None and not self._whole and len(self._partly_open) < _MAX_ALIKE:
            whole = self._import_partly_open(before, self._before)
        return [(self._open_plan(whole), whole.feeds)] if whole else []

    def _run_open(self, fed: Mapping[str, np.ndarray]) -> list[Any] | None:
        """The outputs by a program for open sizes that was written for such feeds; None if there is none."""
        for whole in self._partly_open:
            if whole.takes(fed) and (plan := self._open.get(id(whole))) is not None:
                with suppress(FluidxError):
                    return plan.run({v: fed[n] for n, v in whole.feeds.items()})
        return None

    def _open_plan(self, whole: WholeModel) -> StagedPlan:
        if id(whole) not in self._open:
            self._open[id(whole)] = self._plan(whole.main, whole.startup, (), whole.outputs, whole.feeds.values())
        return self._open[id(whole)]

    def _write_likely(self) -> None:
        """Write the programs with which a model that has a cache will be run."""
        for shapes in likely_shapes(self.graph, self.optional):
            with suppress(Exception):  # the model is not trusted; if it is wrong, a run says so
                if whole := self._import_whole(shapes):
                    self._open_plan(whole)
                    self._partly_open.append(whole)

    def _import_whole(self, shapes: Mapping[str, Sequence[int | str]]) -> WholeModel | Literal[False]:
        """The program for all sizes of the open axes; False if the model has none, or if the program differs from run to run. `shapes` are
        those of `load`."""
        sizes = [d for i in self.graph.input if i.name not in self.optional for d in i.type.tensor_type.shape.dim]
        if all(d.HasField("dim_value") for d in sizes):
            return False
        with suppress(FluidxError), unique_name.guard():
            whole = WholeModel.of(import_model(self.model, shapes, own=False, integers=True), self.inputs, self.outputs)
            return whole if whole.is_plain() else False
        return False

    def _import_partly_open(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> WholeModel | Literal[False]:
        """The program for all sizes of the axes in which two feeds differ; the other axes have the sizes of both. In the generation of text
        one token at a time, for example, only the length of the cache is open."""
        if not before or before.keys() != now.keys() or any(not shape for some in (before, now) for shape in some.values()):
            return False
        if any(0 in sizes for n, shape in now.items() for sizes in zip(before[n], shape) if sizes[0] != sizes[1]):
            return False
        shapes = {n: _opened(self._types[n].tensor_type, before[n], shape) for n, shape in now.items()}
        if any(shape is None for shape in shapes.values()) or all(isinstance(d, int) for shape in shapes.values() for d in shape or ()):
            return False
        found = self._import_whole(shapes)  # type: ignore[arg-type]
        if found:
            self._partly_open.append(found)
        return found

    def _keep(self, key: tuple, plan: StagedPlan, given: Mapping[str, Any]) -> None:
        plans = self._plans.setdefault(key, [])
        plans.insert(0, (plan, given))
        del plans[_MAX_ALIKE:]
        shared = {id(one) for one in self._open.values()}
        own = [] if id(plan) in shared else [k for k, alike in self._plans.items() if id(alike[0][0]) not in shared]
        if len(own) > _MAX_PLANS or len(self._plans) > _MAX_KINDS:
            del self._plans[own[0] if len(own) > _MAX_PLANS else next(iter(self._plans))]

    def _by_name(self, feed: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        has = f"the model has: {', '.join(self.inputs) or 'no inputs'}"
        if isinstance(feed, Mapping):
            fed = dict(feed)
        elif not isinstance(feed, (list, tuple)):
            raise OnnxError(f"feed inputs by name in a dict, or in order in a list, not as {type(feed).__name__}; {has}")
        elif len(feed) > len(self.inputs):
            raise OnnxError(f"{len(feed)} values are fed; {has}")
        else:
            fed = dict(zip(self.inputs, feed, strict=False))
        missing, unknown = [n for n in self.inputs if n not in fed], [n for n in fed if n not in self._types]
        wrong = [*(f"{n!r} is not an input" for n in unknown[:1]), *(f"input {n!r} is not fed" for n in missing[:1])]
        if wrong:
            raise OnnxError(f"{', and '.join(wrong)}; {has}")
        return fed

    def dtype(self, name: str) -> np.dtype | None:
        """The dtype of an input. None if the input is missing or not a tensor."""
        if name not in self._dtypes:
            code = self._types[name].tensor_type.elem_type if name in self._types else 0
            self._dtypes[name] = numpy_dtype(code) if code else None
        return self._dtypes[name]

    def _in_own_dtype(self, name: str, value: Any) -> Any:
        """The fed value in the dtype of the input. Raises OnnxError if the conversion would change values."""
        own = self.dtype(name)
        if own is None or not isinstance(value, np.ndarray) or value.dtype == own:
            return value
        try:
            return kept(value, own)
        except ValueError as e:
            found = f"found {_type(value.dtype)}; convert it first" if str(e).startswith("has") else f"the array {e}"
            raise OnnxError(f"input {name!r} takes {_type(own)}, {found}") from None

    def _check_type(self, name: str, value: Any) -> None:
        """Raise OnnxError if the value is not an array, or has another number of axes than the input. Sizes are not compared, because some
        files declare wrong ones."""
        t = self._types[name].tensor_type
        if not t.elem_type or isinstance(value, dict):  # operators that take maps check them
            return
        if not isinstance(value, np.ndarray):
            own = numpy_dtype(t.elem_type)
            what = "nothing" if value is ABSENT else f"a {type(value).__name__}; give np.asarray({name}, {own.name!r})"
            raise OnnxError(f"input {name!r} takes an array of {_type(own)}, found {what}")
        if t.HasField("shape") and value.ndim != len(t.shape.dim):
            one = f"; a batch of one is {name}[None]" if value.ndim == len(t.shape.dim) - 1 else ""
            sizes = _declared_sizes(t)
            raise OnnxError(f"input {name!r} has {len(sizes)} axes, [{', '.join(map(str, sizes))}]; found {list(value.shape)}{one}")

    def _undeclared_shape(self, fed: Mapping[str, Any]) -> str:
        """A sentence about a fed shape that the file does not declare; "" if there is none."""
        for name, value in fed.items():
            sizes = _declared_sizes(self._types[name].tensor_type)
            if isinstance(value, np.ndarray) and any(isinstance(d, int) and d != size for d, size in zip(sizes, value.shape)):
                return f"input {name!r} is declared [{', '.join(map(str, sizes))}], the feed has shape {list(value.shape)}"
        return ""

    def _write(self, fed: Mapping[str, Any]) -> tuple[StagedPlan, dict[str, Any]]:
        """A plan, and for each input the name of its variable or its RuntimeValue."""
        main, startup = Program(program_name(self.graph)), Program(f"{program_name(self.graph)}_startup")
        importer = Importer(main, startup, self.opsets, integers=True)
        importer.node_cache = self._node_cache
        importer.take_weights(self.graph)
        given = {n: importer.add_runtime_value(n, v, fits_program(v) and n not in self.optional) for n, v in fed.items()}
        importer.evaluate = run_once(importer)
        importer.run_nodes(self.graph.node)
        outputs = [importer.unwrapped(importer.lookup(n)) for n in self.outputs]
        return self._plan(main, startup, importer.host_steps, outputs, importer.fed), given

    def _plan(self, main: Program, startup: Program, host_steps: HostSteps, outputs: Sequence[Any], fed: Collection[str]) -> StagedPlan:
        """The plan of a program, with the values of its weights. Plans share equal weights."""
        scope = Scope()
        _run_startup(startup, scope, shared=not writes_state(main))
        main = _for_inference(main, scope, read_by_host(host_steps, outputs))
        if not writes_state(main):
            for name, array in [*scope.arrays.items()]:
                known = self._weights.setdefault(name, array)
                if known is not array and np.array_equal(known, array):
                    scope.bind(name, known)
        return StagedPlan(self._executor, main, scope, host_steps, outputs, fed)


def _run_startup(startup: Program, scope: Scope, shared: bool) -> None:
    """Give the variables of a startup program their values. If they may be `shared`, large constants are not copied."""
    left = []
    for op in startup.global_block().oplist:
        values = op.attrs.get("values")
        if shared and op.type == "assign_value" and isinstance(values, Array) and values.in_file is None:
            array = values.values.reshape(op.attrs["shape"])
            scope.bind(op.output_arg_names[0], array if array.ctypes.data % ALIGN == 0 else copied(array))
        else:
            left.append(op)
    if left:
        Executor(CPUPlace()).run(with_ops(startup, left), scope=scope)  # one that does not keep the plan, which has the weights


def _for_inference(main: Program, scope: Scope, wanted: set[str]) -> Program:
    """The program with values that depend on weights alone computed in the scope, with batch normalizations and scales folded into the
    filters there, and with chains of operators joined."""
    if what_trains(main) is not None:
        return main
    for fold in (join_quantized, fold_weights, fold_batch_norms, fold_scales):
        folded = fold(main, scope.arrays.__getitem__, wanted)
        for name, array in folded.values.items():
            scope.arrays.pop(name, None)  # its memory stays as it is: other plans may have it
            scope.set(name, array)
        main = folded.program
    for name in [n for n in scope.arrays if n not in main.global_block().descs]:
        del scope.arrays[name]
    return simplified(rewritten(main, (JoinLayerNorm(), JoinAttention()), fetch=wanted), wanted)


def _opened(t: Any, before: Sequence[int], now: Sequence[int]) -> list[int | str] | None:
    """A shape in which the axes where two shapes differ have their names in the file; None if an axis there has none."""
    if not len(t.shape.dim) == len(before) == len(now):
        return None
    names = [size if size == other else d.dim_param for d, size, other in zip(t.shape.dim, now, before, strict=True)]
    return names if all(isinstance(d, int) or re.fullmatch(WORD, d) for d in names) else None


def _declared_sizes(t: Any) -> list[int | str]:
    """The sizes that a file declares for a tensor, names of open axes, and "?"."""
    return [d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in t.shape.dim]


def _kind(fed: Mapping[str, Any]) -> tuple:
    """The key of a plan."""
    return tuple([(n, v.dtype, v.shape) if isinstance(v, np.ndarray) else (n, type(v)) for n, v in fed.items()])


def host_value(value: Any) -> Any:
    """A fed value as the host stores it: an array, a list of them, or ABSENT."""
    if value is None or value is ABSENT:
        return ABSENT
    if isinstance(value, list):
        return [host_value(v) for v in value]
    if isinstance(value, dict):
        return value
    array = np.asarray(value)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.astype(object) if array.dtype.kind in "SU" else array


def _type(dtype: np.dtype) -> str:
    return "strings" if dtype.kind == "O" else dtype.name


def session(source: Any) -> Session:
    """A session for a model, given as a path, bytes or a ModelProto."""
    held: list[np.ndarray] = []
    return Session(read(source, held=held))  # which has them from here on
