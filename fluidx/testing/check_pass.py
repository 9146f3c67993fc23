"""Check a pass by program text: what goes in, what must come out."""

from __future__ import annotations

from ..ir.parser import parse_program
from ..ir.program import Program
from ..transpiler.cluster import Cluster
from ..transpiler.rewrite import Job, Pass


def check_pass(one: Pass, *, given: str, before: str, after: str, loss_op: str = "avg") -> Job:
    """Run a pass on the program text `before` and compare the operators with those of `after`.

    `given` is the head of the program (groups, data, parameters), lines or parts separated by ";". `before` and `after` are operator lines,
    with section headers ("backward:") where they matter. The number of ranks is that of the groups. Raises AssertionError that shows both
    texts. Returns the job, for looking at notes and layout.
    """
    head = "\n".join(f"  {line.strip()}" for line in given.replace(";", "\n").splitlines() if line.strip())
    source, wanted = _program(head, before), _program(head, after)
    ranks = 1 + max((r for sets in source.groups.values() for s in sets for r in s), default=0)
    job = Job(source.copy(), Program("startup"), Cluster(1, ranks), loss_op=loss_op)
    one.run(job)
    found, expected = _lines(job.main), _lines(wanted)
    if found != expected:
        raise AssertionError(f"{one!r} made\n" + "\n".join(found) + "\n\nexpected\n" + "\n".join(expected))
    if source != _program(head, before):
        raise AssertionError(f"{one!r} changed the program that it was given")
    return job


def _program(head: str, ops: str) -> Program:
    body = ops.strip("\n")
    if not any(line.strip().endswith(":") for line in body.splitlines()):
        body = "forward:\n" + body
    return parse_program("program given {\n" + head + "\n" + body + "\n}\n")


def _lines(program: Program) -> list[str]:
    return [f"{op.role.value}: {op}" for op in program.ops]
