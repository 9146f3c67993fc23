"""Operators by which ranks exchange values."""
