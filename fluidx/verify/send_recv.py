"""Messages between ranks in the proof: batches of sends and receives, their matching, and the checks of each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir.attributes import is_exact
from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.opdef import OPS, Effect, opdef
from ..ir.operator import Operator
from ..ir.sizes import StandInShapes, with_open_axes
from ..ir.types import ANY
from .operator_check import Signature, check_attrs
from .rank_values import PerRank
from .refusal import Refusal, fail
from .values import UNDEFINED

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


def is_message(op: Operator) -> bool:
    return op.type in OPS and OPS[op.type].effect is Effect.P2P


def reused_in_batch(ops: Sequence[Operator], codes: Sequence[int], message: Sequence[bool]) -> tuple[int, str] | None:
    """(index, name) of the first message of a batch that uses a variable which a recv of the same batch writes; None if there is none.

    The sends of a batch are posted first, so such a send would send the old value. An operator between messages does not always separate
    batches, because operators whose results are not needed do not run. `codes` are indices into `ops` and `message`.
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
    """True if an operator runs even if its results are not needed."""
    definition = OPS.get(op.type)
    return definition is None or definition.effect not in (Effect.PURE, Effect.RANDOM)


_PLAIN = frozenset((int, str, tuple))  # types of attributes of which each value is right; tuples must be of ints
_WHO = ("peer", "group", "batch")  # attributes of a recv that do not change the type of what it makes


class PendingMessage:
    """One send or recv that waits for its partner."""

    __slots__ = ("op", "index", "peer", "done", "value", "signature", "sends")

    def __init__(self, op: Operator, index: int, sends: bool, signature: Signature, value: int):
        self.op, self.index, self.sends, self.signature, self.value = op, index, sends, signature, value
        self.peer, self.done = op.attrs["peer"], False


class Messages:
    """The messages of one run of all ranks. `items`: the batch that each rank is in."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.rank_values, self.operators, self.rank_classes = world, world.rank_values, world.operators, world.rank_classes
        self.table, self.n = world.table, world.n
        self.count = 0
        self.items: list[list[PendingMessage] | None] = [None] * self.n
        self._received_types: set[tuple] = set()
        self._checked_messages: set[tuple] = set()
        self._peers: set[tuple[int, int, str]] = set()
        self._sizes: dict[int, StandInShapes] = {}  # by the id of a block, which the run keeps alive
        self._open: set[tuple] = set()

    def exchange(self, r: int, woken: list[int]) -> bool:
        """Match the sends and receives of rank r's batch with those of its peers. True if all of the batch are done."""
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
                    raise fail(self.rank_classes.programs[peer], self.world.separate.at[peer], str(e), rank=peer) from None
            if not theirs:
                continue
            # messages between two ranks keep their order, so the partner is the first message that is not done
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
        self.world.separate.at[r] += len(items)
        self.items[r] = None
        return True

    def _is_next(self, r: int) -> bool:
        at = self.world.separate.at[r]
        return at < self.world.separate.stop[r] and self.rank_classes.is_message[self.rank_classes.of[r].codes[at]]

    def _start(self, r: int) -> list[PendingMessage]:
        """Start the batch that rank r has reached. All sends take the values from before the batch."""
        rank_class, at = self.rank_classes.of[r], self.world.separate.at[r]
        first, last = rank_class.spans.get(at, (at, at))
        items = []
        for k in range(at, last + 1):
            op = self.rank_classes.ops[rank_class.codes[k]][0]
            ins, outs = op.input_arg_names, op.output_arg_names
            if len(ins) + len(outs) != 1:
                raise Refusal(f"op {op.type} must send or receive one value")
            name = (ins or outs)[0]
            s = self.rank_values.declared.signature(name, r)
            self._check_message(op, s, r)
            peer, group = op.attrs["peer"], op.attrs["group"]
            if (r, peer, group) not in self._peers:
                if not 0 <= peer < self.n or peer == r:
                    raise Refusal(f"op {op.type} names peer {peer}; peers are other ranks from 0 to {self.n - 1}")
                if peer not in self.world.collective_calls.members(op, r):
                    raise Refusal(f"op {op.type} names peer {peer}, which is in no set of group {group} with rank {r}")
                self._peers.add((r, peer, group))
            if ins:
                items.append(PendingMessage(op, k, True, s, self.operators.local_expression(s, self.rank_values.read(name, r), r)))
            else:
                self._received(op, s, r)
                items.append(PendingMessage(op, k, False, s, UNDEFINED))
        return items

    def _check_message(self, op: Operator, signature: Signature, r: int) -> None:
        """Check the slots, the operand and the attributes of a message, once for those with attributes of the same types."""
        attrs = op.attrs
        kinds = [*map(type, attrs.values())]
        key: tuple = op.type, id(signature), *op.inputs, *map(len, op.inputs.values()), *op.outputs, *map(len, op.outputs.values())
        known = (*key, *attrs, *kinds)
        if known in self._checked_messages and all(is_exact(v) for v, kind in zip(attrs.values(), kinds, strict=True) if kind is tuple):
            return
        definition = opdef(op.type)
        try:
            check_attrs(definition, attrs)
        except ProgramError as e:
            raise Refusal(str(e)) from None
        if key not in self._checked_messages:
            op_class, _, _ = self.operators.class_of(op, PerRank(self.rank_values, r))
            self.world.collective_calls.check(op_class, op)
            self._checked_messages.add(key)
        if _PLAIN.issuperset(kinds) and all(definition.attr_types[n] is kind for n, kind in zip(attrs, kinds, strict=True)):
            self._checked_messages.add(known)

    def _received(self, op: Operator, signature: Signature, r: int) -> None:
        """Check that the type in a recv's attributes is the local type of its variable on this rank."""
        local = self.operators.local_type(signature, r)
        key = op.type, *[item for item in op.attrs.items() if item[0] not in _WHO], local.dtype, local.shape
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
            self.rank_values.write(out, b, self.operators.as_stored(send.value, recv.signature, b))
        except Refusal as e:
            raise Refusal(f"rank {b} receives %{out} from rank {a}: {e}") from None
        if ANY in here.shape:
            if is_local(recv.signature[1]):
                raise Refusal(f"rank {b} receives %{out}, which is local to the rank and has an open size")
            self._check_open(a, x, b, recv.op)
        send.done = recv.done = True
        self.count += 1

    def _check_open(self, a: int, x: str, b: int, recv: Operator) -> None:
        """Check the sizes that a recv states for open axes against the sizes of the sent value."""
        block = self.rank_classes.of[a].program.global_block()
        key = id(block), x, self.table.attrs_id(recv.attrs)
        if key in self._open:
            return
        if why := wrong_open_axes(self._sizes.setdefault(id(block), StandInShapes(block)), x, recv, f"%{x} from rank {a}"):
            raise Refusal(f"op {recv.type} on rank {b}{why}")
        self._open.add(key)


def wrong_open_axes(sizes: StandInShapes, x: str, recv: Operator, label: str) -> str:
    """Why the sizes that a recv states for open axes are not those of the sent value x; "" if they are."""
    open_axes, block = OPS[recv.type].control.open_axes, sizes.block
    axes = open_axes(recv.attrs) if open_axes is not None else []
    for name, axis, _ in axes:
        if name not in block.descs or not block.descs[name].is_data or axis >= block.descs[name].type.ndim:
            return f" names axis {axis} of {name!r}, which is not an axis of a data variable"
    try:
        stated = with_open_axes(block.desc(x).type, axes, sizes.shape)
    except ProgramError as e:
        return f": {e}"
    if stated.shape == sizes.shape(x):
        return ""
    listed = ", ".join(f"{times} times axis {axis} of %{name}" for name, axis, times in axes)
    return f": the open axes of {label} are not known to be {listed}"
