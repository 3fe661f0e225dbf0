#!/usr/bin/env bash
# Formats every C++ file of the tree, or only tells which differ: format.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(command -v clang-format-14 || command -v clang-format) ||
  { echo "clang-format is missing: apt-get install clang-format-14" >&2; exit 1; }
if [ "${1:-}" = --check ]; then
  git ls-files -z '*.h' '*.cpp' | xargs -0 "$tool" --dry-run --Werror
else
  git ls-files -z '*.h' '*.cpp' | xargs -0 "$tool" -i
fi
