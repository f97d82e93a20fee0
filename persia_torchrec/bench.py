"""The benchmarks stand beside the package, in a checkout: ``python -m benchmarks``."""

import sys

if __name__ == "__main__":
    sys.stderr.write(
        "The benchmarks are run in a checkout of the repository: "
        f"python -m benchmarks {' '.join(sys.argv[1:]) or 'NAME'}\n"
    )
    sys.exit(2)
