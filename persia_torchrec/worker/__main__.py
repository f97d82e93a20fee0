"""Run an embedding worker: see ``persia/worker/__main__.py``."""

import sys

from persia_torchrec.persia.worker.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
