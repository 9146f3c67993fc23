"""Placement: which part of each value every rank holds, propagated through the operators."""
