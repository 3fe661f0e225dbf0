#!/usr/bin/env bash
# Makes a Python environment with packages from pip, once. Usage: make_environment.sh FOLDER PACKAGE...
# Where they bring a CUDA build of torch, also the headers that NCCL's header wants and torch does not bring.
set -euo pipefail

folder=$1
shift
[ "$(cat "$folder/.complete" 2>/dev/null)" != "$*" ] || exit 0

echo "[setup] making $folder with $* (a CUDA build of torch takes a few GB)" >&2
python3 -m venv "$folder"
pip() { "$folder/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install "$@"
runtime=$("$folder/bin/pip" list --format=freeze 2>/dev/null |
  sed -n 's/^nvidia-cuda-runtime==\([0-9]*\.[0-9]*\)\..*/\1/p')
if [ -n "$runtime" ]; then
  pip install "nvidia-cuda-crt==$runtime.*" "nvidia-cuda-cccl==$runtime.*" ||
    echo "[setup] no CUDA $runtime header packages: built without NCCL" >&2
fi
echo "$*" > "$folder/.complete"
