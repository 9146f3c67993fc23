"""The algorithm of a collective: given by name, by a table, or the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.types import TensorType
from ..algorithms import SEQUENCES
from ..algorithms.cost import Estimate, estimates
from ..algorithms.selection import AlgorithmTable
from ..cluster import Links
from .write_algorithm import carried_by, why_whole

BETWEEN_HOSTS = ("ring", "halving_doubling")  # by the first that can, where nothing is chosen
LINKS = Links()
T = TypeVar("T", str, "str | AlgorithmTable")


def flat(name: T) -> T:
    """What `algorithm=` says of collectives that no sequence carries out: nothing, where it is the name of a sequence."""
    return "" if isinstance(name, str) and name in SEQUENCES else name


def carried(
    op: Operator, name: str | AlgorithmTable, t: TensorType, n: int, links: Links = LINKS, inside: bool = False
) -> tuple[Operator, str]:
    """The operator with an algorithm among n ranks that have a value of this type together, as it is where no algorithm can carry it; and
    what explain() says. `inside`: are the ranks on one host? Then it may be left to the communicator."""
    if why := why_whole(op, t, n):
        return op, stays_whole(op, why)
    name, said = named(op, name, n, t.nbytes, links, inside)
    return carried_by(op, name, n) if name else op, said


def stays_whole(op: Operator, why: str) -> str:
    """What explain() says of a collective without an algorithm."""
    return f"{op.type} over {op.attrs['group']} stays whole: {why}"


def named(
    op: Operator, name: str | AlgorithmTable, n: int, nbytes: int, links: Links = LINKS, inside: bool = False
) -> tuple[str, str]:
    """The name of the algorithm, and what explain() says: what "auto" or a table comes to for an operator among n ranks."""
    if isinstance(name, AlgorithmTable):
        name = name.choose(op.type, op.attrs["group"], nbytes)
    name = flat(name)
    if name != "auto":
        return name, ""
    link, own = (links.inside, links.shared) if inside else (links.between, None)
    found = estimates(opdef(op.type).algorithm_method, n, nbytes, "root" in op.attrs, link, own)
    return found[0].name if found else "", chosen(op, n, nbytes, found)


def chosen(op: Operator, n: int, nbytes: int, found: Sequence[Estimate]) -> str:
    """What explain() says of a choice by estimates, the cheapest first."""
    listed = "; ".join(map(str, found[:3])) or "whole, no algorithm does it"
    return f"{op.type} over {op.attrs['group']}, {n} ranks, {nbytes} bytes: {listed}"
