#!/usr/bin/env bash
# Times the build in a copy of the tree: from nothing with an empty ccache, without a change, after a change of one
# file. Median of RUNS (3). Exits non-zero beyond the limits, which are for 2 cores.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${RUNS:-3}
jobs=${JOBS:-2}
limit_nothing=900 limit_no_change=5 limit_one_file=40

torch_root=$(sed -n 's/^TORCH_ROOT := //p' build/setup.mk)
folder=$(mktemp -d "${TMPDIR:-/tmp}/fsdp2-timings-XXXXXX")
trap 'rm -rf "$folder"' EXIT
git ls-files -z | xargs -0 tar -cf - | tar -xf - -C "$folder"
cd "$folder"
export CCACHE_DIR=$folder/ccache

# shellcheck disable=SC2317  # called through `seconds`
build() { cmake --build build/release -j "$jobs" >/dev/null; }
seconds() { # COMMAND: how long it takes, with tenths
  local start end
  start=$(date +%s%N)
  "$@"
  end=$(date +%s%N)
  awk "BEGIN {printf \"%.1f\n\", ($end - $start) / 1e9}"
}
# shellcheck disable=SC2317
from_nothing() { cmake --preset release "-DTORCH_ROOT=$torch_root" >/dev/null && build; }
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

largest=$(find src -name '*.cpp' -size +0 -printf '%s %p\n' | sort -rn | awk 'NR == 1 {print $2}')
for run in $(seq "$runs"); do
  rm -rf build "$CCACHE_DIR"
  seconds from_nothing | tee -a nothing.txt | sed "s/^/run $run: from nothing /"
  seconds build | tee -a no_change.txt | sed "s/^/run $run: no change /"
  # Code, not a comment: ccache looks past comments.
  echo "[[maybe_unused]] static const int kChangedInRun$run = $run;" >> "$largest"
  seconds build | tee -a one_file.txt | sed "s/^/run $run: one file /"
done

status=0
report() { # TEXT FILE LIMIT
  local value
  value=$(median < "$2")
  printf '%-28s %8.1f s   (limit %d s, median of %d)\n' "$1" "$value" "$3" "$runs"
  awk "BEGIN {exit !($value > $3)}" && status=1
  return 0
}
echo "on $(nproc) cores, -j $jobs:"
report 'from nothing, ccache empty' nothing.txt $limit_nothing
report 'no change' no_change.txt $limit_no_change
report "one file ($largest)" one_file.txt $limit_one_file
exit $status
