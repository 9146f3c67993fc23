"""The gradient of a while loop: a second loop over the iterations of the first, the last one first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..ir import flow
from ..ir.builder import Builder
from ..ir.errors import ProgramError
from ..ir.opdef import opdef
from ..ir.operator import BlockRef, Role
from ..ir.program import Block
from ..ir.types import TensorType
from ..ir.unique_name import unused
from ..ir.variable import Variable
from .renamed_copies import copy_renamed


def loop_gradient(b: Builder, op: Any, g: Sequence[Variable | None]) -> list[Variable | None]:
    """The gradients of the variables that a loop lists, in their order.

    The loop counts its iterations and stashes those values from the start of each iteration that the gradient reads. An iteration of the
    gradient takes the values of the last remaining iteration from the stash, recomputes that iteration on copies, and computes its
    gradient. Raises ProgramError for a loop that is itself the gradient of a loop: second derivatives of loops are not implemented.
    """
    if op.op.role == Role.BACKWARD:
        raise ProgramError(
            "op while has no gradient here: this is the gradient of a loop, and second derivatives of loops are not implemented; "
            "unroll the loop if the number of iterations is known"
        )
    return _Back(b, op, g).write()


class _Back:
    def __init__(self, b: Builder, op: Any, g: Sequence[Variable | None]):
        self.b, self.op, self.outer, self.program = b, op, b.block, b.block.program
        self.body: Block = self.program.blocks[op.attrs["sub_block"].idx]
        self.xs: list[Variable] = op["X"]
        self.given = {v.name: v_grad for v, v_grad in zip(op["Out"], g, strict=True) if v_grad is not None}
        writes = flow.sub_writes(self.program, self.body)
        self.wanted = [x for x in self.xs if x.desc.type.is_float and op.wants(x.name)]
        self.carried = self._carried(writes)
        self.live = flow.live_ops(self.program, self.carried, ops=self.body.oplist)  # loop-carried values depend on these
        if other := next((n for n in self.carried if not isinstance(self.body.desc(n).type, TensorType)), None):
            raise ProgramError(f"the gradient of a loop goes through tensors, and {other!r} is {self.body.desc(other).type}; carry tensors")
        self.begins = [n for n in flow.needs(self.program, self.live) if n in writes]
        self.read = [x for x in self.wanted if x.name not in writes]
        # each iteration fills a separate part of these: the gradient of all parts is known before the last iteration, and does not change
        others = [o for o in self.live if not opdef(o.type).storage.same_variable]
        self.filled = {n for n in self.carried if not any(n in flow.writes(self.program, o) for o in others)}

    def _carried(self, writes: Sequence[str]) -> list[str]:
        """The loop-carried values that depend on variables whose gradients are wanted, and on which values with a given gradient depend."""
        program, ops = self.program, self.body.oplist
        moved: set[str] = {x.name for x in self.wanted}
        size = -1
        while len(moved) != size:
            size = len(moved)
            for o in ops:
                if not moved.isdisjoint(flow.reads(program, o)):
                    moved.update(n for n in flow.writes(program, o) if self._passes(n))
        needed, size = set(self.given), -1
        while len(needed) != size:
            size = len(needed)
            live = flow.live_ops(program, needed, ops=ops)
            needed.update(n for n in flow.needs(program, live) if n in writes)
        return [n for n in writes if n in moved and n in needed]

    def _passes(self, name: str) -> bool:
        """Can a variable that the body writes have a gradient? Parameters that are not trained have none: they are statistics."""
        desc = self.body.desc(name)
        return desc.type.is_float and not (desc.is_parameter and desc.stop_gradient)

    def write(self) -> list[Variable | None]:
        if not self.carried:
            return [None] * len(self.xs)
        rounds = self._count_rounds()
        b = self.b
        left, none = b.assign(rounds), b.fill_constant(shape=[1], dtype="int64", value=0.0)
        more = b.greater_than(left, none)
        grads = {n: self._begin(n) for n in self.carried}
        with self.program.sub_block(self.outer.idx) as block:
            again, back = Builder(block, role=Role.FORWARD), Builder(block, role=b.role)
            again.site = back.site = b.site
            back.increment(left, step=-1.0, out={"Out": left})
            stashes = {n: self._stash(n) for n in self.begins}
            start = {n: again.stash_read(stashes[n], left, name=f"{n}@again{block.idx}") for n in self.begins}
            now = copy_renamed(self.live, self.body, block, {n: v.name for n, v in start.items()}, f"@again{block.idx}")
            inputs = [*(start[n] for n in self.carried if n in start and n not in self.filled), *self.read]
            made = self.op.gradients([block.var(now[n]) for n in self.carried], inputs, list(grads.values()))
            found = dict(zip([v.name for v in inputs], made, strict=True))
            sums = self._add_up(back, found)
            for n, carried in grads.items():
                if n in self.filled:
                    continue
                v = found.get(start[n].name) if n in start else None
                back.assign(v if v is not None else back.fill_zeros_like(carried), out={"Out": carried})
            back.greater_than(left, none, out={"Out": more})
            keep_only(block, [v.name for v in (left, more, *grads.values(), *sums.values())])
        self._keep_stashes(block, stashes, rounds)
        reads, writes = flow.sub_reads(self.program, block), flow.sub_writes(self.program, block)
        b.emit("while", more, list(dict.fromkeys([*writes, *reads])), left, out={"Out": writes}, sub_block=BlockRef(block.idx))
        results = {**grads, **sums}
        return [results.get(x.name) if self.op.wants(x.name) else None for x in self.xs]

    def _fresh(self, name: str, like: Variable, shape: Sequence[int] | None = None) -> Variable:
        found = unused(name, self.outer.find, "_{}".format)
        return self.outer.create_var(found, like.shape if shape is None else shape, like.dtype, stop_gradient=True)

    def _begin(self, name: str) -> Variable:
        """The gradient of a loop-carried value after the last iteration, in a variable that the iterations overwrite."""
        var, given = self.outer.var(name), self.given.get(name)
        like = var if given is None else given  # of a stash that does not know its number of rows: as many rows as there were iterations
        mine = self._fresh(f"{name}@GRAD@while{self.body.idx}", like)
        return self.b.assign(given, out={"Out": mine}) if given is not None else self.b.fill_zeros_like(var, out={"Out": mine})

    def _add_up(self, back: Builder, found: dict[str, Variable | None]) -> dict[str, Variable]:
        """Sum over the iterations the gradients of the variables that the loop only reads."""
        sums = {}
        for x in self.read:
            term = found[x.name]
            if term is not None:
                total = self.b.fill_zeros_like(x, out={"Out": self._fresh(f"{x.name}@GRAD@while{self.body.idx}", x)})
                maker = next(op for op in reversed(back.block.oplist) if term.name in op.output_arg_names)
                add = opdef(maker.type).storage.accumulate_into
                sums[x.name] = back.sum([total, term], out={"Out": total}) if add is None else add(back, maker, total)
        return sums

    # -- additions to the forward loop --------------------------------------------------------------------------------------------

    def _count_rounds(self) -> Variable:
        with self.op.ahead(self.outer):
            rounds = self.b.fill_constant(shape=[1], dtype="int64", value=0.0, name=self._name_of_rounds())
        return rounds

    def _name_of_rounds(self) -> str:
        k = 0
        while self.outer.find(name := f"while{self.body.idx}@ROUNDS" + (f"_{k}" if k else "")) is not None:
            k += 1
        return name

    def _stash(self, name: str) -> Variable:
        var = self.outer.var(name)
        bound = self.op.attrs["max_rounds"]
        return self._fresh(f"{name}@STASH@while{self.body.idx}", var, (bound, *var.shape))

    def _keep_stashes(self, back: Block, stashes: dict[str, Variable], rounds: Variable) -> None:
        """Write the operators that fill the stashes which the gradient reads."""
        read = set(flow.sub_reads(self.program, back))
        inside = Builder(self.body, role=self.b.role)
        inside.site = self.b.site
        for name, stash in stashes.items():
            if stash.name not in read:
                del self.outer.descs[stash.name]
                continue
            with self.op.ahead(self.outer):
                self.b.stash(self.outer.var(name), rounds=self.op.attrs["max_rounds"], out={"Out": stash})
            with self.op.ahead(self.body):
                inside.stash_write(stash, self.outer.var(name), rounds, out={"Out": stash})
        with self.op.ahead(self.body):
            inside.increment(rounds, step=1.0, out={"Out": rounds})


def keep_only(block: Block, results: Iterable[str]) -> None:
    """Remove the operators and variables of a block that its results do not need."""
    program, results = block.program, list(results)
    live = flow.live_ops(program, results, ops=block.oplist)
    named = {*results, *flow.uses(program, live), *flow.definitions(program, live)}
    for op in block.oplist:
        if op.sub_blocks() and not any(op is o for o in live):
            for idx in op.sub_blocks():
                program.blocks[idx].oplist, program.blocks[idx].descs = [], {}
    block.oplist, block.descs = live, {n: d for n, d in block.descs.items() if n in named}
