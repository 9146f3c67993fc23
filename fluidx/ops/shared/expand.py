"""Write out an operator as the operators that stand for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir.make_op import make_op
from ...ir.opdef import opdef
from ...ir.operator import Operator


class Parts:
    """The operators that stand for `op`, in order. A result that is not named gets a name of its own, behind the first output of `op`."""

    def __init__(self, op: Operator, fresh: Callable[[str], str]):
        self.op, self.fresh, self.made = op, fresh, list[Operator]()

    def __call__(self, op_type: str, *ins: str, out: str = "", word: str = "", **attrs: Any) -> str:
        """Append an operator of single operands and one result; give the name of the result. Who writes the output of `op` has its role."""
        out = out or self.fresh(f"{self.op.output_arg_names[0]}.{word or 'part'}")
        role_var = self.op.role_var if out in self.op.role_var else ()
        made = make_op(op_type, ins, (out,), opdef(op_type).complete_attrs(attrs), self.op.site, self.op.role, role_var)
        self.made.append(made.replace(device=self.op.device))
        return out
