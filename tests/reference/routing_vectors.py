#!/usr/bin/env python3
"""tests/reference/routing.safetensors: the logits of 34 models whose weights are hashes of names.

  routing_vectors.py            writes the file
  routing_vectors.py --print    prints the table that tests/unit/routing_vectors_test.cpp holds

A tensor of the Megatron family is a function of its name there: FNV-1a of the name seeds
splitmix64. So no weights are stored, and any language can make the models anew; the C++ test does.
The table is of exact weights, the file of weights rounded to float32, as a checkpoint holds them.
"""

import pathlib
import sys

import numpy as np

sys.dont_write_bytecode = True
from golden_model import Mlp  # noqa: E402
from golden_store import write_safetensors  # noqa: E402
from golden_weir import WeirModel  # noqa: E402

MASK = (1 << 64) - 1
TOKENS = [(7 * i + 3) % 64 for i in range(12)]
HIDDEN, FFN, VOCAB = 32, 48, 64


def hashed(name, count):
    """`count` numbers in [-1, 1)."""
    seed = 0xCBF29CE484222325
    for letter in name.encode():
        seed = (seed ^ letter) * 0x100000001B3 & MASK
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0 ** -52 - 1


def tensor(name, shape):
    """A tensor of a Megatron checkpoint: what its kind makes of the hashed numbers."""
    u = hashed(name, int(np.prod(shape))).reshape(shape)
    last = name.rsplit(".", 1)[-1]
    if "norm" in name:
        return 1 + 0.1 * u
    if last == "A_log":
        return np.log(1 + 15 * (u + 1) / 2)
    if last == "dt_bias":
        return u - 3
    if last == "cler_gamma":
        return 0.3 + 0.2 * u
    if "cler_hidden_gate" in name:
        return np.array([1, 0]) + 0.2 * u
    if "conv1d" in name or last in ("bias", "cler_attn_self_bias"):
        return 0.5 * u
    if "quer" in name or name.startswith("embedding"):
        return u
    return u * np.sqrt(3 / shape[-1])


class Converted:
    """A store that answers in Weir's layout from hashed Megatron tensors."""

    def __init__(self, config, rounded):
        self.config, self.rounded = config, rounded
        self.keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        self.values = config["linear_num_value_heads"] * config["linear_value_head_dim"]

    def maybe(self, *_, **__):
        return None

    def __call__(self, name, shape, **_):
        exact = self.exact(name, shape)
        return np.float64(np.float32(exact)).reshape(exact.shape) if self.rounded else exact

    def exact(self, name, shape):
        whole = {"model.embeddings.weight": "embedding.word_embeddings.weight",
                 "model.norm.weight": "decoder.final_layernorm.weight",
                 "model.res_proj.weight": "decoder.attn_res_queries.final",
                 "lm_head.weight": "output_layer.weight"}.get(name)
        if whole:
            return tensor(whole, shape)
        _, _, layer, rest = name.split(".", 3)
        return self.of_layer(int(layer), rest, shape)

    def of_layer(self, layer, name, shape):
        kind = self.config["layer_types"][layer]
        at, mixer = f"decoder.layers.{layer}.", f"decoder.layers.{layer}.self_attention."
        fused = mixer + ("linear_qkv." if kind == "softmax" else "in_proj.")
        if name == "attn_norm.weight":
            own = at + "input_layernorm.weight"
            return tensor(own if kind == "kda" else fused + "layer_norm_weight", shape)
        if name == "mlp_norm.weight":
            return tensor(at + "mlp.linear_fc1.layer_norm_weight", shape)
        if name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            first = 0 if "gate" in name else FFN
            both = tensor(at + "mlp.linear_fc1.weight", (2 * FFN, HIDDEN))
            return both[first:first + FFN]
        if name == "mlp.down_proj.weight":
            return tensor(at + "mlp.linear_fc2.weight", shape)
        if name in ("attn_res_proj.weight", "mlp_res_proj.weight"):
            return tensor(f"decoder.attn_res_queries.{2 * layer + ('mlp' in name)}", shape)
        if name.startswith("route_"):
            old = name.replace("route_proj", "cler_hidden_proj").replace("route_gate",
                                                                         "cler_hidden_gate")
            stem, _, factor = old.partition(".")
            return tensor(f"decoder.{stem}.{layer}" + ("." + factor if factor else ""), shape)
        name = name.removeprefix("attn.")
        if kind == "softmax":
            return self.of_softmax(name, fused, mixer, shape)
        return self.of_recurrent(kind, name, mixer, layer, shape)

    def of_softmax(self, name, fused, mixer, shape):
        if name == "o_proj.weight":
            return tensor(mixer + "linear_proj.weight", shape)
        c = self.config
        per, dim = c["num_heads"] // c["num_kv_heads"], c["head_dim"]
        gated = c["attention_output_gate"]
        sizes = {"q": per * dim, "g": per * dim * gated, "k": dim, "v": dim}
        rows = sum(sizes.values())
        blocks = tensor(fused + "weight", (c["num_kv_heads"] * rows, HIDDEN))
        blocks = blocks.reshape(c["num_kv_heads"], rows, HIDDEN)
        first = sum(size for part, size in sizes.items() if "qgkv".index(part) < "qgkv".index(name[0]))
        return blocks[:, first:first + sizes[name[0]]].reshape(shape)

    def of_recurrent(self, kind, name, mixer, layer, shape):
        keys, values, heads = self.keys, self.values, self.config["linear_num_value_heads"]
        dv = self.config["linear_value_head_dim"]
        low = self.config["gdn2_low_rank"]
        order = {"delta": {"b": heads}, "linear": {"b": heads}, "kda": {"b": heads},
                 "gdn": {"g": values, "b": heads, "a": heads},
                 "gdn2": {"b": keys, "w": values} if low else
                         {"g": values, "b": keys, "w": values, "a": keys}}[kind]
        order = {"q": keys, "k": keys, "v": values} | order
        first = lambda part: sum(list(order.values())[:list(order).index(part)])  # noqa: E731
        if name[1:] == "_proj.weight" and name[0] in order:
            rows = tensor(mixer + "in_proj.weight", (sum(order.values()), HIDDEN))
            return rows[first(name[0]):first(name[0]) + order[name[0]]]
        if name[1:] == "_conv1d.weight":
            taps = tensor(mixer + "conv1d.weight", (2 * keys + values, 1, 4))
            return taps[first(name[0]):first(name[0]) + shape[0]]
        if kind == "kda" and name in ("f_proj.0.weight", "g_proj.0.weight"):
            both = tensor(mixer + "bottleneck_proj.weight", (2 * dv, HIDDEN))
            return both[:dv] if name[0] == "f" else both[dv:]
        if name == "cler_query" and self.config["cler"]["mode"] == "dense_softmax":
            return tensor(f"decoder.cler_route_queries.{layer}", shape)
        renamed = {"o_proj.weight": "out_proj.weight", "o_norm.weight": "out_norm.weight",
                   "cler_query": "cler_attn_query", "cler_self_bias": "cler_attn_self_bias",
                   "cler_self_gate.weight": "cler_attn_self_gate.weight",
                   "cler_self_gate.bias": "cler_attn_self_gate.bias"}
        if kind == "kda":
            renamed |= {"f_proj.1.weight": "f_out_proj.weight", "g_proj.1.weight": "g_out_proj.weight",
                        "g_proj.1.bias": "g_out_proj.bias"}
        return tensor(mixer + renamed.get(name, name), shape)


def model(kind, pure=False, low_rank=False, layers=6, **keys):
    types = [kind if pure or (i + 1) % 3 else "softmax" for i in range(layers)]
    few = kind in ("delta", "linear")
    return {"model_type": "weir", "hidden_size": HIDDEN, "vocab_size": VOCAB,
            "num_hidden_layers": layers, "intermediate_size": FFN, "layer_types": types,
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "attention_output_gate": kind in ("gdn", "gdn2"),
            "linear_num_key_heads": 2, "linear_num_value_heads": 2 if few else 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 16 if few else 8,
            "gdn2_low_rank": low_rank} | keys


def hidden(signal, **keys):
    return {"route": {"signal": signal} | keys}


def cler(mode="latest", **keys):
    return {"cler": {"mode": mode} | keys}


DEPTH = {"attention_residuals": {"eps": 1e-6}}
MODELS = {
    "softmax": model("softmax", pure=True, layers=4),
    "delta-hybrid": model("delta"), "delta-pure": model("delta", pure=True),
    "gdn-hybrid": model("gdn"), "gdn-pure": model("gdn", pure=True),
    "kda-hybrid": model("kda"), "kda-pure": model("kda", pure=True),
    "gdn2-hybrid": model("gdn2"), "gdn2-pure": model("gdn2", pure=True),
    "gdn2-lowrank-hybrid": model("gdn2", low_rank=True), "linear-hybrid": model("linear"),
    "gdn-clvr": model("gdn", **hidden("value")), "gdn-cler-h": model("gdn", **hidden("error")),
    "delta-clvr": model("delta", **hidden("value")),
    "delta-cler-h": model("delta", **hidden("error")),
    "gdn-clvr-r4": model("gdn", **hidden("value", rank=4)),
    "gdn-clvr-norm": model("gdn", **hidden("value", normalize=True)),
    "gdn-cler-g": model("gdn", **hidden("gated_value")),
    "gdn-cler-rv": model("gdn", **hidden("both")),
    "gdn-selftrans-r4": model("gdn", **hidden("self", rank=4)),
    "gdn-attnres": model("gdn", **DEPTH), "delta-attnres": model("delta", **DEPTH),
    "gdn-attnres-clvr": model("gdn", **DEPTH, **hidden("value")),
    "gdn-attnres-cler-densesoftmax": model("gdn", **DEPTH, **cler("dense_softmax", gamma="head")),
    "gdn-cler-scalar": model("gdn", **cler()), "delta-cler-scalar": model("delta", **cler()),
    "gdn-cler-head-norm": model("gdn", **cler(gamma="head", normalize=True)),
    "gdn-cler-channel": model("gdn", **cler(gamma="channel")),
    "gdn-cler-output": model("gdn", **cler(site="output")),
    "gdn-cler-densemean": model("gdn", **cler("dense_mean", gamma="head")),
    "gdn-cler-densesoftmax": model("gdn", **cler("dense_softmax", gamma="head")),
    "gdn-cler-dyngate": model("gdn", **cler(dynamic=True)),
    "gdn-cler-attnres": model("gdn", **cler("attnres")),
    "gdn-cler-attnres-dyn": model("gdn", **cler("attnres", dynamic=True)),
}


def main(arguments):
    logits = {}
    for name, config in MODELS.items():
        answers = WeirModel(config, Converted(config, rounded=not arguments), Mlp)
        logits[name] = np.array([answers.step(token) for token in TOKENS])
        if arguments[:1] == ["--print"]:
            last = logits[name][-1]
            print(f'    Variant{{"{name}",\n            {{{", ".join(f"{x:.9f}" for x in last[:4])}}}, '
                  f'{last.argmax()}, {(last ** 2).sum():.9f}}},')
    if not arguments:
        path = pathlib.Path(__file__).resolve().parent / "routing.safetensors"
        write_safetensors(path, {name: ("F32", np.float32(x)) for name, x in logits.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
