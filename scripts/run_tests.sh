#!/usr/bin/env bash
# Runs ctest on a build and ends with one line of totals, counted in test cases. Usage: run_tests.sh [ctest option...]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

folder=build/${PRESET:-release}
results=$folder/test-results
rm -rf "$results"
mkdir -p "$results"
ctest --test-dir "$folder" -j 2 --output-on-failure --no-tests=error --output-junit "$PWD/$results/ctest.junit" "$@"
status=$?
python3 scripts/summarize_tests.py "$results" || status=1
exit $status
