#!/usr/bin/env python3
"""Tests the scheduler simulation: puts one bug at a time into a copy of the scheduler and expects
the simulation to fail. usage: self_test.py COMPILER WORK_FOLDER [NAME_PART]"""

import concurrent.futures
import os
import re
import signal
import subprocess
import sys

from bugs import BUGS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
FLAGS = ["-std=c++20", "-O1", "-I", ROOT]
SOURCES = ["tests/sim/scheduler_sim_test.cpp", "engine/request.cpp", "engine/logit_edits.cpp",
           "engine/scheduler.cpp", "engine/snapshots.cpp", "kernels/check.cpp"]
# What they all include, compiled once: a third of the time of each copy.
COMMON = ["algorithm", "deque", "memory", "optional", "span", "string", "unordered_map", "vector"]
DAYS_MAX = 1000
SECONDS_MAX = 60  # for these days; the sound scheduler needs less than one


def object_of(folder, source):
    return os.path.join(folder, os.path.basename(source) + ".o")


def common_header(folder):
    return os.path.join(folder, "common.h")


def compile_common(compiler, folder):
    with open(common_header(folder), "w", encoding="utf-8") as file:
        file.write("".join(f"#include <{name}>\n" for name in COMMON))
    header = common_header(folder)
    subprocess.run([compiler, *FLAGS, "-x", "c++-header", header, "-o", header + ".gch"],
                   check=True)


def compile_source(compiler, folder, source, target):
    built = subprocess.run([compiler, *FLAGS, "-include", common_header(folder), "-c", source,
                            "-o", target], capture_output=True, text=True)
    return built.stderr if built.returncode != 0 else ""


def link_and_run(compiler, objects, program):
    subprocess.run([compiler, *objects, "-o", program], check=True)
    return subprocess.run([program, "1", str(DAYS_MAX)], capture_output=True, text=True,
                          timeout=SECONDS_MAX)


def mutant(bug, source_text):
    _, old, new = bug
    if source_text.count(old) != 1:
        return None
    return source_text.replace(old, new)


def try_bug(number, bug, compiler, folder):
    """(caught, what happened)"""
    source = bug[0]
    with open(os.path.join(ROOT, source), encoding="utf-8") as file:
        text = mutant(bug, file.read())
    if text is None:
        return False, f"its text no longer stands exactly once in {source}: update bugs.py"
    copy = os.path.join(folder, f"bug{number}.cpp")
    with open(copy, "w", encoding="utf-8") as file:
        file.write(text)
    errors = compile_source(compiler, folder, copy, copy + ".o")
    if errors:
        return False, "does not compile:\n" + errors
    objects = [object_of(folder, other) for other in SOURCES if other != source] + [copy + ".o"]
    try:
        result = link_and_run(compiler, objects, os.path.join(folder, f"bug{number}"))
    except subprocess.TimeoutExpired:
        return False, f"the simulation hangs (over {SECONDS_MAX} s)"
    day = re.search(r"day of seed (\d+)", result.stderr)
    if result.returncode == 0 or day is None or result.returncode != -signal.SIGABRT:
        return False, f"not caught in {DAYS_MAX} days: exit {result.returncode} {result.stderr}"
    check = result.stderr.splitlines()[0].replace(ROOT + "/", "").replace(copy, source)
    return True, f"day {day.group(1)}: {check}"


def main():
    compiler, folder = sys.argv[1], sys.argv[2]
    part = sys.argv[3] if len(sys.argv) > 3 else ""
    os.makedirs(folder, exist_ok=True)
    compile_common(compiler, folder)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = [pool.submit(compile_source, compiler, folder, os.path.join(ROOT, source),
                              object_of(folder, source)) for source in SOURCES]
        errors = "".join(build.result() for build in builds)
        if errors:
            sys.exit("the scheduler as it is does not compile:\n" + errors)
        objects = [object_of(folder, source) for source in SOURCES]
        sound = link_and_run(compiler, objects, os.path.join(folder, "sound"))
        if sound.returncode != 0:
            sys.exit("the scheduler as it is fails its simulation:\n" + sound.stderr)
        results = [(name, pool.submit(try_bug, number, bug, compiler, folder))
                   for number, (name, bug) in enumerate(BUGS.items()) if part in name]
        missed = 0
        for name, future in results:
            caught, what = future.result()
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}: {name}: {what}", flush=True)
    print(f"{len(results) - missed} of {len(results)} bugs caught")
    return 1 if missed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
