"""The statements of a scalar expression in C and CUDA C++, and functions and kernels around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...ir.dtypes import np_dtype
from ...ir.errors import ProgramError
from .nodes import BOOLEAN, COMPARE, Expr, nodes, substitute, sym, symbols

_C_TYPE = {
    "float32": "float", "float64": "double", "float16": "float", "bfloat16": "float", "bool": "unsigned char",
    "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short", "int32": "int",
    "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
}  # fmt: skip
_SAME_IN_C = (
    "exp", "log", "log1p", "sqrt", "tanh", "erf", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh",
    "floor", "ceil", "pow", "fmod",
)  # fmt: skip
_C_CALL = {fn: fn for fn in _SAME_IN_C} | {"round": "rint", "abs": "fabs"}
_C_INFIX = {
    **COMPARE, "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "bit_and": "&", "bit_or": "|", "bit_xor": "^",
}  # fmt: skip
_REPEATS = {"max", "min", "sign", "mod", "floordiv", "softplus", "shift_left", "shift_right"}  # whose text has an operand more than once

_NOT_FINITE = """\
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
"""


def to_c(e: Expr, dtype: str, result: str = "out") -> str:
    """Statements in C (and CUDA C++) that set the variable `result` to `e` for one element, symbols being variables.

    Half precision is worked in float. A value used more than once gets a temporary.

    >>> from fluidx.ops.expr.nodes import tanh, trace
    >>> print(to_c(trace(lambda x, y: x * tanh(y)), "float32"))
    out = x * tanhf(y);
    """
    ctype = _C_TYPE[dtype]
    f = "" if dtype == "float64" else "f"
    uses: dict[Expr, int] = {}
    for n in nodes(e):
        for a in n.args if n.fn not in ("const", "sym") else ():
            uses[a] = uses.get(a, 0) + (2 if n.fn in _REPEATS else 1)
    lines: list[str] = []
    text: dict[Expr, str] = {}
    integer, bits = ctype not in ("float", "double"), 8 * np_dtype(dtype).itemsize

    def number(v: Any) -> str:
        if isinstance(v, bool):
            return "1" if v else "0"
        if v != v:
            return "NAN"
        if v in (math.inf, -math.inf):
            return "INFINITY" if v > 0 else "-INFINITY"
        if integer and v == int(v):
            return str(int(v))
        return (repr(float(v)) if v >= 0 else f"({float(v)!r}") + f + ("" if v >= 0 else ")")

    for n in nodes(e):
        a = [text[x] for x in n.args] if n.fn not in ("const", "sym") else []
        match n.fn:
            case "const":
                t = number(n.args[0])
            case "sym":
                t = n.args[0]
            case "neg":
                t = f"(-{a[0]})"
            case "not":
                t = f"(!{a[0]})"
            case "xor":
                t = f"(!{a[0]} != !{a[1]})"
            case "where":
                t = f"({a[0]} ? {a[1]} : {a[2]})"
            case "max":
                t = f"({a[0]} > {a[1]} || {a[0]} != {a[0]} ? {a[0]} : {a[1]})"
            case "min":
                t = f"({a[0]} < {a[1]} || {a[0]} != {a[0]} ? {a[0]} : {a[1]})"
            case "sign":
                t = f"({ctype})(({a[0]} > 0) - ({a[0]} < 0))"
            case "rsqrt":
                t = f"({number(1.0)} / sqrt{f}({a[0]}))"
            case "sigmoid":
                t = f"({number(1.0)} / ({number(1.0)} + exp{f}(-({a[0]}))))"
            case "softplus":
                t = f"(({a[0]} > 0 ? {a[0]} : {number(0.0)}) + log1p{f}(exp{f}(-fabs{f}({a[0]}))))"
            case "mod" if integer:
                t = f"(({a[0]} % {a[1]} + {a[1]}) % {a[1]})"
            case "mod":
                t = f"({a[0]} - floor{f}({a[0]} / {a[1]}) * {a[1]})"
            case "floordiv" if integer:
                t = f"({a[0]} / {a[1]} - (({a[0]} % {a[1]} != 0) && (({a[0]} < 0) != ({a[1]} < 0))))"
            case "floordiv":
                t = f"floor{f}({a[0]} / {a[1]})"
            case "fmod" if integer:
                t = f"({a[0]} % {a[1]})"
            case "bit_not":
                t = f"(~{a[0]})"
            case "shift_left":
                t = f"({a[1]} >= 0 && {a[1]} < {bits} ? ({ctype})((unsigned long long){a[0]} << {a[1]}) : 0)"
            case "shift_right":
                t = f"({a[1]} >= 0 && {a[1]} < {bits} ? {a[0]} >> {a[1]} : -({a[0]} < 0))"
            case "abs" if integer:
                t = f"({a[0]} < 0 ? -{a[0]} : {a[0]})"
            case "isnan" | "isinf" | "isfinite":
                t = f"({n.fn}({a[0]}) != 0)"
            case fn if fn in _C_INFIX:
                t = f"({a[0]} {_C_INFIX[fn]} {a[1]})"
            case fn:
                t = f"{_C_CALL[fn]}{f}({', '.join(_bare(x) for x in a)})"
        if uses.get(n, 0) > 1 and a and n is not e:
            name = f"t{len(lines)}"
            lines.append(f"{'int' if n.fn in BOOLEAN else ctype} {name} = {_bare(t)};")
            t = name
        text[n] = t
    return "\n".join([*lines, f"{result} = {_bare(text[e])};"])


def _bare(text: str) -> str:
    """`text` without one pair of parentheses that encloses all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


def c_function(name: str, e: Expr, dtype: str, params: Sequence[str]) -> str:
    """A C function `void name(long n, const T *x, ..., R *out)` that runs `to_c` over n elements; `params` names the arrays.

    R is T, or `unsigned char` where the result is a bool. Attributes must have been substituted by numbers. Symbols that are no C names
    (Out@GRAD) are renamed with _ for @.
    """
    signature, body = _over_arrays(name, e, dtype, params)
    return f"{signature} {{\n  for (long i = 0; i < n; i++) {{\n{body}  }}\n}}\n"


def cuda_kernel(name: str, e: Expr, dtype: str, params: Sequence[str]) -> str:
    """A CUDA kernel with the parameters of `c_function`, whose threads stride over the n elements: any launch of one-dimensional blocks
    does. The text needs no header, so NVRTC compiles it as it stands.

    >>> from fluidx.ops.expr.nodes import max, trace
    >>> print(cuda_kernel("relu", trace(lambda x: max(x, 0)), "float32", ["x"]), end="")
    extern "C" __global__ void relu(long n, const float *v_x_, float *out_) {
      for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x) {
        float v_x = v_x_[i];
        float out;
        out = v_x > 0.0f || v_x != v_x ? v_x : 0.0f;
        out_[i] = out;
      }
    }
    """
    signature, body = _over_arrays(name, e, dtype, params)
    steps = "long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x"
    macros = _NOT_FINITE if "INFINITY" in body or "NAN" in body else ""
    return f'{macros}extern "C" __global__ {signature} {{\n  for ({steps}) {{\n{body}  }}\n}}\n'


def _over_arrays(name: str, e: Expr, dtype: str, params: Sequence[str]) -> tuple[str, str]:
    """The signature of a function over arrays, and the statements that work out its element i."""
    ctype, result = _C_TYPE[dtype], _C_TYPE["bool" if e.fn in BOOLEAN else dtype]
    unknown = sorted(set(symbols(e)) - set(params))
    if unknown:
        raise ProgramError(f"the C function {name} reads {', '.join(unknown)}, which is no parameter; parameters are {', '.join(params)}")
    c_names = {p: "v_" + p.replace("@", "_") for p in params}
    e = substitute(e, {p: sym(c) for p, c in c_names.items()})
    lines = [f"{ctype} {c} = {c}_[i];" for c in c_names.values() if c in symbols(e)]
    lines += [f"{result} out;", *to_c(e, dtype).splitlines(), "out_[i] = out;"]
    args = ", ".join(f"const {ctype} *{c}_" for c in c_names.values())
    return f"void {name}(long n, {args}, {result} *out_)", "".join(f"    {line}\n" for line in lines)
