"""Operators that create, reshape, move, select and sort elements."""
