"""Make the send and recv operators by which a rank carries out another operator."""

from __future__ import annotations

from typing import Any

from ...ir.make_op import filled, make_op
from ...ir.operator import Operator
from ...ir.types import TensorType


def send(op: Operator, x: str, **attrs: Any) -> Operator:
    """Send a value for an operator. `attrs` are the peer, the group and the batch of messages that start together."""
    return make_op("send", (x,), (), filled("send", attrs), op.site)


def recv(op: Operator, out: str, t: TensorType, **attrs: Any) -> Operator:
    """Receive a value of a type for an operator. `attrs` are as in `send`, and the sizes of open axes."""
    return make_op("recv", (), (out,), filled("recv", {**attrs, "shape": t.shape, "dtype": t.dtype}), op.site)
