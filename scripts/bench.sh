#!/usr/bin/env bash
# Builds the benchmarks and runs them beside their Python twins. Usage: bench.sh [arguments of benchmarks/run_dcp.py]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --tests
scripts/build.sh benchmarks
python=$(sed -n 's/^TEST_PYTHON := //p' build/setup.mk)
exec "$python" benchmarks/run_dcp.py "$@"
