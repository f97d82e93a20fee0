"""Verbs that start something: jobs, and the examples that come with the package."""

import shutil
from pathlib import Path

import click

import persia_torchrec


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default="examples")
def examples(folder: Path) -> None:
    """Copy the examples into FOLDER, a new one.

    persia-torchrec examples && python examples/quickstart.py
    """
    package = Path(persia_torchrec.__file__).parent
    source = package / "examples"
    if not source.is_dir():  # a checkout
        source = package.parent / "examples"
    if folder.exists():
        raise click.ClickException(
            f"FOLDER must be a new folder. Received: {folder}, which exists."
        )
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    click.echo(f"copied to {folder}; begin with python {folder}/quickstart.py")
