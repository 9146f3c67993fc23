"""Tables of small cases in one test: one test for each would cost more than many of them, in fixtures, reports and the queue."""

import functools
import inspect


def each(names, cases):
    """As `pytest.mark.parametrize`, for cases that take a millisecond: the decorated test runs them one after the other, under the same
    fixtures, and names those that fail."""
    words = [word.strip() for word in names.split(",")]

    def decorate(test):
        @functools.wraps(test)
        def run_all(**fixtures):
            failed = []
            for case in cases:
                values = dict(zip(words, case if len(words) > 1 else (case,), strict=True))
                try:
                    test(**values, **fixtures)
                except Exception as error:
                    error.add_note(f"with {', '.join(f'{word} = {value}' for word, value in values.items())}")
                    failed.append(error)
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases fail", failed)

        kept = [p for name, p in inspect.signature(test).parameters.items() if name not in words]
        run_all.__signature__ = inspect.Signature(kept)
        return run_all

    return decorate
