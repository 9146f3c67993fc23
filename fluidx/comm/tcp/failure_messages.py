"""The end or the failure of a rank, as messages over a connection of each rank to rank 0, which passes them on to all."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..base import CommError
from ..process_spawner import Channel

Heard = Callable[[CommError, int | None], None]  # called with a failure; and with the rank, if its process has ended


class FailureMessages:
    """The connections of rank 0 to all others, or of another rank to rank 0. A thread reads them."""

    def __init__(self, rank: int, peers: Mapping[int, Channel]):
        self.rank, self.peers = rank, dict(peers)
        self._guard = threading.Lock()
        self._heard: Heard = lambda failure, gone: None

    def listen(self, heard: Heard) -> None:
        self._heard = heard
        for channel in self.peers.values():
            channel.sock.settimeout(None)
        threading.Thread(target=self._listen, name="fluidx-failures", daemon=True).start()

    def spread(self, text: str, rank: int | None = None, gone: bool = False) -> None:
        """Send all other ranks the reason of a failure, by way of rank 0."""
        self._send({"failed": text, "rank": self.rank if rank is None else rank, "gone": gone})

    def goodbye(self) -> None:
        """This rank ends without a failure."""
        self._send("bye")

    def _send(self, message: Any, but: int | None = None) -> None:
        with self._guard:
            for rank, channel in self.peers.items():
                if rank != but:
                    with suppress(OSError):  # it has ended
                        channel.send(message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for rank, channel in self.peers.items():
                waiting.register(channel.sock, selectors.EVENT_READ, (rank, channel))
            while waiting.get_map():
                for key, _ in waiting.select():
                    if not self._take(*key.data):
                        waiting.unregister(key.fileobj)

    def _take(self, rank: int, channel: Channel) -> bool:
        """Read a message of a rank; False if no more follow."""
        said = read(rank, channel)
        if said is None:
            return False
        if self.rank == 0:
            self._send(said, but=rank)
        self._heard(CommError(said["failed"], rank=said["rank"]), said["rank"] if said["gone"] else None)
        return said != _end_of(rank)


def read(rank: int, channel: Channel) -> dict[str, Any] | None:
    """The next message of a rank: a failure, as `spread` sends it, or None for a goodbye. A connection that ends is a failure."""
    try:
        said, _ = channel.receive()
    except (EOFError, OSError, ValueError):
        return _end_of(rank)
    return None if said == "bye" else said


def _end_of(rank: int) -> dict[str, Any]:
    return {"failed": f"rank {rank}: its process has ended", "rank": rank, "gone": True}
