"""The table of kernels: for every op the bodies that can compute it, which device each is for, and the scratch that it asks for.

The rows are read off the declarations: `native` gives calls of C kernels, `bind` is the body "numpy", for a CPU, and `kernel`, written
over an array module, is "any".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..ir.errors import ProgramError
from ..ir.opdef import OpDef

Step = Callable[[], Any]


class Body(NamedTuple):
    """One way to compute an op. `bind(xp, ins, outs, attrs, ctx, part, scratch)` gives a call without arguments, or None when it does
    not cover these operands; then the next body of the table serves.

    `scratch(ins, outs, attrs)` lists the types of the arrays that the call needs for itself, from the types of the operands.
    """

    name: str
    device: str  # "cpu", or "" for every device
    bind: Callable[..., Step | None]
    scratch: Callable[[list[Any], list[Any], Mapping[str, Any]], Sequence[Any]] | None = None


def bodies(definition: type[OpDef]) -> tuple[Body, ...]:
    """The bodies of an op, the preferred one first.

    >>> from fluidx.ir import opdef
    >>> [(b.name, b.device) for b in bodies(opdef("relu"))], [b.name for b in bodies(opdef("shape"))]
    ([('numpy', 'cpu'), ('any', '')], ['any'])
    """
    found = []
    if definition.bind is not None:
        found.append(Body("numpy", "cpu", partial(_bound, definition), definition.scratch))
    if definition.kernel is not None or definition.view is not None:
        found.append(Body("any", "", partial(_kernel, definition)))
    return tuple(found)


def choose(definition: type[OpDef], device: str = "cpu") -> Body:
    """The body that computes an op on a device: "cpu" or "cuda"."""
    for body in bodies(definition):
        if body.device in ("", device):
            return body
    raise ProgramError(f"op {definition.name} has no kernel for {device}")


def bind(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any = None,
    scratch: Sequence[Any] = (),
) -> Step:  # fmt: skip
    """A call without arguments that computes the op from these arrays into these; the first body that covers them."""
    device = "cpu" if xp is np else "cuda"
    for body in bodies(definition):
        if body.device in ("", device) and (step := body.bind(xp, ins, outs, attrs, ctx, part, scratch)) is not None:
            return step
    raise ProgramError(f"op {definition.name} has no kernel for {device}")


def _bound(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step | None:
    bind: Any = definition.bind
    told: dict[str, Any] = {"part": part} if part is not None and definition.bind_takes_part else {}
    if scratch:
        told["scratch"] = scratch
    return bind(xp, ins, outs, attrs, ctx, **told)


def _kernel(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any, scratch: Sequence[Any]
) -> Step | None:
    if definition.kernel is None:
        return partial(_copy_view, xp, outs[0], partial(definition.view_of, ins[0], ctx, attrs))
    kwargs = dict(attrs)
    if definition.takes_ctx:
        kwargs["ctx"] = ctx
    if definition.takes_part:
        kwargs["part"] = part
    if definition.takes_out:
        return partial(definition.kernel, xp, *ins, out=outs[0] if len(outs) == 1 else tuple(outs), **kwargs)
    return partial(_copy_results, xp, partial(definition.kernel, xp, *ins, **kwargs), outs)


def copy(xp: Any, out: Any, x: Any) -> None:
    """Fill `out` with `x`, converted to its dtype."""
    if xp is np:
        np.copyto(out, x, casting="unsafe")
    else:
        out[...] = x


def _copy_view(xp: Any, out: Any, view: Step) -> None:
    copy(xp, out, view())


def _copy_results(xp: Any, kernel: Step, outs: list[Any]) -> None:
    results = kernel()
    if len(outs) == 1 and not isinstance(results, tuple):
        results = (results,)
    for out, result in zip(outs, results, strict=True):
        if isinstance(out, list):
            for o, r in zip(out, result, strict=True):
                copy(xp, o, r)
        elif out is not None:
            copy(xp, out, result)
