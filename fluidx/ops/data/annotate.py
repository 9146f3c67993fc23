"""The operator `shard`: an annotation that states the placement of a value among ranks. On one device it changes nothing."""

from __future__ import annotations

import numpy as np

from ...ir.entries import axis_of
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Comm, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.parts import entry_of
from ...ir.types import Shard
from ..elementwise.arithmetic import Assign
from ..shared.samples import f32


class ShardValue(OpDef):
    """X unchanged. Among ranks it is sharded along `axes[i]`, between blocks of `units[i]`, over mesh axis `groups[i]`, or replicated over
    it (-1).

    Over other mesh axes it has the placement of X. If Like is given and sharded over one of the `groups`, X is sharded like it. The
    gradient has the placement of the result and is returned in the placement of X where X is sharded. Only the shape of Like is read.
    """

    name = "shard"
    arithmetic = Arithmetic(flops=0)
    rewrite = Rewrite(identity_if=Assign.rewrite.identity_if, meaning=lambda a, ins, outs, **attrs: [ins[0]])
    inputs = ("X", "Like?")
    storage = Storage(inplace=(("X", "Out"),))
    attrs = {"groups": Required(tuple[str, ...]), "axes": Required(tuple), "units": Required(tuple)}
    pattern = staticmethod(lambda ins, outs, attrs: f"*, ~* -> * | U(0){' L(0)' if ins[0].dtype != 'bool' else ''}")

    @staticmethod
    def _annotation(places, *, groups, axes, units):
        entries = {g: None if axis < 0 else Shard(axis, g, unit) for g, axis, unit in zip(groups, axes, units, strict=True)}
        like = {g: entry_of(places[1] or (), g) for g in groups}
        return {g: e if axis_of(like[g]) is None else like[g] for g, e in entries.items()}

    comm = Comm(annotation=_annotation)

    @staticmethod
    def infer(x, like=None, *, groups=(), axes=(), units=()):
        if not len(groups) == len(axes) == len(units) or len(set(groups)) < len(groups):
            raise ProgramError(f"op shard: groups {list(groups)} need an axis and a unit each, found {list(axes)} and {list(units)}")
        for axis, unit in zip(axes, units, strict=True):
            if not -1 <= axis < x.ndim or unit < 1:
                raise ProgramError(f"op shard: axis {axis} in blocks of {unit} does not shard {x}")
        if like is not None and not like.accepts(x):
            raise ProgramError(f"op shard: X {x} cannot have the placement of Like {like}")
        return x

    @staticmethod
    def grad(b, op, g):
        return b.shard(b.shard(g, **op.attrs), op["X"], **op.attrs), None

    @staticmethod
    def kernel(xp, x, like, *, out, **attrs):
        xp.copyto(out, x)

    native = Assign.native

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), None, groups=("tp",), axes=(1,), units=(2,))
        yield Sample.of(f32(3, 4), f32(3, 4, seed=1), groups=("tp", "dp"), axes=(-1, 0), units=(1, 1), grad=("X",), why="Like is not read")
        yield Sample.of(np.arange(5), None, groups=(), axes=(), units=())
