"""Curves of losses as SVG text, from the lines of benchmarks/results/precision_curves_*.csv."""

from __future__ import annotations

import csv
from html import escape
from math import log10
from pathlib import Path

import numpy as np

from fluidx.view.draw.svg import STYLE

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TITLES = {"gpt": "character GPT, Adam", "resnet": "ResNet on digits, Momentum"}
# colour and dashes: lines that lie upon one another all stay visible
LINES = {"float32": ("#9aa3ad", "none"), "bfloat16": ("#2f6fb7", "7 5"), "bfloat16, state too": ("#d9791a", "2 4")}
WIDTH, HEIGHT, LEFT, TOP = 380, 230, 46, 58
Runs = dict[str, dict[int, list[float]]]


def read(model: str) -> Runs:
    """{precision: {step: the losses of all seeds}}."""
    runs: Runs = {}
    with (RESULTS / f"precision_curves_{model}.csv").open(encoding="utf-8") as f:
        for row in csv.DictReader(f):
            runs.setdefault(row["precision"], {}).setdefault(int(row["step"]), []).append(float(row["loss"]))
    return runs


def panel(title: str, runs: Runs, left: float) -> list[str]:
    """One model: the mean over the seeds of each precision, and from the least to the largest of float32 as a band."""
    values = [v for of in runs.values() for losses in of.values() for v in losses]
    low, high, end = log10(min(values)), log10(max(values)), max(runs["float32"])

    def at(step: float, loss: float) -> str:
        return f"{left + WIDTH * step / end:.1f},{TOP + HEIGHT * (high - log10(loss)) / (high - low):.1f}"

    out = [f'<text class="h" x="{left}" y="{TOP - 10}">{escape(title)}</text>']
    out.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#c6ced6"/>')
    for mark in (k * 10.0**d for d in range(-6, 3) for k in (1, 2, 3, 5)):
        if low <= log10(mark) <= high:
            x, y = at(0, mark).split(",")
            out.append(f'<line x1="{x}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="#eceff2"/>')
            out.append(f'<text class="k" x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for step in range(0, end + 1, 100):
        x = at(step, values[0]).split(",")[0]
        out.append(f'<text class="k" x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{step}</text>')
    steps = sorted(runs["float32"])
    upper = [at(k, max(runs["float32"][k])) for k in steps]
    lower = [at(k, min(runs["float32"][k])) for k in reversed(steps)]
    out.append(f'<polygon points="{" ".join(upper + lower)}" fill="#1f2730" fill-opacity="0.12"/>')
    for name, (colour, dashes) in LINES.items():
        points = " ".join(at(k, float(np.mean(losses))) for k, losses in sorted(runs[name].items()))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
    return out


def precision_curves() -> str:
    """The loss of training in float32, in mixed precision, and with optimizer state in bfloat16: one panel for each model."""
    body, legend = [], float(LEFT)
    for name, (colour, dashes) in LINES.items():
        line = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        body.append(f'<line x1="{legend}" x2="{legend + 24}" y1="18" y2="18" {line}/>')
        body.append(f'<text class="k" x="{legend + 30}" y="22">{escape(name)}</text>')
        legend += 60 + 7 * len(name)
    body.append(f'<text class="k" x="{legend}" y="22">grey: from the least to the largest of the seeds in float32</text>')
    for k, (model, title) in enumerate(TITLES.items()):
        body += panel(title, read(model), LEFT + k * (WIDTH + LEFT + 14))
    width, height = 2 * (WIDTH + LEFT) + 30, TOP + HEIGHT + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", '<rect width="100%" height="100%" fill="#ffffff"/>', *body, "</svg>", ""])
