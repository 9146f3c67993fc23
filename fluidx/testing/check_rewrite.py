"""Check a rewrite by program text: what goes in, what must come out."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.pass_base import Job, Pass
from .check_pass import check_result, lines_of, program_of


def check_rewrite(one: Pass, *, given: str, before: str, after: str, fetch: Sequence[str] = ()) -> list[str]:
    """Run a rewrite on the program text `before` and compare operators and their variables with `after`, as `check_pass` does.

    What comes out is rewritten once more and must stay. Raises AssertionError that shows both texts, and for a rewrite that changed what it
    was given. Returns the reasons of what was left alone.
    """
    source, wanted, job = program_of(given, before), program_of(given, after), Job(fetch=tuple(fetch))
    result = check_result(one, source, wanted, job)
    if lines_of(again := one.run(result, Job(fetch=tuple(fetch))), wanted) != lines_of(wanted, wanted):
        raise AssertionError(f"{one!r} once more made\n{again}")
    return job.log
