"""A call of an op's `kernel`, which is written for any array module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..ir.opdef import OpDef
from .shared.arrays import copy


def bind_kernel(
    definition: type[OpDef], xp: Any, ins: list[Any], outs: list[Any], attrs: Mapping[str, Any], ctx: Any, part: Any = None,
    scratch: Sequence[Any] = (),
) -> Callable[[], Any]:  # fmt: skip
    """A call of the op's `kernel`, or a copy of its view."""
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


def _copy_view(xp: Any, out: Any, view: Callable[[], Any]) -> None:
    copy(xp, out, view())


def _copy_results(xp: Any, kernel: Callable[[], Any], outs: list[Any]) -> None:
    results = kernel()
    if len(outs) == 1 and not isinstance(results, tuple):
        results = (results,)
    for out, result in zip(outs, results, strict=True):
        if isinstance(out, list):
            for o, r in zip(out, result, strict=True):
                copy(xp, o, r)
        elif out is not None:
            copy(xp, out, result)
