"""The bytes that a collective moves, in closed form: the only source for the choice, count and prediction of communication."""

from __future__ import annotations

# how often the bytes of a value pass each of many ranks: a sum is collected, a value is spread
PASSES = {"reduce": 1.0, "spread": 1.0, "all_reduce": 2.0}


def share(method: str, n: int) -> float:
    """The bytes that each of n ranks sends on average, as a fraction of the bytes of the whole value, if nothing is sent twice. `method` is
    the `algorithm_method` of a collective.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).

    >>> share("all_reduce", 4), share("spread", 4), share("exchange", 4)
    (1.5, 0.75, 0.1875)
    """
    if method == "exchange":
        return (n - 1) / n**2
    if method == "adaptive":  # pairs exchange whole values; surplus ranks send theirs to another rank, and get the result back
        pairs = 1 << n.bit_length() - 1
        return ((n.bit_length() - 1) * pairs + 2 * (n - pairs)) / n
    return PASSES[method] * (n - 1) / n
