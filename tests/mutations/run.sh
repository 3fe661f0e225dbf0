#!/usr/bin/env bash
# Puts each fault of this folder into a copy of the sources, one at a time, builds, and requires that the test named in
# the patch fails there; without the patch it must pass. Usage: run.sh [beginning of a patch's name...]
#
# A patch starts with two lines before the diff: `Fault: what goes wrong` and `Test: executable gtest-filter`.
# The copy and its build stay in build/mutants, so that another run compiles only what changed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

export PRESET=${PRESET:-release} OMP_NUM_THREADS=1
export CMAKE_OPTIONS=-DFSDP2_UNITY_BUILD=OFF  # a fault is one file to compile
tree=$PWD/build/mutants/tree
log=$PWD/build/mutants/log
export GIT_CEILING_DIRECTORIES=$PWD/build/mutants  # the copy is no part of a repository
seconds_per_test=240

copy_sources() {
  local file
  mkdir -p "$tree/build"
  cp build/setup.mk "$tree/build/"
  sources . | while IFS= read -r file; do
    cmp -s "$file" "$tree/$file" && continue
    mkdir -p "$tree/$(dirname "$file")"
    cp "$file" "$tree/$file"  # with a new time: a fault that an earlier run left is compiled away
  done
  (cd "$tree" && sources .) | while IFS= read -r file; do
    [ -e "$file" ] || rm "$tree/$file"
  done
}
sources() { find "$1" \( -path ./build -o -name .git -o -name '.venv*' -o -path ./outputs \) -prune -o -type f -print; }

fault_of() { sed -n 's/^Fault: //p;/^---/q' "$1"; }
test_of() { sed -n 's/^Test: //p;/^---/q' "$1"; }

build() { "$tree/scripts/build.sh" "$@" > "$log" 2>&1; }

# passes, fails, or cannot say: no such test
run_test() { # EXECUTABLE FILTER
  local program=$tree/build/$PRESET/tests/$1
  if ! timeout -k 5 "$seconds_per_test" "$program" --gtest_filter="$2" > "$log" 2>&1; then
    echo fails
  elif grep -q '^\[  PASSED  \] [1-9]' "$log"; then echo passes; else echo 'no such test'; fi
}

judge() { # PATCH; prints the result
  local executable filter result
  read -r executable filter <<< "$(test_of "$1")"
  git -C "$tree" apply "$1" 2> "$log" || { echo 'does not apply'; return; }
  if build "$executable"; then
    result=$(run_test "$executable" "$filter")
  else
    result='does not build'
  fi
  git -C "$tree" apply -R "$1"
  case $result in
    fails) echo caught ;;
    passes) echo SURVIVED ;;
    *) echo "$result" ;;
  esac
}

patches=()
for name in "${@:-}"; do
  for patch in "$PWD"/tests/mutations/"$name"*.patch; do
    [ -e "$patch" ] || { echo "no patch $name*" >&2; exit 2; }
    patches+=("$patch")
  done
done

copy_sources
mapfile -t tests < <(for patch in "${patches[@]}"; do test_of "$patch"; done | sort -u)
mapfile -t executables < <(printf '%s\n' "${tests[@]}" | cut -d' ' -f1 | sort -u)
echo "building the copy without a fault"
build "${executables[@]}" || { tail -n 40 "$log"; exit 1; }
failed=0
for test in "${tests[@]}"; do
  read -r executable filter <<< "$test"
  result=$(run_test "$executable" "$filter")
  if [ "$result" != passes ]; then
    echo "without a fault: $test: $result"
    tail -n 40 "$log"
    failed=1
  fi
done
[ $failed = 0 ] || exit 1

printf '%-38s %-14s %5s  %s\n' fault result time 'what goes wrong'
for patch in "${patches[@]}"; do
  start=$SECONDS
  result=$(judge "$patch")
  printf '%-38s %-14s %4ds  %s\n' "$(basename "$patch" .patch)" "$result" $((SECONDS - start)) "$(fault_of "$patch")"
  [ "$result" = caught ] || failed=1
done
[ $failed = 0 ] && echo "all ${#patches[@]} faults are caught"
exit $failed
