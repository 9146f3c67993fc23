"""Transfers of a program for all ranks, and the messages that ranks have instead of them.

A transfer moves a value from one root of a group to another one. All ranks have their messages in the order of the transfers, so no rank
waits for ever: of the transfers that are not complete, both ranks of the first one have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.parts import Coords, entry_of, holds, local_type
from ..ir.program import Program
from ..ir.sizes import StandInShapes
from ..ir.types import ANY, TensorType
from .operator_check import check_attrs
from .refusal import Refusal
from .send_recv import is_message, reused_in_batch, wrong_open_axes

TRANSFER = "transfer"


class TransferMessages:
    """The messages of one rank for the transfers of a program for all ranks."""

    def __init__(self, common: Program, rank: int, coords: Coords):
        self.common, self.rank, self.coords = common, rank, coords
        self.descs = common.global_block().descs
        self.any = False  # has the rank such messages?

    def has_message(self, op: Operator) -> bool:
        """Does the rank send or receive the value of a transfer?"""
        group = op.attrs["group"]
        if group not in self.coords or self.coords[group][0] not in (op.attrs["root"], op.attrs["to"]):
            return False
        rest = tuple(e for e in self.descs[op.output_arg_names[0]].placement if e.group != group)
        return holds(rest, self.coords)

    def allow(self, op: Operator, found: Operator) -> bool:
        """Is `found` the rank's message for a transfer? Raises Refusal if it is, with another type than the value has on the rank."""
        self.any = True
        group = op.attrs["group"]
        sends = self.coords[group][0] == op.attrs["root"]
        members = self.common.group_ranks(group, self.rank)
        index = op.attrs["to" if sends else "root"]
        if not 0 <= index < len(members):
            raise Refusal(f"{op.to_string()}: {index} is not an index of {group}, which has {len(members)} ranks")
        wanted = {"peer": members[index], "group": group, "batch": op.attrs["batch"]}
        names = (op.input_arg_names, ()) if sends else ((), op.output_arg_names)
        if found.type != ("send" if sends else "recv") or (found.input_arg_names, found.output_arg_names) != names:
            return False
        try:
            check_attrs(opdef(found.type), found.attrs)
        except ProgramError as e:
            raise Refusal(str(e)) from None
        if any(found.attrs[k] != v for k, v in wanted.items()):
            return False
        if not sends:
            self._check_received(op, found)
        return True

    def _check_received(self, op: Operator, found: Operator) -> None:
        made, local = TensorType(found.attrs["dtype"], tuple(found.attrs["shape"])), self._type(op)
        if made != local:
            raise Refusal(f"{found.to_string()} receives {made}, and %{op.output_arg_names[0]} is {local} on this rank")
        if ANY not in local.shape and (found.attrs["like"] or found.attrs["open"]):
            raise Refusal(f"{found.to_string()} gives sizes of open axes, and {local} has none")
        if ANY in local.shape and (why := wrong_open_axes(self._sizes, op.input_arg_names[0], found, f"%{op.input_arg_names[0]}")):
            raise Refusal(f"{found.to_string()}{why}")

    def check_batches(self, ops: Sequence[Operator]) -> None:
        """Raise Refusal if a message of a rank's operators uses what another one receives that starts together with it."""
        if self.any and (reused := reused_in_batch(ops, range(len(ops)), [is_message(op) for op in ops])) is not None:
            raise Refusal(f"{ops[reused[0]].to_string()}: %{reused[1]} is received by a message that starts together with it")

    def _type(self, op: Operator) -> TensorType:
        d = self.descs[op.output_arg_names[0]]
        return local_type(d.type, d.placement, self.coords)

    @cached_property
    def _sizes(self) -> StandInShapes:
        return StandInShapes(self.common.global_block())


def transfers_follow(ops: Sequence[Operator], program: Program) -> bool:
    """Do the ranks' messages follow from these neighbouring transfers? They do if each goes between two ranks of each set of its group, no
    value is local to a rank, and none of a batch sends what another one receives."""
    descs = program.global_block().descs
    batch, received = "", set[str]()
    for op in ops:
        group, ends = op.attrs["group"], (op.attrs["root"], op.attrs["to"])
        (x,), (out,) = op.input_arg_names, op.output_arg_names
        sets = program.groups.get(group, ())
        if not sets or any(not 0 <= k < len(s) for s in sets for k in ends):
            return False
        if any(n not in descs or is_local(descs[n].placement) or (e := entry_of(descs[n].placement, group)) is None or e.root != k
               for n, k in zip((x, out), ends, strict=True)):  # fmt: skip
            return False
        if not op.attrs["batch"] or op.attrs["batch"] != batch:
            batch, received = op.attrs["batch"], set()
        if x in received or out in received:
            return False
        received.add(out)
    return True
