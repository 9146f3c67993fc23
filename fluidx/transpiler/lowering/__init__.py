"""Lowering: replace changes of placement by collectives, and collectives with an algorithm by sends and receives."""
