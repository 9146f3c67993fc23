"""Views of programs: diffs, the census of operators and communication, SVG drawings, HTML pages; and the placement rules of ops."""

from .diff import Census, ProgramDiff, census, diff
from .draw import draw, draw_before_after
from .page import html, in_notebook
from .rules import patterns, rules

__all__ = ["Census", "ProgramDiff", "census", "diff", "draw", "draw_before_after", "html", "in_notebook", "patterns", "rules"]
