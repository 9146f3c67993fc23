"""The parts of program text below a statement: types, placements and flags of a variable, and the values of attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .constants import Array, Given
from .errors import ProgramError, nearest
from .operator import BlockRef
from .parts import REDUCE
from .program import Program
from .text import FLAGS, implied_inline, quote, var_name
from .tokens import Tokens
from .types import At, Entry, Local, Own, Partial, Pieces, Placement, Shard, TensorType
from .valuetypes import A_TYPE, MAX_SIZE, ValueType, read_type
from .var import Var

PLACES = ("shard", "partial", "at", "pieces", "own", "local")
MAX_NESTING = 32  # of lists in an attribute
MAX_INT = 1 << 64  # magnitude of an integer attribute; a seed may use all 64 bits
MAX_INDEX = (1 << 31) - 1  # of a rank, an axis or a block

_CONSTANTS = {"true": True, "false": False, "none": None, "inf": float("inf")}
_A_VALUE = "a value: a number, a quoted string, true, false, none, inf, nan, block N, an array or a list"
_NAN = math.nan  # the one object: two programs that hold it compare equal


class ValueParser(Tokens):
    """Reads the declaration of a variable behind its name, and attributes. `constants` are the arrays that a text names by digest."""

    def __init__(self, text: str, constants: Mapping[str, Any] | None):
        super().__init__(text)
        self.constants = Given(constants)
        self.types: dict[str, ValueType] = {}
        self.blocks: list[tuple[int, int, Program, int]] = []  # (row, column, program, index) of every sub-block that an attribute names

    def _record(self, name: str, implied: frozenset[str] | None) -> Var:
        """The type, placement and flags of a variable; `implied` None stands for a definition by an operator."""
        type_ = self._type(f"{var_name(name)}:")
        if implied is None:
            implied = implied_inline(type_)
        placement: Placement = ()
        flags = implied
        while self.kinds[self.k] == "word":
            text = self.texts[self.k]
            if text in FLAGS:
                self.k += 1
                flags = flags | {text}
            elif text == "not":
                self.k += 1
                if self.texts[self.k] not in FLAGS:
                    self._fail(f"a flag after 'not': {', '.join(FLAGS)}")
                flags = flags - {self.texts[self.k]}
                self.k += 1
            elif text in PLACES:
                placement += (self._place(text),)
            elif text == "replicate" and not placement:
                self.k += 1
            else:
                options = (*PLACES, "replicate", "not", *FLAGS)
                self._wrong(f"{quote(text)} says nothing about a variable; {nearest(text, options)}")
        written: dict[str, Any] = {flag: flag in flags for flag in FLAGS}
        return Var(name, type_, placement, **written)

    def _type(self, after: str) -> ValueType:
        text = self.texts[self.k]
        if self.kinds[self.k] != "type":
            self._fail(f"{A_TYPE} after {after}")
        type_ = self.types.get(text)
        if type_ is None:
            try:
                type_ = self.types[text] = read_type(text)
            except ProgramError as e:
                self._fail(str(e))
        self.k += 1
        return type_

    def _place(self, kind: str) -> Entry:
        self.k += 1
        if kind == "local":
            return Local()
        if kind == "own":
            return Own(self._over())
        self._take("(")
        if kind == "partial":
            what: Any = (self._word("a reduction such as sum"),)
            if what[0] not in REDUCE:
                self._wrong(f"a value can wait for {', '.join(REDUCE)}, not for {quote(what[0])}", self.k - 1)
        else:
            what = (self._int("an index", -MAX_INDEX, MAX_INDEX),)
            while kind in ("shard", "pieces") and self.texts[self.k] == ",":
                self.k += 1
                what += (self._int("an index", 0, MAX_SIZE),)
        self._take(")")
        group = self._over()
        if kind == "pieces":
            return Pieces(what, group)
        if kind == "shard":
            if len(what) > 2 or 0 in what[1:]:
                self._fail("an axis and perhaps a unit of at least 1 in shard(...)")
            return Shard(what[0], group, *what[1:])
        return (Partial if kind == "partial" else At)(what[0], group)

    def _over(self) -> str:
        if not self._took_word("over"):
            self._fail("'over' and the name of a group")
        return self._word("the name of a group")

    # -- attributes -----------------------------------------------------------------------------------------------------------------------

    def _attrs(self, program: Program) -> dict[str, Any]:
        """Attributes up to the closing brace; the opening one was taken."""
        attrs: dict[str, Any] = {}
        while not self._took("}"):
            if attrs:
                self._take(",", "',' or '}' after an attribute")
            at = self.k
            name = self._word("the name of an attribute")
            if name in attrs:
                self._wrong(f"attribute {name} is given twice", at)
            self._take("=", f"'=' after attribute {name}")
            attrs[name] = self._value(program, 0)
        return attrs

    def _value(self, program: Program, depth: int) -> Any:
        kind, text = self.kinds[self.k], self.texts[self.k]
        if kind == "number":
            self.k += 1
            return self._number(text)
        if kind == "string":
            return self._string()
        if kind == "word":
            self.k += 1
            if text in _CONSTANTS:
                return _CONSTANTS[text]
            if text == "nan":
                return _NAN
            if text == "block":
                at = self.k
                idx = self._int("the index of a block", 0, MAX_INDEX)
                self.blocks.append((self.row, self.cols[at], program, idx))
                return BlockRef(idx)
            if text == "array":
                return self._array()
            self._fail(_A_VALUE, self.k - 1)
        if kind == "[":
            if depth >= MAX_NESTING:
                self._wrong(f"lists are nested more than {MAX_NESTING} deep")
            self.k += 1
            values: list[Any] = []
            while not self._took("]"):
                if values:
                    self._take(",", "',' or ']' in a list")
                values.append(self._value(program, depth + 1))
            return tuple(values)
        self._fail(_A_VALUE)

    def _array(self) -> Array:
        """One of the constants; the word `array` was taken."""
        self._take("(", "'(' after array")
        at, digest = self.k, self._string()
        self._take(",", "',' after the digest")
        type_ = self._type("the digest")
        if not isinstance(type_, TensorType):
            self._wrong(f"an array has a dtype and a shape, found {type_}", self.k - 1)
        self._take(")")
        try:
            return self.constants.array(digest, type_)
        except ProgramError as e:
            self._wrong(str(e), at)

    def _number(self, text: str) -> int | float:
        digits = text.lstrip("+-")
        if digits.isdigit():
            if len(digits) > 20 or int(digits) >= MAX_INT:
                self._fail(f"an integer below {MAX_INT}", self.k - 1)
            return int(text)
        value = float(text)
        if digits != "inf" and value in (float("inf"), float("-inf")):
            self._fail("a number that a float64 can hold", self.k - 1)
        return value
