"""Expansion of an operator into several simpler operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir.make_op import make_op
from ...ir.opdef import opdef
from ...ir.operator import Operator


class Parts:
    """Collects the operators that replace `op`, in order. A result without a given name gets a fresh one, made from the first output of
    `op`.
    """

    def __init__(self, op: Operator, fresh: Callable[[str], str]):
        self.op, self.fresh, self.made = op, fresh, list[Operator]()

    def __call__(self, op_type: str, *ins: str, out: str = "", word: str = "", **attrs: Any) -> str:
        """Append an operator with one variable per slot and one result; return the name of the result. The writer of an output of `op` gets
        the role_var of `op`.
        """
        out = out or self.fresh(f"{self.op.output_arg_names[0]}.{word or 'part'}")
        role_var = self.op.role_var if out in self.op.role_var else ()
        made = make_op(op_type, ins, (out,), opdef(op_type).complete_attrs(attrs), self.op.site, self.op.role, role_var)
        self.made.append(made.replace(device=self.op.device))
        return out
