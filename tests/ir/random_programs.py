"""Random programs for the property tests of the text form, the JSON form and the diff; most of them make no sense, all must survive."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from fluidx.ir import OPS, At, Block, BlockRef, OpDef, Operator, Partial, Program, ProgramPair, Required, Role, Shard, TensorType, Var
from fluidx.ir.constants import Array
from fluidx.ir.dtypes import SHORT
from fluidx.ir.types import Dim
from fluidx.ir.valuetypes import KEYS, AnyRankType, MapType, OptionalType, SequenceType
from fluidx.ir.var import PARAM_DEFAULTS, VAR_ATTRS

if "t_text_pair" not in OPS:  # declared once, whichever test module comes first

    class Pair(OpDef):
        """A declared op with every kind of slot and attribute."""

        name = "t_text_pair"
        inputs, outputs = ("X", "Y?", "Z*"), ("Out", "Parts*", "Mask?")
        attrs = {
            "axis": -1,
            "group": "dp",
            "op": "sum",
            "root": 0,
            "scale": 1.0,
            "shape": Required(tuple),
            "label": "",
            "flip": False,
            "free": None,
        }

    class Unary(OpDef):
        """One input, one output, no attributes."""

        name = "t_text_unary"
        inputs, outputs = ("X",), ("Out",)

    class Start(OpDef):
        """Makes a value out of nothing."""

        name = "t_text_start"
        inputs, outputs = (), ("Out?",)
        attrs = {"shape": (), "value": 0.0}


plain = st.from_regex(r"[A-Za-z0-9_.@/:\-]{1,6}", fullmatch=True)
odd = st.text(min_size=1, max_size=4)
names = st.one_of(st.sampled_from(["x", "y", "w", "w@GRAD", "a.b", "h:0"]), plain, odd)
words = st.one_of(st.sampled_from(["dp", "tp", "none", "only", "startup", "data", "block", "for", "on", "_"]), odd)
sizes = st.one_of(st.just(-1), st.integers(0, 2**40))
tensor_types = st.builds(TensorType, st.sampled_from(list(SHORT)), st.lists(st.one_of(sizes, st.just(Dim("n"))), max_size=4).map(tuple))
types = st.recursive(
    st.one_of(tensor_types, st.builds(AnyRankType, st.sampled_from(list(SHORT)))),
    lambda t: st.one_of(st.builds(SequenceType, t), st.builds(OptionalType, t), st.builds(MapType, st.sampled_from(KEYS), t)),
    max_leaves=3,
)
reductions = st.sampled_from(["sum", "max", "min"])
indices = st.integers(-3, 9)
entries = st.one_of(st.builds(Shard, indices, words), st.builds(Partial, reductions, words), st.builds(At, indices, words))
placements = st.lists(entries, max_size=3).map(tuple)
floats = st.one_of(st.floats(allow_nan=False), st.just(math.nan))
arrays = st.builds(
    lambda dtype, shape, first: Array(np.arange(first, first + math.prod(shape)).reshape(shape), dtype),
    st.sampled_from([name for name in SHORT if name != "string"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
)
scalars = st.one_of(arrays, st.none(), st.booleans(), st.integers(-(2**64) + 1, 2**64 - 1), floats, st.text(max_size=6))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
attributes = st.dictionaries(words, values, max_size=4)
roles = st.sampled_from(list(Role))
devices = st.one_of(st.just(""), st.sampled_from(["gpu:2", "gpu:0", "cpu"]), odd)
slots = st.dictionaries(
    st.one_of(st.sampled_from(["X", "Y", "Z", "Out", "Parts", "Mask"]), odd), st.lists(names, max_size=3).map(tuple), max_size=3
)


@st.composite
def declared(draw: st.DrawFn) -> Operator:
    """An operator of a declared type as the builder leaves it: declared slots, all attributes."""
    kind = draw(st.sampled_from(["t_text_pair", "t_text_unary", "t_text_start"]))
    definition = OPS[kind]
    sides = []
    for side in (definition.in_slots, definition.out_slots):
        filled = {}
        for slot in side:
            given = draw(st.lists(names, max_size=3)) if slot.many else draw(st.lists(names, min_size=not slot.optional, max_size=1))
            if given:
                filled[slot.name] = tuple(given)
        sides.append(filled)
    strange = draw(st.integers(0, 9))  # now and then one that no builder would make
    attrs = dict(draw(attributes)) if strange == 0 else {}
    for name, default in definition.attrs.items() if strange != 1 else ():
        kinds = {
            tuple: st.lists(st.integers(-99, 99), max_size=3).map(tuple),
            int: st.integers(-99, 99),
            float: floats,
            str: st.text(max_size=4),
            bool: st.booleans(),
        }
        wanted = default.type if isinstance(default, Required) else type(default)
        if isinstance(default, Required) or draw(st.booleans()):
            attrs[name] = draw(kinds.get(wanted, values) if strange != 2 else values)
        else:
            attrs[name] = default
    return Operator(kind, *sides, attrs, draw(roles), tuple(draw(st.lists(names, max_size=2))), None, draw(devices))


foreign = st.builds(
    lambda *fields: Operator(*fields),  # not the class: of a named tuple, Hypothesis would fill in every field
    st.one_of(words, st.just("t_text_unary")),
    slots,
    slots,
    attributes,
    roles,
    st.lists(names, max_size=2).map(tuple),
    st.none(),
    devices,
)
operators = st.one_of(declared(), declared(), foreign)


@st.composite
def records(draw: st.DrawFn, name: str) -> Var:
    simple = draw(st.booleans())
    flags = (False,) * 4 if simple else tuple(draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    attrs = (
        {}
        if simple
        else {**(PARAM_DEFAULTS if draw(st.booleans()) else {}), **draw(st.dictionaries(st.sampled_from(VAR_ATTRS), values, max_size=2))}
    )
    return Var(name, draw(types), draw(placements), *flags, attrs, not simple and draw(st.booleans()))


def fill(draw: st.DrawFn, block: Block, known: tuple[Var, ...] = ()) -> None:
    block.oplist = draw(st.lists(operators, max_size=5))
    used = sorted({n for op in block.oplist for n in (*op.input_arg_names, *op.output_arg_names)})
    for n in (*(n for n in used if draw(st.integers(0, 4))), *draw(st.lists(names, max_size=3))):
        block.descs[n] = draw(records(n))
    for d in known:
        if draw(st.booleans()):
            block.descs[d.name] = d


def build(draw: st.DrawFn, known: tuple[Var, ...] = ()) -> Program:
    p = Program(draw(words))
    p.rank = draw(st.one_of(st.none(), st.integers(0, 9)))
    p.strategy = draw(st.one_of(st.just(""), odd))
    p.random_seed = draw(st.one_of(st.just(0), st.integers(0, 2**64 - 1)))
    p.groups = draw(st.dictionaries(words, st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=2).map(tuple), max_size=2))
    fill(draw, p.blocks[0], known)
    for idx in range(1, 1 + draw(st.integers(0, 2))):
        block = Block(p, idx, draw(st.integers(0, idx - 1)))
        fill(draw, block)
        body = Operator("while", {}, {}, {"sub_block": BlockRef(idx)})
        p.blocks[block.parent_idx].oplist.append(body)
        p.blocks.append(block)
    return p


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return build(draw)


@st.composite
def pairs(draw: st.DrawFn) -> ProgramPair:
    main = build(draw)
    startup = build(draw, tuple(main.blocks[0].descs.values()))
    if draw(st.booleans()):
        startup.groups, startup.rank, startup.strategy = dict(main.groups), main.rank, main.strategy
    return ProgramPair(main, startup)
