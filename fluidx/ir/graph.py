"""The dependence view of a program as a networkx graph: which operator must come before which, and because of what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .flow import reads, writes

if TYPE_CHECKING:
    import networkx

    from .program import Program

RAW, WAR, WAW = "read_after_write", "write_after_read", "write_after_write"


def dependence_graph(program: Program) -> networkx.DiGraph:
    """A DiGraph over the operators of block 0, by index, with `type` and `role`.

    An edge u → v says that v must stay behind u; `name` is the variable and `kind` one of read_after_write, write_after_read and
    write_after_write. Where several reasons join two operators, the edge shows the first read_after_write, and `reasons`
    lists all (name, kind) pairs. An operator with sub-blocks reads and writes what they do outside of themselves.
    """
    import networkx

    graph = networkx.DiGraph(name=program.name)
    for k, op in enumerate(program.blocks[0].oplist):
        graph.add_node(k, type=op.type, role=op.role.value)
    for (u, v), reasons in dependences(program).items():
        name, kind = next((r for r in reasons if r[1] == RAW), reasons[0])
        graph.add_edge(u, v, name=name, kind=kind, reasons=reasons)
    return graph


def dependences(program: Program) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """{(earlier, later): [(variable, kind), ...]} over the operators of block 0, linear in their names."""
    edges: dict[tuple[int, int], list[tuple[str, str]]] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # since the last write
    for k, op in enumerate(program.blocks[0].oplist):
        for n in dict.fromkeys(reads(program, op)):
            if n in writer:
                edges.setdefault((writer[n], k), []).append((n, RAW))
            readers.setdefault(n, []).append(k)
        for n in dict.fromkeys(writes(program, op)):
            for r in readers.pop(n, ()):
                if r != k:
                    edges.setdefault((r, k), []).append((n, WAR))
            if n in writer:
                edges.setdefault((writer[n], k), []).append((n, WAW))
            writer[n] = k
    return edges
