"""Remove operators that return a value unchanged, bit by bit, and merge pairs of operators into one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.opdef import OpDef
from ..ir.operator import Operator
from ..ir.types import TensorType
from ..ops.expr.nodes import const, substitute
from ..ops.expr.numpy import evaluate
from .constants import Constants
from .walk import Answer, NameFacts

# 0 and -0 differ only in their bits; a product or a quotient may lose the others
_PROBES = (0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e-45, 1.7e308, 3e38)


class Identities:
    """The rule. `constants`, if that rule runs too, knows the constant operands of products."""

    def __init__(self, walk: NameFacts, constants: Constants | None = None):
        self.walk, self.constants = walk, constants

    def __call__(self, op: Operator, definition: type[OpDef]) -> Answer:
        if definition.rewrite.identity_if is not None:
            return self._kept(op, definition)
        if self.constants is not None and definition.expr is not None and len(op.input_arg_names) == 2:
            return self._with_constant(op, definition)
        return None

    def _kept(self, op: Operator, definition: type[OpDef]) -> Answer:
        """The answer for an op that may return its first operand unchanged."""
        walk, outs = self.walk, op.output_arg_names
        if not op.input_arg_names:
            return None
        x, out = op.input_arg_names[0], outs[0]
        if x in walk.changing or (same := walk.ask(_keeps, op, definition)) is None:
            return None
        laid_out = definition.storage.view is not None or walk.in_one_piece(x)
        if same and laid_out and walk.free(op) and walk.alike(x, out):
            walk.stands_for(x, out)
            return () if len(outs) == 1 else (op,)  # such as a mask, which dead-code elimination removes
        return self._with_the_one_before(op, definition, x) if definition.rewrite.merge_two is not None else None

    def _with_the_one_before(self, op: Operator, definition: type[OpDef], x: str) -> Answer:
        walk, before = self.walk, self.walk.maker.get(x)
        if before is None or before.type != op.type or before.device != op.device or not walk.whole((x, *op.output_arg_names)):
            return None
        source = before.input_arg_names[0]
        if source in walk.changing or not walk.in_one_piece(source) or not walk.whole((source,)):
            return None
        assert definition.rewrite.merge_two is not None
        attrs = definition.rewrite.merge_two(before.attrs, op.attrs)
        if attrs is None:
            return None
        joined = op.replace(inputs=before.inputs, attrs=definition.complete_attrs(attrs))
        return found if (found := self._kept(joined, definition)) is not None else (joined,)

    def _with_constant(self, op: Operator, definition: type[OpDef]) -> Answer:
        """The answer for an elementwise op with one known number as operand: x * 1 and x + (-0) are x; x + 0 is not, since it turns -0 into
        0."""
        walk, (out,) = self.walk, op.output_arg_names
        assert self.constants is not None and definition.expr is not None
        for k, number in enumerate(op.input_arg_names):
            x = op.input_arg_names[1 - k]
            if number not in self.constants.known or x in walk.changing or not walk.alike(x, out) or not walk.free(op):
                continue
            if not walk.in_one_piece(x) or not walk.ask(_is_one_number, number):
                continue
            value = self.constants.value(number)
            if value is not None and self._leaves(op, definition, 1 - k, value.item()):
                walk.stands_for(x, out)
                return ()
        return None

    def _leaves(self, op: Operator, definition: type[OpDef], at: int, number: float) -> bool:
        """Does the scalar formula return its operand `at`, bit by bit, if the other operand is `number`?"""
        assert definition.expr is not None
        t = self.walk.type_of(op.output_arg_names[0])
        e, shapes = definition.expr(op.attrs, [t.shape, t.shape], t.ndim)
        x, other = list(shapes)[at], list(shapes)[1 - at]
        if (left := substitute(e, {other: const(number)})).fn != "sym" or left.args[0] != x:
            return False
        dtype = np_dtype(t.dtype)
        if dtype.kind in "iub":
            return True  # for integers, equal formulas have equal bits
        with np.errstate(all="ignore"):
            probes = np.array(_PROBES).astype(dtype)
            made = np.asarray(evaluate(e, np, {x: probes, other: np.full_like(probes, number)}))
        return made.dtype == dtype and made.tobytes() == probes.tobytes()


def _keeps(types: Mapping[str, TensorType], op: Operator, definition: type[OpDef]) -> bool | None:
    """Does the operator return its first operand unchanged if that is contiguous? None if a type is not known."""
    x, out = types.get(op.input_arg_names[0]), types.get(op.output_arg_names[0])
    if x is None or out is None:
        return None
    assert definition.rewrite.identity_if is not None
    return x == out and bool(definition.rewrite.identity_if(x, op.attrs, len(op.input_arg_names)))


def _is_one_number(types: Mapping[str, TensorType], name: str) -> bool:
    return types[name].numel == 1
