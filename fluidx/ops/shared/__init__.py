"""Helpers for operators of several kinds: shapes and dtypes, broadcasting, blocked NumPy loops, C kernel calls, sample arrays."""
