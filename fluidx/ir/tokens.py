"""Program text as tokens, line by line, and the errors that point into it."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from .dtypes import FULL, SHORT
from .errors import ParseError
from .text import NAME, quote
from .types import WORD

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_DTYPE = "|".join(sorted({*SHORT, *FULL}, key=len, reverse=True))
_TOKEN = re.compile(
    rf"""(?P<blank>[ \t\r\f\v]+|\#.*)
    |(?P<name>%(?:{NAME}|{_STRING}))
    |(?P<type>(?:{_DTYPE})\[[^\]%"=]*\]|(?:seq|opt|map)<[^%"={{}}();#]*>)
    |(?P<word>{WORD})
    |(?P<number>[-+]?(?:inf\b|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?))
    |(?P<string>{_STRING})
    |(?P<mark>[{{}}()\[\]=,:;])
    |(?P<bad>.)""",
    re.VERBOSE,
)


class Tokens:
    """The tokens of one line and where the next one is; `kinds` ends in "line" at every line end and "end" at the end of the text."""

    def __init__(self, text: str):
        if not isinstance(text, str):
            raise ParseError(f"program text must be a str, got {type(text).__name__}")
        self.lines = text.removeprefix("\ufeff").split("\n")
        self.row = -1
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.cols: list[int] = []
        self.k = 0
        self.names: dict[str, str] = {}
        self._next_line()

    def _next_line(self) -> None:
        self.row += 1
        kinds: list[str] = []
        texts: list[str] = []
        cols: list[int] = []
        last = self.row >= len(self.lines)
        if not last:
            for m in _TOKEN.finditer(self.lines[self.row]):
                kind = m.lastgroup
                if kind == "blank":
                    continue
                text = m.group()
                kinds.append(text if kind == "mark" else kind or "bad")
                texts.append(text)
                cols.append(m.start())
            cols.append(len(self.lines[self.row].rstrip()))
        else:
            cols.append(0)
        kinds.append("end" if last else "line")
        texts.append("")
        self.kinds, self.texts, self.cols, self.k = kinds, texts, cols, 0

    def _skip_lines(self) -> None:
        while True:
            kind = self.kinds[self.k]
            if kind == "line":
                self._next_line()
            elif kind == ";":
                self.k += 1
            else:
                return

    def _fail(self, expected: str, k: int | None = None, found: str | None = None) -> NoReturn:
        k = self.k if k is None else k
        kind = self.kinds[k]
        if found is None:
            found = {"line": "the end of the line", "end": "the end of the text"}.get(kind) or quote(_clip(self.texts[k], 40))
        row = self.row if self.row < len(self.lines) else len(self.lines) - 1
        line = self.lines[row].rstrip()
        col = self.cols[k] if self.row < len(self.lines) else len(line)
        raise ParseError(f"line {row + 1}: expected {expected}, found {found}\n{_pointer(line, row, col)}")

    def _wrong(self, message: str, k: int | None = None) -> NoReturn:
        self._wrong_at(min(self.row, len(self.lines) - 1), self.cols[self.k if k is None else k], message)

    def _wrong_at(self, row: int, col: int, message: str) -> NoReturn:
        raise ParseError(f"line {row + 1}: {message}\n{_pointer(self.lines[row].rstrip(), row, col)}")

    def _take(self, kind: str, expected: str = "") -> str:
        if self.kinds[self.k] != kind:
            self._fail(expected or repr(kind))
        self.k += 1
        return self.texts[self.k - 1]

    def _took(self, kind: str) -> bool:
        if self.kinds[self.k] == kind:
            self.k += 1
            return True
        return False

    def _at_word(self, text: str) -> bool:
        return self.texts[self.k] == text and self.kinds[self.k] == "word"

    def _took_word(self, text: str) -> bool:
        if self._at_word(text):
            self.k += 1
            return True
        return False

    def _line_end(self, after: str) -> None:
        if self.kinds[self.k] not in ("line", ";", "}", "end"):
            self._fail(f"the end of the line after {after}")

    def _word(self, expected: str) -> str:
        if self.kinds[self.k] == "string":
            return self._string()
        return self._take("word", expected)

    def _string(self) -> str:
        text = self._take("string", "a quoted string")
        try:
            return json.loads(text)
        except ValueError as e:
            self._wrong(f"this is no string: {str(e).split(':')[0]}", self.k - 1)

    def _int(self, expected: str, low: int, high: int) -> int:
        text = self._take("number", expected)
        if not text.lstrip("+-").isdigit():
            self._fail(expected, self.k - 1)
        value = int(text) if len(text) <= 21 else None
        if value is None or not low <= value <= high:
            self._fail(f"{expected} from {low} to {high}", self.k - 1)
        return value

    def _name(self) -> str:
        text = self._take("name", "a variable such as %x")
        name = self.names.get(text)
        if name is None:
            if text[1] == '"':
                try:
                    name = json.loads(text[1:])
                except ValueError as e:
                    self._wrong(f"this is no variable name: {str(e).split(':')[0]}", self.k - 1)
                if not name:
                    self._wrong("a variable needs a name", self.k - 1)
            else:
                name = text[1:]
            self.names[text] = name
        return name


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _pointer(line: str, row: int, col: int) -> str:
    """The line with its number and a caret under the column; of a long line the part around it."""
    start = max(0, col - 80) if len(line) > 120 else 0
    shown = line[start : start + 120]
    shown = "".join(c if c.isprintable() else "?" for c in shown)  # contents of a binary file must not reach the terminal
    head = f"    {row + 1} | {'...' if start else ''}"
    return f"{head}{shown}\n{' ' * (len(head) + col - start)}^"
