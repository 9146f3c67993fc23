"""Carry: say of each collective how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import flow
from ...ir.errors import TranspileError
from ...ir.opdef import opdef
from ...ir.operator import Frozen, Operator, op_types
from ...ir.parts import Coords, coords_of, local_type
from ...ir.pass_base import Job, Pass
from ...ir.program import Block, Program, ProgramPair
from ...ir.types import TensorType
from ..algorithms import able, algorithm
from ..algorithms.choice import cheapest
from ..algorithms.selection import AlgorithmTable
from ..cluster import SERVERS
from ..lowering.write_algorithm import carried_by, others, why_whole

BETWEEN_HOSTS = ("ring", "halving_doubling")  # by the first that can, where nothing is chosen


@dataclass(frozen=True)
class Carry(Pass):
    """Give collectives without an algorithm this one: a name, "auto" for the cheapest, or "" to leave them to the communicator. A table
    says it by collective, group and size.

    On several hosts, and by "auto", what stays inside a host is whole. Between hosts a value always goes by send and recv: where nothing
    is chosen, by a ring, and an adaptive sum by halving_doubling.
    What no algorithm can carry (a maximum, a value of open size, what stands in a loop) stays whole, and explain() says why; so does what
    none can of which "auto" chooses, and what a named one cannot beside others that it carries.
    `types`: the collectives that the choice is for; () for all.
    """

    algorithm: str | AlgorithmTable = ""
    types: tuple[str, ...] = ()
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if isinstance(self.algorithm, str) and self.algorithm not in ("", "auto"):
            algorithm(self.algorithm)
        if not self.algorithm and job.mesh.hosts == 1:
            return pair
        main, refused = self._chosen(pair.main, self.algorithm, job)
        if refused is not None and not any(op.attrs.get("algorithm") for b in main.blocks for op in b.oplist):
            raise refused  # it carries nothing at all
        # startup runs once: there is nothing to choose, but hosts are crossed alike
        return ProgramPair(main, self._chosen(pair.startup, "", job)[0])

    def _chosen(self, program: Program, name: str | AlgorithmTable, job: Job) -> tuple[Program, TranspileError | None]:
        """The program whose collectives have algorithms, and why the first is without one that the algorithm does not do."""
        new = program.copy()
        coords = coords_of(new.groups, 0, new.turns)
        stay = dict.fromkeys(flow.repeated(new), "it stands in a loop, and no proof follows messages from round to round")
        refused = None
        if SERVERS in new.groups:
            stay.update((b.idx, "it stands in a block, which servers do not run") for b in new.blocks[1:])
        for block in new.blocks:
            collectives = {t for t in op_types(block.oplist) if opdef(t).algorithm_method}
            known: dict[tuple, tuple[Frozen, str]] = {}  # attributes, types and placements are few objects
            for k, op in enumerate(block.oplist) if collectives else ():
                if op.type not in collectives:
                    continue
                x, out = block.desc(op.input_arg_names[0]), block.desc(op.output_arg_names[0])
                key = op.type, id(op.attrs), id(x.placement), id(out.placement), id(out.type)
                if key not in known:
                    try:
                        first, said = self._carried(op, name, block, coords, job, stay.get(block.idx, ""))
                    except TranspileError as e:
                        first, said, refused = op, stays_whole(op, str(e)), refused or e
                    known[key] = first.attrs, said
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
        inside = hosts == 1 and (name == "auto" or job.mesh.hosts > 1)
        if isinstance(name, AlgorithmTable):
            name = name.choose(op.type, group, self._local_type(op, block, coords).nbytes)
            inside = hosts == 1 and name == "auto"
        if inside or self.types and op.type not in self.types:
            name = ""
        if not name and hosts == n:
            name = next((a for a in BETWEEN_HOSTS if able(a, opdef(op.type).algorithm_method, n)), "")
        if op.attrs["algorithm"] or n == 1 or not name:
            return op, ""
        if stays:
            return op, stays_whole(op, stays)
        terms = next((e for e in block.desc(op.input_arg_names[0]).placement if e.op), None)
        # the proof does not follow parts of partial values through messages
        if terms is not None and opdef(op.type).algorithm_method in ("spread", "exchange"):
            return op, stays_whole(op, f"what ranks hold of it is {terms}")
        return carried(op, name, self._local_type(op, block, coords), n)

    @staticmethod
    def _local_type(op: Operator, block: Block, coords: Coords) -> TensorType:
        """The type of what the ranks of the group have together."""
        return local_type(block.desc(op.output_arg_names[0]).type, others(block.program, block, op), coords)


def carried(op: Operator, name: str | AlgorithmTable, t: TensorType, n: int) -> tuple[Operator, str]:
    """The operator with an algorithm among n ranks that have a value of this type together, as it is where no algorithm can carry it; and
    what explain() says."""
    if why := why_whole(op, t, n):
        return op, stays_whole(op, why)
    name, said = named(op, name, n, t.nbytes)
    return carried_by(op, name, n) if name else op, said


def stays_whole(op: Operator, why: str) -> str:
    """What explain() says of a collective without an algorithm."""
    return f"{op.type} over {op.attrs['group']} stays whole: {why}"


def named(op: Operator, name: str | AlgorithmTable, n: int, nbytes: int) -> tuple[str, str]:
    """The name of the algorithm, and what explain() says: what "auto" or a table comes to for an operator among n ranks."""
    if isinstance(name, AlgorithmTable):
        name = name.choose(op.type, op.attrs["group"], nbytes)
    if name != "auto":
        return name, ""
    name = cheapest(opdef(op.type).algorithm_method, n, nbytes, rooted="root" in op.attrs)
    return name, f"{op.type} over {op.attrs['group']}, {n} ranks, {nbytes} bytes: {name or 'whole'}"
