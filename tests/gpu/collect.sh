#!/usr/bin/env bash
# Collect what tests/gpu/run.sh needs, where an index can be reached:
#
#   tests/gpu/collect.sh FOLDER [NAME...]
#
#   FOLDER/*.whl          what this package, its tests and two benchmarks need beyond a
#                         Python 3.12 on x86-64 with a CUDA build of torch 2.11 (never
#                         collected), numpy and numba (llvmlite alone is larger than all
#                         of these together)
#   FOLDER/fbgemm.tar.xz  fbgemm's CUDA build, cut to one architecture by
#                         tests/gpu/prune_fbgemm.py, which takes some minutes; one that is
#                         there already stays. For CUDA 13, as that torch
#   FOLDER/adult          the data of the example, from $PERSIA_DATA_DIR, if that is set
#
# $ARCH is the architecture, by default 90, which is H100 and H200; with ARCH=none the
# wheel of fbgemm's CPU build takes the place of the archive, and there are no tables of
# plain TorchRec on a GPU. NAME adds packages that the other Python lacks all the same,
# such as numpy numba llvmlite; without them the folder is kept below 55 MiB.
set -euo pipefail

max_mib=55
arch=${ARCH:-90}
here=$(dirname "$0")
fbgemm=1.6.0

# Each line begins with what is wanted for itself; what it needs follows.
packages=(
    "torchrec==1.6.*" tensordict "pyvers<0.3" cloudpickle iopath portalocker tqdm \
    pyre-extensions typing-inspect mypy-extensions "torchmetrics==1.0.3" \
    lightning-utilities packaging
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
    echo "usage: $0 FOLDER [NAME...]" >&2
    exit 2
fi
folder=$1
shift
[[ $arch == none || $arch =~ ^[0-9]+$ ]] || {
    echo "ARCH must be none or a number, as 90 for H100. Received: $arch." >&2
    exit 2
}

platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
done
download=("${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check download
    --no-deps --only-binary :all: --python-version 3.12 --implementation cp
    "${platforms[@]}")
mkdir -p "$folder"
[[ $arch != none ]] || packages+=("fbgemm-gpu-cpu==$fbgemm")
"${download[@]}" --dest "$folder" "${packages[@]}" "$@"
if [[ $arch != none && ! -e $folder/fbgemm.tar.xz ]]; then
    whole=$(mktemp -d)
    trap 'rm -rf "$whole"' EXIT
    "${download[@]}" --dest "$whole" "fbgemm-gpu==$fbgemm"
    "${PYTHON:-python3}" "$here/prune_fbgemm.py" --arch "$arch" \
        "$whole"/fbgemm_gpu-*.whl "$folder/fbgemm.tar.xz"
fi
if [[ -n ${PERSIA_DATA_DIR:-} ]]; then
    mkdir -p "$folder/adult"
    cp "$PERSIA_DATA_DIR"/adult.* "$folder/adult/"
fi

size_mib=$(du --apparent-size --block-size 1M --summarize "$folder" | cut -f1)
echo "$folder: $(find "$folder" -name '*.whl' | wc -l) wheels, $size_mib MiB in all"
if (($# == 0 && size_mib > max_mib)); then
    echo "The folder must take $max_mib MiB at most. Received: $size_mib MiB." >&2
    exit 1
fi
