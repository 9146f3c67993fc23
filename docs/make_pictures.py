"""Draw the pictures of the documentation into docs/img: `python docs/make_pictures.py`."""

from __future__ import annotations

from html import escape
from itertools import accumulate
from pathlib import Path

from curves import precision_curves
from one_weight import OneWeight

import fluidx as fx
from fluidx.ir import Operator, Role, Shard
from fluidx.transpiler.scheduling.pipeline_schedules import SCHEDULES, slots
from fluidx.transpiler.specialize import Specializer
from fluidx.view.draw import draw, draw_before_after
from fluidx.view.draw.svg import COLOURS, STYLE

IMG = Path(__file__).parent / "img"


def model() -> tuple[fx.Program, fx.Program]:
    """One fully connected layer trained by SGD: a weight and a bias, small enough to see every operator."""
    main, startup = fx.Program("one_device"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], "float32")
        y = fx.layers.fc(x, 3, param_attr=fx.ParamAttr(name="w"), bias_attr=fx.ParamAttr(name="b"), name="y")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.square(y)))
    return main, startup


def two_layers() -> tuple[fx.Program, fx.Program]:
    """Two layers cut over `tp`: the first by columns, the second by rows."""
    main, startup = fx.Program("two_layers"), fx.Program("two_layers_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], "float32")
        h = fx.layers.fc(x, 8, act="relu", param_attr=fx.ParamAttr(name="w1", placement=Shard(1, "tp")), bias_attr=False, name="h")
        y = fx.layers.fc(h, 3, param_attr=fx.ParamAttr(name="w2", placement=Shard(0, "tp")), bias_attr=False, name="y")
        fx.layers.mean(fx.layers.square(y))
    return main, startup


def trained_layers() -> tuple[fx.Program, fx.Program]:
    """Two layers of a weight each, trained by SGD: backward works with the second weight, too."""
    main, startup = fx.Program("trained_layers"), fx.Program("trained_layers_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 8, param_attr=fx.ParamAttr(name="w1"), bias_attr=False, name="h")
        y = fx.layers.fc(h, 2, param_attr=fx.ParamAttr(name="w2"), bias_attr=False, name="y")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(y))
    return main, startup


def overview() -> str:
    """One weight on one device, and by zero1 on four ranks: the picture of the README, 900 pixels wide."""
    main, startup = fx.Program("overview"), fx.Program("overview_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        y = fx.layers.fc(fx.data("x", [-1, 64], "float32"), 64, param_attr=fx.ParamAttr(name="w"), bias_attr=False)
        fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(y))
    panels = {
        "one device": (1, ()),
        "four ranks, zero1()": (4, (
            "every rank has the weight", "and a quarter of the optimizer state", "computes on a quarter of the batch", "",
            "and gets a partial gradient;", "ranks add them, each gets a quarter", "of the sum,", "updates its quarter of the weight,", "",
            "and sends it to the others.", "",
        )),
    }  # fmt: skip
    out, x = [], 0
    for title, (ranks, captions) in panels.items():
        t = fx.DistributeTranspiler("zero1").transpile(program=main, startup_program=startup, trainers=ranks)
        svg = OneWeight(t, title, "w", {}, captions=captions).svg()
        out.append(svg.replace("<svg ", f'<svg x="{x}" ', 1))
        x += 220
    # each panel has a drawing area of its own; the captions are right of the last column, outside of it
    inner = "\n".join(panel.replace("<svg ", '<svg overflow="visible" ', 1) for panel in out)
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 300" width="900" height="300" role="img">\n{paper}\n{inner}\n</svg>\n'


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    main, startup = model()
    out = {"one_device.svg": draw(main), "overview.svg": overview()}
    for name in ("data_parallel", "reduce_broadcast", "ring_optimizer", "zero1"):
        t = fx.DistributeTranspiler(name).transpile(program=main, startup_program=startup, trainers=2)
        ranks = [t.get_trainer_program(r) for r in range(2)]
        out[f"{name}.svg"] = draw([part(p, _after_backward) for p in ranks])
        if name == "data_parallel":
            out["before_after.svg"] = draw_before_after(main, ranks)
            out["startup.svg"] = draw([t.get_startup_program(r) for r in range(2)])
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(wire="float16")).transpile(program=main, startup_program=startup, trainers=2)
    out["wire.svg"] = draw([part(t.get_trainer_program(r), _after_backward) for r in range(2)])
    out["ring_hops.svg"] = ring_hops(4)
    alone = fx.strategies.data_parallel(bucket_mb=0)
    t = fx.DistributeTranspiler(alone).transpile(program=main, startup_program=startup, trainers=fx.Cluster(2, 2))
    out["several_hosts.svg"] = draw([part(t.get_trainer_program(r), _about_w) for r in range(4)])
    main, startup = two_layers()
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=fx.Mesh(tp=2))
    out["tensor_parallel.svg"] = draw([part(t.get_trainer_program(r), _forward) for r in range(2)])
    main, startup = trained_layers()
    t = fx.DistributeTranspiler("zero3").transpile(program=main, startup_program=startup, trainers=2)
    out["zero3.svg"] = draw([part(t.get_trainer_program(r), _of_w2) for r in range(2)])
    out["precision_curves.svg"] = precision_curves()
    out |= {f"pipeline_{name}.svg": in_slots(name, stages=4, turns=6) for name in SCHEDULES}
    return out


def ring_hops(ranks: int) -> str:
    """The way of one parameter round the ring: gradient to the root, update there, new value back."""
    group, root = list(range(ranks)), ranks - 1
    program = fx.Program.parse_from_string(f"""
program ring {{
  group dp = {group}
  var %w@GRAD: f32[1024] partial(sum) over dp persistable
  param %w: f32[1024]
  var %lr: f32[1] persistable
dist:
  %w@GRAD.sum: f32[1024] at({root}) over dp = reduce(%w@GRAD) {{algorithm="ring", group="dp", op="sum", root={root}}}
optimize:
  %w.new: f32[1024] at({root}) over dp = sgd(%w, %w@GRAD.sum, %lr)
dist:
  %w = broadcast(%w.new) {{algorithm="ring", group="dp", root={root}}}
}}
""")
    special = Specializer(program)
    return draw([special.rank_program(r) for r in range(ranks)])


def in_slots(schedule: str, stages: int, turns: int, cell: int = 34, title: str = "") -> str:
    """What each stage of a pipeline does in every slot of time, and how many micro-batches it keeps the activations of at most."""
    left, top = max(56, 2 * cell + 2), 34 if title else 10
    found = slots(schedule, stages, turns)
    last = 1 + max(max(of.values()) for of in found)
    boxes = [f'<text class="h" x="8" y="20">{escape(title)}</text>'] if title else []
    for stage, of in enumerate(found):
        boxes.append(f'<text class="k" x="8" y="{top + cell / 2 + 4:g}">stage {stage}</text>')
        for action, slot in of.items():
            fill, line = COLOURS["backward" if action.backward else "forward"]
            x = left + slot * cell
            boxes.append(f'<rect x="{x}" y="{top}" width="{cell - 2}" height="{cell}" rx="4" fill="{fill}" stroke="{line}"/>')
            small = f' style="font-size: {cell * 0.45:g}px"' if cell < 26 else ""
            boxes.append(f'<text class="t" x="{x + cell / 2 - 1:g}" y="{top + cell / 2 + 4:g}"{small}>{action}</text>')
        kept = accumulate(-1 if action.backward else 1 for action in of)
        boxes.append(f'<text class="k" x="{left + last * cell + 6}" y="{top + cell / 2 + 4:g}">keeps {max(kept)}</text>')
        top += cell + 6
    width = left + last * cell + 56
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">'
    return "\n".join([head, f"<style>{STYLE}</style>", '<rect width="100%" height="100%" fill="#ffffff"/>', *boxes, "</svg>", ""])


def part(program: fx.Program, keep) -> fx.Program:
    """The program with some of its operators only; what the others made appears as a value from outside."""
    p = program.copy()
    block = p.global_block()
    block.oplist = [op for op in block.oplist if keep(op)]
    return p


def _after_backward(op: Operator) -> bool:
    return op.role in (Role.DIST, Role.OPTIMIZE)


def _forward(op: Operator) -> bool:
    return op.role in (Role.DIST, Role.FORWARD, Role.LOSS)


def _about_w(op: Operator) -> bool:
    return op.role is Role.DIST and any(n.startswith("w@GRAD.") for n in (*op.input_arg_names, *op.output_arg_names))


def _of_w2(op: Operator) -> bool:
    return any(n.startswith("w2") for n in (*op.input_arg_names, *op.output_arg_names))


def main() -> None:
    IMG.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMG / name).write_text(svg, encoding="utf-8")
        print(f"docs/img/{name}")


if __name__ == "__main__":
    main()
