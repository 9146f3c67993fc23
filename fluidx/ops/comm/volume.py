"""How much a collective moves: the closed forms from which all get their numbers that choose, count or predict communication."""

from __future__ import annotations

# how often the bytes of a value pass a rank where all ranks send alike and there are many: a sum comes together, a value is spread
PASSES = {"reduce": 1.0, "spread": 1.0, "all_reduce": 2.0}


def share(method: str, n: int) -> float:
    """Of the bytes of the value that n ranks have together, the share that each sends on average if nothing is sent twice. `method` is the
    `algorithm_method` of a collective.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).

    >>> share("all_reduce", 4), share("spread", 4), share("exchange", 4)
    (1.5, 0.75, 0.1875)
    """
    if method == "exchange":
        return (n - 1) / n**2
    if method == "adaptive":  # pairs exchange all they have; ranks beyond a power of two send it to another one, and get it back
        pairs = 1 << n.bit_length() - 1
        return ((n.bit_length() - 1) * pairs + 2 * (n - pairs)) / n
    return PASSES[method] * (n - 1) / n
