"""The dependence view: edges that say what must stay behind what, and why."""

from __future__ import annotations

import networkx

from fluidx.ir.graph import dependence_graph
from fluidx.ir.parser import parse_program

TEXT = """program p {
  data %x: f32[2]
  param %w: f32[2]
forward:
  Out=[%y: f32[2]] = f_mul(X=[%x], Y=[%w])
  Out=[%z: f32[2]] = f_relu(X=[%y])
backward:
  Out=[%w@GRAD: f32[2]] = f_mul_grad(X=[%x, %z])
optimize:
  ParamOut=[%w] = f_sgd(Param=[%w], Grad=[%w@GRAD])
  Out=[%w] = f_clip(X=[%w])
}"""


def test_edges_carry_the_variable_and_the_kind_of_dependence():
    g = dependence_graph(parse_program(TEXT))
    assert dict(g.nodes(data="type")) == {0: "f_mul", 1: "f_relu", 2: "f_mul_grad", 3: "f_sgd", 4: "f_clip"}
    assert g.nodes[3]["role"] == "optimize"
    assert {(u, v, d["name"], d["kind"]) for u, v, d in g.edges(data=True)} == {
        (0, 1, "y", "read_after_write"),
        (1, 2, "z", "read_after_write"),
        (2, 3, "w@GRAD", "read_after_write"),
        (0, 3, "w", "write_after_read"),
        (3, 4, "w", "read_after_write"),
    }
    assert g.edges[3, 4]["reasons"] == [("w", "read_after_write"), ("w", "write_after_write")]
    assert networkx.is_directed_acyclic_graph(g)


def test_the_method_of_a_program_gives_the_same_graph():
    p = parse_program(TEXT)
    assert networkx.utils.graphs_equal(p.graph(), dependence_graph(p))


def test_a_sub_block_reads_and_writes_for_the_operator_that_runs_it():
    p = parse_program("""program p {
forward:
  Out=[%a: f32[2]] = f_start()
  Out=[%b: f32[2]] = f_start()
  while() {sub_block=block 1}
  Out=[%c: f32[2]] = f_relu(X=[%b])
block 1 in 0 {
  Out=[%inner: f32[2]] = f_relu(X=[%a])
  Out=[%b] = f_relu(X=[%inner])
}
}""")
    edges = {(u, v, d["name"], d["kind"]) for u, v, d in dependence_graph(p).edges(data=True)}
    assert edges == {(0, 2, "a", "read_after_write"), (1, 2, "b", "write_after_write"), (2, 3, "b", "read_after_write")}
