"""New operators."""

from __future__ import annotations

from random import Random

from fluidx.ir import Operator, Program, Role, Shard, TensorType, Var

from .edit import DTYPES, Edit, Programs, completed, names_of, on_op, some_op


def insert(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """A plausible operator behind another one; it writes over a variable, or makes a copy that the next reader takes."""
    program = programs[rank]
    if (got := some_op(rng, program)) is None:
        return None
    place, op = got
    names = [*op.output_arg_names, *op.input_arg_names]
    name = rng.choice(names) if names else rng.choice(names_of(program))
    block = program.blocks[place.block]
    desc = block.find(name)
    if desc is None:
        return None
    made = _plausible(rng, programs, rank, block.idx, desc)
    if made is None:
        return None
    type_, ins, outs, attrs = made
    complete = completed(type_, attrs)
    if complete is None:
        return None
    role = rng.choice([op.role, Role.DIST])
    before = rng.random() < 0.3
    aside = bool(outs) and rng.random() < 0.3
    copy = f"{name}.mutant"
    if aside:
        outs = {slot: tuple(copy if n == name else n for n in values) for slot, values in outs.items()}
    new = Operator(type_, ins, outs, complete, role)
    made_text = f"{', '.join(new.output_arg_names) or '-'} = {type_}({', '.join(new.input_arg_names)}) {attrs or ''}"
    text = f"{made_text} {'before' if before else 'behind'} {place}"

    def change(program: Program, ops: list[Operator], at: int) -> None:
        at = at if before else at + 1
        ops.insert(at, new)
        if aside:
            program.blocks[place.block].descs[copy] = desc._replace(name=copy, persistable=False, is_data=False, is_parameter=False)
            readers = [k for k in range(at + 1, len(ops)) if name in ops[k].input_arg_names]
            if readers:
                ops[readers[0]] = ops[readers[0]].renamed({name: copy})

    return on_op("insert", place, text, change)


def _plausible(rng: Random, programs: Programs, rank: int, block: int, desc: Var) -> tuple[str, dict, dict, dict] | None:
    program = programs[rank]
    x, n = desc.name, len(programs)
    at = program.blocks[block]
    group = rng.choice([*program.groups, "dp"]) if program.groups else "dp"
    same = [m for m in names_of(program) if m != x and (d := at.find(m)) is not None and d.type == desc.type]
    y = rng.choice(same or [x])
    out = {"Out": (x,)}
    two = {"X": (x,), "Y": (y,)}
    ways: list[tuple[str, dict, dict, dict]] = [
        ("scale", {"X": (x,)}, out, {"scale": rng.choice([2.0, 0.5, -1.0, 1.0 / n, float(n), 0.0, 1e-17, 1.001])}),
        ("scale", {"X": (x,)}, out, {"scale": 1.0, "bias": rng.choice([0.0, 1.0, 1e-3, -1.0])}),
        ("sum", {"X": (x, x)}, out, {}),
        ("sum", {"X": (x, y)}, out, {}),
        ("assign", {"X": (y,)}, out, {}),
        ("assign", {"X": (x,)}, out, {}),
        ("elementwise_add", two, out, {}),
        ("elementwise_sub", two, out, {}),
        ("elementwise_mul", two, out, {}),
        ("elementwise_max", two, out, {}),
        ("clip", {"X": (x,)}, out, {"min": -1e3, "max": 1e3}),
        ("abs", {"X": (x,)}, out, {}),
        ("square", {"X": (x,)}, out, {}),
        ("cast", {"X": (x,)}, out, {"dtype": desc.type.dtype}),
        ("fill_zeros_like", {"X": (x,)}, out, {}),
        ("all_reduce", {"X": (x,)}, out, {"group": group, "op": rng.choice(["sum", "avg", "max", "min"])}),
        ("all_reduce", {"X": (x,)}, out, {"group": group, "op": "sum"}),
        ("broadcast", {"X": (x,)}, out, {"group": group, "root": rng.randrange(n)}),
        ("reduce", {"X": (x,)}, out, {"group": group, "op": "sum", "root": rng.randrange(n)}),
        ("barrier", {}, {}, {"group": group}),
        ("nccl_init", {}, {}, {"group": group}),
        ("print", {"In": (x,)}, out, {}),
        ("increment", {"X": (x,)}, out, {}),
        ("dropout", {"X": (x,)}, out, {"dropout_prob": 0.3}),
    ]
    if -1 not in desc.type.shape:
        shape = tuple(desc.type.shape)
        ways += [
            ("fill_constant", {}, out, {"shape": shape, "dtype": desc.type.dtype, "value": rng.choice([0.0, 1.0, 0.1])}),
            ("gaussian_random", {}, out, {"shape": shape, "dtype": desc.type.dtype, "seed": 3}),
            ("reshape", {"X": (x,)}, out, {"shape": shape}),
        ]
    if len(desc.type.shape) == 2:
        ways.append(("transpose", {"X": (x,)}, out, {"axis": (1, 0)}))
    peer = rng.randrange(n)
    ways += [
        ("send", {"X": (x,)}, {}, {"group": group, "peer": peer}),
        ("recv", {}, out, {"group": group, "peer": peer, "shape": tuple(desc.type.shape)}),
    ]
    return rng.choice(ways)


def there_and_back(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """A value is made something else and back again, which loses some of it or nothing."""
    program = programs[rank]
    if (got := some_op(rng, program)) is None:
        return None
    place, op = got
    names = [*op.output_arg_names, *op.input_arg_names]
    block = program.blocks[place.block]
    if not names or (desc := block.find(x := rng.choice(names))) is None:
        return None
    t, other = desc.type, rng.choice([d for d in DTYPES if d != desc.type.dtype])
    turned = tuple(reversed(range(t.ndim)))
    ways: list[tuple[TensorType, tuple, tuple]] = [
        (t.with_dtype(other), ("cast", {"dtype": other}), ("cast", {"dtype": t.dtype})),
        (t, ("scale", {"scale": 0.5}), ("scale", {"scale": rng.choice([2.0, 1.9])})),
        (t, ("scale", {"scale": -1.0, "bias": 1.0}), ("scale", {"scale": -1.0, "bias": 1.0})),
        (t, ("square", {}), ("sqrt", {})),
        (t, ("exp", {}), ("log", {})),
        (t.with_shape(tuple(t.shape[k] for k in turned)), ("transpose", {"axis": turned}), ("transpose", {"axis": turned})),
    ]
    if -1 not in t.shape:
        flat = t.with_shape((t.numel,))
        ways.append((flat, ("reshape", {"shape": flat.shape}), ("reshape", {"shape": t.shape})))
        if t.ndim == 2:
            ways.append((flat, ("reshape", {"shape": flat.shape}), ("reshape", {"shape": tuple(reversed(t.shape))})))
    between, (go, go_attrs), (back, back_attrs) = rng.choice(ways)
    name = f"{x}.between"
    gone, came = completed(go, go_attrs), completed(back, back_attrs)
    if gone is None or came is None:
        return None
    before = rng.random() < 0.3

    def change(program: Program, ops: list[Operator], at: int) -> None:
        placement = desc.placement if between.ndim == t.ndim else ()
        if go == "transpose":
            placement = tuple(Shard(t.ndim - 1 - e.axis, e.group, e.unit) if isinstance(e, Shard) else e for e in placement)
        program.blocks[place.block].descs[name] = Var(name, between, placement, stop_gradient=True)
        at = at if before else at + 1
        ops[at:at] = [
            Operator(go, {"X": (x,)}, {"Out": (name,)}, gone, op.role),
            Operator(back, {"X": (name,)}, {"Out": (x,)}, came, op.role),
        ]

    text = f"{x} = {back}({go}({x})) {go_attrs} {back_attrs} {'before' if before else 'behind'} {place}"
    return on_op("there and back", place, text, change)
