"""The seconds of the communicator's collectives, from the figures of a machine: inside a host, between hosts, and over shared cards.

Every form is a latency plus a time of bytes, and an all_reduce takes the best of its forms, as NCCL chooses. Among p ranks, for n bytes:
a ring is a reduce_scatter and an all_gather, 2 (p-1) messages and 2 (p-1)/p n bytes; a double binary tree is 4 log2 p messages and 2 n
bytes; a binary tree is 2 log2 p messages with n bytes each; a chain to a root or from it is p-1 messages and n bytes. Over hosts, the
part inside the hosts and the part between them overlap, slice by slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log2
from typing import NamedTuple

from ..hardware.records import Figure, Hardware, LinkFigures
from ..ir.errors import FluidxError, nearest
from ..ops.comm.volume import share
from .costs import NOTHING, CostEstimate, tables
from .measured_collectives import MEASURED_OP, MeasuredCollectives

SLICE = 4 << 20  # bytes that are inside a host before the first of them are between hosts: the buffers of NCCL, 4 MiB
PIECE = 1 << 19  # bytes of a rank's part that are added at a time, where ranks send messages
METHODS = ("all_reduce", "reduce", "spread", "exchange", "adaptive", "to_root", "from_root", "root_parts")
ROOTED = {"to_root": "reduce", "from_root": "spread", "root_parts": "exchange"}  # the bytes that those with a root send are those of these


class GroupShape(NamedTuple):
    """Where the ranks of a group are: how many there are, on how many hosts, and the most and the fewest on one of these.

    >>> GroupShape.of([0, 1, 2, 8], devices_per_host=8)
    GroupShape(ranks=4, hosts=2, most=3, fewest=1)
    """

    ranks: int
    hosts: int
    most: int
    fewest: int

    @staticmethod
    def of(ranks: Sequence[int], devices_per_host: int) -> GroupShape:
        on = Counter(r // devices_per_host for r in ranks)
        return GroupShape(len(ranks), len(on), max(on.values(), default=0), min(on.values(), default=0))


class CollectiveTimes:
    """The seconds of collectives on a machine, whose hosts are filled with `devices_per_host` ranks each (without it, one on each device).

    >>> from fluidx.hardware import load
    >>> times = CollectiveTimes(load("dgx-v100"))
    >>> [round(times.seconds("all_reduce", range(n), 25 << 20) * 1e6) for n in (1, 2, 4, 8)]
    [0, 1188, 497, 398]
    """

    def __init__(self, hardware: Hardware, devices_per_host: int | None = None):
        self.hardware = hardware
        self.devices_per_host = devices_per_host or hardware.devices_per_host
        self._known: dict[tuple, float] = {}
        self._curves = None if hardware.measured is None else MeasuredCollectives(tables(hardware), hardware.name)
        self._shapes: dict[int, tuple[Sequence[int], GroupShape]] = {}  # by the identity of groups that cannot change

    def seconds(self, method: str, ranks: Sequence[int], nbytes: float, sharing: int = 1) -> float:
        """The time of a collective among `ranks`. `method` is the `algorithm_method` of its op, `nbytes` the size of the whole value.
        `sharing`: how many groups use the network cards of a host at the same time, this one included.

        >>> from fluidx.hardware import load
        >>> times, rail = CollectiveTimes(load("dgx-v100")), (0, 8, 16, 24)
        >>> [f"{times.seconds('all_reduce', rail, 1 << 28, sharing) * 1e3:.0f} ms" for sharing in (1, 8)]
        ['35 ms', '71 ms']
        """
        shape = self._shape(ranks)
        key = method, shape, nbytes, sharing
        if key not in self._known:
            self._known[key] = self._seconds(method, shape, nbytes, sharing)
        return self._known[key]

    def estimate(self, method: str, ranks: Sequence[int], nbytes: float, sharing: int = 1) -> CostEstimate:
        """The same with its spread and source."""
        if len(ranks) <= 1:
            return NOTHING
        seconds = self.seconds(method, ranks, nbytes, sharing)
        if (measured := self._measured(method, self._shape(ranks), nbytes)) is not None:
            return measured._replace(seconds=seconds)
        return CostEstimate(seconds, self.spread(ranks), "sheet")

    def spread(self, ranks: Sequence[int]) -> float:
        """The relative spread of these times: that of the bandwidth that bounds them."""
        shape = self._shape(ranks)
        inside, between = self.hardware.inside, self.hardware.between
        if shape.hosts > 1 and between is not None:
            return between.bandwidth.spread
        return _nearest_figure(inside.by_group, shape.ranks, inside.bandwidth).spread

    def _shape(self, ranks: Sequence[int]) -> GroupShape:
        if not isinstance(ranks, tuple):
            return GroupShape.of(ranks, self.devices_per_host)
        if id(ranks) not in self._shapes:
            self._shapes[id(ranks)] = ranks, GroupShape.of(ranks, self.devices_per_host)  # held, so that its identity stays its own
        return self._shapes[id(ranks)][1]

    def sharing(self, groups: Sequence[Sequence[int]]) -> int:
        """How many of these groups, at most, use the network cards of one host, or a link that all share.

        >>> from fluidx.hardware import load
        >>> times = CollectiveTimes(load("dgx-v100"))
        >>> times.sharing([range(r, 32, 8) for r in range(8)]), times.sharing([range(8), range(8, 16)])
        (8, 1)
        """
        hosts = [{r // self.devices_per_host for r in group} for group in groups]
        apart = max(map(len, hosts), default=1) > 1
        if apart and self._shared_link(2) is not None:
            return sum(len(on) > 1 for on in hosts)
        if not apart and self._shared_link(1) is None:
            return 1
        busy = (on for on, group in zip(hosts, groups, strict=True) if len(on) > 1 or (not apart and len(group) > 1))
        return max(Counter(h for on in busy for h in on).values(), default=1)

    def message(self, ranks: int) -> Callable[[float], float] | None:
        """The seconds of a message inside a host of so many ranks, by its bytes; None if they were not measured."""
        return None if self._curves is None else self._curves.message(ranks)

    def call(self, ranks: Sequence[int]) -> float:
        """The seconds in which the messages of a call without data are on a link that all ranks share; 0 if there is no such link."""
        shape = self._shape(ranks)
        links = self._shared_link(shape.hosts)
        ends = shape.hosts if shape.hosts > 1 else shape.ranks
        return 0.0 if links is None or links.shared is None else ends * (ends - 1) * links.call_bytes / links.shared.value

    def _measured(self, method: str, shape: GroupShape, nbytes: float) -> CostEstimate | None:
        """The time on the curve of a calibration, which has those inside a host."""
        if self._curves is None or shape.hosts > 1 or method not in MEASURED_OP:
            return None
        return self._curves.estimate(method, shape.ranks, nbytes)

    def _shared_link(self, hosts: int) -> LinkFigures | None:
        """The figures of the links that groups on so many hosts use, if all messages share one of them."""
        links = self.hardware.inside if hosts <= 1 else self.hardware.between
        return None if links is None or links.shared is None else links

    def _seconds(self, method: str, shape: GroupShape, nbytes: float, sharing: int) -> float:
        """The time that the ranks need, and beside it that of the bytes of all ranks on a link that they share. A piece is received and
        added before it is sent on: so much of the shorter time comes beside the longer one."""
        own = self._without_limit(method, shape, nbytes, sharing)
        links = self._shared_link(shape.hosts)
        if links is None or links.shared is None or shape.ranks <= 1:
            return own
        rate = links.shared.value / sharing
        ends, each = (shape.hosts, shape.most if method == "adaptive" else 1) if shape.hosts > 1 else (shape.ranks, 1)
        least = self._without_limit(method, shape, 0, sharing) + ends * (ends - 1) * links.call_bytes / rate
        if not nbytes:
            return least
        # ranks that send messages add parts of a sum for a root on all ranks, and send it the parts
        sent = share(ROOTED.get(method, method), ends) * (1 + 1 / ends if method == "to_root" else 1)
        shared = each * ends * sent * nbytes / rate
        own = max(0.0, own - self._without_limit(method, shape, 0, sharing))
        return least + max(own, shared) + min(own, shared) * min(1.0, ends * PIECE / nbytes)

    def _without_limit(self, method: str, shape: GroupShape, nbytes: float, sharing: int) -> float:
        if method not in METHODS:
            raise FluidxError(f"no time is known for collectives of method {method!r}; {nearest(method, METHODS, 'there are')}")
        if shape.ranks <= 1:
            return 0.0
        if (measured := self._measured(method, shape, nbytes)) is not None:
            return measured.seconds
        if shape.hosts > 1 and self.hardware.between is None:
            raise FluidxError(
                f"a group of {shape.ranks} ranks is on {shape.hosts} hosts, and {self.hardware.name} has no network; "
                f"give the network's figures in its file: between"
            )
        forms = _Forms(self.hardware, shape, nbytes, sharing, self.devices_per_host)
        if method == "all_reduce":
            return min(forms.all_reduce())
        if method in ("reduce", "spread"):
            return forms.ring() / 2
        if method == "root_parts":
            return forms.root_parts()
        if method in ROOTED:
            return forms.chain()
        return forms.exchange() if method == "exchange" else forms.adaptive()


class _Forms:
    """The times that a collective may take among the ranks of a group: g on each of k hosts."""

    def __init__(self, hardware: Hardware, shape: GroupShape, nbytes: float, sharing: int, devices_per_host: int):
        self.shape, self.nbytes = shape, nbytes
        self.g, self.k = shape.most, shape.hosts
        inside = hardware.inside
        self.base = (inside.collective_latency or inside.latency).value
        self.hop, self.rate = inside.latency.value, inside.ring_bandwidth(self.g)
        self.switch = inside.in_switch
        self.far, self.out, self.card = 0.0, float("inf"), float("inf")  # a rank's card, and all that a host's ranks use
        if (between := hardware.between) is not None:
            card, cards = between.bandwidth.value, between.count
            self.far, self.card = between.latency.value, card * max(1.0, cards / devices_per_host)
            self.out = card * min(shape.fewest * max(1.0, cards / devices_per_host), cards / sharing)
            if between.by_group:
                self.out *= min(1.0, between.ring_bandwidth(self.k) / (card * cards))

    def all_reduce(self) -> Iterator[float]:
        """The times of the forms of all_reduce."""
        g, k, n = self.g, self.k, self.nbytes
        deep, wide = _depth(g), _depth(k)
        yield self.ring()
        latency, twice = deep * self.hop + wide * self.far, 2.0 if k > 2 else 1.0
        yield self.base + 4 * latency + self._overlapped((g > 1) * 2 * n / self.rate, (k > 1) * twice * n / self.out)
        yield self.base + 2 * latency + 2 * n * (deep / self.rate + wide / self.out)
        if self.switch is not None and g > 1:
            within = _ring_bytes(g, n) / self.switch.bandwidth.value
            yield self.switch.latency.value + 2 * wide * self.far + self._overlapped(2 * within, 2 * _ring_bytes(k, n) / self.out)

    def ring(self) -> float:
        """A reduce_scatter and an all_gather."""
        latency = 2 * ((self.g - 1) * self.hop + (self.k - 1) * self.far)
        n, within = self.nbytes, 2 * _ring_bytes(self.g, self.nbytes) / self.rate
        return self.base + latency + self._overlapped(within, 2 * _ring_bytes(self.k, n) / self.out)

    def chain(self) -> float:
        """A sum passes from rank to rank to the root, or a value from there to the last: every link on the way carries all bytes."""
        latency = self.base / 2 + (self.g - 1) * self.hop + (self.k - 1) * self.far
        return latency + self._overlapped((self.g > 1) * self.nbytes / self.rate, (self.k > 1) * self.nbytes / self.out)

    def exchange(self) -> float:
        """Every rank sends a part to every other."""
        p, g, n = self.shape.ranks, self.g, self.nbytes
        within, over = (g - 1) * n / p**2 / self.rate, g * (p - g) * n / p**2 / self.out
        return self.base + (g - 1) * self.hop + (self.k - 1) * self.far + max(within, over)

    def root_parts(self) -> float:
        """A root sends each rank its part, or gets it from there: all parts but its own are on the root's link, and on its card."""
        p, g, n = self.shape.ranks, self.g, self.nbytes
        within, over = (g - 1) * n / p / self.rate, (p - g) * n / p / min(self.card, self.out)
        return self.base + (g - 1) * self.hop + (self.k - 1) * self.far + max(within, over)

    def adaptive(self) -> float:
        """Pairs exchange whole values, in rounds: between hosts all ranks of a host at the same time."""
        rounds = share("adaptive", self.shape.ranks)
        over = min(rounds, _depth(self.k))
        within = rounds - over
        return self.base + within * (self.hop + self.nbytes / self.rate) + over * (self.far + self.g * self.nbytes / self.out)

    def _overlapped(self, within: float, over: float) -> float:
        """The time of bytes inside hosts and between them: the longer one, and the shorter one until the first slice is through."""
        return max(within, over) + min(within, over) * min(1.0, SLICE / self.nbytes if self.nbytes else 1.0)


def _ring_bytes(n: int, nbytes: float) -> float:
    return (n - 1) / n * nbytes


def _depth(n: int) -> float:
    return log2(n) if n > 1 else 0.0


def _nearest_figure(by_group: Mapping[int, Figure], n: int, otherwise: Figure) -> Figure:
    return min(by_group.items(), key=lambda item: abs(item[0] - n))[1] if by_group else otherwise
