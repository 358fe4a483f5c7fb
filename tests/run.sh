#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test. Needs Debian 12 or Ubuntu 24.04. 27 minutes
# on two cores with CUDA compiled and a warm compiler cache; from an empty one longer.
# `./tests/run.sh --quick` leaves out the sanitizer builds and the fuzzers.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=no
[ "${1:-}" = "--quick" ] && quick=yes
jobs=$(nproc)
started=$SECONDS

phase() { printf '\n=== %s (%d s)\n' "$1" $((SECONDS - started)); }
build() {  # build PRESET [TARGET...]
  local preset=$1
  shift
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" -j "$jobs" ${@:+--target "$@"}
}
run_ctest() { ctest --test-dir "build/$1" --output-on-failure --no-tests=error "${@:2}"; }

phase "packages"
./deploy/install-packages.sh --tests

phase "tidy"
python3 tests/tidy.py

phase "release: build"
build release
phase "release: tests"
run_ctest release
phase "release: golden checkpoints"
for folder in tests/vectors/*/; do
  build/release/bin/weir-verify "$folder" --tolerance 1e-4
done

phase "release: bundle"
tests/bundle.sh

if [ $quick = no ]; then
  phase "address and undefined sanitizers: build"
  build asan
  phase "address and undefined sanitizers: tests"
  run_ctest asan -LE selftest

  phase "thread sanitizer: build"
  build tsan
  phase "thread sanitizer: tests"
  run_ctest tsan -LE 'selftest|ops'

  phase "fuzzing, 60 s each"
  build fuzz
  pids=()
  for fuzzer in build/fuzz/bin/*_fuzz; do
    name=$(basename "$fuzzer" _fuzz)
    mkdir -p "build/fuzz/corpus/$name"
    "$fuzzer" -max_total_time=60 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="build/fuzz/$name-" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" \
      >"build/fuzz/$name.log" 2>&1 &
    pids+=("$name:$!")
  done
  failed=no
  for entry in "${pids[@]}"; do
    name=${entry%%:*}
    if wait "${entry##*:}"; then
      echo "$name: clean, $(grep -o 'number_of_executed_units: [0-9]*' "build/fuzz/$name.log")"
    else
      failed=yes
      echo "$name: FAILED"
      tail -40 "build/fuzz/$name.log"
    fi
  done
  [ $failed = no ]
fi

phase "done"
