"""Two binary trees, each with half of the value: a leaf of one tree is an inner node of the other.

Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009), in the form that NCCL uses.
"""

from __future__ import annotations

from .schedule import Algorithm, Refused, Rounds, Transfer, backwards


class DoubleBinaryTree(Algorithm):
    """The value is cut into blocks 0 and 1; in each tree the leaves send first, then their parents."""

    name = "double_binary_tree"

    def reduce(self, n: int) -> Rounds:
        raise Refused("double_binary_tree has only an all_reduce: its two trees have different roots; tree has one root")

    def all_reduce(self, n: int) -> Rounds:
        up = _up(n)
        return up + backwards(up)

    def cut(self, n: int, size: int) -> list[int]:
        return [0, size // 2, *[size] * (n - 1)] if n > 1 else [0, size]


def parent(rank: int, n: int) -> int:
    """The parent of a rank in the first tree, whose root is 0 with one child; -1 for the root.

    >>> [parent(k, 8) for k in range(8)]
    [-1, 2, 4, 2, 0, 6, 4, 6]
    """
    if rank == 0:
        return -1
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return rank ^ bit if up >= n else up


def _up(n: int) -> Rounds:
    height = [0] * n
    order = sorted(range(1, n), key=lambda k: k & -k)  # children come before their parents
    for k in order:
        height[parent(k, n)] = max(height[parent(k, n)], height[k] + 1)
    twin = [n - 1 - k for k in range(n)] if n % 2 == 0 else [(k + 1) % n for k in range(n)]
    out = []
    for level in range(max(height)):
        at = [k for k in order if height[k] == level]
        first = [Transfer(k, parent(k, n), 0, 1, True) for k in at]
        out.append((*first, *(Transfer(twin[t.source], twin[t.target], 1, 2, True) for t in first)))
    return tuple(out)
