"""The page of ONNX operators, made while the documentation is built (see hooks.py): which are taken, and which fluidx writes.

What fluidx writes is found by writing: the samples of each operator are saved, and the nodes looked at.
"""

from __future__ import annotations

from collections import defaultdict

from fluidx.ir.opdef import all_ops
from fluidx.onnx import import_tables, known
from fluidx.onnx.import_tables import IMPORTERS, NUMPY_IMPORTERS
from fluidx.onnx.normalize import domain_of
from fluidx.onnx.registry import OnnxOperator
from fluidx.testing.alone import in_onnx

HEAD = """\
# Operators of ONNX

{count} operators of ONNX, by domain. `fluidx onnx ops` prints them for the version of onnx that is installed; this page is of opsets
up to {newest}. How an operator is done:

- *operators*: it is one or several operators of a program, which are trained where they have a gradient (see [Operators](ops.md));
- *body*: the function that its schema defines is written out, which is trained where what it consists of is;
- *host*: NumPy computes it, in a session (`fx.onnx.session`), or while a program is written where its operands are known. It has no
  gradient.

Models of the standard's own domain are brought to the newest opset first, so that all versions are taken; operators of other domains are
taken as they are. *Written by* names the operators of fluidx that `fx.onnx.save` writes with it. An operator of your own joins them by
`@fx.onnx.face("MyOp", domain="com.example")` (see [ONNX](onnx.md#operators-of-your-own)).

"""


def writers() -> dict[str, list[str]]:
    """By operator of ONNX: the operators of fluidx that are written with it."""
    found: dict[str, list[str]] = defaultdict(list)
    for d in all_ops():
        if d.__module__.startswith("fluidx.ops."):
            for op in in_onnx(d.name):
                found[op].append(d.name)
    return found


def _is_fluidx(k: OnnxOperator) -> bool:
    """Is it no operator that somebody has added?"""
    key = domain_of(k.domain), k.name
    found = IMPORTERS.get(key) or NUMPY_IMPORTERS.get(key)
    return found is None or found.__module__.startswith(import_tables.FUNCTIONS)


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
