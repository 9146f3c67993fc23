"""Check a rewrite by program text: what goes in, what must come out."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.pass_base import Job, Pass
from .check_pass import lines_of, program_of


def check_rewrite(one: Pass, *, given: str, before: str, after: str, fetch: Sequence[str] = ()) -> list[str]:
    """Run a rewrite on the program text `before` and compare operators and their variables with `after`, as `check_pass` does.

    What comes out is rewritten once more and must stay. Raises AssertionError that shows both texts, and for a rewrite that changed what it
    was given. Returns the reasons of what was left alone.
    """
    source, wanted = program_of(given, before), program_of(given, after)
    text, job = str(source), Job(fetch=tuple(fetch))
    result = one.run(source, job)
    if str(source) != text:
        raise AssertionError(f"{one!r} changed the program that it was given")
    found, expected = lines_of(result, wanted), lines_of(wanted, wanted)
    if found != expected:
        raise AssertionError(f"{one!r} made\n" + "\n".join(found) + "\n\nexpected\n" + "\n".join(expected))
    if lines_of(again := one.run(result, Job(fetch=tuple(fetch))), wanted) != expected:
        raise AssertionError(f"{one!r} once more made\n{again}")
    return job.log
