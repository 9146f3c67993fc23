"""The data of a page: every operator once in the tree, repeated blocks, links, the life of a parameter, ranks that are alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import fluidx as fx
from fluidx.ir import ProgramError, ProgramPair
from fluidx.view.page.model import page_model, program_model, views_of
from tests.ir.random_programs import programs
from tests.sweep import examples


def residual(blocks: int, scoped: bool = False) -> tuple[fx.Program, fx.Program]:
    """An input layer, alike blocks with a way around, an output layer, SGD."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 8], "float32")
        h = fx.layers.fc(x, 8, act="tanh")
        for k in range(blocks):
            if scoped:
                with fx.name_scope(f"layer{k}"):
                    h = block(h, k)
            else:
                h = block(h, k)
        loss = fx.layers.mean(fx.layers.fc(h, 1))
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def block(h, k):
    inner = fx.layers.fc(h, 16, act="relu", param_attr=f"b{k}_up", bias_attr=f"b{k}_shift")
    return fx.layers.elementwise_add(h, fx.layers.fc(inner, 8, param_attr=f"b{k}_down", bias_attr=False))


def transpiled(blocks: int = 3, strategy: str = "data_parallel", ranks: int = 4):
    main, startup = residual(blocks)
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)


def leaves(nodes) -> list[int]:
    return [k for n in nodes for k in ([n] if isinstance(n, int) else leaves(n["children"]))]


def groups(nodes):
    for n in nodes:
        if not isinstance(n, int):
            yield n
            yield from groups(n["children"])


def titled(part, title: str) -> list[dict]:
    return [g for g in groups(part["tree"]) if g["title"] == title]


def types(part, nodes) -> list[str]:
    return [part["ops"][k]["type"] for k in leaves(nodes)]


def test_blocks_that_repeat_are_one_group_in_forward_and_one_in_backward():
    main, _ = residual(12)
    part = program_model(main)
    forward, backward = titled(part, "12 × block")
    assert [types(part, [c]) for c in forward["children"]] == [["mul", "elementwise_add", "relu", "mul", "elementwise_add"]] * 12
    assert {part["ops"][k]["section"] for k in leaves(backward["children"])} == {"backward"}
    assert forward["alike"] == backward["alike"] == "the copies are alike; sizes may differ"
    assert [c["title"] for c in forward["children"]][:2] == ["block 1 · b0", "block 2 · b1"]
    assert [c["title"] for c in backward["children"]][:2] == ["block 12 · b11", "block 11 · b10"]


def test_a_block_ends_where_one_value_crosses_not_inside_of_the_way_around():
    main, _ = residual(12)
    part = program_model(main)
    first = titled(part, "block 1 · b0")[0]
    inside = set(leaves(first["children"]))
    entering = {v for a, b, v in part["links"] if b in inside and a not in inside}
    assert len(entering) == 1


def test_a_name_scope_is_a_group_and_alike_scopes_are_one():
    main, _ = residual(6, scoped=True)
    part = program_model(main)
    forward, backward = titled(part, "6 × layer")
    assert [c["title"] for c in forward["children"]] == [f"layer{k}" for k in range(6)]
    assert [c["kind"] for c in forward["children"]] == ["scope"] * 6
    assert [c["title"] for c in backward["children"]] == [f"layer{k}" for k in reversed(range(6))]


def test_stages_of_blocks_of_different_number_are_alike():
    main, startup = fx.Program("staged"), fx.Program()
    with fx.program_guard(main, startup):
        h = fx.data("x", [-1, 8], "float32")
        for width, blocks in ((8, 2), (16, 3), (32, 5), (64, 2)):
            for act in ("tanh", "sigmoid", "relu", "tanh"):  # the beginning of a stage
                h = fx.layers.fc(h, width, act=act)
            for _ in range(blocks):
                inner = fx.layers.fc(fx.layers.fc(h, width, act="relu"), width, act="relu")
                h = fx.layers.elementwise_add(h, fx.layers.fc(inner, width))
    part = program_model(main)
    (stages,) = part["tree"]
    assert stages["title"] == "4 × stage"
    blocks = [g["title"] for s in stages["children"] for g in s["children"] if not isinstance(g, int)]
    assert blocks == ["2 × block", "3 × block", "5 × block", "2 × block"]


def test_what_communicates_between_blocks_does_not_hide_that_they_are_alike():
    part = page_model(transpiled(12))["views"][1]["parts"][0]
    forward, backward = titled(part, "12 × block")
    assert len(forward["children"]) == len(backward["children"]) == 12
    assert "all_reduce" in types(part, part["tree"])


@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "fsdp"])
def test_blocks_of_a_rank_are_those_of_one_device(strategy):
    before, after = (view["parts"][0] for view in page_model(transpiled(12, strategy))["views"])
    kinds = [[types(part, [titled(part, f"block {k} · b{k - 1}")[0]]) for k in (1, 12)] for part in (before, after)]
    assert [[t for t in b if t not in ("pack", "all_gather", "unpack")] for b in kinds[1]] == kinds[0]


def test_links_go_from_the_operator_that_wrote_a_value_last():
    main, _ = residual(2)
    part = program_model(main)
    writer: dict[str, int] = {}
    wanted = set()
    for k, op in enumerate(main.ops):
        wanted |= {(writer[n], k, n) for n in op.input_arg_names if n in writer}
        writer.update(dict.fromkeys(op.output_arg_names, k))
    assert {(a, b, part["vars"][v]["name"]) for a, b, v in part["links"]} == wanted


def test_the_life_of_a_parameter_is_value_gradient_communication_update():
    part = page_model(transpiled())["views"][1]["parts"][0]
    ops = part["ops"]
    life = {stage: [ops[k]["type"] for k in found] for stage, found in part["lives"]["b0_up"].items()}
    assert list(life) == ["value", "gradient", "communication", "update"]
    assert life["value"] == ["mul", "matmul"]  # forward, and the gradient of what it is multiplied with
    assert life["gradient"] == ["matmul"]
    assert "all_reduce" in life["communication"]
    assert life["update"] == ["sgd"]


def test_the_life_of_a_sharded_parameter_begins_where_it_is_gathered():
    part = page_model(transpiled(strategy="fsdp"))["views"][1]["parts"][0]
    ops = part["ops"]
    life = {stage: [ops[k]["type"] for k in found] for stage, found in part["lives"]["b0_up"].items()}
    assert "all_gather" in life["communication"] and "reduce_scatter" in life["communication"]
    assert "mul" in life["value"] and life["update"] == ["sgd"]


def test_the_life_of_another_parameter_has_other_gradients():
    part = page_model(transpiled())["views"][1]["parts"][0]
    gradients = [set(part["lives"][n]["gradient"]) for n in ("b0_up", "b0_down", "b1_up")]
    assert all(not a & b for a in gradients for b in gradients if a is not b)


def test_ranks_that_run_the_same_are_shown_once():
    views, note = views_of(transpiled())
    assert [v.title for v in views] == ["before: one device", "rank 0 (ranks 1-3 alike)"]
    assert [v.ranks for v in views] == [[], [0, 1, 2, 3]] and not note


def test_ranks_that_differ_are_shown_each():
    views, _ = views_of(transpiled(strategy="reduce_broadcast", ranks=2))
    assert [v.title for v in views] == ["before: one device", "rank 0", "rank 1"]


def test_what_is_left_out_of_a_page_is_said():
    views, note = views_of(transpiled(blocks=12, strategy="ring_optimizer", ranks=10))
    assert len(views) == 9 and note == "left out: ranks 8-9, of other kinds"


def test_operators_tell_their_text_and_the_line_of_the_user():
    main, startup = residual(1)
    part = program_model(main)
    assert [op["text"] for op in part["ops"]][0] == "%fc_0.tmp_0: f32[-1,8] = mul(%x, %fc_0.w_0)"
    file, line, where, text = part["sites"][part["ops"][0]["site"]]
    assert Path(file).resolve() == Path(__file__) and where == "residual" and text == 'h = fx.layers.fc(x, 8, act="tanh")'


def test_a_page_is_one_file_that_loads_nothing(tmp_path):
    out = tmp_path / "page.html"
    assert fx.view.html(transpiled(), out) == str(out)
    page = out.read_text(encoding="utf-8")
    assert page == fx.view.html(transpiled())
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)|fetch\(|XMLHttpRequest""", page.replace('url("data', ""))


def test_names_cannot_end_the_data_of_a_page():
    main, startup = residual(1)
    main.name = "</script><script>alert(1)</script>"
    page = fx.view.html(main)
    assert "alert(1)</script>" not in page
    data = re.search(r'<script type="application/json" id="model">(.*?)</script>', page, re.S).group(1)
    assert json.loads(data)["name"] == main.name


def test_what_is_no_program_is_refused():
    with pytest.raises(ProgramError, match="html takes a Program, a ProgramPair, a list of rank programs or a transpiler, not str"):
        fx.view.html("program")


def test_main_and_startup_are_two_parts():
    main, startup = residual(1)
    (view,) = page_model(ProgramPair(main, startup))["views"]
    assert [p["title"] for p in view["parts"]] == ["main", "startup"]
    assert len(view["parts"][1]["ops"]) == len(startup.ops)


@settings(max_examples=examples(12, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(programs())
def test_every_operator_stands_once_in_the_tree_in_order(program):
    part = program_model(program)
    assert leaves(part["tree"]) == list(range(len(program.ops)))
    assert len(part["ops"]) == len(program.ops)


def test_notebooks_show_a_small_program_as_its_page_and_a_large_one_as_a_picture(monkeypatch):
    main, _ = residual(1)
    shown = main._repr_html_()
    assert shown.startswith("<code>Program net: 33 ops, 7 params</code><iframe srcdoc=") and "&lt;!doctype html&gt;" in shown
    monkeypatch.setattr(fx.view.page, "_NOTEBOOK_LIMIT", 1000)
    shown = main._repr_html_()
    assert "<svg" in shown and "<iframe" not in shown and "fx.view.html" in shown


def test_notebooks_show_what_a_transpiler_made(monkeypatch):
    assert fx.DistributeTranspiler()._repr_html_().startswith("&lt;fluidx.transpiler")
    t = transpiled()
    assert "rank 0 (ranks 1-3 alike)" in t._repr_html_()
    head = f"<code>Program net: {len(t.main.ops)} ops, {len(t.main.all_parameters())} params, data_parallel()</code>"
    assert t._repr_html_().startswith(head)


def test_ranks_that_differ_in_attributes_alone_are_alike_up_to_these():
    text = 'program net {{\n  rank {0}\n  group dp = [0, 1]\n  data %x: f32[3]\nforward:\n  send(%x) {{group="dp", peer={1}}}\n}}\n'
    (view,), _ = views_of([fx.Program.parse_from_string(text.format(k, 1 - k)) for k in (0, 1)])
    assert (view.title, view.note) == ("rank 0 (rank 1 alike)", "alike up to peer")
