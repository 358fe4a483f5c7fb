#!/usr/bin/env bash
# Installs the packages Weir is built from, those that are missing; with --tests also what only
# tests/run.sh needs. Debian 12 and Ubuntu 24.04 name them alike.
set -euo pipefail

packages=(g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev protobuf-compiler-grpc protobuf-compiler libprotobuf-dev libprotoc-dev libabsl-dev
  libsentencepiece-dev prometheus-cpp-dev nlohmann-json3-dev libxxhash-dev zlib1g-dev libgtest-dev libgmock-dev
  python3 curl)
case "${1:-}" in
  "") ;;
  --tests) packages+=(clang-14 libclang-rt-14-dev libbenchmark-dev sentencepiece
    python3-grpcio python3-protobuf python3-numpy) ;;
  *) echo "usage: install-packages.sh [--tests]" >&2; exit 2 ;;
esac

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "install-packages.sh: no apt-get here; Weir needs: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "install-packages.sh: not root and no sudo; please install: ${missing[*]}" >&2
    exit 1
  }
  as_root=(sudo)
fi
echo "installing: ${missing[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -q --no-install-recommends "${missing[@]}"
