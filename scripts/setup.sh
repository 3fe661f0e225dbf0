#!/usr/bin/env bash
# Makes this machine able to build: system packages, and a libtorch where none is found. With --tests also a Python
# whose torch is the linked release, with --packages nothing but the packages. Doing it twice costs nothing.
#
# Environment: TORCH_ROOT or CMAKE_PREFIX_PATH choose a libtorch; TORCH_VERSION is what .venv gets (default 2.13.0).
# Writes build/setup.mk for the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${TORCH_VERSION:-2.13.0}
with_tests=false
[ "${1:-}" = --tests ] && with_tests=true

say() { printf '[setup] %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# package=what proves that it is there: a command, or a header
required='g++=g++ cmake=cmake ninja-build=ninja nlohmann-json3-dev=nlohmann/json.hpp libcli11-dev=CLI/CLI.hpp
  libxxhash-dev=xxhash.h zlib1g-dev=zlib.h libisal-dev=isa-l/crc.h libzstd-dev=zstd.h libgtest-dev=gtest/gtest.h
  python3=python3 python3-venv=python-venv'
faster='ccache=ccache mold=mold'

have() {
  case "$1" in
    python-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    *.h | *.hpp) [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing_of() {
  local entry
  for entry in "$@"; do
    have "${entry#*=}" || printf '%s ' "${entry%%=*}"
  done
}

install_packages() {
  local needed wanted
  # shellcheck disable=SC2086
  needed=$(missing_of $required) wanted=$(missing_of $faster)
  [ -n "$needed$wanted" ] || return 0
  command -v apt-get >/dev/null ||
    { [ -z "$needed" ] && return 0; fail "needs what Debian calls: $needed"; }
  if [ "$(id -u)" != 0 ]; then
    if [ -n "$needed" ]; then
      say "not root, so please run this and then the same command again:"
      say "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $needed$wanted"
      exit 1
    fi
    say "builds are faster with: $wanted"
    return 0
  fi
  say "installing $needed$wanted"
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  # shellcheck disable=SC2086
  apt-get -qq install -y --no-install-recommends $needed $wanted ca-certificates >/dev/null
}

find_torch() {
  IFS=';' read -r torch_root torch_found torch_python < <(cmake -P scripts/print_torch.cmake 2>/dev/null) || true
}

install_packages
[ "${1:-}" != --packages ] || exit 0
find_torch
if [ -z "${torch_root:-}" ]; then
  [ -z "${TORCH_ROOT:-}" ] || fail "TORCH_ROOT is $TORCH_ROOT, which holds no libtorch"
  scripts/make_environment.sh .venv "torch==$torch_version" numpy safetensors zstandard
  find_torch
  [ -n "${torch_root:-}" ] || fail "no libtorch in .venv after installing torch==$torch_version"
fi

usable() { # PYTHON: has the linked torch and what the tests import
  [ -n "$1" ] && "$1" - "$torch_found" <<'PY' 2>/dev/null
import importlib.metadata, importlib.util, sys
assert importlib.metadata.version("torch").split("+")[0] == sys.argv[1]
assert all(importlib.util.find_spec(name) for name in ("numpy", "safetensors", "zstandard"))
PY
}

if ! usable "$torch_python"; then
  torch_python=$PWD/.venv-tests/bin/python
  if $with_tests; then
    scripts/make_environment.sh .venv-tests "torch==$torch_found" numpy safetensors zstandard
  elif ! usable "$torch_python"; then
    torch_python=
  fi
fi

mkdir -p build
printf 'TORCH_ROOT := %s\nTEST_PYTHON := %s\n' "$torch_root" "$torch_python" > build/setup.mk.new
cmp -s build/setup.mk.new build/setup.mk || mv build/setup.mk.new build/setup.mk
rm -f build/setup.mk.new
say "libtorch $torch_found at $torch_root"
