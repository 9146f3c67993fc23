"""RootCards: each parameter, or each chunk of one, has a root rank that alone gathers its gradient and optimizes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir.errors import TranspileError
from ..ir.opdef import OPS
from ..ir.operator import Operator, Role
from ..ir.program import Var
from ..ir.types import At, Partial, TensorType
from .places import collect_pairs, is_trainable_pair
from .rewrite import Job, Pass, Writer
from .roots import Chunk, assign, chunk_bytes, cut


@dataclass(frozen=True)
class Piece:
    """Part of a value, on its root: `name` holds elements [start, stop) of it."""

    name: str
    root: int
    start: int
    stop: int


@dataclass
class _Scalars:
    """A small value that is the sum of terms on several roots, not added up yet."""

    terms: list[Piece]
    like: Var


@dataclass(frozen=True)
class RootCards(Pass):
    """Reduce each gradient to its root, optimize there, hand the new value back to all ranks.

    `how="collective"` uses reduce and broadcast, whole parameters (Paddle's BuildStrategy.ReduceStrategy.Reduce); `how="ring"` uses
    ring_reduce and ring_broadcast over chunks (the ring scheme of Paddle's NCCL design document, steps 1 to 6).

    A parameter is cut only if every operator of its update is elementwise; one whose update needs the whole parameter (the
    norms of Lamb and LARS, clipping by norm) keeps one root. The optimizer's state exists on the root only. What the roots must agree
    on, such as the global norm, is summed per root and then all-reduced.
    """

    how: str = "ring"
    roots: str = "greedy"
    chunk_mb: float = 4.0
    group: str = "dp"

    def run(self, job: Job) -> None:
        if not job.loss_op:
            return
        _Rewrite(self, job).run()


@dataclass
class _Rewrite:
    cards: RootCards
    job: Job
    owned: dict[str, list[Piece]] = field(default_factory=dict)  # values in pieces on the roots: gradients, what is made of them, state
    scalars: dict[str, _Scalars] = field(default_factory=dict)
    lazy: dict[str, Operator] = field(default_factory=dict)
    param_of: dict[str, str] = field(default_factory=dict)  # owned or lazy value -> its parameter
    pending: dict[str, list[tuple[Piece, int]]] = field(default_factory=dict)  # parameters whose new value is on the roots only
    totals: dict[str, str] = field(default_factory=dict)  # scalars whose sum could not keep their name
    cut_state: dict[str, Var] = field(default_factory=dict)  # state that now exists in pieces only
    wave_of: dict[str, int] = field(default_factory=dict)
    waves: int = 0

    def run(self) -> None:
        job, cards = self.job, self.cards
        self.group = cards.group
        self.block = block = job.main.global_block()
        self.descs = block.descs
        self.pairs = collect_pairs(job.main)
        self.params = {p for p, _ in self.pairs}
        self.state = self._find_state(block.oplist)
        self._choose_roots(block.oplist)
        self.writer = Writer(job.main)
        ends = {g: end for (_, g), end in zip(self.pairs, self._wave_ends(), strict=True)}
        waiting: list[tuple[str, str]] = []
        last: Operator | None = None
        for op in self.writer.old:
            if op.role in (Role.OPTIMIZE, Role.LR_SCHED):
                if waiting and last is not None:  # another loss may have gradients behind this update
                    self._reduce(waiting, last)
                    waiting = []
                self._optimize(op)
                continue
            self._flush_for(op.input_arg_names)
            self.writer.keep(op)
            for param, grad in is_trainable_pair(self.descs, op):
                waiting.append((param, grad))
                last = op
                if ends[grad]:
                    self._reduce(waiting, op)
                    waiting = []
        self._flush()
        self._startup()

    def _find_state(self, ops: list[Operator]) -> dict[str, str]:
        """Persistables that updates make from gradients, element by element, each with its parameter: they move to the roots."""
        owner = {g: p for p, g in self.pairs}
        for _ in range(2):  # state may be read before the first operator that writes it
            for op in ops:
                if op.role is not Role.OPTIMIZE or op.type == "squared_l2_norm":
                    continue
                params = {owner[n] for n in op.input_arg_names if n in owner}
                if len(params) != 1:
                    continue
                (p,) = params
                for n in op.output_arg_names:
                    d = self.descs.get(n)
                    if d is not None and n not in self.params and d.type.shape == self.descs[p].type.shape:
                        owner.setdefault(n, p)
        return {n: p for n, p in owner.items() if self.descs[n].persistable}

    # -- roots --------------------------------------------------------------------------------------------------------------

    def _choose_roots(self, ops: list[Operator]) -> None:
        cards, n = self.cards, self.job.world_size
        whole = self._needs_whole(ops) if cards.how == "ring" else self.params
        total = sum(self.descs[p].type.nbytes for p in self.params)
        size = chunk_bytes(total, n, cards.chunk_mb)
        chunks: list[Chunk] = []
        for p in dict.fromkeys(p for p, _ in self.pairs):
            t = self.descs[p].type
            chunks += cut(p, t.numel, t.nbytes // max(1, t.numel), t.nbytes if p in whole else size)
        self.chunks = assign(chunks, n, cards.roots)
        self.job.roots[:] = self.chunks
        self.by_param: dict[str, list[Chunk]] = {}
        for c in self.chunks:
            self.by_param.setdefault(c.param, []).append(c)

    def _needs_whole(self, ops: list[Operator]) -> set[str]:
        """Parameters with an update operator that is not elementwise (squared norms can be added up over chunks, if they end in a sum)."""
        source: dict[str, set[str]] = {n: {p} for n, p in self.state.items()}
        for p, g in self.pairs:
            source[g] = {p}
            source[p] = {p}
        whole: set[str] = set()
        norms: dict[str, set[str]] = {}
        nothing: set[str] = set()
        for op in ops:
            if op.role is not Role.OPTIMIZE:
                continue
            reads = op.input_arg_names
            touched = nothing.union(*(source.get(n, nothing) for n in reads))
            of_norm = nothing.union(*(norms.get(n, nothing) for n in reads))
            if op.type == "squared_l2_norm":
                norms[op.output_arg_names[0]] = touched
                continue
            if op.type == "sum" and of_norm and not touched:
                continue  # summed over parameters and all-reduced: chunks are fine
            # the norm of one parameter, used as it is: keep the parameter whole, which keeps the norm on one rank
            whole |= of_norm
            if not touched:
                continue
            size = self.descs[next(iter(touched))].type.numel
            if not OPS[op.type].elementwise or any(self.descs[n].type.numel not in (1, size) for n in reads if n in self.descs):
                whole |= touched
            for n in op.output_arg_names:
                d = self.descs.get(n)
                if d is not None and len(touched) == 1 and d.type.shape == self.descs[next(iter(touched))].type.shape:
                    source.setdefault(n, touched)
        return whole

    def _wave_ends(self) -> list[bool]:
        """For each gradient in order: does a wave end behind it? A wave carries up to `chunk_mb` for each rank."""
        limit = self.cards.chunk_mb * 2**20 * self.job.world_size
        ends, held = [], 0.0
        for p, _ in self.pairs:
            held += self.descs[p].type.nbytes
            ends.append(held >= limit)
            if ends[-1]:
                held = 0.0
        if ends:
            ends[-1] = True
        return ends

    # -- gradients ------------------------------------------------------------------------------------------------------------

    def _reduce(self, pairs: list[tuple[str, str]], near: Operator) -> None:
        """Bring the gradients of one wave to their roots."""
        ring = self.cards.how == "ring"
        wave = self.waves
        self.waves += 1
        ready = []
        for param, grad in pairs:
            like = self.descs[grad]
            chunks = self.by_param[param]
            if not like.placement:
                raise TranspileError(
                    f"gradient {grad!r} is the same on every rank, so it has no terms to gather on a root; use data_parallel()"
                )
            for k, c in enumerate(chunks):
                source = grad
                if len(chunks) > 1:
                    source = f"{grad}.c{k}"
                    self.writer.declare(source, like, like.placement, type=TensorType(like.type.dtype, (c.stop - c.start,)))
                    self.writer.builder(Role.DIST, near=near).chunk(grad, start=c.start, stop=c.stop, name=source)
                ready.append((param, grad, source, c))
        for param, grad, source, c in ready:
            like = self.descs[source]
            name = f"{source}.{self.job.loss_op}"
            self.writer.declare(name, like, (At(c.root, self.group),))
            b = self.writer.builder(near=near)
            if ring:
                b.ring_reduce(source, group=self.group, op=self.job.loss_op, root=c.root, wave=wave, name=name)
            else:
                b.reduce(source, group=self.group, op=self.job.loss_op, root=c.root, name=name)
            self.owned.setdefault(grad, []).append(Piece(name, c.root, c.start, c.stop))
            self.param_of[grad] = param
        for param, _, _, _ in ready:
            self.wave_of[param] = wave

    # -- the update -------------------------------------------------------------------------------------------------------------

    def _optimize(self, op: Operator) -> None:
        reads = op.input_arg_names
        for n in (*reads, *op.output_arg_names):
            if n in self.state and n not in self.owned:
                self._adopt(n)
        if op.type == "squared_l2_norm" and (reads[0] in self.owned or reads[0] in self.lazy):
            return self._norm(op)
        if op.type == "sum" and reads and all(n in self.scalars for n in reads):
            out = op.output_arg_names[0]
            terms = [t for n in reads for t in self.scalars[n].terms]
            self.scalars[out] = _Scalars(terms, self.descs[out])
            return None
        owned = [n for n in reads if n in self.owned]
        single = [n for n in reads if n in self.scalars and len(self.scalars[n].terms) == 1]
        if owned:
            like, param = self.owned[owned[0]], self.param_of[owned[0]]
            single = [n for n in single if len(like) == 1 and self.scalars[n].terms[0].root == like[0].root]
            return self._on_roots(op, like, param, single)
        where = self._root_of_scalars(op, single) if single else None
        if where is not None:
            return self._on_roots(op, where, next((n for n in reads if n in self.params), ""), single)
        self._total([n for n in reads if n in self.scalars], op)
        if self._is_lazy(op):
            for n in op.output_arg_names:
                self.lazy[n] = op
                self.param_of[n] = next(self.param_of.get(r, r) for r in reads if r in self.params or r in self.lazy)
            return None
        for n in reads:
            self._materialize(n)
        self._flush_for(reads)
        for n in op.output_arg_names:
            if n in self.params:
                self._materialize_of(n)
        self.writer.keep(op.renamed(self.totals) if self.totals else op)
        return None

    def _root_of_scalars(self, op: Operator, single: list[str]) -> list[Piece] | None:
        """Where an operator can stay that reads scalars of one root: there, until they meet the parameter that lies there too."""
        roots = {self.scalars[n].terms[0].root for n in single}
        outs = [self.descs[n] for n in op.output_arg_names]
        if len(roots) != 1 or any(n in self.scalars and n not in single for n in op.input_arg_names):
            return None
        if any(d.persistable and d.name not in self.params for d in outs):
            return None  # every rank keeps it, so every rank must be able to make it
        params = {n for n in (*op.input_arg_names, *op.output_arg_names) if n in self.params}
        if not params:
            return [Piece("", min(roots), 0, outs[0].type.numel)] if outs else None
        chunks = self.by_param[next(iter(params))]
        if len(params) > 1 or len(chunks) != 1 or chunks[0].root not in roots:
            return None
        return [Piece("", c.root, c.start, c.stop) for c in chunks]

    def _is_lazy(self, op: Operator) -> bool:
        """Computed from a parameter alone and of its shape (a regularization term, say): made on the root when the root needs it."""
        params = {self.param_of.get(n, n) for n in op.input_arg_names if n in self.params or n in self.lazy}
        if len(params) != 1 or not OPS[op.type].elementwise or len(op.output_arg_names) != 1:
            return False
        out = self.descs[op.output_arg_names[0]]
        return not out.persistable and out.type.shape == self.descs[next(iter(params))].type.shape and not (params & self.pending.keys())

    def _materialize(self, name: str) -> None:
        op = self.lazy.pop(name, None)
        if op is not None:
            for n in op.input_arg_names:
                self._materialize(n)
            self.writer.keep(op.renamed(self.totals) if self.totals else op)

    def _materialize_of(self, param: str) -> None:
        """Before a parameter changes, make what was to be computed from its old value."""
        for n in [n for n in self.lazy if self.param_of[n] == param]:
            self._materialize(n)

    def _pieces(self, name: str, like: list[Piece], param: str, near: Operator) -> list[str] | None:
        """Names of the pieces of a value on the roots of `like`; None for a value that every rank has and that is read whole."""
        if name in self.lazy and self.param_of[name] == param:
            self._on_roots(self.lazy.pop(name), like, param, [])
        if name in self.owned:
            return [p.name for p in self.owned[name]]
        self._materialize(name)
        if name in self.scalars:
            self._total([name], near)
            return None
        d = self.descs[name]
        if name == param:
            return self._windows(d, like)
        self._flush_for([name])
        if len(like) == 1 or d.type.numel == 1:
            return None
        out = []
        for k, p in enumerate(like):
            chunk = f"{name}.c{k}"
            self.writer.declare(chunk, d, (At(p.root, self.group),), type=TensorType(d.type.dtype, (p.stop - p.start,)), persistable=False)
            self.writer.builder(Role.OPTIMIZE, self._owner(p.root), near).chunk(name, start=p.start, stop=p.stop, name=chunk)
            out.append(chunk)
        return out

    def _owner(self, root: int) -> str:
        return f"{self.group}:{root}"

    def _windows(self, d: Var, like: list[Piece]) -> list[str]:
        """A parameter's chunks are windows onto it."""
        if len(like) == 1:
            return [d.name]
        names = []
        for k, p in enumerate(like):
            name = f"{d.name}.c{k}"
            if name not in self.descs:
                attrs = {"window_of": d.name, "start": p.start, "stop": p.stop}
                self.writer.declare(name, d, type=TensorType(d.type.dtype, (p.stop - p.start,)), is_parameter=False, attrs=attrs)
            names.append(name)
        return names

    def _adopt(self, name: str) -> None:
        """State of a parameter becomes state of its roots, each holding its part."""
        d, param = self.descs[name], self.state[name]
        like = self.by_param[param]
        pieces = []
        for k, p in enumerate(like):
            new = name if len(like) == 1 else f"{name}.c{k}"
            attrs = {**d.attrs, "owner": self._owner(p.root), "part_of": name, "start": p.start, "stop": p.stop, "size": d.type.numel}
            t = d.type if len(like) == 1 else TensorType(d.type.dtype, (p.stop - p.start,))
            self.writer.declare(new, d, (At(p.root, self.group),), type=t, attrs=attrs)
            pieces.append(Piece(new, p.root, p.start, p.stop))
        if len(like) > 1:
            self.cut_state[name] = self.descs.pop(name)
        self.job.layout[name] = [(p.name, p.root, p.start, p.stop) for p in pieces]
        self.owned[name] = pieces
        self.param_of[name] = param

    def _on_roots(self, op: Operator, like: list[Piece], param: str, single: list[str]) -> None:
        """Run an update operator piece by piece, each piece on its root."""
        self._check_joins(op, like)
        names = {n: self._pieces(n, like, param, op) for n in dict.fromkeys(op.input_arg_names) if n not in single}
        outs: dict[str, list[str]] = {}
        for n in op.output_arg_names:
            if n in self.owned and len(self.owned[n]) == len(like):
                outs[n] = [p.name for p in self.owned[n]]
            elif n in self.params:
                self._materialize_of(n)
                outs[n] = self._windows(self.descs[n], like)
            elif self.descs[n].persistable:
                raise TranspileError(
                    f"op {op.type} writes persistable {n!r} from a gradient that is on its root only; "
                    "use data_parallel() for this optimizer" + (f"\n  written at {op.site}" if op.site else "")
                )
            else:
                outs[n] = [n] if len(like) == 1 else [f"{n}.c{k}" for k in range(len(like))]
        for k, p in enumerate(like):
            renamed = {n: self.totals.get(n, n) if pieces is None else pieces[k] for n, pieces in names.items()}
            renamed.update({n: self.scalars[n].terms[0].name for n in single})
            onames = {n: pieces[k] for n, pieces in outs.items()}
            for n, new in onames.items():
                self._declare_piece(n, new, p, len(like))
            ins = {s: tuple(renamed.get(a, a) for a in args) for s, args in op.inputs.items()}
            results = {s: tuple(onames[a] for a in args) for s, args in op.outputs.items()}
            self.writer.keep(op.replace(inputs=ins, outputs=results, owner=self._owner(p.root)))
        from_scalars = single and not any(pieces for n, pieces in names.items() if n != param)
        for n, pieces in outs.items():
            made = [Piece(name, p.root, p.start, p.stop) for name, p in zip(pieces, like, strict=True)]
            if n in self.params:
                self.pending[n] = [(m, self.wave_of.get(n, 0)) for m in made]
            elif n in self.state:
                continue
            elif from_scalars and self.descs[n].type.numel == 1:
                self.scalars[n] = _Scalars(made, self.descs[n])
            else:
                self.owned[n] = made
                self.param_of[n] = param

    def _check_joins(self, op: Operator, like: list[Piece]) -> None:
        """All pieces that an operator reads must lie where it runs."""
        owned = [n for n in op.input_arg_names if n in self.owned]
        where = [(p.root, p.start, p.stop) for p in like]
        if any([(p.root, p.start, p.stop) for p in self.owned[n]] != where for n in owned):
            raise TranspileError(
                f"op {op.type} joins gradients of parameters that lie on different ranks ({', '.join(owned)}); "
                "use data_parallel() for this optimizer" + (f"\n  written at {op.site}" if op.site else "")
            )
        if len(like) > 1 and not OPS[op.type].elementwise:
            raise TranspileError(f"op {op.type} is not elementwise, but its parameter is cut into {len(like)} chunks")

    def _declare_piece(self, whole: str, name: str, p: Piece, pieces: int) -> None:
        if name in self.descs and (self.descs[name].persistable or pieces > 1):
            return
        d = self.descs[whole]
        t = d.type if pieces == 1 else TensorType(d.type.dtype, (p.stop - p.start,))
        self.writer.declare(name, d, (At(p.root, self.group),), type=t)

    # -- what the roots must agree on ----------------------------------------------------------------------------------------------

    def _norm(self, op: Operator) -> None:
        """The squared norm of each piece on its root; added up only when somebody needs the total."""
        source, out = op.input_arg_names[0], op.output_arg_names[0]
        if source in self.lazy:
            self._materialize(source)
            self.writer.keep(op)
            return
        like, pieces, terms = self.descs[out], self.owned[source], []
        for k, p in enumerate(pieces):
            name = out if len(pieces) == 1 else f"{out}.c{k}"
            self.writer.declare(name, like, (At(p.root, self.group),))
            self.writer.keep(
                op.replace(inputs={"X": (p.name,)}, outputs={op.output_names[0]: (name,)}, owner=self._owner(p.root))
            )
            terms.append(Piece(name, p.root, 0, 1))
        self.scalars[out] = _Scalars(terms, like)

    def _total(self, names: list[str], near: Operator) -> None:
        """Add up the terms of a scalar: each root its own, then an all_reduce."""
        for n in names:
            held = self.scalars.pop(n)
            part = f"{n}.part"
            self.writer.declare(part, held.like, (Partial("sum", self.group),))
            for root in range(self.job.world_size):
                mine = [t.name for t in held.terms if t.root == root]
                b = self.writer.builder(Role.OPTIMIZE, self._owner(root), near)
                if mine:
                    b.sum(mine, name=part)
                else:
                    b.fill_constant(shape=held.like.type.shape, dtype=held.like.type.dtype, value=0.0, name=part)
            total = n
            if any(t.name == n for t in held.terms):  # the root's own term has the name
                total = self.totals[n] = f"{n}.total"
            self.writer.declare(total, held.like)
            self.writer.builder(near=near).all_reduce(part, group=self.group, op="sum", name=total)

    # -- handing back -----------------------------------------------------------------------------------------------------------------

    def _flush_for(self, reads: Sequence[str]) -> None:
        """Before every rank reads a parameter that only roots have updated, hand back all that waits: together costs fewer messages."""
        if self.pending and any(n in self.pending for n in reads):
            self._flush()

    def _flush(self) -> None:
        """Give every rank the new values of the parameters that wait, wave by wave."""
        ring = self.cards.how == "ring"
        held = sorted(((wave, k, p) for k, pieces in enumerate(self.pending.values()) for p, wave in pieces), key=lambda x: x[0])
        self.pending.clear()
        for wave, _, p in held:
            b = self.writer.builder()
            if ring:
                b.ring_broadcast(p.name, group=self.group, root=p.root, wave=wave, out={"Out": p.name})
            else:
                b.broadcast(p.name, group=self.group, root=p.root, out={"Out": p.name})

    def _startup(self) -> None:
        """State that moved to its root is initialised there, in its part only."""
        layout = self.job.layout
        writer = Writer(self.job.startup)
        descs = writer.block.descs
        for op in writer.old:
            cut_up = [n for n in op.output_arg_names if n in layout]
            if not cut_up:
                writer.keep(op)
                continue
            if len(op.output_arg_names) != 1:
                together = ", ".join(op.output_arg_names)
                raise TranspileError(f"startup op {op.type} initialises {together} together; initialise each by itself")
            name = cut_up[0]
            old = descs.pop(name)
            for chunk, root, start, stop in layout[name]:
                d = self.descs[chunk]
                owner = self._owner(root)
                if op.type == "fill_constant":
                    descs[chunk] = d
                    writer.keep(op.replace(outputs={"Out": (chunk,)}, attrs={**op.attrs, "shape": d.type.shape}, owner=owner))
                elif chunk == name:
                    descs[chunk] = d
                    writer.keep(op.replace(owner=owner))
                else:
                    whole = f"{name}.whole{root}"
                    if whole not in descs:
                        descs[whole] = old.changed(name=whole, persistable=False, placement=d.placement, attrs={})
                        writer.keep(op.replace(outputs={op.output_names[0]: (whole,)}, owner=owner))
                    descs[chunk] = d
                    writer.builder(Role.FORWARD, owner, op).chunk(whole, start=start, stop=stop, out={"Out": chunk})
