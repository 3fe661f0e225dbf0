#!/usr/bin/env bash
# Configures where needed and builds. Usage: build.sh [target...]
# Environment: PRESET (release), JOBS (one per core, as far as memory goes), CMAKE_OPTIONS (for a new folder).
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${PRESET:-release}
folder=build/$preset
value() { sed -n "s/^$1 := //p" build/setup.mk; }
torch_root=$(value TORCH_ROOT)
test_python=$(value TEST_PYTHON)

# A compiler that reads a precompiled header of libtorch needs up to 2 GiB.
cores=$(nproc)
memory=$(awk '/^MemAvailable:/ {print int($2 / 2097152)}' /proc/meminfo)
jobs=${JOBS:-$((memory < 1 ? 1 : memory < cores ? memory : cores))}

cached() { sed -n "s/^$1:[^=]*=//p" "$folder/CMakeCache.txt" 2>/dev/null || true; }
if [ ! -f "$folder/build.ninja" ] || [ "$(cached TORCH_ROOT)" != "$torch_root" ] ||
  [ "$(cached FSDP2_TEST_PYTHON)" != "$test_python" ]; then
  # shellcheck disable=SC2086
  cmake --preset "$preset" "-DTORCH_ROOT=$torch_root" "-DFSDP2_TEST_PYTHON=$test_python" ${CMAKE_OPTIONS:-}
fi
cmake --build "$folder" -j "$jobs" ${1:+--target "$@"}
