"""Drawings: well-formed SVG, every operator shown once, boxes that do not overlap, collectives lined up across ranks."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidx.ir import Operator, Program, ProgramError, Role, TensorType, Var
from fluidx.ir.parser import parse_pair, parse_program
from fluidx.view.diff import diff
from fluidx.view.draw import draw, draw_before_after
from tests.ir.random_programs import pairs, programs
from tests.sweep import examples

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[str, float, float, float, float, str]]:
    """(label, left, top, right, bottom, outline) of every box."""
    out = []
    for g in ET.fromstring(svg).iter(f"{SVG}g"):
        rect, text = g.find(f"{SVG}rect"), g.find(f"{SVG}text")
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        out.append((text.text, x, y, x + w, y + h, rect.get("stroke")))
    return out


def labels(svg: str) -> list[str]:
    return [b[0] for b in boxes(svg)]


def overlapping(svg: str) -> list[tuple[str, str]]:
    return [(a[0], b[0]) for a, b in combinations(boxes(svg), 2) if a[1] < b[3] - 0.2 and b[1] < a[3] - 0.2 and a[2] < b[4] and b[2] < a[4]]


ONE = """program mnist {
  data %x: f32[-1,784]
  param %w: f32[784,10]
startup:
  Out=[%w] = f_uniform() {shape=[784, 10]}
forward:
  Out=[%y: f32[-1,10]] = f_matmul(X=[%x], Y=[%w]) {only a=1}
  Out=[%z: f32[-1,10]] = f_tanh(X=[%y])
backward:
  Out=[%z@GRAD: f32[-1,10]] = f_fill(X=[%z])
  Out=[%y@GRAD: f32[-1,10]] = f_tanh_grad(X=[%z], G=[%z@GRAD])
  Out=[%w@GRAD: f32[784,10]] = f_matmul(X=[%x], Y=[%y@GRAD]) {only a=1}
optimize:
  ParamOut=[%w] = f_sgd(Param=[%w], Grad=[%w@GRAD]) {only lr=0.1}
}
"""


def rank(k: int) -> str:
    return (
        ONE.replace("data %x", f"rank {k}\n  group dp = [0, 1]\n  data %x")
        .replace(
            "forward:", 'startup dist:\n  nccl_init() {group="dp"}\n  Out=[%w] = broadcast(X=[%w]) {only group="dp", root=0}\nforward:'
        )
        .replace("optimize:", '  Out=[%w@GRAD.sum: f32[784,10]] = all_reduce(X=[%w@GRAD]) {only group="dp", op="sum"}\noptimize:')
        .replace("Grad=[%w@GRAD]", "Grad=[%w@GRAD.sum]")
    )


def test_a_program_is_drawn_with_its_operators_inputs_and_legend():
    svg = draw(parse_pair(ONE).main)
    found = labels(svg)
    for name in ("f_matmul", "f_tanh", "f_fill", "f_tanh_grad", "f_sgd", "%x f32[-1,784]", "%w f32[784,10]"):
        assert name in found
    texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"forward", "backward", "optimize", "data", "parameter"} < set(texts)
    assert "communication" not in texts
    assert not overlapping(svg)


def test_an_operator_stands_below_what_it_reads():
    top = {label: y for label, _, y, *_ in boxes(draw(parse_pair(ONE).main))}
    assert top["f_tanh"] < top["f_fill"] < top["f_tanh_grad"] < top["f_sgd"]
    assert top["%w f32[784,10]"] < top["f_sgd"]  # a parameter appears again near each section that reads it


def test_the_boxes_of_a_collective_stand_on_one_line_across_ranks_and_are_joined():
    svg = draw([parse_pair(rank(k)) for k in (0, 1)])
    for name in ("nccl_init", "broadcast", "all_reduce"):
        tops = [y for label, _, y, *_ in boxes(svg) if label == name]
        assert len(tops) == 2 and tops[0] == tops[1]
    joined = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "c"]
    assert len(joined) == 3
    texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count("startup") == 2 and "rank 0" in texts and "rank 1" in texts


def test_a_recv_stands_below_its_send_on_the_other_rank():
    text = "program p {{ rank {0}; group pp = [0, 1]; var %h: f32[4]\nforward:\n {1} }}"
    first = parse_program(text.format(0, 'Out=[%h] = f_relu(X=[%h])\n send(X=[%h]) {only group="pp", peer=1}'))
    second = parse_program(text.format(1, 'Out=[%h] = recv() {only group="pp", peer=0}'))
    svg = draw([first, second])
    top = {label: y for label, _, y, *_ in boxes(svg)}
    assert top["f_relu"] < top["send"] < top["recv"]


def test_ranks_that_disagree_on_the_order_of_collectives_are_still_drawn():
    text = "program p {{ rank {0}; group dp = [0, 1]; group tp = [0, 1]; var %h: f32[4]\nforward:\n {1} }}"
    one, two = ('Out=[%h] = all_reduce(X=[%h]) {only group="dp"}', 'Out=[%h] = all_reduce(X=[%h]) {only group="tp"}')
    svg = draw([parse_program(text.format(0, f"{one}\n{two}")), parse_program(text.format(1, f"{two}\n{one}"))])
    assert labels(svg).count("all_reduce") == 4


def test_before_and_after_stand_side_by_side_and_highlights_are_outlined():
    before, afters = parse_pair(ONE), [parse_pair(rank(k)) for k in (0, 1)]
    svg = draw_before_after(before, afters, highlight=diff(before, afters[0]))
    texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"before: one device", "transpile", "highlighted"} < set(texts)
    outlined = {label for label, *_, stroke in boxes(svg) if stroke == "#d81b60"}
    assert outlined == {"nccl_init", "broadcast", "all_reduce", "f_sgd"}
    assert not overlapping(svg)


@pytest.mark.parametrize("highlight", [[1], ["f_tanh"], ["z"], [parse_pair(ONE).main.ops[1]]])
def test_operators_are_highlighted_by_index_type_output_or_themselves(highlight):
    svg = draw(parse_pair(ONE).main, highlight=highlight)
    assert [label for label, *_, stroke in boxes(svg) if stroke == "#d81b60"] == ["f_tanh"]


def chain(n: int, every: int = 0) -> Program:
    p = Program("chain")
    b = p.global_block()
    for k in range(n):
        b.declare(Var(f"v{k}", TensorType("float32", (8,))))
        comm = every and k % every == 0
        b.oplist.append(
            Operator("all_reduce", {"X": (f"v{k - 1}",)}, {"Out": (f"v{k}",)}, {"group": "dp"}, Role.BACKWARD)
            if comm
            else Operator("f_relu", {"X": (f"v{k - 1}",)}, {"Out": (f"v{k}",)})
        )
    return p


def test_a_long_program_is_shortened():
    assert "12 forward operators" in labels(draw(chain(12), max_ops=10))
    found = labels(draw(chain(10_000, every=100)))
    assert found.count("all_reduce") == 100 and found.count("99 forward operators") == 100
    assert len(labels(draw(chain(10_000, every=2), max_ops=50))) <= 60


def test_nothing_and_mixtures_are_refused():
    with pytest.raises(ProgramError, match="draw needs at least one program"):
        draw([])
    with pytest.raises(ProgramError, match="draw takes programs or pairs, not a mixture"):
        draw([parse_pair(ONE), parse_pair(ONE).main])
    with pytest.raises(ProgramError, match="highlight takes operator indices"):
        draw(parse_pair(ONE).main, highlight=[1.5])


def test_an_empty_program_is_an_empty_panel():
    assert boxes(draw(Program("empty"))) == []


def test_a_drawing_that_is_shortened_says_so_and_names_the_page():
    chain = "\n".join(f"  Out=[%v{k + 1}: f32[3]] = f_tanh(X=[%v{k}])" for k in range(30))
    text = f"program long {{\n  data %v0: f32[3]\nforward:\n{chain}\n}}\n"
    note = "shortened: 30 operators are in 1 box; fluidx show FILE --html PAGE, or fx.view.html, shows every operator"
    assert note in draw(parse_program(text), max_ops=10)
    assert "shortened" not in draw(parse_program(text))


def test_sixteen_ranks_are_drawn_and_the_rest_is_counted():
    picture = draw([parse_pair(rank(0)).main for _ in range(19)])
    assert picture.count('class="h"') == 16 and "3 more ranks not drawn; fluidx show FILE --html PAGE" in picture


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(8, 60))
@given(st.lists(programs(), min_size=1, max_size=3), st.integers(1, 6))
def test_any_programs_give_well_formed_svg_without_overlaps(ranks, max_ops):
    svg = draw(ranks, max_ops=max_ops)
    assert not overlapping(svg)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(8, 60))
@given(pairs(), pairs())
def test_any_pairs_give_well_formed_svg(a, b):
    assert not overlapping(draw_before_after(a, [a, b], highlight=diff(a, b)))


def test_placements_are_shown_where_there_is_room_and_values_of_other_ranks_are_not():
    text = """program p {{
  rank {0}
  group dp = [0, 1]
  param %w: f32[4] shard(0) over dp
  var %r: f32[4] at(1) over dp
forward:
  %y: f32[4] shard(0) over dp = relu(%w)
  %z: f32[4] = broadcast(%r) {{group="dp", root=1}}
}}
"""
    svg = draw(parse_program(text.format(0)))
    assert "%w f32[4] shard(0) dp" in svg and "%y f32[4] shard(0) dp" in svg
    assert "%r f32[4]" not in svg
    assert "%r f32[4] at(1) dp" in draw(parse_program(text.format(1)))
