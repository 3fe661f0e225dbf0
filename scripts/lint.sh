#!/usr/bin/env bash
# What can be checked without running: clang-tidy over the library and the program, shellcheck where it is there,
# line lengths.
# Usage: lint.sh [file.cpp...]
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
long=$(git ls-files '*.h' '*.cpp' '*.py' '*.sh' | xargs grep -nE '^.{121,}' | cut -c1-100 || true)
if [ -n "$long" ]; then
  printf 'lines beyond 120 columns:\n%s\n' "$long"
  status=1
fi
if command -v shellcheck >/dev/null; then
  git ls-files '*.sh' .ci/run | xargs shellcheck || status=1
fi

# Older ones do not know std::source_location.
tool=$(command -v clang-tidy-16 || command -v clang-tidy) ||
  { echo "clang-tidy is missing: apt-get install clang-tidy-16" >&2; exit 1; }
# clang cannot read GCC's precompiled header, so the commands come from a configuration without it.
scripts/setup.sh
torch_root=$(sed -n 's/^TORCH_ROOT := //p' build/setup.mk)
cmake -G Ninja -S . -B build/lint "-DTORCH_ROOT=$torch_root" -DFSDP2_PRECOMPILED_HEADER=OFF >/dev/null
if [ $# = 0 ]; then
  mapfile -t files < <(git ls-files 'src/*.cpp' 'tools/*.cpp' | grep -v 'backend/nccl.cpp')
  set -- "${files[@]}"
fi
printf '%s\n' "$@" |
  xargs -P "${JOBS:-2}" -n 1 "$tool" -p build/lint --quiet --extra-arg=-Wno-unknown-warning-option || status=1
exit $status
