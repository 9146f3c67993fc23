"""Passes of the transpiler: each rewrites the main and startup programs, one step of a strategy."""
