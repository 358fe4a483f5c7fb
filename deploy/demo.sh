#!/usr/bin/env bash
# From a fresh Debian 12 or Ubuntu 24.04 to streamed tokens: installs what is missing, builds,
# serves models/demo on free ports, asks one question, shows some metrics, stops. No GPU is needed.
#
#   ./deploy/demo.sh [PROMPT]
set -euo pipefail
cd "$(dirname "$0")/.."

prompt=${1:-"My fellow Americans, the state of our union is"}
bin=build/release/bin
step() { printf '\n== %s\n' "$1"; }

step "packages"
./deploy/install-packages.sh

step "build (a few minutes the first time)"
cmake --preset release >/dev/null
cmake --build --preset release --target weir-server weir-ask -j "$(nproc)"

step "weir-server models/demo"
folder=$(mktemp -d)
server=
stop() {
  if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then wait "$server" || true; fi
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Once it is ready it prints "weir-server: serving demo on HOST:PORT, metrics on HOST:PORT".
"$bin/weir-server" models/demo --port=0 --metrics_port=0 >"$folder/out" 2>"$folder/log" &
server=$!
for _ in $(seq 600); do
  grep -q ' serving ' "$folder/out" && break
  kill -0 "$server" 2>/dev/null || break
  sleep 0.1
done
cat "$folder/log" "$folder/out"
line=$(grep -m1 ' serving ' "$folder/out") || {
  echo "demo.sh: the server did not become ready" >&2
  exit 1
}
address=${line%%, metrics on *}
address=${address##* on }
metrics=${line##*, metrics on }

step "weir-ask --server $address --temperature 0.7 --top_p 0.9 --seed 7 \"$prompt\""
"$bin/weir-ask" --server "$address" --wait_s 60 --temperature 0.7 --top_p 0.9 --seed 7 \
  --max_tokens 120 --echo --stats "$prompt"
echo

step "http://$metrics/metrics, a few lines"
curl -sS --max-time 10 "http://$metrics/metrics" |
  grep -E '^weir_((prompt|generated)_tokens_total|requests_(running|waiting)|state_slots)' || true

step "stop"
kill -TERM "$server"
code=0
wait "$server" || code=$?
server=
echo "the server ended with exit code $code"
[ "$code" -eq 0 ]
