"""Proof of algorithms of collectives: the rounds of sends and receives give every rank the result of the collective.

The proof is symbolic: a block on a rank is represented by the set of ranks whose terms it sums. It holds for values of every type and size,
so one proof for each number of ranks is enough for all collectives with that algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import itemgetter

from .refusal import Refusal

# (source, target, start, stop, add): blocks [start, stop) are sent; the target adds them to its own, or replaces its own by them
Rounds = Iterable[Iterable[Sequence]]


def prove_rounds(collective: str, world_size: int, rounds: Rounds, filled: Collection[int] | None = None) -> Refusal | None:
    """None if the rounds give the result of a collective of `world_size` ranks.

    Otherwise the Refusal that names the wrong transfer, or the rank and the block with a wrong result.

    `collective` is the `algorithm_method` of an op: "reduce" (terms on all ranks, the sum of block k to rank k), "spread" (block k from
    rank k to all), "all_reduce", "exchange" (n*n blocks, k*n + j from rank k to rank j) or "adaptive" (adaptive sums). In a round all
    sends come first: a transfer sends the blocks as they were before the round. `filled`: the blocks that have elements, for an algorithm
    that cuts a value into fewer blocks than ranks (Algorithm.cut); other blocks are not checked. Adaptive sums fill all blocks.

    >>> prove_rounds("reduce", 2, [[(0, 1, 1, 2, True), (1, 0, 0, 1, True)]])
    >>> print(prove_rounds("reduce", 2, [[(0, 1, 1, 2, True)]]))
    at the end, rank 0 has of block 0 the term of rank 0; rank 1's is missing
    """
    n = world_size
    if collective not in _PROOFS:
        return Refusal(f"there is no collective {collective!r}; there are: {', '.join(_PROOFS)}")
    run = _PROOFS[collective](n)
    try:
        run.ignore(() if filled is None else set(range(run.blocks)) - {*filled})
        for k, transfers in enumerate(rounds):
            run.round(k + 1, [_checked(t, k + 1, n, run.blocks) for t in transfers])
        run.finish()
    except Refusal as e:
        return e
    return None


def ranges_of(method: str, marks: Sequence[int], size: int, me: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The elements of a value of `size` that rank `me` of n has before a collective, and those that it gets, by the bounds of the blocks.

    >>> ranges_of("reduce", (0, 3, 5), 5, 1, 2), ranges_of("exchange", (0, 3, 5, 5, 5), 5, 1, 2)
    (((0, 5), (3, 5)), ((5, 5), (3, 5)))
    """
    if method == "exchange":
        got = [k for k in range(me, n * n, n) if marks[k] < marks[k + 1]]
        return (marks[me * n], marks[me * n + n]), (marks[got[0]], marks[got[-1] + 1]) if got else (0, 0)
    whole, own = (0, size), (marks[me], marks[me + 1])
    return own if method == "spread" else whole, own if method == "reduce" else whole


def shifted_rounds_hold(collective: str, n: int, rounds: Iterable[Iterable[Sequence]]) -> bool:
    """True if rounds of transfers give the result of a collective, for rounds that are equal on all ranks up to a shift.

    A round is given by its first transfers; each stands for n transfers, of which the k-th adds k to its ranks and its block, modulo n.
    Then the blocks of each rank are those of rank 0, shifted, so it is enough to track rank 0.

    >>> shifted_rounds_hold("reduce", 3, [[(1, 2, 0, 1, True)], [(2, 0, 0, 1, True)]])
    True
    """
    full = (1 << n) - 1
    spread = collective == "spread"
    if not spread and collective not in ("reduce", "all_reduce"):
        return False
    have = [1, *[0] * (n - 1)] if spread else [1] * n  # for each block on rank 0: the ranks whose terms are in it, as bits
    for firsts in rounds:
        before, arrived = [*have], dict[int, bool]()  # block -> whether it was added
        for source, target, block, stop, add in firsts:
            if stop != block + 1 or not all(0 <= v < n for v in (source, target, block)) or source == target:
                return False
            away, b = (source - target) % n, (block - target) % n  # the rank that sends to rank 0, and the block
            bits = before[(b - away) % n]
            sent = (bits << away | bits >> n - away) & full
            if not sent or add and (not have[b] or have[b] & sent) or b in arrived and not (add and arrived[b]):
                return False
            have[b], arrived[b] = have[b] | sent if add else sent, add
    if collective == "reduce":
        return have[0] == full
    return all(bits == (1 << b if spread else full) for b, bits in enumerate(have))


def _hold(collective: str, n: int, rounds: Sequence[Iterable[Sequence]]) -> bool:
    """True if rounds give the result of a collective among n ranks. Rounds with `firsts` and `n` consist of shifted transfers."""
    firsts = [getattr(r, "firsts", None) if getattr(r, "n", None) == n else None for r in rounds]
    if all(f is not None for f in firsts) and shifted_rounds_hold(collective, n, firsts):  # type: ignore[arg-type]
        return True
    return prove_rounds(collective, n, rounds) is None


# collective -> those of the rounds inside hosts, between hosts, and inside hosts again; "" if there are none
_LEVELS = {"reduce": ("reduce", "reduce", ""), "spread": ("", "spread", "spread"), "all_reduce": ("reduce", "all_reduce", "spread")}


def two_level_rounds_hold(collective: str, hosts: int, devices: int, rounds: Sequence[tuple[bool, Iterable[Sequence]]]) -> bool:
    """True if rounds inside hosts and between hosts give the result of a collective. Device l of host h is rank h*devices + l.

    `rounds` are (True, a round among the devices of a host) or (False, a round among hosts). All hosts run the former at once, where
    block l is the blocks j*devices + l of all hosts j; devices of all numbers l run the latter at once, where block j is the block
    j*devices + l. The whole follows from the two parts, because the blocks of one part are the ranks of the other:

    - After a reduce inside hosts, device l of host h has the terms of the host's ranks, once, of all blocks j*devices + l.
    - These are the terms of host h for the rounds between devices l, which use no other blocks. A reduce between hosts leaves the terms of
      all hosts, once, of block h*devices + l there; an all_reduce leaves those of all blocks j*devices + l.
    - A spread is the same in the other order. It only replaces blocks, since its proof allows no sum of a block with itself, and it sends
      only blocks that a rank owns or has received. So blocks that an earlier reduce has left do not matter.

    >>> adds, sends = [(1, 0, 0, 1, True), (0, 1, 1, 2, True)], [(0, 1, 0, 1, False), (1, 0, 1, 2, False)]
    >>> two_level_rounds_hold("reduce", 2, 2, [(True, adds), (False, adds)])
    True
    >>> two_level_rounds_hold("reduce", 2, 2, [(True, adds), (False, sends)])
    False
    """
    if collective not in _LEVELS:
        return False
    parts: list[list[Iterable[Sequence]]] = [[], [], []]
    at = 0
    for inside, r in rounds:
        if not inside and at == 2:
            return False
        at = (2 if at else 0) if inside else 1
        parts[at].append(r)
    sizes = devices, hosts, devices
    return all(_hold(of, n, part) if of else not part for of, n, part in zip(_LEVELS[collective], sizes, parts, strict=True))


def _checked(transfer: Sequence, number: int, n: int, blocks: int) -> Sequence:
    try:
        source, target, start, stop, add = transfer
    except (TypeError, ValueError):
        raise Refusal(f"round {number}: a transfer is (source, target, start, stop, add), found {transfer!r}") from None
    if not (type(source) is type(target) is type(start) is type(stop) is int and type(add) is bool):
        raise Refusal(f"round {number}: a transfer is four ints and a bool, found {tuple(transfer)!r}")
    if not (0 <= source < n and 0 <= target < n):
        raise Refusal(f"{_show(transfer, number)}: ranks are 0 to {n - 1}")
    if source == target:
        raise Refusal(f"{_show(transfer, number)}: a rank sends to other ranks")
    if not 0 <= start < stop <= blocks:
        raise Refusal(f"{_show(transfer, number)}: blocks are 0 to {blocks - 1}, and a transfer has one or more")
    return transfer


def _show(transfer: Sequence, number: int) -> str:
    source, target, start, stop, _ = transfer
    what = f"block {start}" if stop == start + 1 else f"blocks {start} to {stop - 1}"
    return f"round {number}, {what} from rank {source} to rank {target}"


def _arrivals(transfers: Sequence[Sequence], number: int) -> dict[int, list[Sequence]]:
    """The transfers of a round by target. Raises Refusal if one replaces a block that another one sends too."""
    found: dict[int, list[Sequence]] = {}
    for t in transfers:
        found.setdefault(t[1], []).append(t)
    for mine in found.values():
        if not _replaces_a_sent_block(mine):
            continue
        for k, t in enumerate(mine):
            clash = next((o for j, o in enumerate(mine) if j != k and not (t[4] and o[4]) and o[2] < t[3] and t[2] < o[3]), None)
            if clash is not None:
                raise Refusal(f"{_show(t, number)}: rank {clash[0]} sends it the same block in this round, and one is lost")
    return found


def _replaces_a_sent_block(mine: Sequence[Sequence]) -> bool:
    """True if one of these transfers replaces a block that another one sends too."""
    stop = kept = 0  # ends of the blocks of earlier transfers: of all, and of those that replace
    for t in sorted(mine, key=itemgetter(2)) if len(mine) > 1 else ():
        if t[2] < (kept if t[4] else stop):
            return True
        stop, kept = max(stop, t[3]), kept if t[4] else max(kept, t[3])
    return False


class _Sums:
    """The blocks of every rank: the ranks whose terms are in a block, as bits of an int; 0 if the rank does not have it."""

    def __init__(self, n: int, operand: Callable[[int, int], int], due: Callable[[int, int], int], blocks: int | None = None):
        self.n, self.blocks = n, n if blocks is None else blocks
        self.full = (1 << n) - 1
        self.due = due
        self.have = [[operand(rank, b) for b in range(self.blocks)] for rank in range(n)]
        self.ignored: Collection[int] = ()

    def ignore(self, blocks: Collection[int]) -> None:
        self.ignored = blocks
        for have in self.have:
            for b in blocks:
                have[b] = self.full

    def round(self, number: int, transfers: Sequence[Sequence]) -> None:
        sent = {id(t): self.have[t[0]][t[2] : t[3]] for t in transfers}
        for t in transfers:
            if 0 in sent[id(t)]:
                raise Refusal(f"{_show(t, number)}: rank {t[0]} does not have block {t[2] + sent[id(t)].index(0)}")
        for target, mine in _arrivals(transfers, number).items():
            have = self.have[target]
            for t in mine:
                start, stop, add = t[2:]
                if not add:
                    have[start:stop] = sent[id(t)]
                    continue
                for b, new in enumerate(sent[id(t)], start):
                    old = have[b]
                    if b in self.ignored:
                        continue
                    if old & new:
                        raise Refusal(f"{_show(t, number)}: block {b} gets the term of rank {_ranks(old & new)[0]} a second time")
                    if not old:
                        raise Refusal(f"{_show(t, number)}: rank {target} has nothing of block {b} to add it to")
                    have[b] = self.full if (sum_ := old | new) == self.full else sum_

    def finish(self) -> None:
        for rank, have in enumerate(self.have):
            for b, found in enumerate(have):
                due = self.due(rank, b)
                if due and found != due and b not in self.ignored:
                    raise Refusal(f"at the end, rank {rank} has of block {b} {_terms_text(found)}{_missing_text(found, due)}")


def _ranks(bits: int) -> list[int]:
    return [k for k in range(bits.bit_length()) if bits >> k & 1]


def _terms_text(bits: int) -> str:
    ranks = _ranks(bits)
    if not ranks:
        return "nothing"
    return f"the term of rank {ranks[0]}" if len(ranks) == 1 else f"the terms of ranks {', '.join(map(str, ranks))}"


def _missing_text(found: int, due: int) -> str:
    missing = _ranks(due & ~found)
    return f"; rank {missing[0]}'s is missing" if missing else ""


class _Adaptive:
    """Adaptive sums: two values of neighbouring ranks are combined block by block.

    Block n represents the products of two values, which are summed over all blocks before the values are combined. The sum of ranks lo to
    hi-1 is (lo, hi).
    """

    def __init__(self, n: int):
        self.n, self.blocks = n, n + 1
        self.have: list[list[tuple[int, int] | None]] = [[(rank, rank + 1)] * n for rank in range(n)]
        self.pair: list[tuple[int, int, int] | None] = [None] * n  # the two values to combine on a rank: (lo, mid, hi)
        self.pair_blocks: list[list[int]] = [[] for _ in range(n)]  # the blocks of the two values
        self.products = [0] * n  # the blocks that are in their products, as bits
        self.combinations, self.rounds_left = [0] * n, [0] * n

    def ignore(self, blocks: Collection[int]) -> None:
        if blocks:
            raise Refusal("adaptive sums fill all blocks")

    def round(self, number: int, transfers: Sequence[Sequence]) -> None:
        sent = {id(t): self._sent(t, number) for t in transfers}
        for target, mine in _arrivals(transfers, number).items():
            adds = mine[0][4]
            if any(t[4] != adds or (t[2] < self.n) != (mine[0][2] < self.n) for t in mine):
                raise Refusal(f"{_show(mine[0], number)}: rank {target} must receive values, products and results in different rounds")
            if not adds:
                for t in mine:
                    if self.rounds_left[target]:
                        raise Refusal(f"{_show(t, number)}: rank {target} waits for products")
                    self.have[target][t[2] : t[3]] = sent[id(t)][0]
                continue
            if mine[0][2] < self.n:
                self._pair(target, [(t, *sent[id(t)]) for t in mine], number)
            else:
                for t in mine:
                    _, pair, products = sent[id(t)]
                    self._add(target, t, pair, products, number)
                self.rounds_left[target] -= 1
            if not self.rounds_left[target]:
                self._combine(target, number)

    def _sent(self, t: Sequence, number: int) -> tuple:
        """(sent blocks, pair of values, blocks in their products)."""
        source, start, stop, pair = t[0], t[2], t[3], self.pair[t[0]]
        if stop > self.n:
            if start < self.n or pair is None:
                raise Refusal(f"{_show(t, number)}: block {self.n} is the products, which must be sent alone, and by a rank that has them")
            return (), pair, self.products[source]
        blocks = self.have[source][start:stop]
        if None in blocks:
            raise Refusal(f"{_show(t, number)}: rank {source} waits for the products of block {start + blocks.index(None)}")
        return blocks, None, 0

    def _pair(self, target: int, mine: Sequence[tuple], number: int) -> None:
        have = self.have[target]
        self.combinations[target] += 1
        self.pair_blocks[target], self.products[target], self.pair[target] = [], 0, None
        for t, blocks, _, _ in mine:
            for b, theirs in enumerate(blocks, t[2]):
                own = have[b]
                if own is None:
                    raise Refusal(f"{_show(t, number)}: rank {target} has nothing of block {b}, or receives it twice")
                (lo, mid), (begin, hi) = sorted((own, theirs))
                if mid != begin or mid - lo != hi - mid or lo % (hi - lo):
                    raise Refusal(f"{_show(t, number)}: values of ranks {lo} to {mid - 1} and {begin} to {hi - 1} are not neighbours")
                if self.pair[target] not in (None, (lo, mid, hi)):
                    raise Refusal(f"{_show(t, number)}: different blocks combine different values")
                self.pair[target] = lo, mid, hi
                self.pair_blocks[target].append(b)
                self.products[target] |= 1 << b
                have[b] = None
        whole = (mine[0][0][2], mine[-1][0][3]) == (0, self.n)
        self.rounds_left[target] = 0 if whole else self.combinations[target]

    def _add(self, target: int, t: Sequence, pair: tuple[int, int, int], blocks: int, number: int) -> None:
        if self.pair[target] is None or not self.rounds_left[target]:
            raise Refusal(f"{_show(t, number)}: rank {target} does not wait for products")
        if self.pair[target] != pair:
            raise Refusal(f"{_show(t, number)}: the products are of other values")
        if twice := self.products[target] & blocks:
            raise Refusal(f"{_show(t, number)}: the products of block {_ranks(twice)[0]} come a second time")
        self.products[target] |= blocks

    def _combine(self, target: int, number: int) -> None:
        pair = self.pair[target]
        missing = _ranks((1 << self.n) - 1 & ~self.products[target])
        if missing or pair is None:
            raise Refusal(f"round {number}, rank {target} combines two values without the products of block {missing[0] if missing else 0}")
        for b in self.pair_blocks[target]:
            self.have[target][b] = pair[0], pair[2]

    def finish(self) -> None:
        for rank, have in enumerate(self.have):
            for b, found in enumerate(have):
                if found != (0, self.n):
                    said = "no sum yet" if found is None else f"the adaptive sum of ranks {found[0]} to {found[1] - 1}"
                    raise Refusal(f"at the end, rank {rank} has of block {b} {said}, not of all {self.n}")


def _terms(n: int, at_owner: bool) -> _Sums:
    full = (1 << n) - 1
    return _Sums(n, lambda rank, b: 1 << rank, lambda rank, b: full if not at_owner or rank == b else 0)


def _spread(n: int) -> _Sums:
    return _Sums(n, lambda rank, b: 1 << b if rank == b else 0, lambda rank, b: 1 << b)


def _exchange(n: int) -> _Sums:
    return _Sums(n, lambda rank, b: 1 << rank if b // n == rank else 0, lambda rank, b: 1 << b // n if b % n == rank else 0, n * n)


_PROOFS: dict[str, Callable[[int], _Sums | _Adaptive]] = {
    "reduce": partial(_terms, at_owner=True),
    "spread": _spread,
    "all_reduce": partial(_terms, at_owner=False),
    "exchange": _exchange,
    "adaptive": _Adaptive,
}
