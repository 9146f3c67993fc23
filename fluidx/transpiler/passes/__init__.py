"""Passes: one rewrite of main and startup each, from programs to programs."""
