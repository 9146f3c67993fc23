"""What is found for an operator or a message of one rank counts for others only if it holds for them: hand-made wrong programs."""

import pytest

import fluidx as fx
from fluidx.ir import ProgramPair
from fluidx.verify import verify_ranks

SOURCE = "program p { data %x: f32[4]\nforward:\n  %y: f32[4] = relu(%x)\n}"
HEAD = "program p {\n  group dp = [0, 1, 2]\n  data %x: f32[4]\n"
Y = "  %y: f32[4] = relu(%x)\n"
MESSAGES = """dist:
  %a: f32[2] local = chunk(%x) {start=0, stop=2}
  send(%a) {group="dp", peer=1}
  send(%a) {group="dp", peer=2}
"""
RECEIVED = """dist:
  %b: f32[2] local = recv() {group="dp", peer=0, shape=[2]}
"""


def parse(text):
    return fx.Program.parse_from_string(text)


def proved(programs):
    one = ProgramPair(parse(SOURCE), parse("program s { }"))
    return verify_ranks(one, programs, [parse("program s { group dp = [0, 1, 2] }") for _ in programs])


def changed(program, k, **attrs):
    """The program with other attributes of operator k, whatever their types are."""
    ops = program.global_block().oplist
    ops[k] = ops[k].replace(attrs={**ops[k].attrs, **attrs})
    return program


# -- operators that some ranks have -------------------------------------------------------------------------------------------------------

WITH_T = HEAD + "forward:\n  %t: f32[4] = relu(%x)\n" + Y + "}"
WITHOUT_T = HEAD + "forward:\n" + Y + "}"


def test_ranks_may_have_operators_that_another_rank_does_not_have():
    assert proved([parse(WITH_T), parse(WITH_T), parse(WITHOUT_T)]).values == 2


@pytest.mark.parametrize("name", ["t", "u"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_does_not_declare_a_variable_is_refused_where_others_declare_it(name, rank):
    """The operator is right on the other ranks, whose programs differ from each other."""
    right = HEAD + "forward:\n  %t: f32[4] = relu(%x)\n  %u: f32[4] = relu(%t)\n" + Y
    programs = [parse(right + f"  %z{r}: f32[4] = relu(%x)\n}}") for r in range(3)]
    assert proved(programs)
    del programs[rank].global_block().descs[name]
    with pytest.raises(fx.VerifyError, match=f"%{name} is not declared"):
        proved(programs)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("declared", ["%t: f32[2,2]", "%t: f32[4] shard(0) over dp", "%t: f64[4]"])
def test_a_rank_that_declares_a_variable_otherwise_is_refused(rank, declared):
    text = HEAD + "forward:\n  %t: f32[4] = relu(%x)\n" + Y
    programs = [parse(text + f"  %z{r}: f32[4] = relu(%x)\n}}") for r in range(3)]
    other = parse(HEAD + f"  var {declared}\n" + "}").global_block().descs["t"]
    programs[rank].global_block().descs["t"] = other
    with pytest.raises(fx.VerifyError):
        proved(programs)


# -- attributes of messages ---------------------------------------------------------------------------------------------------------------


def with_messages():
    return [parse(HEAD + "forward:\n" + Y + MESSAGES + "}"), *(parse(HEAD + "forward:\n" + Y + RECEIVED + "}") for _ in range(2))]


def test_messages_with_right_attributes_are_proved():
    assert proved(with_messages()).messages == 2


@pytest.mark.parametrize("rank, k, attrs", [
    (0, 3, {"peer": True}), (0, 3, {"peer": 2.0}), (0, 3, {"batch": 0}), (0, 3, {"batch": None}), (0, 3, {"other": 1}),
    (0, 3, {"peer": "2"}), (2, 1, {"peer": False}), (2, 1, {"shape": [2]}), (2, 1, {"shape": (2.0,)}), (2, 1, {"shape": (True, 2)}),
    (2, 1, {"shape": (3,)}), (2, 1, {"shape": (-1,)}), (2, 1, {"open": (True,)}), (2, 1, {"open": (0, 1)}), (2, 1, {"like": 0}),
    (2, 1, {"like": "x", "open": (0, 1)}), (2, 1, {"dtype": 32}), (2, 1, {"dtype": "float64"}), (2, 1, {"dtype": "", "like": "float32"}),
])  # fmt: skip
def test_the_second_of_two_messages_is_refused_for_its_own_attributes(rank, k, attrs):
    """The first one is right, and has attributes of the same names."""
    programs = with_messages()
    changed(programs[rank], k, **attrs)
    with pytest.raises(fx.VerifyError):
        proved(programs)


# -- parts that are joined ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order, right", [(("a", "b"), True), (("b", "a"), False), (("a", "a"), False)])
def test_parts_are_joined_in_their_order(order, right):
    """Each rank joins the halves of %x. Two do so in order, and the last one as it is told."""
    halves = "  %a: f32[2] local = chunk(%y) {start=0, stop=2}\n  %b: f32[2] local = chunk(%y) {start=2, stop=4}\n"
    text = HEAD + "forward:\n" + Y + "dist:\n" + halves + "  [%y] = unpack([%FIRST, %SECOND]) {shapes=[[4]]}\n}"
    programs = [parse(text.replace("FIRST", first).replace("SECOND", second)) for first, second in (("a", "b"), ("a", "b"), order)]
    if right:
        assert proved(programs)
    else:
        with pytest.raises(fx.VerifyError, match="%y"):
            proved(programs)
