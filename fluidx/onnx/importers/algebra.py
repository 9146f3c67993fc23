"""Import of Einsum, CumSum, CumProd and Det."""

from __future__ import annotations

from string import ascii_letters

from ...ir import Variable
from ..import_tables import imports
from ..node import Node
from .shape import known_sizes, reshaped


@imports("CumSum", "CumProd")
def running(n: Node) -> object:
    (axis,) = n.ints(1) or [0]
    op = {"CumSum": "cumsum", "CumProd": "cumprod"}[n.op_type]
    return n.b.emit(op, n.x(), axis=axis % n.rank(), exclusive=bool(n.attr("exclusive", 0)), reverse=bool(n.attr("reverse", 0)))


@imports("Det")
def det(n: Node) -> object:
    return n.b.det(n.x())


@imports("Einsum")
def einsum(n: Node) -> object:
    """fluidx's einsum has no ellipses, diagonals or broadcast sizes of 1, so they are expanded here."""
    terms, result = _without_ellipses(n)
    sizes: dict[str, int] = {}
    for k, term in enumerate(terms):
        for c, d in zip(term, n.shape(k), strict=True):
            sizes[c] = d if sizes.get(c, 1) == 1 else sizes[c]
    operands, letters = [], []
    for x, term in zip(n.xs(), terms, strict=True):
        x, term = _of_diagonals(n, x, term)
        single = [i for i, (c, d) in enumerate(zip(term, x.shape, strict=True)) if d == 1 != sizes[c]]
        operands.append(n.b.squeeze(x, axes=tuple(single)) if single else x)
        letters.append("".join(c for i, c in enumerate(term) if i not in single))
    return n.b.einsum(operands, equation=f"{','.join(letters)}->{result}")


def _without_ellipses(n: Node) -> tuple[list[str], str]:
    """(the letters of each operand, those of the result), with letters in place of ellipses."""
    equation = n.attr("equation", "").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(n.operands):
        raise n.wrong(f"equation {equation!r} has {len(terms)} operands, found {len(n.operands)}")
    counts = [n.rank(k) - len(t) + 3 if "..." in t else 0 for k, t in enumerate(terms)]
    free = [c for c in ascii_letters if c not in equation][: max(counts)]
    ellipsis = "".join(free)
    terms = [t.replace("...", ellipsis[len(ellipsis) - m :]) for t, m in zip(terms, counts, strict=True)]
    if not arrow:
        joined = "".join(terms)
        result = "..." + "".join(sorted(c for c in {*joined} if joined.count(c) == 1 and c not in free))
    return terms, result.replace("...", ellipsis)


def _of_diagonals(n: Node, x: Variable, term: str) -> tuple[Variable, str]:
    """Replace two axes of one letter by their diagonal: the axes are flattened into one, and read in steps of size + 1."""
    while double := next((c for c in term if term.count(c) > 1), ""):
        i = term.index(double)
        j = term.index(double, i + 1)
        rest = [k for k in range(len(term)) if k not in (i, j)]
        size, _ = known_sizes(n, (x.shape[i], x.shape[j]))
        x = n.b.transpose(x, axis=(*rest, i, j))
        x = reshaped(n, x, (*x.shape[:-2], size * size))
        x = n.b.strided_slice(x, axes=(len(rest),), starts=(0,), ends=(size * size,), strides=(size + 1,))
        term = "".join(term[k] for k in rest) + double
    return x, term
