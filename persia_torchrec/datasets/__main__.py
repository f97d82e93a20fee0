"""``python -m persia_torchrec.datasets FILE...``: a look at files before training."""

import argparse
import sys
from collections.abc import Sequence

from persia_torchrec.datasets.look import look
from persia_torchrec.errors import PersiaError
from persia_torchrec.logger import printable


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is in files, and the lines of Python that read them."""
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.datasets",
        description="Print what is in files, and the lines of Python that read them.",
    )
    parser.add_argument("files", nargs="+", help="paths, folders, globs or URLs")
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="rows looked at [1000000]")
    arguments = parser.parse_args(argv)
    try:
        sys.stdout.write(printable(look(arguments.files, arguments.rows)) + "\n")
    except PersiaError as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
