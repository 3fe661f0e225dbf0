#!/usr/bin/env bash
# Builds and runs every benchmark below benchmarks/. Usage: bench.sh [name...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -f benchmarks/CMakeLists.txt ]; then
  echo "There are no benchmarks yet. What is measured today: \`make demo\` prints tokens/s, \`make timings\` the build."
  exit 0
fi
scripts/build.sh benchmarks
for program in build/"${PRESET:-release}"/bin/*_bench; do
  name=$(basename "$program")
  if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then "$program"; fi
done
