"""Making, shaping, moving, selecting and sorting elements."""
