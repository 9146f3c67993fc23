"""`check_rewrite`: run a rewrite on a program text and compare the result with the expected program text."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.pass_base import Job, Pass
from .check_pass import check_result, lines_of, program_of


def check_rewrite(one: Pass, *, given: str, before: str, after: str, fetch: Sequence[str] = ()) -> list[str]:
    """Run a rewrite on the program text `before` and compare operators and their variables with `after`, as `check_pass` does.

    The result is rewritten once more, which must change nothing. Raises AssertionError, with both texts, if a result differs or the rewrite
    changed its input. Returns the reasons why things were left unchanged.
    """
    source, wanted, job = program_of(given, before), program_of(given, after), Job(fetch=tuple(fetch))
    result = check_result(one, source, wanted, job)
    if lines_of(again := one.run(result, Job(fetch=tuple(fetch))), wanted) != lines_of(wanted, wanted):
        raise AssertionError(f"{one!r} run a second time made\n{again}")
    return job.log
