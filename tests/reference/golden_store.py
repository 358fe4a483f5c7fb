"""The tensors of a checkpoint, as float64: read from a file, or drawn at random on first use.

A model asks for every tensor by name with the shape it must have. A store that was opened on a
file answers from it and refuses another shape; a new store draws the tensor, rounds it to the
type it will be stored in and keeps it, so that one description of a model serves both.
"""

import json
import struct

import numpy as np

NUMPY_TYPES = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}


def to_bf16(values):
    """The nearest bfloat16 numbers as their 16 bits; ties go to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path, tensors):
    """tensors: name -> (type name, array); BF16 arrays hold the 16 bits of each number.

    Wide numbers come first, so that each tensor starts at a multiple of its number's size.
    """
    header, blobs, at = {}, [], 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
    for name, (kind, array) in ordered:
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "BF16":
            array = from_bf16(np.frombuffer(data[begin:end], np.uint16))
        else:
            array = np.frombuffer(data[begin:end], NUMPY_TYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors


class Random:
    """Draws tensors. `center` and `spread` shape them; a matrix is scaled by its input width."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)
        self.tensors = {}

    def __call__(self, name, shape, center=0.0, spread=1.0, exact=False):
        if name not in self.tensors:
            values = self.generator.standard_normal(shape) * spread
            if len(shape) > 1:
                values = values / np.sqrt(shape[-1])
            values = (values + center).astype(np.float32)
            self.tensors[name] = ("F32", values) if exact else ("BF16", to_bf16(values))
        kind, stored = self.tensors[name]
        return np.asarray(stored if kind == "F32" else from_bf16(stored), np.float64)

    def maybe(self, name, shape, **how):
        """Tensors no configuration promises are made only where a case asks for them."""
        return self(name, shape, **how) if name in self.tensors else None


class Stored:
    """Answers from a file, and knows which tensors nobody asked for."""

    def __init__(self, path):
        self.tensors = read_safetensors(path)
        self.unread = set(self.tensors)

    def __call__(self, name, shape, **_):
        tensor = self.tensors[name]
        if tensor.shape != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, found {tensor.shape}")
        self.unread.discard(name)
        return np.asarray(tensor, np.float64)

    def maybe(self, name, shape, **how):
        return self(name, shape, **how) if name in self.tensors else None


class Under:
    """A store seen from inside one module: names get a prefix."""

    def __init__(self, store, prefix):
        self.store, self.prefix = store, prefix

    def __call__(self, name, shape, **how):
        return self.store(self.prefix + name, shape, **how)

    def maybe(self, name, shape, **how):
        return self.store.maybe(self.prefix + name, shape, **how)
