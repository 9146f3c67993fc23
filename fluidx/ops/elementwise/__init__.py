"""Operators that work element by element, each declared by a row: a name, a scalar expression, a sentence."""

from .declare import elementwise

__all__ = ["elementwise"]
