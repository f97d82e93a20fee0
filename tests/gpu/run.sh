#!/usr/bin/env bash
# Run the tests marked gpu, where no index can be reached:
#
#   tests/gpu/run.sh WHEELS [PYTEST ARGUMENT...]
#
# WHEELS is what tests/gpu/collect.sh made. $PYTHON, by default python3.12, must have a
# CUDA build of torch 2.11, numpy and numba; nothing is installed into it. The package is
# on the path and not installed, so that its pin of torch does not matter. Without a
# device the tests are skipped. The status is not zero if one fails.
set -euo pipefail

if (($# == 0)); then
    echo "usage: $0 WHEELS [PYTEST ARGUMENT...]" >&2
    exit 2
fi
wheels=$(realpath "$1")
shift
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12}

"$python" - <<'CHECK'
import importlib.util
import sys

missing = [n for n in ("torch", "numpy", "numba") if not importlib.util.find_spec(n)]
if missing:
    sys.exit(
        "python must have torch, numpy and numba. Received: "
        f"{sys.executable} without {', '.join(missing)}. "
        "Name another: PYTHON=/path/to/python tests/gpu/run.sh WHEELS"
    )
CHECK

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
"$python" -m pip --quiet --disable-pip-version-check install --no-index --no-deps \
    --target "$packages" "$wheels"/*.whl
export PYTHONPATH=$packages:$PWD

"$python" - <<'DEVICES'
from importlib.metadata import version

import torch

names = [torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())]
print(f"torch {torch.__version__}, torchrec {version('torchrec')}")
print("devices:", ", ".join(names) or "none, so that tests marked gpu are skipped")
DEVICES

"$python" -m pytest -m gpu "${@:-tests}"
