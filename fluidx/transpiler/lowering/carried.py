"""The algorithm of a collective: given by name, by a table, or the cheapest."""

from __future__ import annotations

from typing import TypeVar

from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.types import TensorType
from ..algorithms import SEQUENCES
from ..algorithms.choice import cheapest
from ..algorithms.selection import AlgorithmTable
from .write_algorithm import carried_by, why_whole

BETWEEN_HOSTS = ("ring", "halving_doubling")  # by the first that can, where nothing is chosen
T = TypeVar("T", str, "str | AlgorithmTable")


def flat(name: T) -> T:
    """What `algorithm=` says of collectives that no sequence carries out: nothing, where it is the name of a sequence."""
    return "" if isinstance(name, str) and name in SEQUENCES else name


def carried(op: Operator, name: str | AlgorithmTable, t: TensorType, n: int) -> tuple[Operator, str]:
    """The operator with an algorithm among n ranks that have a value of this type together, as it is where no algorithm can carry it; and
    what explain() says."""
    if why := why_whole(op, t, n):
        return op, stays_whole(op, why)
    name, said = named(op, name, n, t.nbytes)
    return carried_by(op, name, n) if name else op, said


def stays_whole(op: Operator, why: str) -> str:
    """What explain() says of a collective without an algorithm."""
    return f"{op.type} over {op.attrs['group']} stays whole: {why}"


def named(op: Operator, name: str | AlgorithmTable, n: int, nbytes: int) -> tuple[str, str]:
    """The name of the algorithm, and what explain() says: what "auto" or a table comes to for an operator among n ranks."""
    if isinstance(name, AlgorithmTable):
        name = name.choose(op.type, op.attrs["group"], nbytes)
    name = flat(name)
    if name != "auto":
        return name, ""
    name = cheapest(opdef(op.type).algorithm_method, n, nbytes, rooted="root" in op.attrs)
    return name, f"{op.type} over {op.attrs['group']}, {n} ranks, {nbytes} bytes: {name or 'whole'}"
