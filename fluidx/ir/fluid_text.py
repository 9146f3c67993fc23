"""fluid's names of collectives in program text: written by `to_string(fluid_names=...)`, and read back to the same operators.

fluid numbers its communicators ("rings"); a program's k-th group is ring k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ProgramError
from .opdef import OPS, Effect, OpDef

if TYPE_CHECKING:
    from .operator import Operator

STYLES = ("nccl", "c")  # of the NCCL design (`ncclAllReduce`), of fluid 1.5 and later (`c_allreduce_sum`)
REDUCTIONS = ("sum", "avg", "max", "min", "prod")

_FOLLOWS = "the plan says where compute and communication wait for each other"
_CONNECTS = "ranks connect by themselves when a group is used first"
_LAYERS = "layers with a placement, such as Shard(1, 'tp'), become operators with collectives"
WITHOUT = {
    "c_sync_calc_stream": _FOLLOWS, "c_sync_comm_stream": _FOLLOWS, "c_wait_compute": _FOLLOWS, "c_wait_comm": _FOLLOWS,
    "c_gen_nccl_id": _CONNECTS, "c_gen_xccl_id": _CONNECTS, "gen_nccl_id": _CONNECTS, "c_comm_init_all": _CONNECTS,
    "c_comm_init_multitrainer": _CONNECTS, "c_identity": _LAYERS, "c_concat": _LAYERS, "c_split": _LAYERS, "c_embedding": _LAYERS,
    "c_softmax_with_cross_entropy": _LAYERS, "mp_allreduce_sum": _LAYERS, "coalesce_tensor": "the pass BucketCollectives packs values",
    "partial_send": "send takes a part that chunk makes", "partial_recv": "recv gives a part that unpack joins",
}  # fmt: skip


class FluidNames(NamedTuple):
    """How one program's text names collectives: the style, and the groups and the rank of the program."""

    style: str
    groups: Mapping[str, Sequence[Sequence[int]]] = {}
    rank: int | None = None

    @staticmethod
    def of(style: bool | str, program: Any = None) -> FluidNames | None:
        """The names that `fluid_names=style` asks for; True is "nccl". None for False."""
        if style is False:
            return None
        if style is not True and style not in STYLES:
            raise ProgramError(f'fluid_names must be True, "nccl" or "c", got {style!r}')
        name = "nccl" if style is True else str(style)
        return FluidNames(name) if program is None else FluidNames(name, program.groups, program.rank)

    def missing(self, ops: Iterable[Operator]) -> list[str]:
        """The operators that communicate and have no name in fluid; they are written under their own names."""
        return sorted({op.type for op in ops if _communicates(op.type) and not OPS[op.type].comm.fluid_names})

    def written(self, definition: type[OpDef], attrs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """fluid's name of an operator and its attributes. `attrs` are those that the text would show."""
        names = definition.comm.fluid_names
        if names is None:
            return definition.name, dict(attrs)
        name, shown = names[STYLES.index(self.style)], dict(attrs)
        if "{op}" in name:
            name = name.format(op=shown.pop("op", "sum"))
        elif name.startswith("nccl") and "op" in shown:
            shown["reduction"] = f"nccl{str(shown.pop('op')).capitalize()}"
        elif shown.get("op") == "sum":
            del shown["op"]
        if self.style == "c":
            shown = {definition.comm.fluid_attrs.get(k, k): v for k, v in shown.items()}
            group = str(shown.get("group", ""))
            if group in self.groups:
                del shown["group"]
                shown["ring_id"] = list(self.groups).index(group)
                counts = self._counts(self.groups[group])
                shown |= {k: counts[k] for k in definition.comm.fluid_counts if k in counts}
        return name, shown

    def _counts(self, sets: Sequence[Sequence[int]]) -> dict[str, int]:
        """The number of ranks in each set of a group, if it is one number, and this rank's index in its set."""
        sizes = {len(s) for s in sets}
        counts = {"nranks": sizes.pop()} if len(sizes) == 1 else {}
        mine = next((tuple(s) for s in sets if self.rank in s), ())
        if self.rank is not None and mine:
            counts["rank"] = mine.index(self.rank)
        return counts


def type_of(name: str) -> str:
    """The op that a name of fluid stands for, with its reduction behind a dot if the name says it; the name itself if it is none of these.

    >>> type_of("c_allreduce_max"), type_of("ncclBcast"), type_of("relu")
    ('all_reduce.max', 'broadcast', 'relu')
    """
    return name if name in OPS else _types().get(name, name)


def read_attrs(kind: str, name: str, attrs: dict[str, Any], program: Any) -> dict[str, Any]:
    """The attributes of an op that was written as `name` of fluid, or with fluid's attributes. Raises ProgramError for a ring that the
    program does not declare, and for numbers of ranks that differ from its group's."""
    kind, _, reduction = kind.partition(".") if kind != name else (kind, "", "")
    if kind not in OPS or OPS[kind].comm.fluid_names is None or (name == kind and "ring_id" not in attrs):
        return attrs
    back = {fluid: own for own, fluid in OPS[kind].comm.fluid_attrs.items()}
    found = {back.get(k, k): v for k, v in attrs.items() if k != "use_calc_stream"}  # where ranks wait follows from the plan
    if reduction:
        found["op"] = reduction
    elif "reduction" in found:
        found["op"] = str(found.pop("reduction")).removeprefix("nccl").lower()
    if "ring_id" in found:
        ring, groups = found.pop("ring_id"), program.groups
        if not isinstance(ring, int) or not 0 <= ring < len(groups):
            listed = ", ".join(f"{k} is {g}" for k, g in enumerate(groups)) or "it declares no group"
            raise ProgramError(f"{name}: there is no ring {ring!r}; rings are the groups of {program.label()} in order: {listed}")
        group = found["group"] = list(groups)[ring]
        counts = FluidNames("c", groups, program.rank)._counts(groups[group])
        for key, what in (("nranks", "ranks"), ("rank", "as this rank's index")):
            given = found.pop(key, counts.get(key))
            if key in counts and given != counts[key]:
                raise ProgramError(f"{name}: {key}={given!r}, but ring {ring} is group {group} with {counts[key]} {what}")
    return found


def why_not(name: str) -> str:
    """Why a name of fluid has no counterpart here, as the end of a message; "" for other names."""
    return f"fluid's {name} has no counterpart here: {WITHOUT[name]}" if name in WITHOUT else ""


def _communicates(kind: str) -> bool:
    return kind in OPS and OPS[kind].effect in (Effect.COLLECTIVE, Effect.P2P)


_known: tuple[int, dict[str, str]] = (-1, {})


def _types() -> dict[str, str]:
    """{name of fluid: op, or op.reduction}, made again when ops are added."""
    global _known
    if _known[0] != len(OPS):
        found: dict[str, str] = {}
        for kind, definition in OPS.items():
            for name in definition.comm.fluid_names or ():
                found |= {name.format(op=r): f"{kind}.{r}" for r in REDUCTIONS} if "{op}" in name else {name: kind}
        _known = len(OPS), found
    return _known[1]
