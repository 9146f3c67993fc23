"""RootCards: each parameter, or each chunk of one, has a root rank that alone gathers its gradient and optimizes it."""

from __future__ import annotations

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
    owned: dict[str, list[Piece]] = field(default_factory=dict)
    scalars: dict[str, _Scalars] = field(default_factory=dict)
    lazy: dict[str, Operator] = field(default_factory=dict)
    param_of: dict[str, str] = field(default_factory=dict)  # owned value -> its parameter
    pending: dict[str, list[tuple[Piece, int]]] = field(default_factory=dict)  # parameters whose new value is on the roots only

    def run(self) -> None:
        job, cards = self.job, self.cards
        self.group = cards.group
        self.block = block = job.main.global_block()
        self.descs = block.descs
        self.pairs = collect_pairs(job.main)
        self.params = {p for p, _ in self.pairs}
        self._choose_roots(block.oplist)
        self.writer = Writer(job.main)
        last_grad = {g: k for k, (_, g) in enumerate(self.pairs)}
        waves = self._waves()
        waiting: list[tuple[str, str]] = []
        for op in self.writer.old:
            if op.role in (Role.OPTIMIZE, Role.LR_SCHED):
                self._optimize(op)
                continue
            self.writer.keep(op)
            for param, grad in is_trainable_pair(self.descs, op):
                waiting.append((param, grad))
                if waves[last_grad[grad]]:
                    self._reduce(waiting, op)
                    waiting = []
        self._flush(list(self.pending))
        self._startup()

    # -- roots --------------------------------------------------------------------------------------------------------------

    def _choose_roots(self, ops: list[Operator]) -> None:
        cards, n = self.cards, self.job.world_size
        whole = self._needs_whole(ops) if cards.how == "ring" else self.params
        total = sum(self.descs[p].type.nbytes for p in self.params)
        size = chunk_bytes(total, n, cards.chunk_mb)
        chunks: list[Chunk] = []
        for p, _ in self.pairs:
            t = self.descs[p].type
            chunks += cut(p, t.numel, t.nbytes // max(1, t.numel), t.nbytes if p in whole else size)
        self.chunks = assign(chunks, n, cards.roots)
        self.job.roots[:] = self.chunks
        self.by_param: dict[str, list[Chunk]] = {}
        for c in self.chunks:
            self.by_param.setdefault(c.param, []).append(c)

    def _needs_whole(self, ops: list[Operator]) -> set[str]:
        """Parameters with an update operator that is not elementwise (squared norms can be added up over chunks, if they end in a sum)."""
        source: dict[str, set[str]] = {}
        for p, g in self.pairs:
            source[g] = {p}
            source[p] = {p}
        whole: set[str] = set()
        norms: dict[str, set[str]] = {}
        for op in ops:
            if op.role is not Role.OPTIMIZE:
                continue
            touched = set().union(*(source.get(n, set()) for n in op.input_arg_names)) if op.input_arg_names else set()
            of_norm = set().union(*(norms.get(n, set()) for n in op.input_arg_names)) if op.input_arg_names else set()
            if op.type == "squared_l2_norm":
                norms[op.output_arg_names[0]] = touched
                continue
            if op.type == "sum" and of_norm and not touched:
                continue  # summed over parameters and all-reduced: chunks are fine
            # the norm of one parameter, used as it is: keep the parameter whole, which keeps the norm on one rank
            whole |= of_norm
            if touched and not OPS[op.type].elementwise:
                whole |= touched
            for n in op.output_arg_names:
                d = self.descs.get(n)
                if touched and d is not None and len(touched) == 1 and d.type.shape == self.descs[next(iter(touched))].type.shape:
                    source[n] = set(touched)
        return whole

    def _waves(self) -> list[bool]:
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
        wave = getattr(self, "wave", -1) + 1
        self.wave = wave
        ready = []
        for param, grad in pairs:
            like = self.descs[grad]
            chunks = self.by_param[param]
            if not like.placement:
                raise TranspileError(f"gradient {grad!r} is the same on every rank, so it has no terms to gather on a root; use data_parallel()")
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
        self.wave_of = getattr(self, "wave_of", {})
        for param, _, _, _ in ready:
            self.wave_of[param] = wave

    # -- the update -------------------------------------------------------------------------------------------------------------

    def _optimize(self, op: Operator) -> None:
        reads = op.input_arg_names
        if op.type == "squared_l2_norm" and (reads[0] in self.owned or reads[0] in self.lazy):
            return self._norm(op)
        if op.type == "sum" and reads and all(n in self.scalars for n in reads):
            out = op.output_arg_names[0]
            terms = [t for n in reads for t in self.scalars[n].terms]
            self.scalars[out] = _Scalars(terms, self.descs[out])
            return None
        owned = [n for n in reads if n in self.owned]
        single = [n for n in reads if n in self.scalars and len(self.scalars[n].terms) == 1]
        if owned or self._stays_on_root(op, single):
            return self._on_roots(op, owned, single)
        self._total([n for n in reads if n in self.scalars], op)
        if self._is_lazy(op):
            for n in op.output_arg_names:
                self.lazy[n] = op
                self.param_of[n] = next(self.param_of.get(r, r) for r in reads if r in self.params or r in self.lazy)
            return None
        for n in reads:
            self._materialize(n)
        self._flush([n for n in reads if n in self.pending])
        self.writer.keep(op)
        return None

    def _stays_on_root(self, op: Operator, single: list[str]) -> bool:
        """A scalar on one root, joined with replicated scalars only, stays there until it meets its parameter."""
        return bool(single) and len({self.scalars[n].terms[0].root for n in single}) == 1 and all(
            n in single or n not in self.scalars for n in op.input_arg_names
        )

    def _is_lazy(self, op: Operator) -> bool:
        """Computed from a parameter alone and of its shape (a regularization term, say): made on the root when the root needs it."""
        params = {self.param_of.get(n, n) for n in op.input_arg_names if n in self.params or n in self.lazy}
        if len(params) != 1 or not OPS[op.type].elementwise or len(op.output_arg_names) != 1:
            return False
        out = self.descs[op.output_arg_names[0]]
        return not out.persistable and out.type.shape == self.descs[next(iter(params))].type.shape and not (params & set(self.pending))

    def _materialize(self, name: str) -> None:
        op = self.lazy.pop(name, None)
        if op is not None:
            for n in op.input_arg_names:
                self._materialize(n)
            self.writer.keep(op)

    def _pieces(self, name: str, like: list[Piece], near: Operator) -> list[str] | None:
        """Names of the pieces of a value on the roots of `like`; None for a scalar that every rank has."""
        if name in self.owned:
            return [p.name for p in self.owned[name]]
        if name in self.lazy:
            self._on_roots(self.lazy.pop(name), [], [], like)
            return [p.name for p in self.owned[name]]
        d = self.descs[name]
        if d.type.numel == 1 and not (d.persistable and len(like) == 1 and name in self.params):
            self._total([name] if name in self.scalars and len(self.scalars[name].terms) > 1 else [], near)
            return None
        if d.persistable:
            return self._state(d, like)
        if len(like) == 1:
            return None
        out = []
        for k, p in enumerate(like):
            chunk = f"{name}.c{k}"
            self.writer.declare(chunk, d, (At(p.root, self.group),), type=TensorType(d.type.dtype, (p.stop - p.start,)))
            self.writer.builder(Role.OPTIMIZE, self._owner(p.root), near).chunk(name, start=p.start, stop=p.stop, name=chunk)
            out.append(chunk)
        return out

    def _owner(self, root: int) -> str:
        return f"{self.group}:{root}"

    def _state(self, d: Var, like: list[Piece]) -> list[str]:
        """A parameter's chunks are windows onto it; state of its shape becomes state of the roots."""
        if d.name in self.params:
            if len(like) == 1:
                return [d.name]
            names = []
            for k, p in enumerate(like):
                name = f"{d.name}.c{k}"
                if name not in self.descs:
                    attrs = {"window_of": d.name, "start": p.start, "stop": p.stop}
                    self.writer.declare(
                        name, d, type=TensorType(d.type.dtype, (p.stop - p.start,)), is_parameter=False, attrs=attrs
                    )
                names.append(name)
            return names
        if d.name in self.job.layout:
            return [name for name, _, _, _ in self.job.layout[d.name]]
        layout, names = [], []
        for k, p in enumerate(like):
            name = d.name if len(like) == 1 else f"{d.name}.c{k}"
            attrs = {**d.attrs, "owner": self._owner(p.root), "part_of": d.name, "start": p.start, "stop": p.stop, "size": d.type.numel}
            t = d.type if len(like) == 1 else TensorType(d.type.dtype, (p.stop - p.start,))
            self.writer.declare(name, d, (At(p.root, self.group),), type=t, attrs=attrs)
            layout.append((name, p.root, p.start, p.stop))
            names.append(name)
        if len(like) > 1:
            del self.descs[d.name]
            self.source = getattr(self, "source", {})
            self.source[d.name] = d
        self.job.layout[d.name] = layout
        return names

    def _on_roots(self, op: Operator, owned: list[str], single: list[str], like: list[Piece] | None = None) -> None:
        """Run an update operator piece by piece, each piece on its root."""
        if like is None:
            if owned:
                like = self.owned[owned[0]]
            else:
                # a scalar's root, and the parameter of the operator if it has one
                param = next((n for n in op.input_arg_names if n in self.params), None)
                root = self.scalars[single[0]].terms[0].root
                t = self.descs[param or op.output_arg_names[0]].type
                like = [Piece("", root, 0, t.numel)]
        for n in owned[1:]:
            if [(p.root, p.start, p.stop) for p in self.owned[n]] != [(p.root, p.start, p.stop) for p in like]:
                raise TranspileError(
                    f"op {op.type} joins gradients of parameters that lie on different ranks ({', '.join(owned)}); "
                    "use data_parallel() for this optimizer" + (f"\n  written at {op.site}" if op.site else "")
                )
        if len(like) > 1 and not OPS[op.type].elementwise:
            raise TranspileError(f"op {op.type} is not elementwise, but its parameter is cut into {len(like)} chunks")
        for n in op.input_arg_names:
            if n in self.scalars and n not in single:
                self._total([n], op)
        names = {n: self._pieces(n, like, op) for n in dict.fromkeys(op.input_arg_names) if n not in single}
        outs: dict[str, list[str]] = {}
        for n in op.output_arg_names:
            d = self.descs.get(n) or self.source[n]
            if n in names and names[n] is not None:
                outs[n] = names[n]  # type: ignore[assignment]
            elif d.persistable and d.type.numel > 1:
                outs[n] = self._state(d, like)
            else:
                outs[n] = [n] if len(like) == 1 else [f"{n}.c{k}" for k in range(len(like))]
        for k, p in enumerate(like):
            renamed = {n: pieces[k] for n, pieces in names.items() if pieces is not None}
            renamed.update({n: self.scalars[n].terms[0].name for n in single})
            onames = {n: pieces[k] for n, pieces in outs.items()}
            for n, new in onames.items():
                self._declare_piece(n, new, p, len(like))
            ins = {s: tuple(renamed.get(a, a) for a in args) for s, args in op.inputs.items()}
            results = {s: tuple(onames[a] for a in args) for s, args in op.outputs.items()}
            self.writer.keep(op.replace(inputs=ins, outputs=results, owner=self._owner(p.root)))
        for n, pieces in outs.items():
            made = [Piece(name, p.root, p.start, p.stop) for name, p in zip(pieces, like, strict=True)]
            if n in self.params:
                self.pending[n] = [(m, self.wave_of.get(n, 0)) for m in made]
            elif n not in self.job.layout:
                d = self.descs.get(n)
                if d is not None and d.type.numel == 1 and not owned and single:
                    self.scalars[n] = _Scalars(made, d)
                else:
                    self.owned[n] = made
                    self.param_of[n] = self.param_of.get(owned[0], "") if owned else self.param_of.get(n, "")

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
            if n in self.descs and any(t.name == n for t in held.terms):
                total = f"{n}.total"
                self.writer.declare(total, held.like)
                raise TranspileError(f"scalar {n!r} is needed on every rank and on its root under one name ({total})")
            self.writer.declare(n, held.like)
            self.writer.builder(near=near).all_reduce(part, group=self.group, op="sum", name=n)

    # -- handing back -----------------------------------------------------------------------------------------------------------------

    def _flush(self, params: list[str]) -> None:
        """Give every rank the new values of these parameters, wave by wave."""
        ring = self.cards.how == "ring"
        held = sorted(((wave, k, p) for k, n in enumerate(params) for p, wave in self.pending.pop(n)), key=lambda x: x[0])
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
                raise TranspileError(f"startup op {op.type} initialises {', '.join(op.output_arg_names)} together; initialise each by itself")
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
