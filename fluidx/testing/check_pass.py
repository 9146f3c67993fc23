"""`check_pass`: run a pass on a program text and compare the result with the expected program text."""

from __future__ import annotations

import re
from itertools import permutations

from ..ir.parser import parse_program
from ..ir.pass_base import Job, Pass
from ..ir.program import Program, ProgramPair
from ..ir.types import show_placement
from ..transpiler.cluster import NODE, Cluster, Mesh

_HEAD_LINE = re.compile(r"(?:data|param|var|group|strategy)\s+(\S+?):?(?:\s|$)")


def check_pass(one: Pass, *, given: str, before: str, after: str) -> Job:
    """Run a pass on the program text `before`; compare operators, types and placements with `after`.

    `given` is the head of the program (groups, data, parameters), as lines or separated by ";". `before` and `after` are operator lines,
    with section headers ("backward:") where they matter; `after` begins with the lines of the head that the pass changes. The mesh follows
    from the groups. The facts that the pass requires are assumed. Raises AssertionError, with both texts, if the result differs or the
    pass changed its input. Returns the job; its `log` has the reasons why things were left unchanged.
    """
    source, wanted = program_of(given, before), program_of(given, after)
    job = Job(_mesh(source), facts=set(one.requires))
    check_result(one, source, wanted, job)
    return job


def check_result(one: Pass, source: Program, wanted: Program, job: Job) -> Program:
    """Run a pass and return the new program. Raises AssertionError if it is not the wanted one, or if the pass changed its input."""
    # compared as text: the two programs may share records
    text = str(source)
    result = one.run(ProgramPair(source, Program("startup")), job).main
    if str(source) != text:
        raise AssertionError(f"{one!r} changed its input program")
    found, expected = lines_of(result, wanted), lines_of(wanted, wanted)
    if found != expected:
        raise AssertionError(f"{one!r} made\n" + "\n".join(found) + "\n\nexpected\n" + "\n".join(expected))
    return result


def _mesh(program: Program) -> Cluster | Mesh:
    """The mesh or cluster that has the program's groups."""
    sizes = {g: len(sets[0]) for g, sets in program.groups.items()}
    for order in permutations(sizes):
        mesh = Mesh(**{g: sizes[g] for g in order}) if sizes else Cluster(1, 1)
        if mesh.groups() == program.groups:
            return mesh
    if (nodes := program.groups.get(NODE)) and Cluster(len(nodes), len(nodes[0])).groups() == program.groups:
        return Cluster(len(nodes), len(nodes[0]))
    return Cluster(1, program.world_size)


def program_of(head: str, ops: str) -> Program:
    lines = [line.strip() for line in head.replace(";", "\n").splitlines() if line.strip()]
    body: list[str] = []
    for line in ops.strip("\n").splitlines():
        if (m := _HEAD_LINE.match(line.strip())) is None:
            body.append(line)
            continue
        kept = [old for old in lines if (o := _HEAD_LINE.match(old)) is None or o.group(1) != m.group(1)]
        lines = [*kept, line.strip()]
    if not any(line.strip().endswith(":") for line in body):
        body = ["forward:", *body]
    return parse_program("program given {\n" + "\n".join(f"  {line}" for line in lines) + "\n" + "\n".join(body) + "\n}\n")


def lines_of(program: Program, wanted: Program) -> list[str]:
    """Text lines for a comparison: the operators of a program, and the variables that they or the expected program name."""
    ops = [f"{op.role.value}: {op}" for op in program.ops]
    block = program.global_block()
    used = {n for op in program.ops for n in (*op.input_arg_names, *op.output_arg_names)} | set(wanted.global_block().descs)
    variables = []
    for name in sorted(used):
        d = block.find(name)
        shown = f"{d.type} {show_placement(d.placement)}{' on_host' if d.on_host else ''}" if d is not None else "not declared"
        variables.append(f"%{name}: {shown}")
    return [*ops, *variables]
