#!/usr/bin/env bash
# Make an environment with this package, and torch, fbgemm and TorchRec that fit it:
#
#   components/install.sh FOLDER [TORCH [DEVICE [EXTRAS]]]
#
#   TORCH   2.X or 2.X.Y; by default what FOLDER has, or 2.13.0
#   DEVICE  cpu or cuda, whose build of fbgemm is installed; by default what is here
#   EXTRAS  of pyproject.toml, by default dev
#
# $PYTHON, by default python3, makes the environment. Another torch than FOLDER has
# replaces it. torch comes first and alone: fbgemm 1.X loads only with torch 2.(X+5).
# TorchRec comes last and without its metadata, which names the CUDA build of fbgemm.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=11 newest=14 # of torch 2.X
folder=${1:?is missing: components/install.sh FOLDER [TORCH [DEVICE [EXTRAS]]]}
has=$(cat "$folder/torch" 2>/dev/null || true)
torch=${2:-${has:-2.13.0}}
device=${3:-$(nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)}
extras=${4:-dev}
python=${PYTHON:-python3}

fail() {
    echo "$*" >&2
    exit 2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed. $python is $("$python" --version 2>&1)." \
        "Name another: make PYTHON=python3.12"
[[ $device == cpu || $device == cuda ]] ||
    fail "DEVICE must be cpu or cuda. Received: $device"
[[ $torch =~ ^2\.([0-9]+)(\.[0-9]+)?$ ]] && minor=${BASH_REMATCH[1]} &&
    ((minor >= oldest && minor <= newest)) ||
    fail "TORCH must be 2.$oldest to 2.$newest, or a release of one. Received: $torch"

exact=$torch
[[ $torch == *.*.* ]] || exact="$torch.*"
twin=1.$((minor - 5)).*
fbgemm=fbgemm-gpu-cpu
[[ $device == cpu ]] || fbgemm=fbgemm-gpu
iopath=()
((minor > 12)) || iopath=(iopath) # TorchRec imports it until 1.7

echo "installing into $folder, with torch $exact and $fbgemm $twin"
clear=()
[[ -z $has || $has == "$torch" ]] || clear=(--clear)
"$python" -m venv "${clear[@]}" "$folder"
# Python writes the bytecode of modules that it imports; pip would write it of all files.
pip=("$folder/bin/python" -m pip -qq --disable-pip-version-check install --no-compile)
"${pip[@]}" "torch==$exact"
rm -rf persia_torchrec.egg-info # of a build: its entry points would hide those installed
"${pip[@]}" "$fbgemm==$twin" "${iopath[@]}" --editable ".[$extras,torchrec-needs]"
"${pip[@]}" --no-deps "torchrec==$twin"
echo "$torch" >"$folder/torch"
