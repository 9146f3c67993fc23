"""`elementwise_loss`: declares a loss of two operands of one shape, and its gradient, from scalar expressions, one row each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...ir import OpDef, Sample, Storage
from ..elementwise.declare import ScalarExpression
from ..expr import trace
from ..shared.samples import f32
from .loss_shared import elementwise_infer

Samples = Callable[[], Iterator[Sample]]


def _declare(
    name: str, body: Callable[..., Any], doc: str, attrs: Mapping[str, Any], slots: Mapping[str, str], out: str, **more: Any
) -> type[OpDef]:
    """An op with the expression `body`; `slots` are the input slots by the names of its parameters."""
    scalar = ScalarExpression(trace(body), tuple(slots), tuple(attrs), False, None)
    fields: dict[str, Any] = scalar.fields() | {
        "name": name, "__doc__": doc, "__qualname__": name, "__module__": __name__, "attrs": dict(attrs), "inputs": tuple(slots.values()),
        "outputs": (out,), "storage": Storage(inplace=tuple((s, out) for s in reversed(list(slots.values())))),
    }  # fmt: skip
    return type(name, (OpDef,), fields | {k: staticmethod(f) for k, f in more.items()})


def elementwise_loss(
    name: str, body: Callable[..., Any], gradient: Callable[..., Any], *, doc: str, grad_doc: str, samples: Samples,
    out: str = "Out", attrs: Mapping[str, Any] | None = None, both: bool = False,
) -> type[OpDef]:  # fmt: skip
    """Declare the loss `name`, and `<name>_grad` with respect to its first operand.

    `body` has the two operands as parameters, called as the slots in lower case, and keyword-only parameters for `attrs`; `gradient` also
    has `g`, the gradient of the result. If `both`, the second operand has the opposite gradient; otherwise it is a constant.
    """
    first, second = (p.name for p in inspect.signature(body).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    slots = {first: first.capitalize(), second: second.capitalize()}

    def infer(x: Any, y: Any, **_: Any) -> Any:
        return elementwise_infer(name, **dict(zip(slots.values(), (x, y), strict=True)))

    def grad(b: Any, op: Any, g: Any) -> Any:
        dx = b.emit(f"{name}_grad", *(op[s] for s in slots.values()), g, **op.attrs)
        return dx, b.scale(dx, scale=-1.0) if both and op.needs(slots[second]) else None

    def grad_samples() -> Iterator[Sample]:
        for k, s in enumerate(samples()):
            yield Sample((*s.args, f32(*s.args[0].shape, seed=k + 2)), s.attrs, grad=(), why="a gradient itself")

    given, more, of_first = attrs or {}, {**slots, "g": f"{out}@GRAD"}, f"{slots[first]}@GRAD"
    _declare(f"{name}_grad", gradient, grad_doc, given, more, of_first, infer=lambda x, *_, **__: x, samples=grad_samples)
    return _declare(name, body, doc, given, slots, out, infer=infer, grad=grad, samples=samples)

