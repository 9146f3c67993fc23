"""Control flow: operators that run sub-blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ..ir import flow
from ..ir.builder import Builder
from ..ir.errors import ProgramError
from ..ir.op_facets import Control
from ..ir.opdef import OpDef, Required
from ..ir.operator import BlockRef, Role
from ..ir.program import Block
from ..ir.sub_blocks import copy_body
from ..ir.types import TensorType
from .loop_gradient import keep_only, loop_gradient
from .shared.random_numbers import round_key

_Step = Callable[[], Any]


class WhileOp(OpDef):
    """Run a sub-block repeatedly while the condition, a [1] bool, is true; at most `max_rounds` times, without a limit if that is 0.

    The body writes the condition and the loop variables in place. Sizes that are declared open may change from iteration to iteration. `X`
    lists the outer variables that the body reads, `Out` those that it writes. The gradient is a loop that runs the iterations again, the
    last one first; the forward loop stashes the values that this needs from the start of each iteration. Random ops draw new numbers in
    each iteration. The gradient loop counts down in `Left`, [1] int64, which its body writes: the number of the next iteration plus 1. So
    each of its iterations draws the same numbers as the forward iteration.
    """

    name = "while"
    inputs = ("Condition", "X*", "Left?")
    outputs = ("Out*",)
    attrs = {"sub_block": Required(BlockRef), "max_rounds": 0}

    @staticmethod
    def infer(condition: Any, xs: list, left: Any, *, sub_block: BlockRef, max_rounds: int) -> list:
        if max_rounds < 0:
            raise ProgramError(f"while: max_rounds must be 0 (no limit) or more, got {max_rounds}")
        if condition.dtype != "bool" or condition.numel != 1:
            raise ProgramError(f"while: the condition must be a bool of one element, got {condition}")
        if left is not None and left != TensorType("int64", (1,)):
            raise ProgramError(f"while: Left must be an int64 of shape [1], got {left}")
        return [[]]

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        """A loop over the iterations, the last one first."""
        return None, loop_gradient(b, op, g), None

    @staticmethod
    def _bind(planner: Any, op: Any) -> _Step:
        body = planner.block_runner(op.attrs["sub_block"].idx)
        holds = planner.array(op.input("Condition")[0]).item
        left = [planner.array(n).item for n in op.input("Left")]
        return partial(_run_rounds, op, planner.ctx, body, holds, *left)

    @staticmethod
    def _run_reference(op: Any, env: dict, run_block: Callable[[int], None], ctx: Any) -> None:
        values = [partial(_item, env, n) for n in (*op.input("Condition"), *op.input("Left"))]
        _run_rounds(op, ctx, partial(run_block, op.attrs["sub_block"].idx), *values)

    control = Control(
        bodies={"sub_block": ""},
        repeats=True,
        bind=_bind,
        run_reference=_run_reference,
        beyond_tensors=("sequence", "optional", "map", "string", "tensor of any rank"),
    )


def _item(env: dict, name: str) -> Any:
    return np.asarray(env[name]).item()


def _run_rounds(op: Any, ctx: Any, body: _Step, holds: Callable[[], bool], left: Callable[[], int] | None = None) -> None:
    """Run the iterations of a loop. The random ops of each iteration draw with a key of its own."""
    most, key = op.attrs["max_rounds"], ctx.key
    try:
        for k in range(most) if most else count():
            if not holds():
                break
            ctx.key = round_key(key, k if left is None else left() - 1)
            body()
    finally:
        ctx.key = key


class Cond(OpDef):
    """The results of one of two sub-blocks, selected by a [1] bool.

    `true_out` and `false_out` name the results inside (or outside) the blocks, in the order of `Out`. Both lists have the same types,
    except for sizes that are declared open. The gradient runs the gradient of the selected branch, which recomputes the branch.
    """

    name = "cond"
    inputs = ("Cond", "X*")
    outputs = ("Out*",)
    attrs = {
        "true_block": Required(BlockRef), "false_block": Required(BlockRef),
        "true_out": Required(tuple[str, ...]), "false_out": Required(tuple[str, ...]),
    }  # fmt: skip

    @staticmethod
    def infer(condition: Any, xs: list, *, true_block: BlockRef, false_block: BlockRef, true_out: tuple, false_out: tuple) -> list:
        if condition.dtype != "bool" or condition.numel != 1:
            raise ProgramError(f"cond: the condition must be a bool of one element, got {condition}")
        return [[]]

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        """A cond whose branches recompute the forward branch and then run its backward operators."""
        gs = [g] if not isinstance(g, (list, tuple)) else list(g[0] if len(g) == 1 and isinstance(g[0], list) else g)
        xs = op["X"]
        wanted = [x for x in xs if x.desc.type.is_float and op.wants(x.name)]
        if not wanted:
            return (None, [None] * len(xs))
        program = b.block.program
        outs, blocks = [], []
        for which in ("true", "false"):
            source = program.blocks[op.attrs[f"{which}_block"].idx]
            with program.sub_block(b.block.idx) as block:
                suffix = f"@{which}.again{block.idx}"
                again = Builder(block, role=Role.FORWARD)
                # the recomputed branch writes into copies, not into the outer variables that the branch writes
                copies = {n: again.assign(block.var(n), name=n + suffix).name for n in flow.sub_writes(program, source)}
                names = copy_body(source, block, copies, suffix)
                # an outer variable that is a result is copied, so that its gradient is computed in this block
                results = {n: block.var(names[n]) if n in names else again.assign(block.var(n)) for n in op.attrs[f"{which}_out"]}
                pairs = [(results[n], v) for n, v in zip(op.attrs[f"{which}_out"], gs, strict=True) if v is not None]
                grads = op.gradients([y for y, _ in pairs], wanted, [v for _, v in pairs])
                zeros = Builder(block, role=b.role)
                outs.append([v.name if v is not None else zeros.fill_zeros_like(x).name for x, v in zip(wanted, grads, strict=True)])
                keep_only(block, outs[-1])
                _check_copies(block, copies)
                blocks.append(block)
        made = [b.block.create_var(f"{x.name}@GRAD@cond{blocks[0].idx}", x.shape, x.dtype, stop_gradient=True) for x in wanted]
        read = [n for block, out in zip(blocks, outs) for n in (*flow.sub_reads(program, block), *out) if n not in block.descs]
        ids = {f"{which}_block": BlockRef(block.idx) for which, block in zip(("true", "false"), blocks)}
        b.cond(op["Cond"], list(dict.fromkeys(read)), **ids, true_out=outs[0], false_out=outs[1], out={"Out": made})
        by_name = {x.name: v for x, v in zip(wanted, made, strict=True)}
        return (None, [by_name.get(x.name) for x in xs])

    @staticmethod
    def _bind(planner: Any, op: Any) -> _Step:
        condition = planner.array(op.input("Cond")[0])
        branches = []
        for which in ("false", "true"):
            run = planner.block_runner(op.attrs[f"{which}_block"].idx)
            named = zip(op.output("Out"), op.attrs[f"{which}_out"], strict=True)  # these outer variables have their values already
            pairs = [(planner.array(o), planner.array(n)) for o, n in named if o != n]
            branches.append((run, pairs))

        def step() -> None:
            run, pairs = branches[bool(condition.item())]
            run()
            for out, value in pairs:
                out[...] = value

        return step

    @staticmethod
    def _run_reference(op: Any, env: dict, run_block: Callable[[int], None], ctx: Any) -> None:
        which = "true" if bool(np.asarray(env[op.input("Cond")[0]]).item()) else "false"
        run_block(op.attrs[f"{which}_block"].idx)
        for out, name in zip(op.output("Out"), op.attrs[f"{which}_out"], strict=True):
            env[out] = env[name]

    control = Control(
        bodies={"true_block": "true_out", "false_block": "false_out"},
        bind=_bind,
        run_reference=_run_reference,
        beyond_tensors=WhileOp.control.beyond_tensors,
    )


def _check_copies(block: Block, copies: dict[str, str]) -> None:
    """Raise ProgramError if the recomputed branch reads a variable that its first run overwrote."""
    program = block.program
    for name, copy in copies.items():
        if not any(name in flow.reads(program, op) for op in block.oplist):
            continue
        readers = [op for op in block.oplist if copy in flow.reads(program, op)]
        # a branch reads running statistics only to update them, and nothing reads the second values
        if not block.desc(name).persistable or any(op.sub_blocks() or copy not in op.output_arg_names for op in readers):
            hint = "write to another variable there"
            raise ProgramError(f"the gradient of cond needs the value of {name!r} before a branch overwrites it; {hint}")
