"""The operator `shard`: an annotation that states the placement of a value among ranks. On one device it changes nothing."""

from __future__ import annotations

import numpy as np

from ...ir.entries import axis_of
from ...ir.errors import ProgramError
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
    flops = 0
    identity_if = Assign.identity_if
    inputs = ("X", "Like?")
    inplace = (("X", "Out"),)
    attrs = {"groups": Required(tuple[str, ...]), "axes": Required(tuple), "units": Required(tuple)}
    meaning = staticmethod(lambda a, ins, outs, **attrs: [ins[0]])
    pattern = staticmethod(lambda ins, outs, attrs: f"*, ~* -> * | U(0){' L(0)' if ins[0].dtype != 'bool' else ''}")

    @staticmethod
    def annotation(places, *, groups, axes, units):
        entries = {g: None if axis < 0 else Shard(axis, g, unit) for g, axis, unit in zip(groups, axes, units, strict=True)}
        like = {g: entry_of(places[1] or (), g) for g in groups}
        return {g: e if axis_of(like[g]) is None else like[g] for g, e in entries.items()}

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

    bind, native = staticmethod(Assign.bind), staticmethod(Assign.native)
    native_any_size = True

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4), None, groups=("tp",), axes=(1,), units=(2,))
        yield Sample.of(f32(3, 4), f32(3, 4, seed=1), groups=("tp", "dp"), axes=(-1, 0), units=(1, 1), grad=("X",), why="Like is not read")
        yield Sample.of(np.arange(5), None, groups=(), axes=(), units=())
