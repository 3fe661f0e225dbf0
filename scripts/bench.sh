#!/usr/bin/env bash
# Builds the benchmarks, runs them beside their Python twins, writes benchmarks/report.md.
# Usage: bench.sh [arguments of benchmarks/run_all.py]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --tests
scripts/build.sh benchmarks
python=$(sed -n 's/^TEST_PYTHON := //p' build/setup.mk)
plots=build/plots
if ! scripts/make_environment.sh "$plots" matplotlib; then
  echo "[bench] no matplotlib: a report without plots" >&2
  plots=
fi
exec "$python" benchmarks/run_all.py ${plots:+--plot-python "$plots/bin/python"} "$@"
