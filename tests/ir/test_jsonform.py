"""Programs as JSON: equal when they come back, and checked field by field when they come from somewhere else."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidx.ir import ParseError, ProgramPair
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.parser import parse_program
from tests.ir.random_programs import pairs, programs
from tests.sweep import examples

relaxed = settings(max_examples=examples(12, 100), deadline=None, suppress_health_check=list(HealthCheck))

TEXT = """program p {
  group dp = [0, 1]
  data %x: f32[-1,4] shard(0) over dp
forward:
  Out=[%y: f32[-1,4]] = foreign(X=[%x]) {group="dp", scale=1.0, shape=[1, 2], bad=nan, body=block 1}
block 1 in 0 {
}
}"""


@relaxed
@given(programs())
def test_every_program_comes_back_equal_through_strict_json(program):
    text = json.dumps(to_json(program), allow_nan=False)
    again = from_json(json.loads(text), program.constants())
    assert again == program
    assert str(again) == str(program)  # 1, 1.0 and True are equal in Python and three texts


@relaxed
@given(pairs())
def test_every_pair_comes_back_equal(pair):
    again = from_json(to_json(pair), pair.constants())
    assert isinstance(again, ProgramPair)
    assert (again.main, again.startup) == (pair.main, pair.startup)


def places(data, path=()):
    """The paths of all fields in a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for k, v in items:
        yield (*path, k)
        yield from places(v, (*path, k))


@pytest.mark.parametrize(
    "junk",
    [None, -5, 10**30, 0.5, "junk", True, [], {}, [[]], {"a": 1}, {"block": 9}, {"float": "x"}, object()],
    ids=lambda junk: type(junk).__name__,
)
def test_junk_in_any_field_gives_a_value_or_a_parse_error(junk):
    whole = to_json(parse_program(TEXT))
    for path in places(whole):
        data = copy.deepcopy(whole)
        inner = data
        for k in path[:-1]:
            inner = inner[k]
        inner[path[-1]] = junk
        try:
            from_json(data)
        except ParseError:
            pass


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text()), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_gives_a_parse_error(data):
    with pytest.raises(ParseError):
        from_json(data)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(format="onnx"), "format: expected 'fluidx-program', found str 'onnx'"),
        (lambda d: d.update(version=2), "version: expected 1, the version that this fluidx reads and writes, found int '2'"),
        (lambda d: d["blocks"][0]["ops"][0].update(role="sideways"), r"blocks\[0\].ops\[0\].role: expected one of forward, loss"),
        (lambda d: d["blocks"][0]["vars"][0].update(dtype="f99"), r"blocks\[0\].vars\[0\].dtype: expected one of bool, int8"),
        (lambda d: d["blocks"][0]["vars"][0].update(shape=[-2]), r"blocks\[0\].vars\[0\].shape\[0\]: expected an integer from -1"),
        (lambda d: d["blocks"][0]["vars"].append(d["blocks"][0]["vars"][0]), r"blocks\[0\].vars\[2\]: variable 'x' is declared twice"),
        (lambda d: d.update(blocks=[]), "blocks: expected one block or more, found nothing"),
        (lambda d: d["blocks"][1].update(parent=1), r"blocks\[1\].parent: expected an integer from 0 to 0, found int '1'"),
        (
            lambda d: d["blocks"][0].update(ops=d["blocks"][0]["ops"] * 2),
            r"blocks\[0\].ops\[1\]: op foreign runs block 1, which op foreign runs already; a block has one operator that runs it",
        ),
        (
            lambda d: d["blocks"][1].update(ops=d["blocks"][0].pop("ops")),
            r"blocks\[1\].ops\[0\]: op foreign in block 1 runs block 1, which lies in block 0; an operator may only run blocks inside",
        ),
    ],
)
def test_messages_name_the_place(change, message):
    data = to_json(parse_program(TEXT))
    change(data)
    with pytest.raises(ParseError, match=message):
        from_json(data)


def test_nesting_is_bounded():
    data = to_json(parse_program(TEXT))
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    data["blocks"][0]["ops"][0]["attrs"]["deep"] = deep
    with pytest.raises(ParseError, match="lists are nested more than 32 deep"):
        from_json(data)
