"""Operators on values that only the host has: sequences, optionals, maps and strings. They run between plans."""
