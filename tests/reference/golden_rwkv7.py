"""RWKV-7, a whole model in float64, one token at a time.

Its blocks are their own: norms take the mean out, each half's input is mixed with that of the token
before, and the values of the first layer are mixed into those of all others.
"""

import numpy as np

from golden_mixers import relu, sigmoid
from golden_store import Under


class LayerNorm:
    def __init__(self, tensors, name, dim, eps, bias=True):
        self.weight = tensors(name + ".weight", (dim,), center=1.0, spread=0.3)
        self.bias = tensors(name + ".bias", (dim,), spread=0.3) if bias else 0.0
        self.eps = eps

    def __call__(self, x):
        return (x - x.mean()) / np.sqrt(x.var() + self.eps) * self.weight + self.bias


class Lora:
    """Down, an activation, up, a bias."""

    def __init__(self, tensors, name, rows, rank, columns, between, bias=True, **how):
        self.down = tensors(name + ".lora.0.weight", (rank, columns))
        self.up = tensors(name + ".lora.2.weight", (rows, rank), spread=1.5)
        self.bias = tensors(name + ".lora.2.bias", (rows,), **how) if bias else 0.0
        self.between = between

    def __call__(self, x):
        return self.up @ self.between(self.down @ x) + self.bias


def same(x):
    return x


class TimeMixing:
    def __init__(self, config, tensors, layer):
        self.hidden = hidden = config["hidden_size"]
        heads, dim = config.get("num_heads"), config.get("head_dim", 64)
        self.dk = dim or hidden // heads
        self.heads = hidden // self.dk
        values = config.get("value_dim") or hidden
        values = values[layer] if isinstance(values, list) else values
        self.dv = values // self.heads
        rows = tensors.maybe("x_x", (6, hidden))  # of the old files
        if rows is not None:
            self.mix = dict(zip("rwkvag", rows))
        else:
            self.mix = {name: tensors("x_" + name, (1, 1, hidden), center=0.5,
                                      spread=0.3 * hidden ** 0.5)[0, 0] for name in "rwkvag"}
        self.maps = {name: tensors(name + "_proj.weight", (rows, hidden), spread=1.3)
                     for name, rows in (("r", hidden), ("k", hidden), ("v", values))}
        self.out = tensors("o_proj.weight", (hidden, values))
        self.loras = {
            "w": Lora(tensors, "w_lora", hidden, config.get("decay_low_rank_dim", 64), hidden,
                      np.tanh, center=-1.0),
            "a": Lora(tensors, "a_lora", hidden, config.get("a_low_rank_dim", 64), hidden, same),
            "g": Lora(tensors, "g_lora", values, config.get("gate_low_rank_dim", 128), hidden,
                      sigmoid, bias=False)}
        if layer > 0:
            self.loras["v"] = Lora(tensors, "v_lora", values, config.get("v_low_rank_dim", 16),
                                   hidden, same)
        # The first head's keys are so short that the 1e-6 under their root shows.
        size = np.where(np.arange(hidden) < self.dk, 1e-3, 1)
        self.k_k = tensors("k_k", (hidden,), center=0.8 * size, spread=0.3 * size)
        self.k_a = tensors("k_a", (hidden,), center=0.9, spread=0.3)
        self.r_k = tensors("r_k", (self.heads, self.dk), spread=0.5 * self.dk ** 0.5)
        self.norm_eps = self.dk * config["norm_eps"]
        self.norm_weight = tensors("g_norm.weight", (values,), center=1.0, spread=0.3)
        self.norm_bias = tensors("g_norm.bias", (values,), spread=0.3)
        self.fused = config.get("fuse_norm", True)
        self.before = np.zeros(hidden)
        self.state = np.zeros((self.heads, self.dk, self.dv))

    def direction(self, key):
        """A head's key, one long."""
        length = np.sqrt((key * key).sum() + 1e-6) if self.fused else max(
            np.sqrt((key * key).sum()), 1e-12)
        return key / length

    def step(self, x, first_values):
        """What is added to the stream, and the values of the first layer."""
        moved = {name: x + (self.before - x) * mix for name, mix in self.mix.items()}
        self.before = x
        r, k, v = [self.maps[name] @ moved[name] for name in "rkv"]
        if first_values is None:
            first_values = v
        else:
            toward = sigmoid(self.loras["v"](moved["v"]))
            v = (1 - toward) * v + toward * first_values
        decay = np.exp(-np.exp(-0.5) * sigmoid(self.loras["w"](moved["w"])))
        rate = sigmoid(self.loras["a"](moved["a"]))
        gate = self.loras["g"](moved["g"])
        erased = k * self.k_k
        k = k * (1 + (rate - 1) * self.k_a)
        out = []
        for h in range(self.heads):
            part = slice(h * self.dk, (h + 1) * self.dk)
            values = v[h * self.dv:(h + 1) * self.dv]
            along = self.direction(erased[part])
            old = self.state[h]
            self.state[h] = (decay[part][:, None] * old
                             - np.outer(along * rate[part], along @ old)
                             + np.outer(k[part], values))
            o = r[part] @ self.state[h]
            o = (o - o.mean()) / np.sqrt(o.var() + self.norm_eps)
            span = slice(h * self.dv, (h + 1) * self.dv)
            o = o * self.norm_weight[span] + self.norm_bias[span]
            out.append(o + (r[part] * k[part] * self.r_k[h]).sum() * values)
        return self.out @ (np.concatenate(out) * gate), first_values


class ChannelMixing:
    def __init__(self, config, tensors):
        hidden = config["hidden_size"]
        self.inner = config["intermediate_size"]
        self.mix = tensors("x_k", (hidden,), center=0.5, spread=0.3)
        self.key = tensors("key.weight", (self.inner, hidden))
        self.value = tensors("value.weight", (hidden, self.inner))
        self.before = np.zeros(hidden)

    def step(self, x):
        moved = x + (self.before - x) * self.mix
        self.before = x
        return self.value @ relu(self.key @ moved) ** 2


class Rwkv7:
    def __init__(self, config, store):
        hidden, vocab, eps = config["hidden_size"], config["vocab_size"], config["norm_eps"]
        bias = config.get("norm_bias", True)
        body = Under(store, "model.")
        tied = config.get("tie_word_embeddings", False)
        self.embeddings = body("embeddings.weight", (vocab, hidden),
                               spread=1.0 if tied else hidden ** 0.5)
        self.norm = LayerNorm(body, "norm", hidden, eps, bias)
        self.head = self.embeddings if tied else store("lm_head.weight", (vocab, hidden))
        self.first_norm = None
        self.layers = []
        for layer in range(config["num_hidden_layers"]):
            inside = Under(body, f"layers.{layer}.")
            if layer == 0 and config.get("norm_first", True):
                self.first_norm = LayerNorm(inside, "pre_norm", hidden, eps, bias)
            self.layers.append((LayerNorm(inside, "attn_norm", hidden, eps, bias),
                                TimeMixing(config, Under(inside, "attn."), layer),
                                LayerNorm(inside, "ffn_norm", hidden, eps, bias),
                                ChannelMixing(config, Under(inside, "ffn."))))

    def step(self, token):
        h = self.embeddings[token]
        if self.first_norm:
            h = self.first_norm(h)
        first_values = None
        for norm, time, channel_norm, channel in self.layers:
            added, first_values = time.step(norm(h), first_values)
            h = h + added
            h = h + channel.step(channel_norm(h))
        return self.head @ self.norm(h)
