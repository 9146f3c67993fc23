"""Operators on values in host memory only: sequences, optionals, maps and strings. They run between plans."""
