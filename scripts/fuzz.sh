#!/usr/bin/env bash
# Runs every fuzzer for some seconds, one after the other, on a copy of its corpus: fuzz.sh [seconds [target...]]
# Needs clang-16 and libclang-rt-16-dev. What finds new code is left in build/fuzz/corpus, what fails in
# build/fuzz/faults; such an input belongs into tests/fuzz/corpus/<target>, where a test replays it.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(pickle metadata item safetensors zstd)

torch_root=${TORCH_ROOT:-}
if [ -z "$torch_root" ]; then
  scripts/setup.sh
  torch_root=$(sed -n 's/^TORCH_ROOT := //p' build/setup.mk)
fi
cmake --preset fuzz "-DTORCH_ROOT=$torch_root" >/dev/null
ninja -C build/fuzz "-j${JOBS:-2}" "${targets[@]/#/fuzz_}"

# libtorch is not instrumented, and keeps what it allocates at its start.
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:detect_container_overflow=0
export OMP_NUM_THREADS=1
mkdir -p build/fuzz/faults
for target in "${targets[@]}"; do
  echo "== $target, $seconds s"
  mkdir -p "build/fuzz/corpus/$target"
  nice -n 19 "build/fuzz/bin/fuzz_$target" -max_total_time="$seconds" -max_len=8192 -timeout=10 -rss_limit_mb=3000 \
    -malloc_limit_mb=1500 -artifact_prefix="build/fuzz/faults/$target-" -print_final_stats=1 -verbosity=0 \
    "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target"
done
