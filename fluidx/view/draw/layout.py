"""Layout of drawings: layers by the longest path, positions within a layer by barycentres and isotonic regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .nodes import DrawnNode

_GAP = 22  # between boxes


def assign_layers(ranks: Sequence[list[DrawnNode]]) -> None:
    """Set `layer` of all nodes: the longest path from the top. A collective has one layer on all ranks; a recv is below its send."""
    total = sum(map(len, ranks))
    if not _settle(ranks, total, synchronised=True):
        _settle(ranks, total, synchronised=False)  # ranks with different orders of collectives cannot share layers
    for nodes in ranks:
        below: dict[DrawnNode, list[DrawnNode]] = {}
        for n in nodes:
            for a in n.above:
                below.setdefault(a, []).append(n)
        for n in reversed(nodes):  # a node without dependences is put just above its first reader
            if n.pill or (not n.above and not n.order_only and n.sync is None):
                if n in below:
                    n.layer = max(n.layer, min(b.layer for b in below[n]) - 1) if not n.pill else min(b.layer for b in below[n]) - 1
    lowest = min((n.layer for nodes in ranks for n in nodes), default=0)
    for nodes in ranks:
        for n in nodes:
            n.layer -= lowest


def _settle(ranks: Sequence[list[DrawnNode]], total: int, synchronised: bool) -> bool:
    for nodes in ranks:
        for n in nodes:
            n.layer = 0
    bound: dict[Any, int] = {}
    while True:
        moved = False
        for nodes in ranks:
            for n in nodes:
                if n.pill:
                    continue
                layer = max((a.layer + 1 for a in (*n.above, *n.order_only) if not a.pill), default=0)
                if synchronised and n.sync is not None:
                    layer = max(layer, bound.get(n.sync, 0), bound.get(n.after, -1) + 1)
                    if layer > bound.get(n.sync, -1):
                        bound[n.sync] = layer
                        moved = True
                n.layer = layer
        if not moved:
            return True
        if max(bound.values()) > total:
            return False


@dataclass(eq=False)
class Point:
    """A position in a layer: of a node, or of a line that crosses the layer."""

    layer: int
    node: DrawnNode | None = None
    up: list[Point] = field(default_factory=list)
    down: list[Point] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        return self.node.width + _GAP if self.node is not None else 14.0


def place(nodes: list[DrawnNode]) -> tuple[float, list[list[Point]]]:
    """Set `x` of all nodes; return the width of the drawing, and the lines as lists of points from top to bottom."""
    layers, lines = _points(nodes)
    _position(layers)
    left = min((p.x - p.width / 2 for layer in layers for p in layer), default=0.0)
    right = max((p.x + p.width / 2 for layer in layers for p in layer), default=0.0)
    for layer in layers:
        for p in layer:
            p.x -= left
            if p.node is not None:
                p.node.x = p.x
    return right - left, lines


def _points(nodes: list[DrawnNode]) -> tuple[list[list[Point]], list[list[Point]]]:
    """The points of each layer, and the lines. A line has a point in every layer that it crosses."""
    points = {n: Point(n.layer, n) for n in nodes}
    layers: list[list[Point]] = [[] for _ in range(1 + max((n.layer for n in nodes), default=0))]
    for n in nodes:
        layers[n.layer].append(points[n])
    below: dict[DrawnNode, list[DrawnNode]] = {}
    for n in nodes:
        for a in n.above:
            below.setdefault(a, []).append(n)
    lines: list[list[Point]] = []
    for a, users in below.items():
        trunk = [points[a]]  # lines from one node share their points
        for n in sorted(users, key=lambda u: u.layer):
            while trunk[-1].layer < n.layer - 1:
                p = Point(trunk[-1].layer + 1, None, [trunk[-1]])
                trunk[-1].down.append(p)
                layers[p.layer].append(p)
                trunk.append(p)
            start = trunk[n.layer - 1 - a.layer]
            start.down.append(points[n])
            points[n].up.append(start)
            lines.append([*trunk[: n.layer - a.layer], points[n]])
    return layers, lines


def _position(layers: list[list[Point]]) -> None:
    """Order the points of each layer and set their `x`, in sweeps over the layers."""
    for layer in layers:
        _spread(layer, [float(k) for k in range(len(layer))])
    for sweep in range(12):
        forwards = sweep % 2 == 0
        for layer in layers if forwards else layers[::-1]:
            wanted = {p: _mean(p.up if forwards else p.down, p.x) for p in layer}
            if sweep < 8:
                layer.sort(key=lambda p: wanted[p])
            _spread(layer, [wanted[p] for p in layer])
    for sweep in range(24):  # both directions, with a fixed order: lines become straighter
        for layer in layers if sweep % 2 else layers[::-1]:
            _spread(layer, [_mean(_along(p), p.x) for p in layer])


def _along(p: Point) -> list[Point]:
    """The neighbours to align a point with: for a point of a line, its neighbours on that line, if any."""
    neighbours = p.up + p.down
    return [q for q in neighbours if q.node is None] or neighbours if p.node is None else neighbours


def _mean(points: list[Point], otherwise: float) -> float:
    return sum(p.x for p in points) / len(points) if points else otherwise


def _spread(layer: list[Point], wanted: list[float]) -> None:
    """Set the positions nearest to the wanted ones that keep order and widths (pool adjacent violators)."""
    offsets, at = [], 0.0
    for k, p in enumerate(layer):
        at += (layer[k - 1].width + p.width) / 2 if k else 0.0
        offsets.append(at)
    pools: list[tuple[float, float, int]] = []  # (weighted sum, weight, count)
    for p, want, offset in zip(layer, wanted, offsets):
        weight = 1.0 if p.node is not None else 4.0  # lines that cross a layer should be straight, so boxes move instead
        total, count = weight * (want - offset), 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            before = pools.pop()
            total, weight, count = before[0] + total, before[1] + weight, before[2] + count
        pools.append((total, weight, count))
    k = 0
    for total, weight, count in pools:
        for _ in range(count):
            layer[k].x = total / weight + offsets[k]
            k += 1
