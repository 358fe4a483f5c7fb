#!/usr/bin/env python3
"""House rules that a machine can check: lengths, and who may include whom."""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINE, FUNCTION, FILE, CUDA_FILE = 100, 70, 400, 600
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".inc")

# Which of our folders each folder may include.
MAY_INCLUDE = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "server": {"server", "engine", "kernels"},
    "clients": {"clients", "engine", "kernels"},
    "tests": {"tests", "server", "engine", "kernels", "clients"},
}
# Headers of other projects that only some folders may include.
ONLY_IN = [
    (re.compile(r"grpcpp/|grpc/|google/protobuf/"), {"server", "clients", "tests"}),
    (re.compile(r"cuda|cublas"), {"kernels"}),
    (re.compile(r"prometheus/"), {"server", "tests"}),
    (re.compile(r"sentencepiece_processor"), {"engine"}),
]


def tracked_sources():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    return [name for name in names if name.endswith(SOURCES)]


def function_lengths(lines):
    """(first line, length) of each function body: from a line at column 0 or 2 that ends in '{'
    to the closing brace in the same column."""
    start, column = None, 0
    for number, line in enumerate(lines, 1):
        indent = len(line) - len(line.lstrip())
        if start is None:
            opens = line.rstrip().endswith("{") and "(" in line or line.rstrip().endswith(") {")
            if opens and indent <= 2 and not re.match(r"\s*(namespace|struct|class|enum|extern)\b", line):
                start, column = number, indent
        elif indent == column and line.startswith(" " * column + "}"):
            yield start, number - start
            start = None


def includes(lines):
    for number, line in enumerate(lines, 1):
        match = re.match(r'\s*#\s*include\s+[<"]([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1)


def check_file(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        lines = file.read().split("\n")
    folder = name.split("/")[0]
    limit = CUDA_FILE if name.endswith((".cu", ".cuh")) else FILE
    if len(lines) > limit:
        yield f"{name}: {len(lines)} lines, at most {limit}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE:
            yield f"{name}:{number}: {len(line)} characters, at most {LINE}"
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{name}:{number}: an open end without an issue"
    if folder != "tests":
        for start, length in function_lengths(lines):
            if length > FUNCTION:
                yield f"{name}:{start}: a function of {length} lines, at most {FUNCTION}"
    for number, path in includes(lines):
        target = path.split("/")[0]
        if target in MAY_INCLUDE and target not in MAY_INCLUDE.get(folder, set()):
            yield f"{name}:{number}: {folder}/ may not include {path}"
        for pattern, folders in ONLY_IN:
            if pattern.match(path) and folder not in folders:
                yield f"{name}:{number}: {folder}/ may not include {path}"
    if name.endswith(".h") and "#pragma once" not in "\n".join(lines[:40]):
        yield f"{name}: no #pragma once"


def main():
    complaints = [line for name in tracked_sources() for line in check_file(name)]
    print("\n".join(complaints) if complaints else "tidy: every rule holds")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
