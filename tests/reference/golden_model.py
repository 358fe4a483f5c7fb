"""A whole model in float64: embedding, layers, head, one token at a time."""

import numpy as np

from golden_erase_mixers import Comba, DeltaProduct
from golden_gated_mixers import Forgetting, MixtureOfMemories
from golden_mixers import (Attention, DeltaNet, GatedDeltaNet, GatedDeltaNet2, KimiDelta, rms,
                           silu, softmax)
from golden_outer_mixers import GatedLinear, GatedSlots, Hgrn2, LinearAttention, Mamba2, RetNet
from golden_store import Under
from golden_swila import SwitchingLinear

MIXERS = {"delta_net": DeltaNet, "gated_deltanet": GatedDeltaNet, "kda": KimiDelta,
          "gdn2": GatedDeltaNet2, "gla": GatedLinear, "retnet": RetNet, "gsa": GatedSlots,
          "comba": Comba, "gated_deltaproduct": DeltaProduct,
          "linear_attn": LinearAttention, "mamba2": Mamba2, "swila": SwitchingLinear,
          "forgetting_transformer": Forgetting, "mom": MixtureOfMemories}


class Mlp:
    def __init__(self, config, tensors):
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate = tensors("gate_proj.weight", (inner, hidden))
        self.up = tensors("up_proj.weight", (inner, hidden))
        self.down = tensors("down_proj.weight", (hidden, inner))

    def step(self, x):
        return self.down @ (silu(self.gate @ x) * (self.up @ x))


def lower_bounds(config, store):
    """The forget gates' bounds of each HGRN2 layer: zero in the first, growing with depth."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    if not config.get("use_lower_bound", True):
        return np.zeros((layers, hidden))
    share = softmax(store("model.lower_bounds", (layers, hidden)), axis=0)
    return share.cumsum(axis=0) - share[0]


def attention_of_layer(config, layer):
    """The `attn` object that claims this layer, or None."""
    options = config.get("attn") or []
    for option in options if isinstance(options, list) else [options]:
        if layer in option["layers"]:
            return option
    return None


def make_mixer(config, tensors, layer, bounds):
    hidden, kind = config["hidden_size"], config["model_type"]
    option = attention_of_layer(config, layer)
    if option:
        return Attention(option, tensors, hidden)
    if kind == "transformer":
        return Attention(config, tensors, hidden, config.get("qk_norm", False))
    if kind == "hgrn2":
        return Hgrn2(config, tensors, bounds[layer])
    return MIXERS[kind](config, tensors)


class DepthMix:
    """Attention residuals: a query, and the gain that sources are normed with before they meet it."""

    def __init__(self, tensors, name, hidden, eps):
        self.query = tensors(name + "_proj.weight", (1, hidden), spread=1.5)[0]
        self.gain = tensors(name + "_norm.weight", (hidden,), center=1.0, spread=0.4)
        self.eps = eps

    def __call__(self, sources):
        scores = np.array([self.query @ rms(source, self.gain, self.eps) for source in sources])
        return softmax(scores) @ np.array(sources)


class Model:
    def __init__(self, config, store):
        mamba = config["model_type"] == "mamba2"
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        body = Under(store, "backbone." if mamba else "model.")
        self.eps = config.get("norm_eps", config.get("layer_norm_epsilon"))
        tied = config.get("tie_word_embeddings", False)
        self.embeddings = body("embeddings.weight", (vocab, hidden),
                               spread=1.0 if tied else hidden ** 0.5)
        self.norm = body("norm_f.weight" if mamba else "norm.weight", (hidden,), center=1.0,
                         spread=0.3)
        self.head = self.embeddings if tied else store("lm_head.weight", (vocab, hidden))
        bounds = lower_bounds(config, store) if config["model_type"] == "hgrn2" else None
        self.halves, self.mixes = [], []
        self.block = config.get("attnres_block_size")
        for layer in range(config["num_hidden_layers"]):
            inside = Under(body, f"layers.{layer}.")
            names = [("norm", "mixer")] if mamba else [("attn_norm", "attn"), ("mlp_norm", "mlp")]
            for norm, module in names:
                weight = inside(norm + ".weight", (hidden,), center=1.0, spread=0.3)
                tensors = Under(inside, module + ".")
                half = Mlp(config, tensors) if module == "mlp" else make_mixer(
                    config, tensors, layer, bounds)
                self.halves.append((weight, half))
                if self.block:
                    self.mixes.append(DepthMix(inside, module + "_res", hidden, self.eps))
        if self.block:
            self.last_mix = DepthMix(body, "res", hidden, self.eps)

    def depth_step(self, token):
        """Every half reads a mix of the finished blocks of halves and of the one under way."""
        finished, current = [], self.embeddings[token]
        for number, ((weight, half), mix) in enumerate(zip(self.halves, self.mixes)):
            y = half.step(rms(mix(finished + [current]), weight, self.eps))
            if number % self.block == 0:
                finished, current = finished + [current], y
            else:
                current = current + y
        return self.head @ rms(self.last_mix(finished + [current]), self.norm, self.eps)

    def step(self, token):
        if self.block:
            return self.depth_step(token)
        h = self.embeddings[token]
        for weight, half in self.halves:
            h = h + half.step(rms(h, weight, self.eps))
        return self.head @ rms(h, self.norm, self.eps)
