"""The commands that predict: `fluidx clusters`."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="The figures in the form of a file, to begin a file of your own.")
def clusters(name: str | None, as_json: bool) -> None:
    """List the machines whose figures are known, or the figures of NAME (a machine, or a JSON file) with their sources."""
    import json

    from . import hardware

    if as_json:
        found = [hardware.load(n) for n in ([name] if name else hardware.names())]
        forms = [hardware.as_json(h) for h in found]
        click.echo(json.dumps(forms[0] if name else forms, indent=2))
        return
    for line in hardware.describe(hardware.load(name)) if name else hardware.overview():
        click.echo(line)
