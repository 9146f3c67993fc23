"""Branches and loops in the proof: a sub-block is a function of the values that it reads, and the results depend on its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.opdef import OPS
from ..ir.operator import Operator
from ..ir.program import Block, Program
from ..ir.sub_blocks import SubBlock, bodies, runners
from ..ir.types import Placement
from .mesh import partial
from .normal_form import ExpressionTable
from .operator_check import Signature
from .operator_meaning import DeclaredNames, NameScope, Operators
from .refusal import Refusal, fail
from .values import UNDEFINED

RunOp = Callable[[Operator, NameScope, Program, Block], None]


class BlockScope:
    """The values in a sub-block: of its own variables, and of outer variables that it writes."""

    def __init__(self, outside: NameScope, block: Block, depth: int, table: ExpressionTable, single: bool):
        self.outside, self.block, self.depth = outside, block, depth
        self.signatures = {n: table.signature(d.type, () if single else d.placement) for n, d in block.descs.items()}
        self.own: dict[str, int] = {}
        self.outer: dict[str, int] = {}

    def signature(self, name: str) -> Signature:
        return self.signatures.get(name) or self.outside.signature(name)

    def read(self, name: str) -> int:
        if name in self.block.descs:
            if name not in self.own:
                raise Refusal(f"%{name} is read before any operator of the block defines it")
            return self.own[name]
        found = self.outer.get(name)
        if found is None:
            return self.outside.read(name)
        if found == UNDEFINED:
            raise Refusal(f"%{name} is not always defined")
        return found

    def write(self, name: str, value: int) -> None:
        (self.own if name in self.block.descs else self.outer)[name] = value


class SubBlockCheck:
    """Runs operators with sub-blocks. `run` runs one operator inside a sub-block."""

    def __init__(self, operators: Operators, run: RunOp, single: bool):
        self.operators, self.values, self.table, self.mesh = operators, operators.values, operators.table, operators.mesh
        self.run, self.single = run, single

    def operator(self, op: Operator, scope: NameScope, program: Program) -> None:
        op_class, ins, _ = self.operators.class_of(op, scope)
        if op_class.local:
            raise Refusal(f"op {op.type} runs a sub-block with local values of a rank")
        for n in ins:
            if n is not None:
                scope.read(n)
        definition, condition = op_class.definition, self.condition(op, scope)
        for decides in definition.control_operands(op):
            placement = self._placement(scope, decides)
            if any(e.root is None for e in placement):
                what = "condition" if decides == condition else "number of the round"
                raise Refusal(f"op {op.type}: the {what} %{decides} must be whole on every rank that runs the block")
            for n in op.output_arg_names:
                after = self._placement(scope, n)
                if any(e.root is not None and e not in after for e in placement):
                    raise Refusal(f"op {op.type}: %{decides} is at a root, but %{n} is declared on other ranks too")
        if definition.control.repeats:
            self._loop(op, scope, program, condition)
        else:
            self._branches(op, scope, program, condition)

    @staticmethod
    def condition(op: Operator, scope: NameScope) -> str:
        """The condition variable."""
        return op.input(OPS[op.type].in_slots[0].name)[0]

    def check_results(self, op: Operator, body: SubBlock, names: Any, scope: DeclaredNames, inside: DeclaredNames) -> None:
        """Raise Refusal unless the results of a block have the types and placements of the operator's outputs."""
        outs = op.output_arg_names
        if len(names) != len(outs) or not all(isinstance(n, str) for n in names):
            raise Refusal(f"op {op.type} has {len(outs)} outputs, but {body.results_attr} names {len(names)}")
        for out, n in zip(outs, names, strict=True):
            (t, _), (t_out, _) = inside.signature(n), scope.signature(out)
            if not t_out.accepts(t) or self._placement(inside, n) != self._placement(scope, out):
                raise Refusal(f"op {op.type}: %{n} has another type or placement than %{out}")

    def _placement(self, scope: DeclaredNames, name: str) -> Any:
        t, placement = scope.signature(name)
        return self.mesh.canonical(placement, t)

    def _body(self, idx: int, scope: NameScope, program: Program, given: Mapping[str, int]) -> BlockScope:
        depth = getattr(scope, "depth", 0) + 1
        block = program.blocks[idx]
        inner = BlockScope(scope, block, depth, self.table, self.single)
        inner.outer.update(given)
        for inner_op in block.oplist:
            self.run(inner_op, inner, program, block)
        return inner

    def _branches(self, op: Operator, scope: NameScope, program: Program, condition: str) -> None:
        ends = []
        outs = op.output_arg_names
        for body in bodies(op):
            inner = self._body(body.idx, scope, program, {})
            names = op.attrs[body.results_attr]
            self.check_results(op, body, names, scope, inner)
            for out, n in zip(outs, names, strict=True):
                if out in inner.block.descs:
                    raise Refusal(f"op {op.type}: %{out} names a variable inside of the block too")
                inner.outer[out] = inner.read(n)
            ends.append(inner.outer)
        pred = self.values.atoms[scope.read(condition)].e
        made = []
        for name in dict.fromkeys(n for end in ends for n in end):
            both = [end[name] if name in end else self._before(scope, name) for end in ends]
            if UNDEFINED in both:
                if name in outs:
                    raise Refusal(f"op {op.type}: %{name} is defined in one branch only")
                made.append((name, UNDEFINED))
                continue
            made.append((name, both[0] if len(set(both)) == 1 else self.chosen(pred, both, scope, name)))
        for name, value in made:
            scope.write(name, value)

    def _carried(self, e: int, placement: Placement, how: tuple) -> int:
        """The atom of a loop-carried value. With a partial placement it is a term.

        By induction the terms of all ranks add up to the value of one device in each round: if they do before the body, then the rules of
        its operators give the same after it.
        """
        return self.values.term(e, placement, how) if partial(placement) else self.values.atom(e, placement)

    def _before(self, scope: NameScope, name: str) -> int:
        try:
            return scope.read(name)
        except Refusal:
            return UNDEFINED

    def chosen(self, pred: int, both: list[int], scope: DeclaredNames, name: str) -> int:
        """The value of a name after branches that give it different values."""
        es = [self.values.atoms[a].e for a in both]
        placement = self._placement(scope, name)
        e = es[0] if len(set(es)) == 1 else self.table.intern(("chosen", pred, *es), scope.signature(name)[0], (pred, *es))
        if partial(placement):
            return self.values.term(e, placement, ("chosen", pred, *map(self.values.of_any_turn, both)))
        return self.values.atom(e, placement)

    def _loop(self, op: Operator, scope: NameScope, program: Program, condition: str) -> None:
        (body,) = bodies(op)
        depth = getattr(scope, "depth", 0)
        first: dict[str, int] = {}
        for name in _written(program, body.idx):
            before = self._before(scope, name)
            if before == UNDEFINED:
                continue
            if is_local(scope.signature(name)[1]):
                raise Refusal(f"op {op.type} carries %{name} from iteration to iteration, but it is local to each rank")
            first[name] = before
        symbols = {
            name: self.table.symbol("round", (depth, k), scope.signature(name)[0]) for k, name in enumerate(first)
        }  # fmt: skip
        given = {name: self._carried(e, self._placement(scope, name), ("round",)) for name, e in symbols.items()}
        atoms = self.values.atoms
        _, *left = [atoms[given[n] if n in given else scope.read(n)].e for n in OPS[op.type].control_operands(op)]
        with self.operators.in_round(("round", depth, *left)):
            inner = self._body(body.idx, scope, program, given)
        again = atoms[inner.read(condition)].e
        last = [inner.outer[n] for n in first]
        if UNDEFINED in last:
            raise Refusal(f"op {op.type}: a loop-carried variable is not always defined")
        results = tuple(atoms[v].e for v in last)
        begin = tuple(atoms[v].e for v in first.values())
        start = atoms[scope.read(condition)].e
        key = ("loop", op.attrs.get("max_rounds", 0), start, again, results, begin)
        loop = self.table.intern(key, self.table.types[start], (start, again, *results, *begin))
        made = []
        # the derivation of terms after the loop depends on all loop-carried values, before the first round and after each round
        how = ("after", loop, *map(self.values.of_any_turn, (*first.values(), *last)))
        for k, name in enumerate(first):
            t = scope.signature(name)[0]
            e = begin[k] if results[k] == symbols[name] else self.table.intern(("after", loop, k, t), t, (loop,))
            unchanged = last[k] == given[name]
            made.append((name, first[name] if unchanged else self._carried(e, self._placement(scope, name), (*how, k))))
        for name in inner.outer:
            if name not in first:
                made.append((name, UNDEFINED))
        for name, value in made:
            scope.write(name, value)
        for n in op.output_arg_names:
            if n not in first:
                raise Refusal(f"op {op.type} may run no iteration, and %{n} has no value before it")


def _written(program: Program, idx: int) -> list[str]:
    """The outer variables that a block and its sub-blocks write, in order."""
    block = program.blocks[idx]
    names: dict[str, None] = {}
    for op in block.oplist:
        inner = [n for b in op.sub_blocks() for n in _written(program, b)]
        names.update((n, None) for n in (*inner, *op.output_arg_names) if n not in block.descs)
    return list(names)


def check_blocks(program: Program) -> None:
    """Raise VerifyError unless the blocks form a tree of at most 40 levels, where each block is run by one operator."""
    try:
        runners(program)
    except ProgramError as e:
        raise fail(program, -1, str(e)) from None
    depth = [0] * len(program.blocks)
    for b in program.blocks[1:]:
        depth[b.idx] = depth[b.parent_idx] + 1
    if max(depth) > 40:
        raise fail(program, -1, f"blocks are nested {max(depth)} deep; the limit is 40")
