"""The documentation page of ONNX operators, made when the documentation is built (see hooks.py): which fluidx imports and which it exports.

The exported operators are found by saving the samples of each operator of fluidx.
"""

from __future__ import annotations

from collections import defaultdict

from fluidx.ir.opdef import all_ops
from fluidx.onnx import known
from fluidx.onnx.normalize import domain_of
from fluidx.onnx.registry import OnnxOperator
from fluidx.onnx.table import IMPORTERS, NUMPY_IMPORTERS, is_own
from fluidx.testing.one_operator import onnx_operators

HEAD = """\
# Operators of ONNX

{count} operators of ONNX, by domain. `fluidx onnx ops` prints them for the installed version of onnx; this page is for opsets up to
{newest}. The column *how* has one of three words:

- *operators*: the operator becomes one or several operators of a program, and is trained if they have gradients (see [Operators](ops.md));
- *body*: the function that its schema defines is inlined, and is trained if its operators are;
- *host*: NumPy computes it, in a session (`fx.onnx.session`), or at import if its operands are known. It has no gradient.

Models of the standard's own domain are converted to the newest opset first, so all versions are supported; operators of other domains are
imported as they are. *Written by* names the operators of fluidx that `fx.onnx.save` exports with it. Register operators of your own with
`@fx.onnx.face("MyOp", domain="com.example")` (see [ONNX](onnx.md#operators-of-your-own)).

"""


def writers() -> dict[str, list[str]]:
    """ONNX operator -> the operators of fluidx that are exported with it."""
    found: dict[str, list[str]] = defaultdict(list)
    for d in all_ops():
        if d.__module__.startswith("fluidx.ops."):
            for op in onnx_operators(d.name):
                found[op].append(d.name)
    return found


def _is_fluidx(k: OnnxOperator) -> bool:
    """Is it an operator of fluidx, not one that a user registered?"""
    key = domain_of(k.domain), k.name
    found = IMPORTERS.get(key) or NUMPY_IMPORTERS.get(key)
    return found is None or is_own(found)


def page() -> str:
    """The text of the page, in Markdown."""
    rows = [k for k in known() if _is_fluidx(k)]
    by, newest = writers(), max(v for k in rows if k.domain == "ai.onnx" for v in k.versions)
    out = [HEAD.format(count=len(rows), newest=newest)]
    for domain in dict.fromkeys(k.domain for k in rows):
        out.append(f"## {domain}\n\n| operator | how | versions | written by |\n|---|---|---|---|\n")
        for k in rows:
            if k.domain == domain:
                names = ", ".join(f"[{n}](ops.md#{n})" for n in by.get(k.name, ())) if domain == "ai.onnx" else ""
                out.append(f"| {k.name} | {k.how} | {', '.join(map(str, k.versions))} | {names} |\n")
        out.append("\n")
    return "".join(out).rstrip() + "\n"
