#!/usr/bin/env bash
# Checks and times the device path on a machine with a GPU, in minutes: values, streams, mixed precision, offload,
# optimizers, checkpoints, memory, step time against the plain model (benchmarks/check_device.cpp says how).
# Usage: check_gpu.sh [--build FOLDER] [--json FILE] [OPTION OF check_device...]
# --build: a build made elsewhere, e.g. by check_torch.sh --cuda for the same release; nothing is compiled then, and
# libtorch is that of `python3` where the recorded one is not there. Otherwise builds build/gpu with JOBS compilers.
# Exit codes: 0 all passed, 1 a check failed, 3 no GPU here.
set -euo pipefail
cd "$(dirname "$0")/.."

folder="" json=check_gpu.json
while [ $# -gt 0 ]; do
  case $1 in
    --build) folder=$2 && shift 2 ;;
    --json) json=$2 && shift 2 ;;
    *) break ;;
  esac
done

if ! gpus=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null) || [ -z "$gpus" ]
then
  echo "check-gpu: no GPU on this machine (nvidia-smi shows none); nothing was checked" >&2
  exit 3
fi
echo "check-gpu: $gpus"

if [ -z "$folder" ]; then
  folder=build/gpu
  cmake -G Ninja -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release -DFSDP2_BUILD_TESTS=OFF
  cmake --build "$folder" -j "${JOBS:-$(nproc)}" --target check_device
fi
program=$folder/bin/check_device
if ldd "$program" 2>/dev/null | grep -q 'not found'; then
  torch=$(python3 -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin))')
  site=$(dirname "$torch")
  LD_LIBRARY_PATH=$folder/lib:$torch/lib:$(printf '%s:' "$site"/nvidia/*/lib)${LD_LIBRARY_PATH-}
  export LD_LIBRARY_PATH
fi
if missing=$(ldd "$program" | grep 'not found'); then
  echo "check-gpu: $program does not load here: $missing" >&2
  exit 1
fi
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} timeout 440 "$program" --device cuda --json "$json" "$@"
echo "check-gpu: results in $json"
