"""Changes of what two ranks do together."""

from __future__ import annotations

from random import Random

from fluidx.ir import Operator, Program, Role

from .edit import Place, Programs, changed_copy, completed, some_op
from .names import other_name


def exchanged(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, list[Program], Programs]:
    """Two ranks run each other's main program."""
    a, b = rng.sample(range(len(mains)), 2)
    keep = rng.random() < 0.5
    new = list(mains)
    for to, source in ((a, b), (b, a)):
        new[to] = changed_copy(mains[source])
        new[to].rank = mains[to if keep else source].rank
    return f"ranks {a} and {b} exchange their main programs{', not their numbers' if keep else ''}", "exchange", new, startups


def message(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    """One rank sends a value, and another one takes it for its own: a pair that matches."""
    startup = rng.random() < 0.2
    programs = list(startups if startup else mains)
    a, b = rng.sample(range(len(programs)), 2)
    if (got := some_op(rng, programs[a])) is None or not got[1].output_arg_names or not programs[a].groups:
        return None
    place, op = got
    x = rng.choice(op.output_arg_names)
    desc, group = programs[a].blocks[place.block].find(x), rng.choice(sorted(programs[a].groups))
    if desc is None or -1 in desc.type.shape:
        return None
    y = x if rng.random() < 0.7 else other_name(rng, programs[b], place.block, x)
    sizes = {"shape": desc.type.shape, "dtype": desc.type.dtype}
    ends = (
        (a, "send", {"X": (x,)}, {}, {"group": group, "peer": b}),
        (b, "recv", {}, {"Out": (y,)}, {"group": group, "peer": a, **sizes}),
    )
    for r, type_, ins, outs, attrs in ends:
        programs[r] = changed_copy(programs[r])
        at = place.find(programs[r])
        complete = completed(type_, attrs)
        if at is None or complete is None:
            return None
        programs[r].blocks[place.block].oplist.insert(at + 1, Operator(type_, ins, outs, complete, Role.DIST))
    text = f"{'startup' if startup else 'main'}: rank {a} sends {x}, rank {b} receives it as {y}, behind {place}"
    return (text, "message", mains, programs) if startup else (text, "message", programs, startups)


def no_message(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    """A send and the recv that takes it, both gone."""
    programs = list(mains)
    a = rng.randrange(len(programs))
    sends = [(k, op) for k, op in enumerate(programs[a].blocks[0].oplist) if op.type == "send"]
    if not sends:
        return None
    k, op = rng.choice(sends)
    b = op.attrs.get("peer")
    if not isinstance(b, int) or not 0 <= b < len(programs) or b == a:
        return None
    nth = [i for i, o in sends if o.attrs.get("peer") == b].index(k)
    takes = [i for i, o in enumerate(programs[b].blocks[0].oplist) if o.type == "recv" and o.attrs.get("peer") == a]
    if nth >= len(takes):
        return None
    for r, at in ((a, k), (b, takes[nth])):
        programs[r] = changed_copy(programs[r])
        del programs[r].blocks[0].oplist[at]
    return f"main: {Place.of(mains[a], 0, k)} of rank {a} and its recv on rank {b} are gone", "no message", programs, startups
