"""Composite operators written out in simpler ones that compute the same: placement, proof, export and tests use the same parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .make_op import make_op
from .opdef import opdef
from .operator import Operator
from .parts import Part


class Decomposition:
    """What `OpDef.decompose` gets for one operator: a call appends a part and returns the name of its result.

    `d["X"]` is the name of an operand and `d.out("Y")` that of a result, "" if it is absent; `d.type(name)` is the type of an operand or of
    a value that a part makes. A part without `out` gets a fresh name, made from the first result of the operator and `word`. `part` is the
    part of the global value that a kernel computes; None: the whole value.
    """

    def __init__(self, op: Operator, fresh: Callable[[str], str], type_of: Callable[[str], Any], part: Part | None = None):
        self.op, self.attrs, self.made, self.part = op, op.attrs, list[Operator](), part
        self._fresh, self._type_of = fresh, type_of
        self._makers: dict[str, Operator] = {}

    def __getitem__(self, slot: str) -> str:
        return next(iter(self.op.inputs.get(slot, ())), "")

    def out(self, slot: str) -> str:
        return next(iter(self.op.outputs.get(slot, ())), "")

    def type(self, name: str) -> Any:
        maker = self._makers.get(name)
        return self._type_of(name) if maker is None else result_types(maker, self.type)[name]

    def __call__(self, op_type: str, *ins: str, out: str = "", word: str = "", **attrs: Any) -> str:
        """Append an operator with one variable for each slot and one result."""
        out = out or self._fresh(f"{self.op.output_arg_names[0]}.{word or 'part'}")
        self._append(make_op(op_type, ins, (out,), opdef(op_type).complete_attrs(attrs), self.op.site, self.op.role))
        return out

    def chain(self, x: str, *steps: Any, out: str = "") -> str:
        """`x` through operators (type, other operands, attributes), of which None are left out; the last one writes `out`."""
        present = [s for s in steps if s]
        for k, (op_type, *others, attrs) in enumerate(present):
            x = self(op_type, x, *others, out=out if k == len(present) - 1 else "", **attrs)
        return x

    def append(self, op_type: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **attrs: Any) -> None:
        """Append an operator with these names by slot."""
        self._append(self.op.replace(type=op_type, inputs=inputs, outputs=outputs, attrs=opdef(op_type).complete_attrs(attrs), role_var=()))

    def _append(self, part: Operator) -> None:
        written = part.output_arg_names
        role_var = self.op.role_var if any(n in self.op.role_var for n in written) else ()
        part = part.replace(device=self.op.device, role_var=role_var)
        self.made.append(part)
        self._makers.update(dict.fromkeys(written, part))


def result_types(part: Operator, type_of: Callable[[str], Any]) -> dict[str, Any]:
    """The types of an operator's results by name."""
    definition = opdef(part.type)
    found = definition.infer_outputs({s: [type_of(n) for n in names] for s, names in part.inputs.items()}, part.attrs)
    return {
        n: t
        for slot, result in zip(definition.out_slots, found, strict=True)
        for n, t in zip(part.outputs.get(slot.name, ()), result if slot.many else [result])
    }


def decomposed(
    op: Operator, fresh: Callable[[str], str], type_of: Callable[[str], Any], part: Part | None = None
) -> list[Operator] | None:
    """The simpler operators, in order; None if the operator is not decomposed.

    >>> from fluidx.ir import TensorType
    >>> op = make_op("softmax", ["x"], ["y"], opdef("softmax").defaults)
    >>> [part.type for part in decomposed(op, lambda name: name, lambda name: TensorType("float32", (2, 3)))]
    ['reduce_max', 'elementwise_sub', 'exp', 'reduce_sum', 'elementwise_div']
    """
    decompose = opdef(op.type).decompose
    if decompose is None:
        return None
    d = Decomposition(op, fresh, type_of, part)
    decompose(d)
    return d.made or None
