# `make demo` and `make test` do all of the set-up themselves. Everything is built below build/<preset>.

PRESET ?= release
PREFIX ?= /usr/local
VERSION ?= 2.14.1
export PRESET
BUILD := build/$(PRESET)

.PHONY: help setup build test demo bench install format lint timings check-torch check-cuda check-gpu check-debian \
	mutants clean

help:
	@echo 'make demo                     train, checkpoint and resume a small Llama on 2, 4 and 1 processes'
	@echo 'make test [ARGS="-L fast"]    build and run the tests; ARGS go to ctest'
	@echo 'make build                    library, program, examples, tests in $(BUILD) (PRESET=dev, asan, ubsan)'
	@echo 'make install PREFIX=/usr/local'
	@echo 'make bench [ARGS=--quick]     time everything beside Python; writes benchmarks/report.md'
	@echo 'make format | lint            clang-format, clang-tidy'
	@echo 'make timings                  measure the build: from nothing, no change, one file'
	@echo 'make mutants                  put known faults in and see their tests fail'
	@echo 'make check-torch VERSION=2.14.1   compile against another libtorch'
	@echo 'make check-cuda               the same against the CUDA builds of all supported releases (15 GB)'
	@echo 'make check-gpu                check and time the device path, on a machine with a GPU'
	@echo 'make check-debian             both commands of the README in a fresh Debian 12'

setup:
	@scripts/setup.sh

build:
	@scripts/setup.sh --tests
	@scripts/build.sh

test:
	@scripts/setup.sh --tests
	@scripts/build.sh
	@scripts/run_tests.sh $(ARGS)

demo:
	@scripts/setup.sh
	@scripts/build.sh programs
	@scripts/demo.sh $(ARGS)

bench:
	@scripts/setup.sh --tests
	@scripts/bench.sh $(ARGS)

install:
	@scripts/setup.sh
	@scripts/build.sh programs
	@cmake --install $(BUILD) --prefix $(PREFIX)

format:
	@scripts/format.sh

lint:
	@scripts/lint.sh

timings:
	@scripts/setup.sh --tests
	@scripts/timings.sh

check-torch:
	@scripts/check_torch.sh $(VERSION)

check-cuda:
	@scripts/check_torch.sh --cuda 2.11.0 2.13.0 2.14.1

check-gpu:
	@scripts/check_gpu.sh $(ARGS)

check-debian:
	@scripts/check_debian.sh

mutants:
	@scripts/setup.sh --tests
	@scripts/build.sh
	@tests/mutations/run.sh $(ARGS)

clean:
	@rm -rf build
