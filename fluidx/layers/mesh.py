"""The layer `shard`, which sets the placement of a value on a mesh of ranks. It has no effect on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import wrong
from ..ir import Variable
from ..param_attr import cuts
from .helper import LayerWriter


def shard(x: Variable, placement: Any = None, whole: str | Sequence[str] = (), name: str | None = None) -> Variable:
    """x with the given placement: `Shard(1, "tp")`, or a list of shards over several axes of a mesh.

    Over the mesh axes in `whole`, x is replicated. Over axes that are not named, its placement stays. The gradient has the same placement,
    and is redistributed to the placement of the input if that is sharded. Collectives redistribute x: a reduce_scatter if x is partial over
    `tp`, an all_to_all if it is sharded along another axis, an all_gather if it becomes replicated. On one device the result is x.

    >>> import fluidx as fx
    >>> from fluidx.ir import Shard
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.shard(fx.data("x", [-1, 6, 8], "float32"), Shard(1, "tp"))
    <Variable shard_0.tmp_0: f32[-1,6,8]>
    """
    helper = LayerWriter("shard", name)
    x, entries = helper.variable(x, "x"), cuts(helper.label, placement)
    together = (whole,) if isinstance(whole, str) else tuple(whole)
    groups = (*(e.group for e in entries), *together)
    if not groups:
        raise wrong(f"{helper.label}: give a placement such as Shard(1, 'tp'), or whole='tp'")
    if len(set(groups)) < len(groups):
        raise wrong(f"{helper.label}: {', '.join(groups)} names a mesh axis twice")
    axes = [helper.axis(x, e.axis, "the axis of a cut") for e in entries]
    rest = len(together)
    return helper.op("shard", x, groups=groups, axes=(*axes, *[-1] * rest), units=(*(e.unit for e in entries), *[1] * rest))


__all__ = ["shard"]
