#!/usr/bin/env bash
# Weir's programs and the libraries they need in one folder, for a machine without these packages:
# x86-64 Linux with a glibc at least as new as this one's. A GPU needs nothing but its driver; large
# batches are faster where CUDA's libcublasLt.so is installed too.
#
#   ./deploy/bundle.sh [FOLDER]     default: build/weir-bundle; what is there is replaced
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-build/weir-bundle}
programs=(weir-server weir-ask weir-load weir-verify weir-convert)
# glibc's own parts come from the machine: they must fit its loader and its kernel.
glibc='^(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv)\.so'

cmake --preset release >/dev/null
cmake --build --preset release --target "${programs[@]}" -j "$(nproc)"

if [ -e "$folder" ] && [ ! -x "$folder/bin/weir-server" ]; then
  echo "bundle.sh: $folder exists and is no bundle; expected a new folder" >&2
  exit 1
fi
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib/weir-private"
for program in "${programs[@]}"; do
  strip -o "$folder/bin/$program" "build/release/bin/$program"
done
strip -o "$folder/lib/libweir-sentencepiece.so" build/release/lib/libweir-sentencepiece.so
cp build/release/lib/weir-private/* "$folder/lib/weir-private/"

ldd "$folder"/bin/* "$folder/lib/libweir-sentencepiece.so" |
  awk '$2 == "=>" { print $1, $3 }' | sort -u | while read -r name path; do
  if [[ $name =~ $glibc || $path == *weir-private* ]]; then continue; fi
  if [ "$path" = not ]; then
    echo "bundle.sh: library $name is not found" >&2
    exit 1
  fi
  cp -L "$path" "$folder/lib/$name"
done
du -sh "$folder" | cut -f 1 | sed "s|^|$folder: |"
