#!/usr/bin/env bash
# Test and measure on a GPU, where no index can be reached:
#
#   tests/gpu/run.sh FOLDER [PART [ARGUMENT...]]
#
# The parts; without PART the first four, which end within 9 minutes together:
#
#   tests      the tests marked gpu, each with the ids of a batch on the host and on the GPU
#   job        the README's main job: what it learns, and how often it waits for the GPU
#   dlrm       python -m benchmarks dlrm: DLRM by TorchRec's pipeline, with its tables on
#              server processes, and plain in the memory of the GPU and of the host
#   sanitizer  tests under torch's CUDA sanitizer, which knows what no stream waits for
#   servers    python -m benchmarks servers: lookups and updates of 1 to 14 server
#              processes, and which side is the limit
#   setup      nothing but what comes before the other parts
#
# FOLDER is what tests/gpu/collect.sh made. $PYTHON, by default python3.12, must have a
# CUDA build of torch 2.11, numpy and numba; nothing is installed into it. Packages of
# FOLDER go into $PACKAGES, where later runs find them, by default into a folder that
# goes with this run. The package itself is on the path; of what its installation would
# make there are the entry points alone. What a part prints is in $LOGS/PART.log too, if
# that is set. Without a device the tests are skipped, and the benchmarks run with small
# numbers on the CPU. The status is not zero if anything fails.
set -euo pipefail

limit_s=480 of_all_s=535 # of a part, and of all
main=(tests job dlrm sanitizer)
parts=("${main[@]}" servers setup)

if (($# == 0)); then
    usage=$(IFS='|' && echo "${parts[*]}")
    echo "usage: $0 FOLDER [$usage [ARGUMENT...]]" >&2
    exit 2
fi
folder=$(realpath "$1")
shift
chosen=("${main[@]}")
if (($# > 0)); then
    [[ " ${parts[*]} " == *" $1 "* ]] || {
        echo "The part must be one of ${parts[*]}. Received: $1." >&2
        exit 2
    }
    chosen=("$1")
    shift
fi
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12}
# Asking for devices must not begin with them: tests fork.
export PYTORCH_NVML_BASED_CUDA_CHECK=1 PYTHONUNBUFFERED=1

"$python" - <<'CHECK'
import importlib.util
import sys

missing = [n for n in ("torch", "numpy", "numba") if not importlib.util.find_spec(n)]
if missing:
    sys.exit(
        "python must have torch, numpy and numba. Received: "
        f"{sys.executable} without {', '.join(missing)}. "
        "Name another: PYTHON=/path/to/python tests/gpu/run.sh FOLDER"
    )
CHECK

if [[ -n ${PACKAGES:-} ]]; then
    mkdir -p "$PACKAGES"
    packages=$(realpath "$PACKAGES")
else
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
fi
if [[ ! -e $packages/complete ]]; then
    archive=$folder/fbgemm.tar.xz
    mapfile -t wheels < <(find "$folder" -maxdepth 1 -name '*.whl' | sort)
    if [[ -e $archive ]]; then
        tar -C "$packages" -xJf "$archive"
        mapfile -t wheels < <(printf '%s\n' "${wheels[@]}" | grep -v /fbgemm_gpu)
    fi
    "$python" -m pip --quiet --disable-pip-version-check install --no-index --no-deps \
        --no-compile --target "$packages" "${wheels[@]}"
    "$python" - "$packages" <<'ENTRY_POINTS'
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
info = Path(sys.argv[1], "persia_torchrec-0.dist-info")
info.mkdir()
named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
(info / "METADATA").write_text(named)
lines = []
for group, points in project["entry-points"].items():
    lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
(info / "entry_points.txt").write_text("\n".join(lines) + "\n")
ENTRY_POINTS
    touch "$packages/complete"
fi
export PYTHONPATH=$packages:$PWD
[[ ! -d $folder/adult ]] || export PERSIA_DATA_DIR=${PERSIA_DATA_DIR:-$folder/adult}

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

# Only these are imported: others need packages that are not in FOLDER.
mapfile -t marked < <(grep -rlE 'mark\.gpu|^from tests\.[a-z.]*places' tests --include 'test_*.py' | sort)

# The versions there have warnings of their own.
pytest=(-m pytest -q -m gpu --timeout 120 --tb short -W default -p tests.gpu.table)

# Set the command of a part, with the arguments that it is given.
command_of() {
    local part=$1
    shift
    case $part in
    tests) # an error of a wait that torch forbids names its operator by its C++ stack
        export TORCH_SHOW_CPP_STACKTRACES=1
        command=("${pytest[@]}" "${@:-${marked[@]}}")
        ;;
    sanitizer)
        [[ $has_device != 1 ]] || export TORCH_CUDA_SANITIZER=1
        command=("${pytest[@]}" -p tests.gpu.sanitizer
            "${@:-tests/sharding/test_on_device.py}")
        ;;
    job) command=(-m tests.gpu.job "$@") ;;
    *)
        command=(-m benchmarks "$part" "$@")
        [[ $has_device == 1 ]] || command+=(--tiny)
        ;;
    esac
}

# Run what follows; what it prints goes to the log of a part too.
logged() {
    local log=${LOGS:+$LOGS/$1.log}
    shift
    if [[ -z $log ]]; then
        "$@"
    else
        mkdir -p "$LOGS"
        "$@" 2>&1 | tee "$log"
    fi
}

status=0
for part in "${chosen[@]}"; do
    [[ $part != setup ]] || continue
    left_s=$((of_all_s - SECONDS))
    if ((left_s <= 0)); then
        echo "$part: not begun, as all parts before took $SECONDS s" >&2
        status=1
        continue
    fi
    (
        command_of "$part" "$@"
        logged "$part" timeout --kill-after 10 "$((left_s < limit_s ? left_s : limit_s))" \
            "$python" "${command[@]}"
    ) || {
        failed=$?
        ((failed != 124)) || echo "$part: did not end in time, after $SECONDS s of all" >&2
        status=$failed
    }
done
exit "$status"
