"""What an engine found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """How often each verdict was given, and what is wrong: each with the number that tries it again."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def fail(self, number: int, what: str) -> None:
        self.verdicts["WRONG"] += 1
        self.wrong.append(f"--only {number}: {what}")
