#!/usr/bin/env bash
# Test and measure on a GPU, where no index can be reached:
#
#   tests/gpu/run.sh WHEELS [PART [ARGUMENT...]]
#
# The parts, each of at most 8 minutes and one table; all of them without PART:
#
#   tests    the tests marked gpu, each with the ids of a batch on the host and on the GPU
#   dlrm     python -m benchmarks dlrm: DLRM with its tables on server processes,
#            and with them in the memory of the GPU and of the host
#   servers  python -m benchmarks servers: lookups and updates of 1 to 14 server
#            processes, and which side is the limit
#
# WHEELS is what tests/gpu/collect.sh made. $PYTHON, by default python3.12, must have a
# CUDA build of torch 2.11, numpy and numba; nothing is installed into it. The package is
# on the path and not installed. Without a device the tests are skipped, and the
# benchmarks run with small numbers on the CPU. The status is not zero if anything fails.
set -euo pipefail

limit_s=480

if (($# == 0)); then
    echo "usage: $0 WHEELS [tests|dlrm|servers [ARGUMENT...]]" >&2
    exit 2
fi
wheels=$(realpath "$1")
shift
parts=(tests dlrm servers)
if (($# > 0)); then
    [[ " ${parts[*]} " == *" $1 "* ]] || {
        echo "The part must be one of ${parts[*]}. Received: $1." >&2
        exit 2
    }
    parts=("$1")
    shift
fi
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

has_device=$("$python" - <<'DEVICES'
import sys
from importlib.metadata import version

import torch

names = [torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())]
none = "none, so that tests marked gpu are skipped, and benchmarks are small, on the CPU"
print(f"torch {torch.__version__}, torchrec {version('torchrec')}", file=sys.stderr)
print("devices:", ", ".join(names) or none, file=sys.stderr)
print(len(names) and 1)
DEVICES
)

# Only these are imported: others need packages that are not in WHEELS.
mapfile -t marked < <(grep -rlE 'mark\.gpu|^from tests\.[a-z.]*places' tests --include 'test_*.py' | sort)

status=0
for part in "${parts[@]}"; do
    if [[ $part == tests ]]; then
        command=(-m pytest -p tests.gpu.table -m gpu "${@:-${marked[@]}}")
    else
        command=(-m benchmarks "$part" "$@")
        [[ $has_device == 1 ]] || command+=(--tiny)
    fi
    timeout --kill-after 10 "$limit_s" "$python" "${command[@]}" || {
        failed=$?
        ((failed != 124)) || echo "$part: did not end within $limit_s s" >&2
        status=$failed
    }
done
exit "$status"
