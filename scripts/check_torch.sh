#!/usr/bin/env bash
# Compiles library, program and examples against another libtorch, in an environment of its own, and loads the result.
# Usage: check_torch.sh VERSION. A CUDA build of torch takes several GB; no CUDA toolkit is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?usage: check_torch.sh VERSION}
environment=.venv-$version
folder=build/torch-$version

scripts/setup.sh --packages
scripts/make_environment.sh "$environment" "torch==$version"

cmake -G Ninja -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
  "-DTORCH_ROOT=$PWD/$environment" -DFSDP2_BUILD_TESTS=OFF
cmake --build "$folder" -j "${JOBS:-2}" --target programs

if ldd -r "$folder/lib/libfsdp2.so" | grep -E 'not found|undefined symbol'; then
  echo "check-torch: libfsdp2.so does not load with torch $version" >&2
  exit 1
fi
nccl=without
if grep -q 'backend/nccl.cpp.o' "$folder/build.ninja"; then nccl=with; fi
echo "check-torch: builds and loads with torch $version, $nccl NCCL"
