"""The page of operators, made from their declarations while the documentation is built (see hooks.py)."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatch

import fluidx.layers
from fluidx.ir import At, Effect, Partial, ProgramError, Shard
from fluidx.ir.opdef import OpDef, Required, all_ops
from fluidx.testing.one_operator import onnx_operators
from fluidx.view import patterns

MOST = 3  # access patterns shown of one operator

# heading -> the modules of fluidx.ops (as shell patterns) that it stands for, in the order of the page
KINDS = {
    "Arithmetic, element by element": "elementwise.arithmetic",
    "Activations": "elementwise.activation",
    "Quantization": "elementwise.quantization",
    "Quantized values": "quantized.*",
    "Comparison and logic": "elementwise.compare",
    "Reductions": "math.reduction*",
    "Matrix products": "math.[demo]*",
    "Fourier transforms": "math.fourier",
    "Convolution": "nn.conv*",
    "Pooling": "nn.pool*",
    "Normalization": "nn.*norm*",
    "Images: sizes, points, regions": "nn.[gr]*",
    "Dropout": "nn.dropout",
    "Softmax": "nn.softmax",
    "Attention": "nn.attention",
    "Experts": "nn.experts",
    "Losses": "loss.*_loss",
    "Metrics": "loss.metric",
    "Sequences, optionals, maps, strings": "values.*",
    "Embedding": "nn.embedding",
    "Shape": "data.reshape",
    "Joining and splitting": "data.joining",
    "Repeating, reversing, shifting, masking": "data.movement",
    "Slices": "data.slicing",
    "Gather and scatter": "data.indexing*",
    "Search and sort": "data.search*",
    "Selection by value": "data.selection",
    "Sizes from values": "data.computed",
    "Sizes of other values": "data.sized_like",
    "Boxes": "data.boxes",
    "Constants": "data.fill",
    "Random values": "data.random",
    "Parameter updates": "update.*",
    "Collectives": "comm.collective",
    "Annotations": "data.annotate",
    "Collectives between a root and parts": "comm.rooted_parts",
    "Changes of placement": "comm.parts",
    "Conversions to a wire dtype": "comm.wire",
    "Replica-local values": "comm.replicas",
    "Adaptive sums": "comm.adasum",
    "Trainers and servers": "comm.serve",
    "Messages": "comm.p2p",
    "Control flow": "control",
    "Stashes of loop iterations": "data.stash",
    "Copies between host and device memory": "data.memory",
    "On the host": "host",
}

HEAD = """\
# Operators

{count} operators. Each is one declaration (see [Design](design.md#add-an-operator)): this page, the builder method `b.name(...)`, the type
check and the tests over all operators come from it. `fluidx ops NAME` prints one entry.

How to read an entry:

- `op(X, Y?, Z*) → Out`: X is one variable, Y may be left out, Z is a list of variables.
- *Attributes* are written with their defaults; one without a default is written with its type.
- *Gradient*: can `append_backward` go through the operator? *Mixed precision*: the dtype that it computes in there, if that is not float32
  (see [Precision and memory](precision.md)).
- *Access*: which elements it reads and writes, for at most three of its own samples; [Placements](placements.md) explains the notation. An
  operator that communicates shows how it changes the placement of its operand instead.
- *ONNX*: the operators that `fx.onnx.save` writes it with ([Operators of ONNX](onnx_ops.md)).
- *Layer*: the function that appends it to a program.

"""


def declared() -> list[type[OpDef]]:
    """The operators of fluidx itself, by name."""
    return [d for d in all_ops() if d.__module__.startswith("fluidx.ops.")]


def kind_of(d: type[OpDef]) -> str:
    """The heading under which an operator stands; "Others" when no pattern of KINDS fits its module."""
    module = d.__module__.removeprefix("fluidx.ops.")
    return next((title for title, pattern in KINDS.items() if fnmatch(module, pattern)), "Others")


def page() -> str:
    """The text of the page, in Markdown."""
    groups: dict[str, list[type[OpDef]]] = {}
    for d in declared():
        groups.setdefault(kind_of(d), []).append(d)
    titles = [t for t in (*KINDS, "Others") if t in groups]
    out = [HEAD.format(count=sum(map(len, groups.values())))]
    out.append(" · ".join(f"[{t}](#kind-{_anchor(t)})" for t in titles) + "\n\n")
    for title in titles:
        out.append(f"## {title} {{ #kind-{_anchor(title)} }}\n\n")  # `softmax` is the operator
        out += [_entry(d) for d in groups[title]]
    return "".join(out).rstrip() + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _entry(d: type[OpDef]) -> str:
    lines = [f"### {d.name} {{ #{d.name} }}\n", "\n", f"`{d.name}({', '.join(d.inputs)}) → {', '.join(d.outputs) or 'nothing'}`\n", "\n"]
    lines.append(_doc(d) + "\n\n")
    if d.attrs:
        lines.append("- Attributes: " + ", ".join(f"`{name}{_default(v)}`" for name, v in d.attrs.items()) + "\n")
    lines.append(f"- Gradient: {'yes' if d.grad is not None else 'no'}{_precision(d)}\n- {_access(d)}\n{_onnx(d)}{_layer(d)}\n")
    return "".join(lines)


def _onnx(d: type[OpDef]) -> str:
    """The operators that its samples are written with."""
    found = ", ".join(f"[{name}](onnx_ops.md)" for name in onnx_operators(d.name))
    return f"- ONNX: {found}\n" if found else ""


def _layer(d: type[OpDef]) -> str:
    """The layer of this name."""
    return f"- Layer: [`fx.layers.{d.name}`](api/layers.md#{d.name})\n" if d.name in fluidx.layers.__all__ else ""


def _precision(d: type[OpDef]) -> str:
    """What an operator of a forward pass works in in mixed precision, unless that is float32."""
    if d.grad is None or d.comm.move is not None or d.control.abstract:
        return ""
    said = {"half": "16 bits", "any": "what comes"}.get(d.in_mixed_precision())
    return f". Mixed precision: {said}" if said else ""


def _doc(d: type[OpDef]) -> str:
    """The docstring; indented examples become text blocks."""
    paragraphs = (inspect.getdoc(d) or "").strip().split("\n\n")
    out = []
    for p in paragraphs:
        if p.lstrip().startswith(">>>") or p.startswith("    "):
            out.append("```text\n" + inspect.cleandoc(p) + "\n```")
        else:
            out.append(re.sub(r"(?<![`\w])\*(?=\w)", r"\\*", p.replace("<", "&lt;")))
    return "\n\n".join(out)


def _default(value: object) -> str:
    """What stands behind the name of an attribute: its default, or the type of one that has none."""
    if isinstance(value, Required):
        return f": {value.type.__name__}"
    if isinstance(value, tuple):
        return "=[" + ", ".join(map(repr, value)) + "]"
    return f"={value!r}"


def _access(d: type[OpDef]) -> str:
    if d.control.abstract:
        return "Placement: any, to any other"
    if d.comm.move is not None:
        return f"Placement: {' · '.join(_moves(d))}"
    if d.control.bodies:
        return "Access: that of the operators in its blocks"
    lines = patterns(d)
    if not lines:
        return "Access: between ranks" if d.effect in (Effect.COLLECTIVE, Effect.P2P) else "Access: every operand whole"
    more = f" and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return "Access: " + " · ".join(f"`{line}`" for line in lines[:MOST]) + more


def _moves(d: type[OpDef]) -> list[str]:
    """What an operator that communicates makes of each placement that it takes, with its attributes as they are by default."""
    attrs = {name: (v.type() if isinstance(v, Required) else v) for name, v in d.attrs.items()} | {"group": "dp"}
    found = []
    for entry in (None, Shard(0), Partial("sum"), At(0)):
        try:
            made = d.comm.move(entry, **attrs)
        except ProgramError:
            continue
        found.append(f"`{_short(entry)} → {_short(made)}`")
    return found or ["any"]


def _short(e: object) -> str:
    return "whole" if e is None else str(e).partition(" over ")[0]
