"""Choose the algorithm of a collective: given by name, by a table, or the cheapest by the cost model."""

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
from .write_algorithm import carried_by, why_no_algorithm

BETWEEN_HOSTS = ("ring", "halving_doubling")  # the default is the first that can carry out the collective
LINKS = Links()
T = TypeVar("T", str, "str | AlgorithmTable")


def flat(name: T) -> T:
    """The value of `algorithm=` for collectives that no sequence carries out: "" if it is the name of a sequence."""
    return "" if isinstance(name, str) and name in SEQUENCES else name


def with_algorithm(
    op: Operator, name: str | AlgorithmTable, t: TensorType, n: int, links: Links = LINKS, inside: bool = False
) -> tuple[Operator, str]:
    """The operator with an algorithm among n ranks that together hold a value of this type, or unchanged if no algorithm can carry it out;
    and the line for explain(). `inside`: the ranks are on one host, so the collective may be left to the communicator."""
    if why := why_no_algorithm(op, t, n):
        return op, without_algorithm(op, why)
    name, said = named(op, name, n, t.nbytes, links, inside)
    return carried_by(op, name, n) if name else op, said


def without_algorithm(op: Operator, why: str) -> str:
    """The line of explain() for a collective without an algorithm."""
    return f"{op.type} over {op.attrs['group']} is left to the communicator: {why}"


def named(
    op: Operator, name: str | AlgorithmTable, n: int, nbytes: int, links: Links = LINKS, inside: bool = False
) -> tuple[str, str]:
    """The name of the algorithm that "auto" or a table chooses for an operator among n ranks, and the line for explain()."""
    if isinstance(name, AlgorithmTable):
        name = name.choose(op.type, op.attrs["group"], nbytes)
    name = flat(name)
    if name != "auto":
        return name, ""
    link, own = (links.inside, links.collective(n)) if inside else (links.between, None)
    found = estimates(opdef(op.type).comm.algorithm_method, n, nbytes, "root" in op.attrs, link, own)
    return found[0].name if found else "", chosen(op, n, nbytes, found)


def chosen(op: Operator, n: int, nbytes: int, found: Sequence[Estimate]) -> str:
    """The line of explain() for a choice by estimates, the cheapest first."""
    listed = "; ".join(map(str, found[:3])) or "communicator, no algorithm can do it"
    return f"{op.type} over {op.attrs['group']}, {n} ranks, {nbytes} bytes: {listed}"
