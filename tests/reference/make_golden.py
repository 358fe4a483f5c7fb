#!/usr/bin/env python3
"""Small random checkpoints and what a model must answer on them: tests/vectors/random-NAME.

  make_golden.py [NAME ...]        writes the named cases, or all of them
  make_golden.py --check FOLDER    compares a folder's golden logits with this reference

Each folder gets config.json, model.safetensors and golden.safetensors (prompt, logits_full of
every prompt position, and the greedy continuation). Everything follows from the case's name.
"""

import json
import pathlib
import sys
import zlib

import numpy as np

sys.dont_write_bytecode = True
from golden_cases import CASES  # noqa: E402
from golden_model import Mlp, Model  # noqa: E402
from golden_rwkv7 import Rwkv7  # noqa: E402
from golden_store import Random, Stored, read_safetensors, write_safetensors  # noqa: E402
from golden_weir import WeirModel  # noqa: E402

VECTORS = pathlib.Path(__file__).resolve().parent.parent / "vectors"
PROMPT, GREEDY = 24, 12
# A greedy token whose lead is smaller than this would not be decided by float32 arithmetic.
LEAD = 2e-3


def make_model(config, store):
    if config["model_type"] == "weir":
        return WeirModel(config, store, Mlp)
    return (Rwkv7 if config["model_type"] == "rwkv7" else Model)(config, store)


def golden(folder, prompt, steps):
    """The logits of each prompt position, the greedy tokens, and the smallest lead of one."""
    config = json.loads((folder / "config.json").read_text())
    store = Stored(folder / "model.safetensors")
    model = make_model(config, store)
    if store.unread:
        raise ValueError(f"{folder.name}: not part of the model: {sorted(store.unread)}")
    logits = [model.step(token) for token in prompt]
    last, tokens, lead = logits[-1], [], np.inf
    for _ in range(steps):
        second, first = np.sort(last)[-2:]
        lead = min(lead, first - second)
        tokens.append(int(last.argmax()))
        last = model.step(tokens[-1])
    return np.array(logits), tokens, lead


def write_case(name, case, attempt=0):
    folder = VECTORS / f"random-{name}"
    folder.mkdir(exist_ok=True)
    config = case.config()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    store = Random(zlib.crc32(f"{name} {attempt}".encode()))
    for tensor, shape in case.extra.items():
        store(tensor, shape, spread=0.4 * (shape[-1] ** 0.5 if len(shape) > 1 else 1))
    make_model(config, store)
    for usual, found in case.renamed.items():
        store.tensors = {key.replace(usual, found): value for key, value in store.tensors.items()}
    write_safetensors(folder / "model.safetensors", store.tensors)
    prompt = store.generator.integers(3, config["vocab_size"], PROMPT)
    logits, tokens, lead = golden(folder, prompt, GREEDY)
    if lead < LEAD:
        return write_case(name, case, attempt + 1)
    if not np.isfinite(logits).all():
        raise ValueError(f"{name}: logits are not finite")
    write_safetensors(folder / "golden.safetensors", {
        "prompt": ("I32", np.int32(prompt)), "greedy": ("I32", np.int32(tokens)),
        "logits_full": ("F32", np.float32(logits))})
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits of spread {logits.std():.2f}, "
          f"greedy lead {lead:.4f}, attempt {attempt}")
    return size


def check(folder):
    stored = read_safetensors(folder / "golden.safetensors")
    logits, _, _ = golden(folder, stored["prompt"], 0)
    print(f"{folder.name}: {np.abs(logits - stored['logits_full']).max():.2e}")


def main(arguments):
    if arguments[:1] == ["--check"]:
        for folder in arguments[1:]:
            check(pathlib.Path(folder))
        return
    sizes = [write_case(name, CASES[name]) for name in arguments or CASES]
    print(f"{len(sizes)} cases, {sum(sizes) / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
