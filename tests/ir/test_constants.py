"""Arrays as attributes: equal by digest, named so in text and JSON, checked when they come back."""

import copy
import hashlib
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import Builder, ParseError, Program, ProgramError
from fluidx.ir.constants import FEW, Array, elements
from fluidx.ir.jsonform import from_json, to_json

MANY = np.arange(2 * FEW, dtype="float32").reshape(2, FEW)


def holding(values, **attrs):
    """A program that makes a constant."""
    p = Program("p")
    Builder(p.global_block()).assign_value(shape=np.shape(values), values=values, **attrs)
    return p


def test_the_digest_is_that_of_the_type_and_the_bytes():
    assert Array([[1, 2, 3]], "uint8").digest == f"sha256:{hashlib.sha256(b'u8[1,3]' + bytes([10, 1, 2, 3])).hexdigest()}"


@pytest.mark.parametrize(
    "other",
    [MANY.reshape(FEW, 2), MANY.astype("float64"), MANY.view("int32"), -MANY, MANY[:1]],
    ids=["shape", "dtype", "bytes as another dtype", "zero with a sign", "size"],
)
def test_arrays_differ_by_shape_dtype_and_bits(other):
    a, b = Array(MANY), Array(other)
    assert a != b and a.digest != b.digest and holding(a) != holding(b, dtype=b.type.dtype)


def test_equal_arrays_are_one_key_however_they_lay_in_memory():
    a, b = Array(MANY), Array(np.asfortranarray(MANY).astype(">f4"))
    assert a == b and len({a, b}) == 1 and repr(a) == repr(b) == f'array("{a.digest}", f32[2,64])'
    nan = np.full(3, np.nan, "float32")
    assert Array(nan) == Array(nan.copy())


def test_nobody_writes_to_an_array():
    mine = MANY.copy()
    a = Array(mine)
    mine[0, 0] = 7
    assert a.values[0, 0] == 0 and a == Array(MANY)
    with pytest.raises(ValueError, match="read-only"):
        a.values[0, 0] = 1
    frozen = np.frombuffer(MANY.tobytes(), "float32")
    assert np.shares_memory(Array(frozen).values, frozen)
    view = mine.view()
    view.setflags(write=False)  # its owner may still write
    assert not np.shares_memory(Array(view).values, mine)


def test_a_copy_is_the_array_itself_and_a_pickle_an_equal_one():
    a = Array(MANY)
    assert copy.copy(a) is copy.deepcopy(a) is a and pickle.loads(pickle.dumps(a)) == a


@given(st.sampled_from(["bool", "int8", "uint64", "float16", "bfloat16", "float32", "float64"]), st.integers(0, 2 * FEW))
def test_few_elements_are_a_tuple_of_numbers_and_many_an_array(dtype, size):
    values = (np.arange(size) % 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    held = elements(values)
    assert isinstance(held, tuple) == (size <= FEW)
    assert np.array_equal(np.asarray(held).astype("float64"), values.astype("float64"))
    assert all(type(v) in (bool, int, float) for v in (held if isinstance(held, tuple) else ()))


def test_an_array_in_a_program_is_a_line_that_names_it_and_a_small_one_is_written_out():
    p = holding(MANY)
    assert str(p.ops[0]).endswith(f'= assign_value() {{shape=[2, 64], values=array("{Array(MANY).digest}", f32[2,64])}}')
    assert "values=[0.0, 1.0, 2.0]" in str(holding(MANY[0, :3]))


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("-inf")]), min_size=FEW - 1, max_size=FEW + 2))
def test_programs_come_back_from_text_and_json_with_their_bits(values):
    array = np.array(values, "float32")
    p = holding(array)
    texts = Program.parse_from_string(str(p), p.constants()), from_json(to_json(p), p.constants())
    assert list(texts) == [p, p]
    assert len(p.constants()) == (array.size > FEW)


def test_plain_arrays_may_be_given_too_and_old_texts_need_none():
    p = holding(MANY)
    assert Program.parse_from_string(str(p), {Array(MANY).digest: MANY}) == p
    old = f"program p {{ %y: f32[2,64] = assign_value() {{shape=[2, 64], values={MANY.ravel().tolist()}}} }}"
    again = Program.parse_from_string(old)
    assert Program.parse_from_string(str(again)) == again and not again.constants()
    assert np.array_equal(np.reshape(again.ops[0].attrs["values"], (2, 64)), MANY)


@pytest.mark.parametrize("read", [lambda p, given: Program.parse_from_string(str(p), given), lambda p, given: from_json(to_json(p), given)])
def test_a_constant_that_is_not_there_or_another_one_is_refused(read):
    p, digest = holding(MANY), Array(MANY).digest
    for lacking in (None, {}, {Array(-MANY).digest: -MANY}):
        with pytest.raises(ParseError, match=f"constant {digest} of f32\\[2,64\\] is missing. It is in the file"):
            read(p, lacking)
    other = Array(-MANY)
    with pytest.raises(ParseError, match=f"constant {digest} of .* does not match the array given for it"):
        read(p, {digest: other})
    with pytest.raises(ParseError, match="unknown dtype"):
        read(p, {digest: "weights"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.replace("sha256:", "md5:"), "is no digest of an array"),
        (lambda t: t.replace("f32[2,64])", "f32[64,2])"), r"of f32\[64,2\] does not match the array given for it"),
        (lambda t: t.replace("f32[2,64])", "f32[-1,64])"), r"of f32\[-1,64\] does not match the array given for it"),
        (lambda t: t.replace(", f32[2,64])", ")"), "expected ',' after the digest"),
        (lambda t: t.replace("array(", "array["), r"expected '\(' after array"),
    ],
)
def test_a_text_that_names_an_array_wrongly_points_at_it(change, message):
    p = holding(MANY)
    with pytest.raises(ParseError, match=message):
        Program.parse_from_string(change(str(p)), p.constants())


@pytest.mark.parametrize("field", ["array", "dtype", "shape"])
@pytest.mark.parametrize("junk", [None, 3, "junk", [], {}, [-1], [[2]]])
def test_junk_in_an_array_of_a_json_form_is_a_parse_error(field, junk):
    p = holding(MANY)
    data = to_json(p)
    data["blocks"][0]["ops"][0]["attrs"]["values"][field] = junk
    place = r"^blocks\[0\].ops\[0\].attrs.values"
    with pytest.raises(ParseError, match=rf"{place}(.{field}(\[0\])?: expected|: constant {Array(MANY).digest} of|: 'junk' is no digest)"):
        from_json(data, p.constants())


def test_an_op_that_declares_numbers_takes_an_array_of_them_as_numbers():
    p = Program("p")
    b = Builder(p.global_block())
    y = b.fill_constant(shape=np.ones(70, "int64"), value=2.0)
    assert p.ops[0].attrs["shape"] == (1,) * 70 and y.name
    with pytest.raises(ProgramError, match="holds 4 values, found 128"):
        b.assign_value(shape=(2, 2), values=MANY)


def test_an_initializer_gives_the_array_and_a_run_its_bits():
    weights = np.random.default_rng(0).standard_normal((40, 5))
    main, startup, scope = Program("main"), Program("startup"), fx.Scope()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.NumpyArrayInitializer(weights))
        y = fx.layers.fc(fx.data("x", [-1, 40]), 5, param_attr=attr)
        table = fx.layers.assign(np.arange(65, dtype="int64"))
    assert startup.ops[0].attrs["values"] == Array(weights, "float32")
    assert main.ops[-1].attrs["values"] == Array(np.arange(65), "int64")
    exe = fx.Executor()
    exe.run(startup, scope=scope)
    assert scope.get("w").tobytes() == weights.astype("float32").tobytes()
    scope.get("w")[...] = 0  # a parameter is not the constant
    assert startup.ops[0].attrs["values"] == Array(weights, "float32")
    assert exe.run(main, feed={"x": np.zeros((1, 40), "float32")}, fetch_list=[table, y], scope=scope)[0].tolist() == list(range(65))


def test_ranks_cut_a_constant_and_the_proof_takes_it_by_its_digest():
    weights = np.arange(96, dtype="float32").reshape(8, 12) % 7
    main, startup = Program("main"), Program("startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.NumpyArrayInitializer(weights))
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 8]), 12, param_attr=attr))
        fx.optimizer.SGD(1.0).minimize(loss)
    t = fx.DistributeTranspiler(fx.strategies.zero3())
    t.transpile(program=main, startup_program=startup, trainers=2)
    mains, startups = ([get(r) for r in range(2)] for get in (t.get_trainer_program, t.get_startup_program))
    read = [Program.parse_from_string(str(p), startup.constants()) for p in startups]
    assert read == startups
    one_device = fx.ir.ProgramPair(main, startup)
    fx.verify.verify_ranks(one_device, mains, read)
    k = next(k for k, op in enumerate(read[1].ops) if op.type == "assign_value")
    op = read[1].ops[k]
    read[1].global_block().oplist[k] = op.replace(attrs={**op.attrs, "values": Array(weights + 1)})
    with pytest.raises(fx.VerifyError):
        fx.verify.verify_ranks(one_device, mains, read)
