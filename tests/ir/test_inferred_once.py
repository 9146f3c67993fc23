"""What type rules said is remembered for all programs. What is remembered must not be taken for the answer to another question."""

import copy
import pickle
import random
import sys

import pytest

from fluidx.ir import Builder, OpDef, Program, ProgramError, TensorType, Var, opdef

LOOKALIKES = [1, True, 1.0, 0, False, 0.0, -0.0, 2, 2.0]  # equal to one another in groups, and yet not the same


def exactly(value):
    """A form that is equal only for values that are the same: `repr` tells 1, 1.0, True, 0.0 and -0.0 apart."""
    return repr(value)


@pytest.mark.parametrize("odd", [(True,), (1.5,), (3, True)])
@pytest.mark.parametrize("same_program", [True, False])
def test_a_size_that_is_no_integer_is_refused_after_an_equal_one_was_accepted(odd, same_program):
    program = Program()
    Builder(program.global_block()).fill_constant(shape=tuple(map(int, odd)), value=1.0)
    again = program if same_program else Program()
    with pytest.raises(ProgramError, match="must be int, got (bool|float)"):
        Builder(again.global_block()).fill_constant(shape=odd, value=1.0)
    assert Builder(again.global_block()).fill_constant(shape=tuple(map(int, odd)), value=1.0).shape == tuple(map(int, odd))


def test_an_integer_attribute_is_not_given_a_bool_after_an_equal_number():
    b = Builder(Program().global_block())
    x = b.fill_constant(shape=(2, 2), value=1.0)
    b.elementwise_add(x, x, axis=1)
    with pytest.raises(ProgramError, match="attribute 'axis' must be int, got bool"):
        b.elementwise_add(x, x, axis=True)


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (1, 1.0), (1.0, 1)])
def test_a_number_is_kept_with_its_sign_and_kind(values):
    block = Program().global_block()
    x = Builder(block).fill_constant(shape=(2,), value=1.0)
    for value in values:
        Builder(block).scale(x, bias=value)
    assert [exactly(op.attrs["bias"]) for op in block.ops[1:]] == [exactly(float(v)) for v in values]


def test_an_attribute_of_any_kind_is_kept_as_it_was_given():
    class Loose(OpDef):
        attrs = {"any": None}

    assert exactly([Loose.complete_attrs({"any": v})["any"] for v in LOOKALIKES]) == exactly(LOOKALIKES)


def test_attributes_are_completed_as_if_nothing_was_remembered():
    rng = random.Random(5)
    given = [{"dim": tuple(rng.choices(LOOKALIKES, k=rng.randint(0, 2))), "keep_dim": rng.choice([True, False, 1, 0])} for _ in range(300)]
    given += [{"dim": rng.choice(LOOKALIKES)} for _ in range(100)]
    fresh = []
    for attrs in given:
        opdef("reduce_sum")._completed.clear()
        fresh.append(exactly(attempt(opdef("reduce_sum").complete_attrs, attrs)))
    assert fresh == [exactly(attempt(opdef("reduce_sum").complete_attrs, attrs)) for attrs in given]


def attempt(f, *args):
    try:
        return f(*args)
    except ProgramError as e:
        return str(e)


@pytest.mark.parametrize("limit", [1, 3, 4096])
def test_types_are_inferred_as_if_nothing_was_remembered(limit, monkeypatch):
    """Types come and go, so that ids are used again; sizes are equal without being the same; answers are dropped now and then."""
    monkeypatch.setattr(sys.modules["fluidx.ir.program"], "_MOST", limit)
    monkeypatch.setattr(sys.modules["fluidx.ir.opdef"], "_MOST", limit)
    rng, program = random.Random(limit), Program()
    ops = [opdef(n) for n in ("relu", "tanh", "elementwise_add", "reduce_sum", "concat", "split")]
    for _ in range(2000):
        definition, odd = rng.choice(ops), TensorType("float32", (rng.choice(LOOKALIKES[:3]), rng.choice([4, 4.0, -1])))
        args = {"concat": [[odd, odd]], "elementwise_add": [odd, odd]}.get(definition.name, [odd])
        given = {"reduce_sum": {"dim": (rng.choice([0, 1]),)}, "concat": {"axis": rng.choice([0, 1])}, "split": {"num": 1}}
        attrs = definition.complete_attrs(given.get(definition.name, {}))
        want = exactly(attempt(lambda d, a, k: d.infer(*a, **k), definition, args, attrs))
        assert exactly(attempt(program.infer, definition, args, attrs)) == want


def test_a_type_with_odd_sizes_does_not_spread():
    block = Program().global_block()
    b = Builder(block)
    block.declare(Var("odd", TensorType("float32", (7.0,))))
    b.relu("odd")
    assert exactly(b.relu(block.create_var("x", [7])).shape) == "(7,)"
    assert exactly(block.create_var("y", [True]).shape) == exactly(b.relu("y").shape) == "(1,)"


def test_values_and_seeds_are_not_held_when_their_program_is_gone():
    program = Program()
    Builder(program.global_block()).assign_value(shape=(3,), dtype="int64", values=(1, 2, 3))
    remembered = sys.modules["fluidx.ir.program"]._INFERRED
    assert not opdef("assign_value")._completed and not any(definition is opdef("assign_value") for definition, *_ in remembered)


def test_a_list_that_changed_is_another_attribute():
    b = Builder(Program().global_block())
    x, perm = b.fill_constant(shape=(2, 3), value=1.0), [0, 1]
    assert b.transpose(x, axis=perm).shape == (2, 3)
    perm.reverse()
    assert b.transpose(x, axis=perm).shape == (3, 2)


def test_a_mistake_made_twice_is_told_twice_each_with_its_line():
    b = Builder(Program().global_block())
    x = b.fill_constant(shape=(2, 3), value=1.0)
    lines = []
    for wrong in (lambda: b.matmul(x, x),
                  lambda: b.matmul(x, x)):  # fmt: skip
        with pytest.raises(ProgramError, match="must be equal") as e:
            wrong()
        lines.append(str(e.value).rsplit("line ", 1)[1].split(",")[0])
    assert int(lines[1]) == int(lines[0]) + 1


def test_operators_written_on_one_line_after_the_other_have_their_own_sites():
    block = Program().global_block()
    b = Builder(block)
    b.fill_constant(shape=(1,), value=1.0)
    b.fill_constant(shape=(1,), value=1.0)
    first, second = (op.site.lineno for op in block.ops)
    assert second == first + 1


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), Program.copy])
def test_a_copy_infers_the_types_of_its_own_operators(twin):
    program = Program()
    block = program.global_block()
    x, y = block.create_var("x", [2]), block.create_var("y", [2])
    Builder(block).relu(x, out={"Out": y})
    again = twin(program)
    assert Builder(again.global_block()).concat(["y", "y"]).shape == (4,) and again.ops[:1] == program.ops
