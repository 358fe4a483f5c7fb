#!/bin/sh
# Writes the Python modules of the service, weir/v1/generation_pb2*.py, into a folder.
# Needs protoc and grpc_python_plugin (Debian: protobuf-compiler protobuf-compiler-grpc).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
plugin=$(command -v grpc_python_plugin) || {
  echo "generate.sh: grpc_python_plugin is missing (package protobuf-compiler-grpc)" >&2
  exit 1
}
mkdir -p "$out"
protoc --proto_path="$here/../../proto" --python_out="$out" --grpc_out="$out" \
  --plugin=protoc-gen-grpc="$plugin" weir/v1/generation.proto
