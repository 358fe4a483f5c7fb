#!/usr/bin/env bash
# The bundle of deploy/bundle.sh: one that leans on this machine's packages, or grows past 60 MiB,
# or does not answer.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
server=
stop() {
  if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then wait "$server" || true; fi
  rm -rf "$folder"
}
trap stop EXIT
fail() {
  echo "bundle: $1" >&2
  exit 1
}

./deploy/bundle.sh "$folder/weir"
size=$(du -sm "$folder/weir" | cut -f 1)
[ "$size" -lt 60 ] || fail "expected less than 60 MiB, found $size"

"$folder/weir/bin/weir-server" models/demo --port=0 --metrics_port=0 >"$folder/out" 2>"$folder/log" &
server=$!
for _ in $(seq 100); do
  grep -q serving "$folder/out" && break
  kill -0 "$server" 2>/dev/null || fail "weir-server ended: $(cat "$folder/log")"
  sleep 0.1
done
# Every library but glibc's comes from the bundle.
outside=$(awk '/\.so/ { print $6 }' "/proc/$server/maps" | sort -u | grep -v "^$folder/" |
  grep -Ev '/(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv|libnss_[a-z]*)\.so' || true)
[ -z "$outside" ] || fail "weir-server loads $outside"
address=$(sed -n 's/.* on \([^ ,]*\),.*/\1/p' "$folder/out")
answer=$("$folder/weir/bin/weir-ask" --server="$address" --max_tokens=5 --temperature=0 "We the people")
[ -n "$answer" ] || fail "weir-ask printed nothing"
echo "bundle: $size MiB, answers \"$answer\""
