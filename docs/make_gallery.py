"""Writes docs/gallery.md and its pictures, docs/img/gallery: `python docs/make_gallery.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from make_pictures import in_slots
from one_weight import OneWeight, legend

import fluidx as fx
from fluidx.ir import Shard
from fluidx.transpiler.strategies import Strategy

DOCS = Path(__file__).parent
WIDTH = 64  # of both layers
WEIGHT_MB = WIDTH * WIDTH * 4 / 2**20
ALONE = {"bucket_mb": WEIGHT_MB, "first_bucket_mb": WEIGHT_MB}  # a bucket has room for one weight
S, opt = fx.strategies, fx.optimizer


def momentum() -> Any:
    return opt.Momentum(0.1, 0.9)


@dataclass(frozen=True)
class Entry:
    """One picture: a strategy, or an optimizer and the strategy that it is shown with.

    `sent` is what a rank sends in a step, `params` and `state` what it keeps of parameters and of the optimizer's state, as formulas in the
    letters that the page explains; `note` stands behind `sent`, and where it names a group, `over`, no other bytes count.
    """

    name: str
    title: str
    strategy: Strategy
    link: str
    says: str
    sent: str = "2·(n-1)/n·P"
    note: str = ""
    over: str = ""
    params: str = "P"
    state: str = "S"
    trainers: Any = 4
    optimizer: Callable[[], Any] = momentum
    placement: dict[str, Shard] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # what to call values
    also: tuple[str, ...] = ()  # values to show beside those of the weight

    def transpiled(self) -> fx.DistributeTranspiler:
        """Two layers, v and w: on stage 0 and 1 of a pipeline, and in scopes of their own."""
        main, startup = fx.Program("two_layers"), fx.Program("two_layers_startup")
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            h = fx.data("x", [-1, WIDTH], "float32")
            for stage, name in enumerate("vw"):
                with fx.device_guard(f"stage:{stage}"), fx.name_scope(name):
                    attr = fx.ParamAttr(name=name, placement=self.placement.get(name))
                    h = fx.layers.fc(h, WIDTH, act="tanh", param_attr=attr, bias_attr=False, name=f"of_{name}")
            with fx.device_guard("stage:1"):
                loss = fx.layers.mean(h)
            self.optimizer().minimize(loss)
        return fx.DistributeTranspiler(self.strategy).transpile(program=main, startup_program=startup, trainers=self.trainers)

    def picture(self) -> str:
        options = dict(self.strategy.options)
        if "schedule" in options:
            return in_slots(options["schedule"], stages=3, turns=options["micro_batches"], cell=19, title=self.title)
        return OneWeight(self.transpiled(), self.title, "w", self.names, self.also).svg()

    def text(self) -> str:
        """What the page shows of it."""
        picture, says = f"![{self.title}](img/gallery/{self.name}.svg)", f"[{self.says}]({self.link})"
        costs = f"Sent: `{self.sent}`{self.note}. Kept: parameters `{self.params}`, state `{self.state}`."
        return f'<div markdown="1">\n\n{picture}\n\n{says}\n\n{costs}\n\n</div>\n'


SECTIONS = {
    "Whole parameters": (
        Entry("data_parallel", "data_parallel()", S.data_parallel(**ALONE), "strategies.md#data_parallel",
              "Every rank gets the sum of the gradients, and updates."),
        Entry("reduce_broadcast", "reduce_broadcast()", S.reduce_broadcast(**ALONE), "strategies.md#reduce_broadcast",
              "The weight's root gets the sum, updates, and broadcasts the new value; v has another root.", state="S/n"),
        Entry("ring_optimizer", "ring_optimizer()", S.ring_optimizer(), "strategies.md#ring_optimizer",
              "The same by a ring: each rank adds its summand and sends on; then the new value travels on "
              "from the root. A large weight has "
              "several roots, one for each piece.", state="S/n"),
        Entry("wire", 'data_parallel(wire="bfloat16")', S.data_parallel(wire="bfloat16", **ALONE), "strategies.md#16-bits-on-the-way",
              "Gradients travel as bfloat16.", "(n-1)/n·P"),
        Entry("reduction_servers", "reduction_servers(servers=2)", S.reduction_servers(2, **ALONE), "strategies.md#reduction-servers",
              "k servers add slices of the gradient and keep no state; trainers update.", "P",
              " by each of n trainers, n/k times that by a server", trainers=2),
    ),
    "Sharded state and parameters": (
        Entry("zero1", "zero1()", S.zero1(**ALONE), "strategies.md#zero1-and-zero2",
              "Each rank updates a part of the bucket; gradients are reduce-scattered after backward.", state="S/n"),
        Entry("zero2", "zero2()", S.zero2(**ALONE), "strategies.md#zero1-and-zero2",
              "As zero1, but each bucket is reduce-scattered as soon as it is complete: no rank keeps all gradients whole.", state="S/n"),
        Entry("zero3", "zero3()", S.zero3(), "strategies.md#zero3-and-fsdp",
              "The weight is stored sharded, too: it is gathered before forward, and again for backward.", "at most 3·(n-1)/n·P",
              params="P/n", state="S/n"),
        Entry("fsdp", 'fsdp(units="scope")', S.fsdp(units="scope"), "strategies.md#zero3-and-fsdp",
              "As zero3, but by units, and the next unit is gathered ahead: w before forward of "
              "v.", "at most 3·(n-1)/n·P", params="P/n", state="S/n"),
        Entry("parameter_server", "parameter_server(servers=2)", S.parameter_server(2, min_block=1), "strategies.md#parameter-servers",
              "Weights are stored on k servers, which add the gradients and update; trainers keep nothing between steps.", "P",
              " by each of n trainers, n/k times that by a server", params="P/k", state="S/k", trainers=2),
        Entry("tensor_parallel", "Mesh(dp=2, tp=2), v and w sharded", S.data_parallel(**ALONE), "meshes.md",
              "v is annotated as sharded by columns, w by rows: outputs of w are summed over tp, gradients over dp.",
              "2·(n-1)/n·P/t + 2·(t-1)/t·A", params="P/t", state="S/t", trainers=fx.Mesh(dp=2, tp=2),
              placement={"v": Shard(1, "tp"), "w": Shard(0, "tp")}, names={"of_w.tmp_0": "x·w", "of_w.tmp_0.sum": "x·w, summed"},
              also=("of_w.tmp_0", "of_w.tmp_0.sum")),
    ),
    "Several hosts": (
        Entry("hierarchical", "data_parallel() on two hosts", S.data_parallel(**ALONE), "strategies.md#several-hosts",
              "Gradients are added inside each host, then between hosts, then gathered inside: each rank sends its share.", "2·(h-1)/h·P/g",
              " over the network", "rail", trainers=fx.Cluster(2, 2)),
        Entry("rails", "rails()", S.rails(), "strategies.md#rails",
              "A slice goes over the rails, where each device adds one shard of it: the number of rounds does "
              "not depend on the hosts.", "2·(h-1)/h·P/g",
              " over the network", "rail", trainers=fx.Cluster(2, 2), names={"w@GRAD.sum.packed.slice0": "slice"}),
    ),
    "Micro-batches and stages": (
        Entry("micro_batches", "micro_batches(2)", S.micro_batches(2, of=S.data_parallel(**ALONE)),
              "pipeline.md#micro-batches-an-axis-of-time",
              "The batch runs in two parts, one after the other; the sum of their gradients is sent "
              "once.", names={"w@GRAD.sum.by1": "both"}),
        Entry("gradient_merge", "GradientMergeOptimizer(..., 4)", S.data_parallel(), "compression.md#gradient-merge",
              "Each rank adds its partial gradients of several runs, and sends the sum in every "
              "k-th.", note=" in every k-th run", state="S + P",
              optimizer=lambda: opt.GradientMergeOptimizer(momentum(), k_steps=4), names={"w@GRAD.merged": "1/k of it"}),
        Entry("pipeline_gpipe", 'pipeline(6, "gpipe")', S.pipeline(6, "gpipe"), "pipeline.md#schedules",
              "Layers on p stages: all forwards (F), then all backwards (B). A stage keeps activations of all micro-batches.", "A",
              " to each neighbour", params="P/p", state="S/p", trainers=fx.Mesh(pp=2)),
        Entry("pipeline_1f1b", 'pipeline(6, "1f1b")', S.pipeline(6, "1f1b"), "pipeline.md#schedules",
              "Each backward as soon as possible: as many slots, fewer activations in memory.", "A", " to each neighbour",
              params="P/p", state="S/p", trainers=fx.Mesh(pp=2)),
    ),
    "Ranks that train separately, and smaller messages": (
        Entry("local_sgd", "replicas(), LocalSGDOptimizer", S.replicas(), "strategies.md#ranks-that-train-separately",
              "Each rank trains its own copy of the weight; in every k-th run the copies are averaged.", note=" in every k-th run",
              optimizer=lambda: opt.LocalSGDOptimizer(momentum(), k_steps=4)),
        Entry("adasum", "replicas(), AdasumOptimizer", S.replicas(), "compression.md#adasum",
              "Each rank computes its own step; weights move by the adaptive sum of the steps.", "log2(n)·P",
              optimizer=lambda: opt.AdasumOptimizer(momentum()),
              names={"assign.tmp_1": "w before", "elementwise_sub.tmp_1": "its step", "replica_adasum.tmp_1": "adaptive sum"}),
        Entry("dgc", "replicas(), DGCMomentumOptimizer", S.replicas(), "compression.md#deep-gradient-compression",
              "Each rank sends its largest elements (a share s of all) with their indices, and keeps the others for later.",
              "2·(n-1)·s·P", state="2·P", optimizer=lambda: opt.DGCMomentumOptimizer(0.1, 0.9, 0, sparsity=[0.75], least=0),
              names={"where.tmp_2": "the largest, or 0", "replica_sparse_mean.tmp_1": "mean"}),
        Entry("powersgd", "PowerSGDOptimizer(..., rank=1)", S.data_parallel(), "compression.md#powersgd",
              "Two thin factors are sent, F bytes, instead of the gradient; the error is kept for the next step.", "2·(n-1)/n·F",
              state="S + P + F/2", optimizer=lambda: opt.PowerSGDOptimizer(momentum(), rank=1),
              names={"w_powersgd_error_0": "error", "w_powersgd_q_0": "Q", "w@GRAD.p": "P = gradient·Q", "w@GRAD.p.sum": "sum",
                     "matmul.tmp_6": "Q = gradientᵀ·P", "matmul.tmp_6.sum": "sum", "w@GRAD.approximated": "P·Qᵀ"}),
    ),
}  # fmt: skip
ENTRIES = tuple(e for entries in SECTIONS.values() for e in entries)

HEAD = """---
hide:
  - toc
---

# Gallery

The life of **one weight** in a step, with every [strategy](strategies.md) and with the optimizers that change what is sent. The model has
two layers, v and w, and is trained with `Momentum`; the pictures show w. A column is a rank, and time goes down. v is handled like w and
is left out. Names are those of the program texts (`print(t.main)`); `docs/make_gallery.py` draws the pictures from these programs.

![Legend](img/gallery/legend.svg)

Rounded boxes are computations. Orange lines join the ranks of a collective; orange arrows are messages (`send` and `recv`).

Below each picture are the bytes that a rank sends in a step and keeps between steps, for P bytes of parameters and S bytes of optimizer
state on n ranks: h hosts of g ranks, p stages, t ranks of `tp`. A is the size of the activations between two layers. Bytes assume the
cheapest algorithm in which all ranks send equally, as in `t.traffic()`; otherwise the average is given.
"""


def page() -> str:
    """The text of docs/gallery.md."""
    out = [HEAD]
    for heading, entries in SECTIONS.items():
        out += [f"## {heading}\n", '<div class="gallery" markdown="1">\n', *(e.text() for e in entries), "</div>\n"]
    return "\n".join(out)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {"legend.svg": legend(), **{f"{e.name}.svg": e.picture() for e in ENTRIES}}


def main() -> None:
    folder = DOCS / "img" / "gallery"
    folder.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
