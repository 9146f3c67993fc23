"""The programs of a launched script: each process makes those of its own ranks, and all compare what they have."""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

from ..._version import __version__
from ...comm.launched_rank import LaunchedRank
from ...ir.constants import Array
from ...ir.errors import ExecutionError
from ...ir.parser import parse_pair
from ...ir.program import ProgramPair
from ..plan import allocation
from .agreement import difference, grouped, listed, parts
from .common_owners import PairForAllRanks
from .launched_script import LaunchedScript
from .published_rank import address_of, array_at
from .rank_programs import RankPrograms, rank_programs


class LaunchedPrograms:
    """The programs that the processes of a launched script give to their executors."""

    def __init__(self, script: LaunchedScript, given: Any):
        self.script, self.given = script, _pairs_of_all(script.member, given) if isinstance(given, ProgramPair) else given
        self._compared: PairForAllRanks | None = None  # the programs for all ranks, if the rank programs are known to follow from them

    def taken(self) -> RankPrograms:
        """The programs of every rank. Where the rank programs follow from the programs for all ranks, these stand for those of the other
        ranks."""
        n, rank, given = self.script.member.world_size, self.script.member.rank, self.given
        if getattr(given, "world_size", 0) != n or not hasattr(given, "common_programs"):
            return self._each()  # also where a process holds several ranks
        self._compared = common = given.common_programs(rank)
        if common is None or not common.stand_for_ranks:
            return self._each()
        return RankPrograms([common.rank_pair(r) if r == rank else common.pair for r in range(n)], (rank,), common)

    def _each(self) -> RankPrograms:
        pairs = rank_programs(self.given)
        return RankPrograms(pairs, [r for r in self.script.own if r < len(pairs)])

    def compared(self, programs: RankPrograms, uneven: str, device: str) -> RankPrograms:
        """The programs, if those of all processes are equal. The programs of each rank are compared only if those for all ranks differ, or
        if a process has programs that may not follow from them.

        Raises ExecutionError if processes have different programs, options or versions of fluidx."""
        self.script.agree(("make an executor",))
        digest = "" if self._compared is None else self._compared.digest
        said = self.script.gather([__version__, digest, uneven, device])
        for k, what in ((0, "fluidx"), (2, "uneven="), (3, "FLUIDX_DEVICE")):
            if len(found := grouped([one[k] for one in said])) > 1:
                _refuse("; ".join(f"{what} {which} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}" for which, ranks in found))
        if digest and all(one[1] == digest for one in said):
            return programs
        if programs.common is not None:
            programs = self._each()
        self._compare_each(programs)
        return programs

    def _compare_each(self, programs: RankPrograms) -> None:
        """Raise ExecutionError if processes have different programs for some rank."""
        pairs = [programs.pair(r) for r in range(programs.world_size)]
        digests = [hashlib.sha256(str(pair).encode()).hexdigest() for pair in pairs]
        said = self.script.gather(digests)
        other = next((r for r in range(len(pairs)) if len({one[r] for one in said}) > 1), None)
        if other is not None:
            said = self.script.gather(parts(pairs[other]))
            _refuse(difference(other, said))


def _refuse(text: str) -> NoReturn:
    """Raise ExecutionError. All ranks find the same difference, so all raise."""
    raise ExecutionError(f"the ranks do not run the same program: {text}")


def _pairs_of_all(member: LaunchedRank, pair: ProgramPair) -> list[ProgramPair]:
    """The programs of all ranks, exchanged among ranks that each have only their own."""
    constants = {digest: allocation.copied(c.values) for digest, c in pair.constants().items()}
    if pair.main.rank not in (None, member.rank):
        raise ExecutionError(f"{pair.main.label()} is the program of rank {pair.main.rank}, but this process is rank {member.rank}")
    said = member.gather([str(pair), {digest: address_of(a) for digest, a in constants.items()}])
    there = [
        constants if r == member.rank else {d: array_at(member.view_at, address) for d, address in addresses.items()}
        for r, (_, addresses) in enumerate(said)
    ]
    member.exchange(list(constants.values()), [list(of.values()) for of in there])
    return [
        pair if r == member.rank else parse_pair(text, {digest: Array(a) for digest, a in there[r].items()})
        for r, (text, _) in enumerate(said)
    ]
