"""Text to program: what is printed comes back equal, and what is no program ends in a ParseError that points at the place."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidx.ir import OpDef, ParseError, Required, Role
from fluidx.ir.parser import parse_pair, parse_program
from fluidx.ir.text import show_program
from tests.ir.random_programs import pairs, programs
from tests.sweep import examples

relaxed = settings(max_examples=examples(12, 100), deadline=None, suppress_health_check=list(HealthCheck))


class Fill(OpDef):
    """An op for the error messages."""

    name = "t_parse_fill"
    inputs, outputs = ("X",), ("Out",)
    attrs = {"shape": Required(tuple), "value": 0.0}


@relaxed
@given(programs())
def test_every_program_comes_back_equal(program):
    text = str(program)
    again = parse_program(text, program.constants())
    assert again == program
    assert str(again) == str(parse_program(str(again), again.constants()))


@relaxed
@given(pairs())
def test_every_pair_comes_back_equal(pair):
    again = parse_pair(show_program(pair.main, startup=pair.startup), pair.constants())
    assert again.main == pair.main
    assert again.startup == pair.startup


@relaxed
@given(programs(), st.data())
def test_damaged_text_gives_a_program_or_a_parse_error(program, data):
    text = str(program)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        stop = min(len(text), at + data.draw(st.integers(0, 5)))
        insert = data.draw(
            st.one_of(st.text(max_size=3), st.sampled_from(["{", "}", "[", "]", "(", '"', "%", "=", "9" * 30, ":", "\n", "block 1", "\\"]))
        )
        text = text[:at] + insert + text[stop:]
    for read in (parse_program, parse_pair):
        try:
            read(text, program.constants())
        except ParseError:
            pass


@given(st.text())
def test_any_text_gives_a_parse_error(text):
    with pytest.raises(ParseError):
        parse_program(text)


def test_what_stands_on_several_lines_may_stand_on_one_and_comments_are_skipped():
    p = parse_program('program p { group dp = [0, 1]; data %x: f32[4,3] # rows\n; Out=[%y: f32[4,3]] = foreign(X=[%x]) {group="dp"} }')
    assert p.groups == {"dp": ((0, 1),)}
    assert p.ops[0].role is Role.FORWARD
    assert p.global_block().descs["x"].stop_gradient


def test_defaults_are_filled_in_for_a_declared_op():
    p = parse_program("program p { %y: f32[2] = t_parse_fill(%x) {shape=[2]} }")
    assert p.ops[0].attrs == {"shape": (2,), "value": 0.0}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: expected program NAME {, found the end of the text"),
        ('{"blocks": []}', 'line 1: expected program NAME {, found "{"; JSON is read with from_json'),
        ("\x7fELF\x02\x00", "line 1: expected program NAME {, found"),
        ("program p {\n  data %x: f32[3]\n", "line 3: expected '}' to close program p, opened on line 1, found the end of the text"),
        ("program p {\nblock 1 in 0 {\n", "expected '}' to close block 1, opened on line 2, found the end of the text"),
        ("program p { } program q { }", "expected the end of the text after the closing '}', found \"program\""),
        ("program p { data %x f32[3] }", "expected ':' and a type after %x, found \"f32\\[3\\]\""),
        ("program p { data %x: g32[3] }", "expected a type such as f32\\[-1,10\\], .*map<i64,f32\\[\\]> after %x:, found \"g32\""),
        ("program p { data %x: f32[-2] }", "expected sizes of 0 to 9223372036854775807, or a name or -1 for an open axis"),
        ("program p { data %x: f32[" + "9" * 5000 + "] }", "expected sizes of 0 to"),
        ("program p { seed " + "9" * 5000 + " }", "expected a seed from"),
        ("program p { f() {a=" + "9" * 5000 + "} }", "expected an integer below 18446744073709551616"),
        ("program p { f() {a=1e999} }", "expected a number that a float64 can hold"),
        ("program p { f() {a=" + "[" * 100000 + "} }", "lists are nested more than 32 deep"),
        ("program p { f() {a=block 3} }", "there is no block 3; program p has 1 blocks"),
        ("program p { f() {a=maybe} }", "expected a value: a number, a quoted string, true, false"),
        ("program p { f() {a=1, a=2} }", "attribute a is given twice"),
        ("program p { backwards: }", "expected a section: startup, forward, loss, backward"),
        ("program p { forward: startup: }", "startup comes before the other sections"),
        ("program p { startup: }", "read it with parse_pair"),
        ("program p { group dp = [0]; group dp = [1] }", "group dp is declared twice"),
        ("program p { var %x: f32[2]; var %x: f32[3] }", "%x is declared twice, before as f32\\[2\\]"),
        ("program p { var %x: f32[2] persistant }", "did you mean 'persistable'"),
        ("program p { var %x: f32[2] partial(avg) over dp }", 'a value can wait for sum, max, min, not for "avg"'),
        ('program p { var %x: f32[2] {owner="dp:1"} }', "variable 'x' cannot have the attribute 'owner'; it may have"),
        ("program p { %y = t_parse_fill(%x) {shape=[2]} on dp:1 }", 'expected the end of the line after operator t_parse_fill, found "on"'),
        ("program p { %y = t_parse_fil(%x) }", "there is no op 't_parse_fil'; did you mean 't_parse_fill'"),
        ("program p { %y = t_parse_fill(%x) }", "op t_parse_fill needs attribute 'shape' \\(tuple\\), which was not given"),
        ("program p { %y = t_parse_fill(%x) {shape=[1], valu=2} }", "op t_parse_fill has no attribute 'valu'; did you mean 'value'"),
        ("program p { %y = t_parse_fill(%x, %z) {shape=[1]} }", "op t_parse_fill has 1 inputs \\(X\\), 2 are given"),
        ("program p { block 2 in 0 { } }", "blocks come in order: expected block 1, found block 2"),
        ("program p { block 1 in 1 { } }", "expected the index of an earlier block from 0 to 0"),
        ('program p { strategy "a', "expected a quoted string"),
        ('program p { strategy "\\q" }', "this is no string: Invalid"),
    ],
)  # fmt: skip
def test_messages(text, message):
    with pytest.raises(ParseError, match=message):
        parse_program(text)


IN_ITS_OWN = "an operator may only run blocks inside its own"
LOOP = "while(%go, []) {sub_block=block 1}"


@pytest.mark.parametrize(
    "outer, inner, line, message",
    [
        (LOOP.replace("1", "0"), "", 2, f"op while in block 0 runs block 0, which is the program itself; {IN_ITS_OWN}"),
        (LOOP, LOOP, 4, f"op while in block 1 runs block 1, which lies in block 0; {IN_ITS_OWN}"),
        (LOOP, LOOP.replace("1", "0"), 4, f"op while in block 1 runs block 0, which is the program itself; {IN_ITS_OWN}"),
        (LOOP, LOOP.replace("1", "2"), 4, f"op while in block 1 runs block 2, which lies in block 0; {IN_ITS_OWN}"),
        (f"{LOOP}; f() {{a=block 1}}", "", 2, "op f runs block 1, which op while runs already; a block has one operator that runs it"),
        ("f() {a=block 2, b=block 2}", "", 2, "op f runs block 2, which op f runs already; a block has one operator that runs it"),
    ],
)
def test_blocks_that_would_run_in_a_circle_are_refused(outer, inner, line, message):
    with pytest.raises(ParseError) as e:
        parse_program(f"program p {{\n{outer}\nblock 1 in 0 {{\n{inner}\n}}\nblock 2 in 0 {{ }}\n}}")
    assert str(e.value).startswith(f"line {line}: {message}\n    {line} | ")


def test_the_blocks_of_startup_are_its_own():
    pair = parse_pair("""program p {
  startup:
    f() {body=block 1}
  startup block 1 in 0 { }
  forward:
    f() {body=block 1}
  block 1 in 0 { }
}""")
    assert pair.main.num_blocks == pair.startup.num_blocks == 2


def test_an_error_shows_the_line_and_points_at_the_place():
    with pytest.raises(ParseError) as e:
        parse_program("program p {\n  data %x: f32[3]\n  %y = foreign(X=[%x]\n}\n")
    assert str(e.value) == (
        "line 3: expected ',' or ')' after an input of foreign, found the end of the line\n"
        "    3 |   %y = foreign(X=[%x]\n"
        "                             ^"
    )


@pytest.mark.parametrize("thing", [None, b"program p { }", 3, ["program p { }"]])
def test_only_text_is_read(thing):
    with pytest.raises(ParseError, match="program text must be a str, got"):
        parse_program(thing)
