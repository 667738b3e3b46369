"""The flags that the trainings of small models have in common."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path


def training_flags(about: str | None, output: Path, clips: int) -> ArgumentParser:
    """A parser of --output, --cache, --clips and --seed. about: the docstring of the training's module."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gridsieve-demo"), help="where rendered clips are kept")
    parser.add_argument("--clips", type=int, default=clips)
    parser.add_argument("--seed", type=int, default=0)
    return parser
