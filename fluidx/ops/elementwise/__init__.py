"""Elementwise operators. Each is declared in one row: a name, a scalar expression, a sentence of documentation."""

from .declare import elementwise

__all__ = ["elementwise"]
