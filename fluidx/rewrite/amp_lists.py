"""AutoMixedPrecisionLists: which operators compute in 16 bits, by their declarations and the user's exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.opdef import OPS, instead_of, opdef
from ..ir.operator import Operator
from ..ir.source_location import wrong
from ..ir.variable import Variable

_OWNER = "AutoMixedPrecisionLists"


class AutoMixedPrecisionLists:
    """Exceptions to the declarations of ops: op types that compute in 16 bits, or in float32, whatever they declare.

    An operator that reads or writes a variable of `custom_black_varnames` computes in float32, and the variable stays float32.

    >>> lists = AutoMixedPrecisionLists(custom_black_list=["matmul"])
    >>> lists.of_type("matmul"), lists.of_type("conv2d"), lists.of_type("relu"), lists.of_type("softmax")
    ('float32', 'half', 'any', 'float32')
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str | Variable] | None = None,
    ):
        white, black = _types("custom_white_list", custom_white_list), _types("custom_black_list", custom_black_list)
        if both := sorted(white & black):
            raise wrong(f"{_OWNER}: {', '.join(map(repr, both))} in custom_white_list and in custom_black_list; an op is in one of them")
        self._custom: Mapping[str, str] = {**dict.fromkeys(white, "half"), **dict.fromkeys(black, "float32")}
        self.black_varnames = {v.name if isinstance(v, Variable) else v for v in custom_black_varnames or ()}

    def of_type(self, op_type: str) -> str:
        """The precision of operators of a type: "half", "float32" or "any"."""
        return self._custom.get(op_type) or opdef(op_type).in_mixed_precision()

    def of(self, op: Operator) -> str:
        """The precision of one operator; its variables may be in `custom_black_varnames`."""
        if self.black_varnames and not self.black_varnames.isdisjoint((*op.input_arg_names, *op.output_arg_names)):
            return "float32"
        return self.of_type(op.type)

    @property
    def white_list(self) -> set[str]:
        return {name for name in OPS if self.of_type(name) == "half"}

    @property
    def black_list(self) -> set[str]:
        return {name for name in OPS if self.of_type(name) == "float32"}

    @property
    def gray_list(self) -> set[str]:
        return {name for name in OPS if self.of_type(name) == "any"}


def _types(argument: str, given: Iterable[str] | None) -> set[str]:
    if isinstance(given, str):
        raise wrong(f"{_OWNER}: {argument} is a list of op types, got {given!r}; write [{given!r}]")
    names = set(given or ())
    for name in names:
        if name not in OPS:
            raise wrong(f"{_OWNER}: {argument}: there is no op {name!r}; {instead_of(str(name))}")
        if OPS[name].control.bodies:
            raise wrong(f"{_OWNER}: {argument}: {name} runs blocks, and the ops inside choose their own precision; list those")
    return names


__all__ = ["AutoMixedPrecisionLists"]
