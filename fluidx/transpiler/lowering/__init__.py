"""Lowering: changes of placement become collectives, sends and receives."""
