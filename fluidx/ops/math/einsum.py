"""einsum: products of any number of operands, summed over the axes that the result lacks."""

from __future__ import annotations

from typing import Any

from ...ir import Arithmetic, Autocast, OpDef, ProgramError, Sample
from ...ir.opdef import Required
from ..shared.samples import f32
from ..shared.types import merge_size, same_dtype


def _terms(equation: str) -> tuple[list[str], str]:
    """The letters of each operand, and those of the result. Raises ProgramError for an invalid equation."""
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    good = arrow and all(t.isalpha() and t.isascii() or not t for t in (*terms, result))
    if not good or any(len(set(t)) < len(t) for t in (*terms, result)) or not set(result) <= set("".join(terms)):
        raise ProgramError(
            f"op einsum: equation {equation!r} must name each axis by a letter, no letter twice in one operand, and the result by letters "
            "of the operands: 'ij,jk->ik'"
        )
    return terms, result


def _words(term: str) -> str:
    return " ".join(f"{c}0" for c in term)


class Einsum(OpDef):
    """The product of the inputs, summed over the letters of `equation` that its result lacks: 'ij,jk->ik' is a matrix product.

    Each letter stands for one size. Source: numpy.einsum, without ellipses and diagonals.
    """

    name = "einsum"
    autocast = Autocast(mixed="half")
    arithmetic = Arithmetic(sums_products="matrix")
    inputs = ("X*",)
    attrs = {"equation": Required(str)}

    @staticmethod
    def pattern(ins, outs, attrs):
        terms, result = _terms(attrs["equation"])
        summed = sorted({*"".join(terms)} - {*result})
        exceptions_text = [*(f"{c}0:+" for c in summed), *(f"L({k})" for k in range(len(terms)))]
        return f"{', '.join(map(_words, terms))} -> {_words(result)} | {' '.join(exceptions_text)}"

    @staticmethod
    def infer(xs, *, equation):
        terms, result = _terms(equation)
        if [len(t) for t in terms] != [x.ndim for x in xs]:
            wanted = ", ".join(str(len(t)) for t in terms)
            raise ProgramError(f"op einsum: equation {equation!r} is for operands with {wanted} axes, found {', '.join(map(str, xs))}")
        same_dtype("einsum", **{f"X[{k}]": x for k, x in enumerate(xs)})
        sizes: dict[str, int] = {}
        for term, x in zip(terms, xs, strict=True):
            for c, d in zip(term, x.shape, strict=True):
                sizes[c] = merge_size("einsum", f"the axes {c!r} in {equation!r}", sizes.get(c, d), d)
        return xs[0].with_shape([sizes[c] for c in result])

    @staticmethod
    def grad(b, op, g):
        terms, result = _terms(op.attrs["equation"])
        return [_grad_of(b, k, op["X"], terms, result, g) for k in range(len(terms))]

    @staticmethod
    def kernel(xp, xs, *, out, equation):
        out[...] = xp.einsum(equation, *xs, optimize=len(xs) > 1)

    @staticmethod
    def samples():
        yield Sample.of([f32(3, 4), f32(4, 2, seed=1)], equation="ij,jk->ik")
        yield Sample.of([f32(5, 3, 4), f32(5, 4, 2, seed=1)], equation="bij,bjk->kbi")
        yield Sample.of([f32(3, 4)], equation="ij->j")
        yield Sample.of([f32(3, 4)], equation="ij->ji")
        yield Sample.of([f32(3), f32(5, seed=1)], equation="i,K->Ki")
        yield Sample.of([f32(3, 2), f32(3, 2, seed=1)], equation="ij,ij->")
        yield Sample.of([f32(3, 4), f32(4, seed=1), f32(3, 2, seed=2)], equation="ij,j,ik->k")
        yield Sample.of([f32(3, 4), f32(2, seed=1)], equation="ij,k->i")


def _grad_of(b: Any, k: int, xs: Any, terms: list[str], result: str, g: Any) -> Any:
    """The gradient of operand k: g times all other operands, broadcast along axes that only operand k has."""
    others = [j for j in range(len(terms)) if j != k]
    given = [result, *(terms[j] for j in others)]
    known = "".join(c for c in terms[k] if c in set("".join(given)))
    made = b.einsum([g, *(xs[j] for j in others)], equation=f"{','.join(given)}->{known}")
    if known == terms[k]:
        return made
    alone = tuple(i for i, c in enumerate(terms[k]) if c not in known)
    return b.expand_as(b.unsqueeze(made, axes=alone), xs[k])
