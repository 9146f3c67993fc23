"""Programs to look at: what a pass changed, what communication moves, drawings, pages; and the rules of ops."""

from .diff import Census, ProgramDiff, census, diff
from .draw import draw, draw_before_after
from .page import html, in_notebook
from .rules import patterns, rules

__all__ = ["Census", "ProgramDiff", "census", "diff", "draw", "draw_before_after", "html", "in_notebook", "patterns", "rules"]
