"""Scalar expressions: the one body of an elementwise op, from which its NumPy kernel, C and CUDA code and gradient come.

Here stand the functions that bodies are written with. `derivative` differentiates an expression, `numpy` evaluates it on arrays and `c`
writes it as C or CUDA; `nodes` holds the expressions themselves.
"""

from .nodes import (
    BOOLEAN,
    COMPARE,
    Expr,
    abs,
    add,
    apply,
    ceil,
    const,
    cos,
    div,
    eq,
    erf,
    exp,
    floor,
    is_const,
    isfinite,
    isinf,
    isnan,
    lift,
    log,
    log1p,
    make_node,
    max,
    min,
    mul,
    ne,
    neg,
    number_of,
    power,
    rebuild,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    softplus,
    sqrt,
    sub,
    substitute,
    sym,
    symbols,
    tanh,
    trace,
    where,
)

__all__ = [
    "BOOLEAN", "COMPARE", "Expr", "abs", "add", "apply", "ceil", "const", "cos", "div", "eq", "erf", "exp", "floor", "is_const",
    "isfinite", "isinf", "isnan", "lift", "log", "log1p", "make_node", "max", "min", "mul", "ne", "neg", "number_of", "power", "rebuild",
    "round", "rsqrt", "sigmoid", "sign", "sin", "softplus", "sqrt", "sub", "substitute", "sym", "symbols", "tanh", "trace", "where",
]  # fmt: skip
