"""`python -m fluidx` is the `fluidx` command."""

from .cli import main

main(prog_name="fluidx")
