"""Sends and receives: those that start together, how they find each other, and the mistakes that one can make with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator
from ..ir.sizes import StandInShapes, with_open_axes
from ..ir.types import ANY
from .operator_check import Signature
from .rank_values import PerRank
from .refusal import Refusal, fail
from .values import UNDEFINED

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


def is_message(op: Operator) -> bool:
    return op.type in OPS and OPS[op.type].effect is Effect.P2P


def handed_on(ops: Sequence[Operator], codes: Sequence[int], message: Sequence[bool]) -> tuple[int, str] | None:
    """The first operator of a batch, and the variable, that touches what a recv of the same batch writes.

    Sends of a batch are posted first, so they would hand on what was there before. Operators that nobody needs do not run, so what stands
    between sends and receives of one batch does not always separate them. `codes` are indices into `ops` and `message`.
    """
    batch: object = None
    received: set[str] = set()
    last = -1
    for k in [k for k, code in enumerate(codes) if message[code]]:
        op = ops[codes[k]]
        label = op.attrs.get("batch")
        if not label or label != batch or any(_acts(ops[code]) for code in codes[last + 1 : k]):
            batch, received = label, set()
        last = k
        for n in (*op.input_arg_names, *op.output_arg_names):
            if n in received:
                return k, n
        received.update(op.output_arg_names)
    return None


def _acts(op: Operator) -> bool:
    """Does an operator run even if nobody needs its results?"""
    definition = OPS.get(op.type)
    return definition is None or definition.effect not in (Effect.PURE, Effect.RANDOM)


class PendingMessage:
    """One send or recv that has not met its partner."""

    __slots__ = ("op", "index", "peer", "done", "value", "signature", "sends")

    def __init__(self, op: Operator, index: int, sends: bool, signature: Signature, value: int):
        self.op, self.index, self.sends, self.signature, self.value = op, index, sends, signature, value
        self.peer, self.done = op.attrs["peer"], False


class Messages:
    """The sends and receives of a world of ranks."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.held, self.operators, self.said = world, world.held, world.operators, world.said
        self.table, self.n = world.table, world.n
        self.count = 0
        self.items: list[list[PendingMessage] | None] = [None] * self.n
        self._received_types: set[tuple] = set()
        self._message_kinds: set[tuple] = set()
        self._peers: set[tuple[int, int, str]] = set()
        self._sizes: dict[int, StandInShapes] = {}  # by the id of a program, which the world keeps
        self._open: set[tuple] = set()

    def exchange(self, r: int, woken: list[int]) -> bool:
        """Match the sends and recvs that rank r has started with those that its peers have started."""
        items = self.items[r]
        if items is None:
            items = self.items[r] = self._start(r)
        for item in items:
            peer = item.peer
            if item.done:
                continue
            theirs = self.items[peer]
            if theirs is None and self._is_next(peer):
                try:
                    theirs = self.items[peer] = self._start(peer)
                except Refusal as e:
                    raise fail(self.said.programs[peer], self.world.at[peer], str(e), rank=peer) from None
            if not theirs:
                continue
            # messages between two ranks keep their order, so the first open partner is the one
            partner = next((x for x in theirs if not x.done and x.sends is not item.sends and x.peer == r), None)
            if partner is None:
                continue
            if next(x for x in items if not x.done and x.sends is item.sends and x.peer == peer) is not item:
                continue
            if item.sends:
                self._pass(r, item, peer, partner)
            else:
                self._pass(peer, partner, r, item)
            if peer not in woken:
                woken.append(peer)
        if not all(x.done for x in items):
            return False
        self.world.at[r] += len(items)
        self.items[r] = None
        return True

    def _is_next(self, r: int) -> bool:
        at = self.world.at[r]
        return at < self.world.stop[r] and self.said.is_message[self.said.of[r].codes[at]]

    def _start(self, r: int) -> list[PendingMessage]:
        """The batch that rank r has come to; what it sends is what was there before."""
        alike, at = self.said.of[r], self.world.at[r]
        first, last = alike.spans.get(at, (at, at))
        items = []
        for k in range(at, last + 1):
            op = self.said.ops[alike.codes[k]][0]
            ins, outs = op.input_arg_names, op.output_arg_names
            if len(ins) + len(outs) != 1:
                raise Refusal(f"op {op.type} must send or receive one value")
            name = (ins or outs)[0]
            s = self.held.declared.signature(name, r)
            number = self.table.attrs_id(op.attrs)
            key = op.type, number, id(s), bool(ins)
            if key not in self._message_kinds:
                kind, _, _ = self.operators.kind(op, PerRank(self.held, r))
                self.world.meetings.check(kind, op)
                self._message_kinds.add(key)
            peer, group = op.attrs["peer"], op.attrs["group"]
            if (r, peer, group) not in self._peers:
                if not 0 <= peer < self.n or peer == r:
                    raise Refusal(f"op {op.type} names peer {peer}; ranks are 0 to {self.n - 1}, and not the rank itself")
                if peer not in self.world.meetings.members(op, r):
                    raise Refusal(f"op {op.type} names peer {peer}, which is in no set of group {group} with rank {r}")
                self._peers.add((r, peer, group))
            if ins:
                items.append(PendingMessage(op, k, True, s, self.operators.plain(s, self.held.read(name, r), r)))
            else:
                self._received(op, number, s, r)
                items.append(PendingMessage(op, k, False, s, UNDEFINED))
        return items

    def _received(self, op: Operator, number: int, signature: Signature, r: int) -> None:
        """What is received has the type that the operator says, on this rank."""
        local = self.operators.local_type(signature, r)
        key = number, local.dtype, local.shape
        if key in self._received_types:
            return
        try:
            (made,) = OPS[op.type].infer_outputs({}, op.attrs)
        except ProgramError as e:
            raise Refusal(str(e)) from None
        if made != local:
            raise Refusal(f"op {op.type} makes {made}, but %{op.output_arg_names[0]} is {local} on this rank")
        self._received_types.add(key)

    def _pass(self, a: int, send: PendingMessage, b: int, recv: PendingMessage) -> None:
        x, out = send.op.input_arg_names[0], recv.op.output_arg_names[0]
        there, here = self.table.types[send.value], self.operators.local_type(recv.signature, b)
        if there != here:
            raise Refusal(f"rank {a} sends %{x}: {there}, rank {b} receives %{out}: {here}")
        if send.op.attrs["group"] != recv.op.attrs["group"]:
            raise Refusal(f"rank {a} sends over {send.op.attrs['group']}, rank {b} receives over {recv.op.attrs['group']}")
        try:
            self.held.write(out, b, self.operators.stored(send.value, recv.signature, b))
        except Refusal as e:
            raise Refusal(f"rank {b} receives %{out} from rank {a}: {e}") from None
        if ANY in here.shape:
            if is_local(recv.signature[1]):
                raise Refusal(f"rank {b} receives %{out}, a value of its own, and its size is open")
            self._check_open(a, x, b, recv.op)
        send.done = recv.done = True
        self.count += 1

    def _check_open(self, a: int, x: str, b: int, recv: Operator) -> None:
        """A recv says how long the open axes of a value are, and so long they are where it is sent."""
        block = self.said.of[a].program.global_block()
        asked = OPS[recv.type].open_axes
        key = id(block), x, self.table.attrs_id(recv.attrs)
        if key in self._open:
            return
        axes = asked(recv.attrs) if asked is not None else []
        sizes = self._sizes.setdefault(id(block), StandInShapes(block))
        for name, axis, _ in axes:
            if name not in block.descs or not block.descs[name].is_data or axis >= block.descs[name].type.ndim:
                raise Refusal(f"op {recv.type} on rank {b} speaks of axis {axis} of {name!r}, and nothing that is fed has it")
        try:
            said = with_open_axes(block.desc(x).type, axes, sizes.shape)
        except ProgramError as e:
            raise Refusal(f"op {recv.type} on rank {b}: {e}") from None
        if said.shape != sizes.shape(x):
            listed = ", ".join(f"{times} times axis {axis} of %{name}" for name, axis, times in axes)
            raise Refusal(f"op {recv.type} on rank {b}: the open axes of %{x} from rank {a} are not known to be {listed}")
        self._open.add(key)
