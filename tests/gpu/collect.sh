#!/usr/bin/env bash
# Collect the wheels that tests/gpu/run.sh installs, where an index can be reached:
#
#   tests/gpu/collect.sh WHEELS [NAME...]
#
# They are what this package, its tests and two benchmarks need beyond a Python 3.12 on x86-64 with a CUDA
# build of torch 2.11 (never collected), numpy and numba (llvmlite alone is larger than
# all of these together). NAME adds packages that the other Python lacks all the same,
# such as numpy numba llvmlite; without them the folder is kept below 55 MiB.
set -euo pipefail

max_mib=55

# Each line begins with what is wanted for itself; what it needs follows.
packages=(
    "torchrec==1.6.*" tensordict "pyvers<0.3" cloudpickle iopath portalocker tqdm \
    pyre-extensions typing-inspect mypy-extensions "torchmetrics==1.0.3" \
    lightning-utilities packaging
    "fbgemm-gpu-cpu==1.6.0" # beside a CUDA torch too: remote tables need no CUDA kernels
    pyzmq
    pyyaml
    msgspec
    prometheus-client
    psutil # with tabulate for the benchmarks
    "torchx==0.7.0" docstring-parser importlib-metadata lazy-importer zipp tabulate \
    docker "urllib3<1.27" requests idna certifi charset-normalizer
    pytest iniconfig pluggy pygments
    pytest-timeout
    hypothesis sortedcontainers
)

if (($# == 0)); then
    echo "usage: $0 WHEELS [NAME...]" >&2
    exit 2
fi
wheels=$1
shift

platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
done
mkdir -p "$wheels"
"${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check download --no-deps \
    --only-binary :all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --dest "$wheels" "${packages[@]}" "$@"

size_mib=$(du --apparent-size --block-size 1M "$wheels" | cut -f1)
echo "$wheels: $(find "$wheels" -name '*.whl' | wc -l) wheels, $size_mib MiB"
if (($# == 0 && size_mib > max_mib)); then
    echo "The wheels must take $max_mib MiB at most. Received: $size_mib MiB." >&2
    exit 1
fi
