"""Programs as JSON dictionaries and back, for tools that do not parse the text form.

A program that is written and read again is equal to the first. The reader checks every field; a wrong one ends in a ParseError that names
its place, such as `blocks[0].ops[3].attrs.axis`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from .constants import Array, Given
from .dtypes import FULL, SHORT
from .errors import ParseError, ProgramError
from .offsets import Offsets
from .operator import BlockRef, Operator, Role
from .parts import REDUCE
from .program import Block, Program, ProgramPair
from .sub_blocks import check_body
from .text import FLAGS
from .time_axes import MAX_TURNS
from .types import At, Dim, Entry, Local, Own, Partial, Pieces, Placement, Shard, TensorType
from .value_parser import MAX_INDEX, MAX_INT, MAX_NESTING
from .valuetypes import MAX_SIZE, ValueType, read_type
from .var import VAR_ATTRS, Var

FORMAT, PAIR_FORMAT, VERSION = "fluidx-program", "fluidx-pair", 1
_ROLES = {r.value: r for r in Role}


def to_json(program: Program | ProgramPair) -> dict[str, Any]:
    """A program, or a pair, as a dictionary of strings, numbers, lists and dictionaries that `json.dumps(..., allow_nan=False)` takes.

    >>> to_json(Program("p"))["blocks"]
    [{'parent': -1, 'vars': [], 'ops': []}]
    """
    if isinstance(program, ProgramPair):
        return {"format": PAIR_FORMAT, "version": VERSION, "main": to_json(program.main), "startup": to_json(program.startup)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": program.name,
        "rank": program.rank,
        "strategy": program.strategy,
        **({"origin": program.origin} if program.origin else {}),
        "seed": program.random_seed,
        "groups": {g: [list(s) for s in sets] for g, sets in program.groups.items()},
        **({"turns": dict(program.turns)} if program.turns else {}),
        "blocks": [
            {"parent": b.parent_idx, "vars": [_var_out(d) for d in b.descs.values()], "ops": [op_to_json(op) for op in b.oplist]}
            for b in program.blocks
        ],
    }


def _var_out(d: Var) -> dict[str, Any]:
    out: dict[str, Any] = {"name": d.name}
    if isinstance(d.type, TensorType):
        out |= {"dtype": d.type.dtype, "shape": [n.name if n.__class__ is Dim else n for n in d.type.shape]}
    else:
        out["type"] = str(d.type)
    if d.placement:
        out["placement"] = [e.to_json() for e in d.placement]
    out.update((flag, True) for flag in FLAGS if getattr(d, flag))
    if d.attrs:
        out["attrs"] = {k: _value_out(v) for k, v in d.attrs.items()}
    return out


def op_to_json(op: Operator) -> dict[str, Any]:
    """The JSON form of one operator, as `to_json` writes it."""
    out: dict[str, Any] = {"type": op.type, "role": op.role.value}
    out["inputs"] = {slot: list(names) for slot, names in op.inputs.items()}
    out["outputs"] = {slot: list(names) for slot, names in op.outputs.items()}
    out["attrs"] = {k: _value_out(v) for k, v in op.attrs.items()}
    if op.role_var:
        out["role_var"] = list(op.role_var)
    if op.device:
        out["device"] = op.device
    return out


def _value_out(v: Any) -> Any:
    if isinstance(v, (tuple, list, Offsets)):
        return [_value_out(x) for x in v]
    if isinstance(v, BlockRef):
        return {"block": v.idx}
    if isinstance(v, Array):
        return {"array": v.digest, "dtype": v.type.dtype, "shape": list(v.type.shape)}
    if isinstance(v, float):  # a whole float is tagged: readers outside Python may write 1.0 as 1, and JSON has no nan and inf
        v = float(v)
        return v if math.isfinite(v) and not v.is_integer() else {"float": repr(v)}
    if v is None or isinstance(v, (bool, int, str)):
        return v
    raise ProgramError(f"an attribute of type {type(v).__name__} has no JSON form: {v!r}")


def from_json(data: Mapping[str, Any], constants: Mapping[str, Any] | None = None) -> Any:
    """The Program, or the ProgramPair, that `to_json` wrote, `constants` being the arrays that it names by digest.

    Raises ParseError for anything else, naming the place in it.
    """
    reader = _Reader(constants)
    if not isinstance(data, Mapping):
        reader.fail("the top", "a dictionary", data)
    if data.get("format") == PAIR_FORMAT:
        reader.version(data)
        return ProgramPair(reader.program(data.get("main"), "main."), reader.program(data.get("startup"), "startup."))
    return reader.program(data, "")


def op_from_json(data: Mapping[str, Any]) -> Operator:
    """The operator that `op_to_json` wrote, of one without sub-blocks and large arrays."""
    return _Reader(None).op(data, "operator")


class _Reader:
    def __init__(self, constants: Mapping[str, Any] | None):
        self.constants = Given(constants)

    def fail(self, where: str, expected: str, found: Any) -> NoReturn:
        shown = (
            "nothing" if found is None else f"{type(found).__name__} {str(found)[:60]!r}" if isinstance(found, (str, int, float)) else ""
        )
        raise ParseError(f"{where}: expected {expected}, found {shown or type(found).__name__}")

    def version(self, data: Mapping[str, Any]) -> None:
        found = data.get("version")
        if type(found) is not int or found != VERSION:
            self.fail("version", f"{VERSION}, the version that this fluidx reads and writes", found)

    def str_(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.fail(where, "a string", value)
        return value

    def int_(self, value: Any, where: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(where, f"an integer from {low} to {high}", value)
        return value

    def list_(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            self.fail(where, "a list", value)
        return list(value)

    def dict_(self, value: Any, where: str, known: tuple[str, ...] = ()) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(where, "a dictionary", value)
        for key in value:
            if not isinstance(key, str) or (known and key not in known):
                self.fail(where, f"keys from {', '.join(known)}" if known else "strings as keys", key)
        return value

    def names(self, value: Any, where: str) -> tuple[str, ...]:
        return tuple(self.str_(v, f"{where}[{k}]") for k, v in enumerate(self.list_(value, where)))

    def program(self, data: Any, at: str) -> Program:
        known = ("format", "version", "name", "rank", "strategy", "origin", "seed", "groups", "turns", "blocks")
        data = self.dict_(data, at or "the top", known)
        if data.get("format") != FORMAT:
            self.fail(f"{at}format", f"{FORMAT!r}", data.get("format"))
        self.version(data)
        p = Program(self.str_(data.get("name"), f"{at}name"))
        if data.get("rank") is not None:
            p.rank = self.int_(data["rank"], f"{at}rank", 0, MAX_INDEX)
        p.strategy = self.str_(data.get("strategy", ""), f"{at}strategy")
        p.origin = self.str_(data.get("origin", ""), f"{at}origin")
        p.random_seed = self.int_(data.get("seed", 0), f"{at}seed", 1 - MAX_INT, MAX_INT - 1)
        for g, sets in self.dict_(data.get("groups", {}), f"{at}groups").items():
            where = f"{at}groups.{g}"
            p.groups[g] = tuple(
                tuple(self.int_(r, f"{where}[{i}][{k}]", 0, MAX_INDEX) for k, r in enumerate(self.list_(s, f"{where}[{i}]")))
                for i, s in enumerate(self.list_(sets, where))
            )
        for axis, n in self.dict_(data.get("turns", {}), f"{at}turns").items():
            p.turns[axis] = self.int_(n, f"{at}turns.{axis}", 1, MAX_TURNS)
        blocks = self.list_(data.get("blocks"), f"{at}blocks")
        if not blocks:
            self.fail(f"{at}blocks", "one block or more", None)
        self.count = len(blocks)
        p.blocks = [self.block(p, i, b, f"{at}blocks[{i}]") for i, b in enumerate(blocks)]
        run: dict[int, Operator] = {}
        for block in p.blocks:
            for k, op in enumerate(block.oplist):
                for idx in op.sub_blocks():
                    try:
                        check_body(op, block, idx, run)
                    except ProgramError as e:
                        raise ParseError(f"{at}blocks[{block.idx}].ops[{k}]: {e}") from None
                    run[idx] = op
        return p

    def block(self, program: Program, idx: int, data: Any, where: str) -> Block:
        data = self.dict_(data, where, ("parent", "vars", "ops"))
        block = Block(program, idx, self.int_(data.get("parent"), f"{where}.parent", min(idx - 1, 0), idx - 1))
        for k, v in enumerate(self.list_(data.get("vars", []), f"{where}.vars")):
            d = self.var(v, f"{where}.vars[{k}]")
            if d.name in block.descs:
                raise ParseError(f"{where}.vars[{k}]: variable {d.name!r} is declared twice")
            block.descs[d.name] = d
        block.oplist = [self.op(o, f"{where}.ops[{k}]") for k, o in enumerate(self.list_(data.get("ops", []), f"{where}.ops"))]
        return block

    def var(self, data: Any, where: str) -> Var:
        data = self.dict_(data, where, ("name", "dtype", "shape", "type", "placement", "attrs", *FLAGS))
        type_ = self.written_type(data["type"], f"{where}.type") if "type" in data else self.type_(data, where)
        flags = {flag: data.get(flag, False) for flag in FLAGS}
        for flag, value in flags.items():
            if not isinstance(value, bool):
                self.fail(f"{where}.{flag}", "true or false", value)
        placement: Placement = tuple(
            self.entry(e, f"{where}.placement[{k}]") for k, e in enumerate(self.list_(data.get("placement", []), f"{where}.placement"))
        )
        name = self.str_(data.get("name"), f"{where}.name")
        attrs = self.attrs(data.get("attrs", {}), f"{where}.attrs")
        for attr in attrs:
            if attr not in VAR_ATTRS:
                self.fail(f"{where}.attrs", f"attributes out of {', '.join(VAR_ATTRS)}", attr)
        return Var(name, type_, placement, attrs=attrs, **flags)

    def type_(self, data: Mapping[str, Any], where: str) -> TensorType:
        dtype = self.str_(data.get("dtype"), f"{where}.dtype")
        dtype = FULL.get(dtype, dtype)
        if dtype not in SHORT:
            self.fail(f"{where}.dtype", f"one of {', '.join(SHORT)}", dtype)
        sizes = enumerate(self.list_(data.get("shape"), f"{where}.shape"))
        return TensorType(dtype, tuple(self.size(n, f"{where}.shape[{k}]") for k, n in sizes))

    def written_type(self, value: Any, where: str) -> ValueType:
        try:
            return read_type(self.str_(value, where))
        except ProgramError as e:
            self.fail(where, str(e), value)

    def size(self, value: Any, where: str) -> int:
        if not isinstance(value, str):
            return self.int_(value, where, -1, MAX_SIZE)
        try:
            return Dim(value)
        except ProgramError as e:
            raise ParseError(f"{where}: {e}") from None

    def entry(self, data: Any, where: str) -> Entry:
        data = self.dict_(data, where, ("shard", "unit", "partial", "at", "pieces", "own", "local", "group"))
        if data == {"local": True}:
            return Local()
        group = self.str_(data.get("group"), f"{where}.group")
        if "shard" in data and data.keys() <= {"shard", "unit", "group"}:
            axis = self.int_(data["shard"], f"{where}.shard", -MAX_INDEX, MAX_INDEX)
            return Shard(axis, group, self.int_(data.get("unit", 1), f"{where}.unit", 1, MAX_SIZE))
        if len(data) == 2:
            if "partial" in data:
                if data["partial"] not in tuple(REDUCE):
                    self.fail(f"{where}.partial", f"one of {', '.join(REDUCE)}", data["partial"])
                return Partial(data["partial"], group)
            if data.get("own") is True:
                return Own(group)
            if "at" in data:
                return At(self.int_(data["at"], f"{where}.at", -MAX_INDEX, MAX_INDEX), group)
            if "pieces" in data:
                bounds = self.list_(data["pieces"], f"{where}.pieces")
                return Pieces(Offsets(self.int_(n, f"{where}.pieces[{k}]", 0, MAX_SIZE) for k, n in enumerate(bounds)), group)
        self.fail(where, "a group and one of shard, partial, at, pieces and own, or local", data)

    def op(self, data: Any, where: str) -> Operator:
        data = self.dict_(data, where, ("type", "role", "inputs", "outputs", "attrs", "role_var", "device"))
        role = self.str_(data.get("role", "forward"), f"{where}.role")
        if role not in _ROLES:
            self.fail(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
        inputs, outputs = (
            {s: self.names(n, f"{where}.{side}.{s}") for s, n in self.dict_(data.get(side, {}), f"{where}.{side}").items()}
            for side in ("inputs", "outputs")
        )
        attrs = self.attrs(data.get("attrs", {}), f"{where}.attrs")
        role_var = self.names(data.get("role_var", []), f"{where}.role_var")
        device = self.str_(data.get("device", ""), f"{where}.device")
        op_type = self.str_(data.get("type"), f"{where}.type")
        return Operator(op_type, inputs, outputs, attrs, _ROLES[role], role_var, None, device)

    def attrs(self, data: Any, where: str) -> dict[str, Any]:
        return {k: self.value(v, f"{where}.{k}", 0) for k, v in self.dict_(data, where).items()}

    def value(self, v: Any, where: str, depth: int) -> Any:
        if isinstance(v, (list, tuple)):
            if depth >= MAX_NESTING:
                raise ParseError(f"{where}: lists are nested more than {MAX_NESTING} deep")
            return tuple(self.value(x, where, depth + 1) for x in v)
        if isinstance(v, Mapping):
            return self.tagged(v, where)
        if v is None or isinstance(v, (bool, str)):
            return v
        if isinstance(v, int):
            return self.int_(v, where, 1 - MAX_INT, MAX_INT - 1)
        if isinstance(v, float):
            return math.nan if v != v else v
        self.fail(where, "a number, a string, true, false, null or a list", v)

    def tagged(self, v: Mapping[str, Any], where: str) -> Any:
        if list(v) == ["block"]:
            return BlockRef(self.int_(v["block"], where, 0, self.count - 1))
        if list(v) == ["float"] and isinstance(v["float"], str) and len(v["float"]) <= 400:
            try:
                value = float(v["float"])
            except ValueError:
                self.fail(where, "a float", v["float"])
            return math.nan if value != value else value
        if v.keys() == {"array", "dtype", "shape"}:
            digest, type_ = self.str_(v["array"], f"{where}.array"), self.type_(v, where)
            try:
                return self.constants.array(digest, type_)
            except ProgramError as e:
                raise ParseError(f"{where}: {e}") from None
        self.fail(where, 'a value; of dictionaries only {"block": 1}, {"float": "inf"} and {"array": ..., "dtype": ..., "shape": ...}', v)
