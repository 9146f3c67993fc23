"""The command line: `python -m tests.mutants`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from . import alarms, engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break rank programs, and run what the proof accepts.")
    parser.add_argument("--count", type=int, default=30_000, help="how many mutants (default 30,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases of a model, strategy, ranks: adam/ring/3, or fewer words")
    parser.add_argument("--cases", type=int, default=0, help="an even sample of so many cases")
    parser.add_argument("--show", metavar="MODEL/STRATEGY/RANKS/NUMBER", help="print one mutant and what becomes of it")
    parser.add_argument("--false-alarms", type=int, metavar="COUNT", help="instead, random right programs: the proof must accept them")
    parser.add_argument("--right", metavar="NUMBER/WHAT", help="print one right program, under a strategy or rewritten")
    parser.add_argument("--log", metavar="FILE", help="write every hole there as soon as it is found")
    parser.add_argument("--all", action="store_true", help="list every hole, not three of a kind")
    args = parser.parse_args()
    shown = 10**9 if args.all else 3
    if args.show:
        return 0 if engine.show(args.show, args.seed) else 1
    if args.right:
        return 0 if alarms.show(args.right, args.seed) else 1
    if args.false_alarms is not None:
        text, well = alarms.report(*_alarms(args), shown)
        print(text)
        return 0 if well else 1
    cases = engine.cases(args.only)
    if not cases:
        parser.error(f"no case has all of {args.only.split('/')}")
    plan = engine.spread(cases, args.count, args.cases)
    tally = engine.Tally(log=args.log)
    engine.run(plan, args.seed, args.workers, _mutants(args.count), tally)
    if left := engine.more(plan, tally, args.count):  # what some cases could not take, the others do
        engine.run(left, args.seed, args.workers, _mutants(args.count), tally)
    print(engine.report(tally, args.seed, shown))
    return 1 if tally.failed else 0


def _alarms(args: argparse.Namespace) -> tuple[list[alarms.Outcome], int, float]:
    say = _progress()

    def heard(found: list[alarms.Outcome], seconds: float) -> None:
        bad = sum(o.verdict not in ("right", "not made") for o in found)
        say(f"{len({o.number for o in found}):,} of {args.false_alarms:,} programs, {bad} bad", seconds)

    outcomes, seconds = alarms.run(args.false_alarms, args.seed, args.workers, heard)
    return outcomes, args.seed, seconds


def _mutants(count: int) -> engine.Progress:
    say = _progress()
    return lambda t: say(f"{t.mutants:,} of {count:,}, {t.count(*engine.HOLES)} holes", t.seconds)


def _progress() -> Callable[[str, float], None]:
    """Says how far the work is: in place on a terminal, elsewhere every two minutes."""
    said, live = 0.0, sys.stderr.isatty()

    def say(text: str, seconds: float) -> None:
        nonlocal said
        if live or seconds >= said + 120:
            said = seconds
            text = f"{text}, {seconds:,.0f} s"
            print(f"\r{text} " if live else text, end="" if live else "\n", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
