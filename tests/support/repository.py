"""Where the files of this repository are, from wherever a test stands."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
