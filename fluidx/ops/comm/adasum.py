"""Adaptive sums of replica-local values, as one collective and as the operators into which it is expanded.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2021); Horovod's `op=Adasum`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Comm, Rewrite, Storage
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.parts import bounds
from ...ir.types import ANY, Entry, TensorType
from ..shared.samples import counting
from .collective_base import HOW
from .replicas import ReplicaMean, from_replica_local, wait_for_data
from .volume import share

_TINY = 1e-30  # a squared norm below this: such a small vector has no reliable direction, and it is added unchanged


def products_type(x: TensorType, layers: Sequence[int]) -> TensorType:
    """The type of the products of values with this number of layers."""
    return TensorType("float64" if x.dtype == "float64" else "float32", (3 * (len(layers) - 1),))


def _blocks(x: TensorType, n: int, attrs: Any) -> list[int] | None:
    """The bounds of the ranks' blocks, and after them the products of all layers."""
    if x.numel < n:
        return None
    return [*bounds(x.numel, n), x.numel + products_type(x, attrs["layers"] or (0, x.numel)).numel]


class ReplicaAdasum(OpDef):
    """The adaptive sum of replica-local values: their sum if they are orthogonal, their mean if they are parallel and equal.

    Two values are combined as (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b, first ranks in pairs, then pairs in pairs. On one device, and
    if every rank has the same value, the result is X.
    """

    name = "replica_adasum"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    pattern = "* -> * | R *!"  # each replica-local value gets a weight that depends on all of its elements
    storage = Storage(inplace=(("X", "Out"),))
    comm = Comm(replica_collective=("adasum_reduce", {}))
    rewrite = Rewrite(meaning=lambda a, ins, outs: [a.adaptive.whole(ins[0])])

    @staticmethod
    def infer(x: TensorType) -> TensorType:
        if not x.is_float:
            raise ProgramError(f"op replica_adasum: X must be of floats, found {x}")
        return x

    kernel = ReplicaMean.kernel

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), grad=(), why="it has no gradient")


class AdasumReduce(OpDef):
    """The adaptive sum of the values of all ranks of a group, on each of them.

    Each of the `layers` is summed separately: they are flat ranges of the value, between these bounds; () means one layer. In round k,
    ranks whose indices differ in bit k exchange their values and combine them in the same way: a rank sends log2(n) times the value. If n
    is not a power of two, the surplus ranks first combine with the ranks before them, and get the result at the end. With an algorithm,
    halves are exchanged: see transpiler/lowering/adasum.py.
    """

    name = "adasum_reduce"
    inputs = ("X",)
    attrs = {"group": Required(str), "layers": (), **HOW}
    effect = Effect.COLLECTIVE

    @staticmethod
    def _replica_op(**attrs: Any) -> tuple[str, dict[str, Any]]:
        return "replica_adasum", {}

    @staticmethod
    def infer(x: TensorType, *, group: str, layers: tuple, **how: Any) -> TensorType:
        if layers and x.numel != ANY:
            _check_layers("adasum_reduce", x, layers, 0)
            if layers[-1] != x.numel:
                raise ProgramError(f"op adasum_reduce: layers={list(layers)} do not end at the number of elements of {x}")
        return x

    @staticmethod
    def _move(entry: Entry | None, **attrs: Any) -> Entry | None:
        return from_replica_local("adasum_reduce", entry)

    comm = Comm(
        move=_move,
        sent=lambda n, *_: share("adaptive", n),
        replica_op=_replica_op,
        algorithm_method="adaptive",
        blocks=_blocks,
        activity="ADASUM",
    )

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, layers: tuple, **how: Any) -> None:
        comm, ranks = ctx.comm, ctx.group(group)
        me, full = ranks.index(ctx.rank), 1 << len(ranks).bit_length() - 1
        mine, theirs = x.copy(), xp.empty_like(x)
        extra = me + full if me + full < len(ranks) else me - full  # the partner of a surplus rank at the beginning and the end

        def swap(peer: int, gives: bool = True, takes: bool = True) -> None:
            comm.exchange([(mine, ranks[peer])] if gives else [], [(theirs, ranks[peer])] if takes else [])
            wait_for_data(comm)

        if me >= full:
            swap(extra, takes=False)
            swap(extra, gives=False)
            mine = theirs
        else:
            if extra >= full:
                swap(extra, gives=False)
                mine = _adasum(xp, mine, theirs, layers)
            for bit in range(full.bit_length() - 1):
                peer = me ^ 1 << bit
                swap(peer)
                mine = _adasum(xp, *((mine, theirs) if me < peer else (theirs, mine)), layers)
            if extra >= full:
                swap(extra, takes=False)
        xp.copyto(out, mine)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", grad=(), why="needs ranks; tested in tests/transpiler/test_adasum.py")


class AdasumProducts(OpDef):
    """x.y, x.x and y.y of each layer, in one vector.

    X and Y are the elements from `start` on of values whose `layers` are between these bounds. The results for parts add up to the result
    for the whole.
    """

    name = "adasum_products"
    inputs = ("X", "Y")
    attrs = {"layers": Required(tuple), "start": 0}
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, layers, start: [a.adaptive.products(*ins, layers, start, outs[0])])

    @staticmethod
    def infer(x: TensorType, y: TensorType, *, layers: tuple, start: int) -> TensorType:
        if not x.is_float or x != y:
            raise ProgramError(f"op adasum_products: X and Y must be floats of one type, found {x} and {y}")
        _check_layers("adasum_products", x, layers, start)
        return products_type(x, layers)

    @staticmethod
    def kernel(xp: Any, x: Any, y: Any, *, out: Any, layers: tuple, start: int) -> None:
        x, y = (v.reshape(-1).astype(out.dtype, copy=False) for v in (x, y))
        out.fill(0)
        for k, a, b in _layers_of(layers, start, x.size):
            for j, (u, v) in enumerate(((x, y), (x, x), (y, y))):
                out[3 * k + j] = xp.dot(u[a:b], v[a:b])

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), counting(4, 3) - 5, layers=(0, 5, 12), grad=(), why="only used next to communication")
        yield Sample.of(counting(4), counting(4) - 1, layers=(0, 2, 5, 6, 12), start=3, grad=(), why="only used next to communication")


class AdasumPair(OpDef):
    """(1 - x.y / (2 x.x)) x + (1 - x.y / (2 y.y)) y in each layer, where Products are the products over all elements.

    X and Y are the elements from `start` on of values whose `layers` are between these bounds. A vector close to 0 has no reliable
    direction: if a square is below 1e-30, its value is added unchanged.
    """

    name = "adasum_pair"
    inputs = ("X", "Y", "Products")
    attrs = {"layers": Required(tuple), "start": 0}
    storage = Storage(inplace=(("X", "Out"), ("Y", "Out")))
    rewrite = Rewrite(meaning=lambda a, ins, outs, *, layers, start: [a.adaptive.pair(*ins, layers, start)])

    @staticmethod
    def infer(x: TensorType, y: TensorType, products: TensorType, *, layers: tuple, start: int) -> TensorType:
        made = AdasumProducts.infer(x, y, layers=layers, start=start)
        if products.shape != made.shape or not products.is_float:
            raise ProgramError(f"op adasum_pair: Products of {len(layers) - 1} layers must be {made}, found {products}")
        return x

    @staticmethod
    def kernel(xp: Any, x: Any, y: Any, products: Any, *, out: Any, layers: tuple, start: int) -> None:
        both, *squares = products.reshape(-1, 3).T
        of_x, of_y = (xp.where(q > _TINY, 1 - both / (2 * xp.maximum(q, _TINY)), 1).astype(x.dtype, copy=False) for q in squares)
        x, y, flat = x.reshape(-1), y.reshape(-1), out.reshape(-1)
        for k, a, b in _layers_of(layers, start, x.size):
            flat[a:b] = of_x[k] * x[a:b] + of_y[k] * y[a:b]

    @staticmethod
    def samples():
        x, y = counting(4, 3), counting(4, 3) - 5
        made = np.empty(6, x.dtype)
        AdasumProducts.kernel(np, x, y, out=made, layers=(0, 5, 12), start=0)
        yield Sample.of(x, y, made, layers=(0, 5, 12), grad=(), why="only used next to communication")


def _layers_of(layers: Sequence[int], start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(layer, begin, end) of the part of each layer in `size` elements from `start` on."""
    for k, (a, b) in enumerate(pairwise(layers)):
        if a < start + size and start < b:
            yield k, max(a - start, 0), min(b - start, size)


def _check_layers(op: str, x: TensorType, layers: tuple, start: int) -> None:
    if len(layers) < 2 or list(layers) != sorted(layers) or layers[0] != 0:
        raise ProgramError(f"op {op}: layers={list(layers)} are not increasing bounds of flat ranges from 0 on")
    if x.numel != ANY and not 0 <= start <= layers[-1] - x.numel:
        raise ProgramError(f"op {op}: {x} from element {start} on is not within layers={list(layers)}")


def _adasum(xp: Any, a: Any, b: Any, layers: tuple) -> Any:
    """Two values combined. Both ranks of a pair compute in the same order, so their results are bitwise equal."""
    wide = np.float64 if a.dtype == np.float64 else np.float32
    x, y = a.astype(wide, copy=False), b.astype(wide, copy=False)
    layers = layers or (0, x.size)
    products, out = xp.empty(3 * (len(layers) - 1), wide), xp.empty_like(x)
    AdasumProducts.kernel(xp, x, y, out=products, layers=layers, start=0)
    AdasumPair.kernel(xp, x, y, products, out=out, layers=layers, start=0)
    return out.astype(a.dtype, copy=False)
