"""Carry: choose the algorithm of each collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir import flow
from ...ir.errors import TranspileError, nearest
from ...ir.opdef import opdef
from ...ir.operator import Frozen, Operator, op_types
from ...ir.parts import Coords, coords_of, local_type
from ...ir.pass_base import Job, Pass
from ...ir.program import Block, Program, ProgramPair
from ...ir.types import Placement, TensorType
from ..algorithms import SEQUENCES, able, algorithm
from ..algorithms.selection import AlgorithmTable
from ..cluster import NODE, RAIL, SERVERS
from ..lowering.choose_algorithm import BETWEEN_HOSTS, flat, with_algorithm, without_algorithm
from ..lowering.write_algorithm import others


@dataclass(frozen=True)
class Carry(Pass):
    """Give collectives without an algorithm this one: a name, "auto" for the cheapest, or "" to leave them to the communicator. A table
    chooses by collective, group and size.

    On several hosts, collectives inside a host are left to the communicator, unless "auto" finds a cheaper algorithm there. Between hosts,
    values always travel by send and recv: by default with ring, and adaptive sums with halving_doubling. A collective that no algorithm can
    carry out (a maximum, a value of open size, one in a loop) is left to the communicator, and explain() says why. So is one that none of
    the candidates of "auto" can carry out, and one that the named algorithm cannot carry out while it can carry out others. `types`: the
    collectives that the choice is for; () for all.
    """

    algorithm: str | AlgorithmTable = ""
    types: tuple[str, ...] = ()
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        name = flat(self.algorithm)
        if isinstance(name, str) and name not in ("", "auto"):
            algorithm(name)
        if isinstance(name, AlgorithmTable):
            job.unused += _idle_rows(name, pair.main, job)
        if not name and not job.mesh.two_levels:
            return pair
        main, refused = self._chosen(pair.main, name, job)
        if refused is not None and not any(op.attrs.get("algorithm") for b in main.blocks for op in b.oplist):
            raise refused  # it carries nothing at all
        # startup runs once, so nothing is chosen there, but values between hosts still need an algorithm
        return ProgramPair(main, self._chosen(pair.startup, "", job)[0])

    def _chosen(self, program: Program, name: str | AlgorithmTable, job: Job) -> tuple[Program, TranspileError | None]:
        """The program with algorithms of collectives, and the error for the first collective that the algorithm cannot carry out."""
        new = program.copy()
        coords = coords_of(new.groups, 0, new.turns)
        stay = dict.fromkeys(flow.repeated(new), "it is in a loop, and the proof does not follow messages from one iteration to the next")
        refused = None
        if SERVERS in new.groups:
            stay.update((b.idx, "it is in a sub-block, which servers do not run") for b in new.blocks[1:])
        for block in new.blocks:
            collectives = {t for t in op_types(block.oplist) if opdef(t).comm.algorithm_method}
            known: dict[tuple, tuple[Frozen, str]] = {}  # attributes, types and placements are few objects
            alike: dict[tuple, tuple[str, str]] = {}  # but for roots: which rank it is decides nothing
            for k, op in enumerate(block.oplist) if collectives else ():
                if op.type not in collectives or op.attrs["algorithm"]:
                    continue
                x, out = block.desc(op.input_arg_names[0]), block.desc(op.output_arg_names[0])
                key = op.type, id(op.attrs), id(x.placement), id(out.placement), id(out.type)
                if key not in known:
                    kind = _but_for_roots(op, x.placement, out.placement, out.type)
                    try:
                        if kind not in alike:
                            found, said = self._carried(op, name, block, coords, job, stay.get(block.idx, ""))
                            alike[kind] = found.attrs["algorithm"], said
                        known[key] = _with_algorithm(op.attrs, alike[kind][0]), alike[kind][1]
                    except TranspileError as e:
                        known[key], refused = (op.attrs, without_algorithm(op, str(e))), refused or e
                attrs, said = known[key]
                job.say(op, said)
                if attrs is not op.attrs:
                    block.oplist[k] = op.replace(attrs=attrs)
        return new, refused

    def _carried(
        self, op: Operator, name: str | AlgorithmTable, block: Block, coords: Coords, job: Job, stays: str
    ) -> tuple[Operator, str]:
        group = op.attrs["group"]
        n, hosts = coords[group][1], job.mesh.hosts_of(block.program.groups[group][0])
        if isinstance(name, AlgorithmTable):
            name = flat(name.choose(op.type, group, self._local_type(op, block, coords).nbytes))
        elif name != "auto" and hosts == 1 and job.mesh.two_levels:
            name = ""
        if self.types and op.type not in self.types:
            name = ""
        if not name and hosts == n and job.mesh.two_levels:
            name = next((a for a in BETWEEN_HOSTS if able(a, opdef(op.type).comm.algorithm_method, n)), "")
        if n == 1 or not name:
            return op, ""
        if stays:
            return op, without_algorithm(op, stays)
        terms = next((e for e in block.desc(op.input_arg_names[0]).placement if e.op), None)
        # the proof does not follow parts of partial sums through messages
        if terms is not None and opdef(op.type).comm.algorithm_method in ("spread", "exchange"):
            return op, without_algorithm(op, f"the local values are {terms}")
        return with_algorithm(op, name, self._local_type(op, block, coords), n, job.mesh.links, inside=hosts == 1)

    @staticmethod
    def _local_type(op: Operator, block: Block, coords: Coords) -> TensorType:
        """The type of the value that the ranks of the group hold together."""
        return local_type(block.desc(op.output_arg_names[0]).type, others(block.program, block, op), coords)


def _idle_rows(table: AlgorithmTable, main: Program, job: Job) -> Iterator[str]:
    """Sentences about rows of a table that fit no collective, or name an algorithm that cannot be used. Rows over the groups of hosts may
    have no effect, so that one table serves one and several hosts."""
    for row in table.rows:
        shown = f"algorithm={AlgorithmTable((row,))!r}"
        if row.group not in ("", NODE, RAIL, *main.groups):
            yield f"{shown} has no effect: the ranks have no group {row.group!r}; {nearest(row.group, main.groups, 'they have')}"
        elif row.algorithm in SEQUENCES and not job.mesh.two_levels:
            why = "all ranks are on one" if job.mesh.hosts == 1 else "the ranks are a Mesh, not a Cluster"
            yield f"{shown} has no effect: {row.algorithm!r} is for several hosts, and {why}; leave it out"


def _with_algorithm(attrs: Frozen, name: str) -> Frozen:
    return Frozen({**attrs, "algorithm": name}) if name else attrs


def _but_for_roots(op: Operator, x: Placement, out: Placement, t: TensorType) -> tuple:
    """A key of a collective, the same for those that differ in nothing but their root."""
    group, rest = op.attrs["group"], [pair for pair in op.attrs.items() if pair[0] != "root"]
    beside = [tuple([e for e in q if e.root is None or e.group != group]) for q in (x, out)]
    return op.type, *rest, *beside, t, "root" in op.attrs
