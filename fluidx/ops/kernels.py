"""The table of kernels: for each op the bodies that compute it, the device of each, and the scratch memory that it needs.

The rows follow from the declarations: `native` makes calls of C kernels; `bind` is the body "numpy", for a CPU; `kernel`, written for NumPy
and CuPy, is the body "any". `bind` of an op that communicates is "any" too, because a communicator knows its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from .. import native
from ..ir.dtypes import HALVES, dtype_name
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, OpDef
from ..ir.types import TensorType
from .array_kernel import bind_kernel
from .parts_kernel import bind_parts, is_by_parts, parts_scratch
from .shared.arrays import copy
from .shared.call_sequence import in_order
from .shared.native import copy_calls
from .shared.types import type_of

Step = Callable[[], Any]
_TALKS = (Effect.COLLECTIVE, Effect.P2P)


class NativeStep:
    """A step that calls C kernels. Neighbouring steps are compiled into one, which enters C once (`joined`)."""

    def __init__(self, calls: Sequence[native.NativeCall]):
        self.calls = calls
        self._run: Step | None = None

    def ready(self) -> Step:
        """The step, compiled without its neighbours."""
        if self._run is None:
            self._run = native.compile(self.calls)
        return self._run

    def __call__(self) -> None:
        self.ready()()


def joined(steps: Sequence[NativeStep]) -> Step:
    """One call that runs the steps in order."""
    return native.compile([call for step in steps for call in step.calls])


class KernelBody(NamedTuple):
    """One way to compute an op. `bind(xp, ins, outs, attrs, ctx, part, scratch)` returns a call without arguments, or None if it does not
    support these operands; then the next body of the table is tried. `covers(ins, outs, attrs, ctx, part)` answers this beforehand, for
    arrays that have shapes and strides but share memory.

    `scratch(ins, outs, attrs)` lists the types of the temporary arrays that the call needs, from the types of the operands. `own(ins, outs,
    attrs)` is the number of bytes that each thread needs, from arrays as for `covers`.
    """

    name: str
    bind: Callable[..., Step | None]
    scratch: Callable[[list[Any], list[Any], Mapping[str, Any]], Sequence[Any]] | None = None
    covers: Callable[..., bool] = lambda *operands: True
    own: Callable[..., int] | None = None


def bodies(definition: type[OpDef], device: str = "cpu", natively: bool | None = None) -> Sequence[KernelBody]:
    """The bodies of an op for a device, the preferred one first. `natively`: whether to use C kernels; None: as configured.

    >>> from fluidx.ir import opdef
    >>> [b.name for b in bodies(opdef("relu"), natively=True)], [b.name for b in bodies(opdef("relu"), "cuda")]
    (['native', 'numpy', 'any'], ['any'])
    """
    hashable: Any = definition
    return _table(hashable, device, device == "cpu" and (native.enabled() if natively is None else natively))


@lru_cache(maxsize=4096)
def _table(definition: type[OpDef], device: str, natively: bool) -> Sequence[KernelBody]:
    found = []
    if natively:
        if definition.native.calls is not None:
            own = partial(_memory_per_thread, definition) if definition.native.memory_per_thread else None
            found.append(KernelBody("native", partial(_native, definition), definition.native.scratch, partial(_covers, definition), own))
        elif definition.storage.view is not None or definition.storage.view_ctx is not None:
            found.append(KernelBody("native", partial(_copied, definition), covers=partial(_copies, definition)))
    if definition.native.bind is not None and device == "cpu":
        found.append(KernelBody("numpy", partial(_bound, definition), definition.native.bind_scratch))
    elif definition.native.bind is not None and definition.effect in _TALKS:
        found.append(KernelBody("any", partial(_bound, definition)))
    if is_by_parts(definition):
        found.append(KernelBody("any", partial(_by_parts, definition), partial(parts_scratch, definition)))
    elif definition.kernel is not None or definition.storage.view is not None:
        found.append(KernelBody("any", partial(bind_kernel, definition)))
    return tuple(found)


def bind(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any = None,
    name: str = "", scratch: Sequence[Any] = (),
) -> Step:  # fmt: skip
    """A call without arguments that computes the op from the arrays `ins` into `outs`. It uses the body `name`, which gets `scratch`, or
    the first later body that supports the arrays.
    """
    device = "cpu" if xp is np else "cuda"
    table = bodies(definition, device, natively=None if not name else name == "native")
    for body in table:
        step = body.bind(xp, ins, outs, attrs, ctx, part, scratch if body.name == name else ())
        if step is not None:
            return step
    raise ProgramError(f"op {definition.name} has no kernel for {device}")


# -- 16-bit floats ----------------------------------------------------------------------------------------------------------------------


def wide_type(t: TensorType) -> TensorType:
    """The type in which kernels that compute see an operand: float32 for 16-bit floats."""
    return t.with_dtype("float32") if t.dtype in HALVES else t


def wide(definition: type[OpDef], xp: Any, ins: Sequence[Any], outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays that an op's kernel gets instead of these outside of a plan: float32 for 16-bit floats, unless it takes 16-bit floats."""
    types = [None if o is None else type_of(o) for some in outs for o in (some if isinstance(some, list) else [some])]
    if not definition.widens("cpu" if xp is np else "cuda", types):
        return list(ins), list(outs)

    def stand_in(a: Any, fill: bool) -> Any:
        if isinstance(a, list):
            return [stand_in(v, fill) for v in a]
        if a is None or dtype_name(a.dtype) not in HALVES:
            return a
        return a.astype("float32") if fill else xp.empty(a.shape, "float32")

    return [stand_in(a, True) for a in ins], [stand_in(o, False) for o in outs]


def narrow(xp: Any, outs: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """The results `made`, rounded into `outs` where `outs` are 16-bit floats and `made` are float32."""

    def put(out: Any, got: Any) -> Any:
        if isinstance(out, list):
            return [put(o, g) for o, g in zip(out, got, strict=True)]
        if out is None or dtype_name(out.dtype) not in HALVES or got.dtype != np.float32:
            return got
        copy(xp, out, got)
        return out

    return [put(o, g) for o, g in zip(outs, made, strict=True)]


def native_calls(definition: type[OpDef], ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], **extra: Any) -> Any:
    """What `native.calls` of an op returns for these arrays. It is asked about 16-bit floats only if the op says that it takes them, or if
    the op does not compute: no kernel reads or writes beyond an array because it does not look at the dtypes.

    >>> from fluidx.ir import opdef
    >>> x, grid, out = np.zeros((1, 1, 2, 2), "float32"), np.zeros((1, 1, 1, 2), "float32"), np.zeros((1, 1, 1, 1), "float32")
    >>> op = opdef("grid_sample")
    >>> [native_calls(op, [x, grid], [o], op.complete_attrs({}), dry=True) for o in (out, out.astype("float16"))]
    [[], None]
    """
    calls: Any = definition.native.calls
    if not definition.native.halves and definition.widens("cpu", ()) and any(map(_is_half, (*ins, *outs))):
        return None
    return calls(ins, outs, attrs, **extra)


def _is_half(a: Any) -> bool:
    return any(map(_is_half, a)) if isinstance(a, list) else a is not None and dtype_name(a.dtype) in HALVES


# -- rows of the table ---------------------------------------------------------------------------------------------------------------


def _covers(definition: type[OpDef], ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any) -> bool:
    extra = _extra_arguments(definition, ctx, part)
    return extra is not None and native_calls(definition, ins, outs, attrs, dry=True, **extra) is not None


def _memory_per_thread(definition: type[OpDef], ins: list[Any], outs: list[Any], attrs: Mapping[str, Any]) -> int:
    return native.taken_by_threads(native_calls(definition, ins, outs, attrs, dry=True))


def _extra_arguments(definition: type[OpDef], ctx: Any, part: Any) -> dict[str, Any] | None:
    """The arguments of `native` beside operands and attributes; None if there is a part and `native` does not take one."""
    if part is not None and not definition.native_takes_part:
        return None
    extra = {} if part is None else {"part": part}
    return {**extra, "ctx": ctx} if definition.native_takes_ctx else extra


def _native(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step | None:
    extra = _extra_arguments(definition, ctx, part)
    if extra is None:
        return None
    if scratch:
        extra["scratch"] = scratch
    calls = native_calls(definition, ins, outs, attrs, **extra)
    return None if calls is None else NativeStep(calls)


def _copies(definition: type[OpDef], ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any) -> bool:
    view = definition.view_of(ins[0], ctx, attrs)
    return view is not None and copy_calls(outs[0], view, dry=True) is not None


def _copied(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step | None:
    view = definition.view_of(ins[0], ctx, attrs)
    calls = None if view is None else copy_calls(outs[0], view)
    return None if calls is None else NativeStep(calls)


def _bound(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step | None:
    bind: Any = definition.native.bind
    extra: dict[str, Any] = {"part": part} if part is not None and definition.bind_takes_part else {}
    if scratch:
        extra["scratch"] = scratch
    return bind(ins, outs, attrs, ctx, **extra)


def _by_parts(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step:
    steps = bind_parts(bind, definition, xp, ins, outs, attrs, ctx, part, scratch)
    if steps and all(isinstance(step, NativeStep) for step in steps):
        return NativeStep([call for step in steps for call in step.calls])
    return in_order(steps)


def copying(xp: Any, out: Any, x: Any) -> Step:
    """A call that copies `x` to `out`; a call of C kernels if they are enabled and support it."""
    calls = copy_calls(out, x) if xp is np and native.enabled() else None
    return partial(copy, xp, out, x) if calls is None else NativeStep(calls)
