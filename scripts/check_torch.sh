#!/usr/bin/env bash
# Compiles library, programs and examples against other releases of libtorch, each in an environment of its own, and
# loads the result. Usage: check_torch.sh [--cuda] VERSION...
# --cuda: PyPI's own wheels, which are CUDA builds, and a result without NCCL is a failure. Each takes 5 GB; no CUDA
# toolkit is needed. JOBS (2) compilers at once.
set -euo pipefail
cd "$(dirname "$0")/.."

cuda=no
[ "${1-}" != --cuda ] || { cuda=yes && shift; }
[ $# -gt 0 ] || { echo "usage: check_torch.sh [--cuda] VERSION..." >&2 && exit 2; }

check() {
  local version=$1 environment=.venv-$1 folder=build/torch-$1 exact="torch==$1"
  # Three: not 2.13.0+cpu, where pip is shown such a wheel.
  if [ $cuda = yes ]; then environment+=-cuda folder+=-cuda exact="torch===$1"; fi
  scripts/make_environment.sh "$environment" "$exact"

  cmake -G Ninja -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release \
    "-DTORCH_ROOT=$PWD/$environment" -DFSDP2_BUILD_TESTS=OFF -DFSDP2_UNITY_BUILD=ON
  cmake --build "$folder" -j "${JOBS:-2}" --target programs benchmarks

  if ldd -r "$folder/lib/libfsdp2.so" | grep -E 'not found|undefined symbol'; then
    echo "check-torch: libfsdp2.so does not load with torch $version" >&2
    return 1
  fi
  local nccl=without
  if grep -q 'backend/nccl.cpp.o' "$folder/build.ninja"; then nccl=with; fi
  if [ $cuda = yes ] && [ $nccl = without ]; then
    echo "check-torch: with torch $version no NCCL was found; see what cmake said above" >&2
    return 1
  fi
  results+=("check-torch: builds and loads with torch $version, $nccl NCCL")
}

scripts/setup.sh --packages
results=()
for version in "$@"; do check "$version"; done
printf '%s\n' "${results[@]}"
