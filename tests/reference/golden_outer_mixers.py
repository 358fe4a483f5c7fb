"""Mixers that only decay and add, in float64, one token at a time: see golden_mixers.py."""

import numpy as np

from golden_mixers import (ACTIVATIONS, LowRank, Maps, OutputNorm, ShortConv, log_sigmoid, relu,
                           rms, rotate, sigmoid, silu, softmax, softplus)


class Sizes:
    """Heads and head dims of the types that derive them from the hidden size."""

    def __init__(self, config, heads, expand_k, expand_v):
        self.hidden = config["hidden_size"]
        self.heads = config.get("num_heads", heads)
        self.kv_heads = config.get("num_kv_heads") or self.heads
        self.group = self.heads // self.kv_heads
        # Gated slot attention's own arguments are misspelt, and so are some of its files.
        expand_k = config.get("expand_k", config.get("exapnd_k", expand_k))
        expand_v = config.get("expand_v", config.get("exapnd_v", expand_v))
        self.dk = int(self.hidden * expand_k) // self.heads
        self.dv = int(self.hidden * expand_v) // self.heads


class Grouped:
    """gla and retnet: query heads in groups over key/value heads, a gated norm per head."""

    def __init__(self, config, tensors, sizes, conv):
        self.sizes = s = sizes
        self.maps = Maps(tensors, s.hidden)
        self.maps.add("q", s.heads * s.dk, s.hidden, conv)
        self.maps.add("k", s.kv_heads * s.dk, s.hidden, conv)
        self.maps.add("v", s.kv_heads * s.dv, s.hidden, conv)
        self.maps.add("o", s.hidden, s.heads * s.dv)
        self.use_gate = config.get("use_output_gate", True)
        if self.use_gate:
            self.maps.add("g", s.heads * s.dv, s.hidden)
        fused = self.use_gate and config.get("fuse_norm", True)
        name = "g_norm_swish_gate.weight" if fused else "g_norm.weight"
        self.out_norm = OutputNorm(tensors, name, s.dv, config["norm_eps"])
        self.feature = ACTIVATIONS[config.get("feature_map")]
        self.activation = silu if conv else lambda x: x
        self.state = np.zeros((s.heads, s.dk, s.dv))

    def qkv(self, x):
        s = self.sizes
        q, k, v = [self.activation(self.maps(name, x)) for name in ("q", "k", "v")]
        return (self.feature(q).reshape(s.heads, s.dk), self.feature(k).reshape(s.kv_heads, s.dk),
                v.reshape(s.kv_heads, s.dv))

    def advance(self, x, q, k, v, decay):
        """decay(head) answers with what the head's state is multiplied by, row by row."""
        s, out = self.sizes, []
        for h in range(s.heads):
            kv = h // s.group
            self.state[h] = decay(h) * self.state[h] + np.outer(k[kv], v[kv])
            out.append((q[h] / np.sqrt(s.dk)) @ self.state[h])
        gate = self.maps("g", x) if self.use_gate else None
        return self.maps("o", self.out_norm(np.array(out), gate))


class GatedLinear(Grouped):
    RANK, DIVISOR = 16, 16

    def __init__(self, config, tensors):
        sizes = Sizes(config, 4, 0.5, 1.0)
        conv = config.get("conv_size", 4) if config.get("use_short_conv", False) else 0
        super().__init__(config, tensors, sizes, conv)
        self.clamp = config.get("clamp_min")
        self.gk = LowRank(tensors, "gk_proj", sizes.kv_heads * sizes.dk, self.RANK, sizes.hidden,
                          True, spread=8.0)

    def step(self, x):
        q, k, v = self.qkv(x)
        gate = log_sigmoid(self.gk(x)) / self.DIVISOR
        if self.clamp is not None:
            gate = np.maximum(gate, self.clamp)
        gate = np.exp(gate).reshape(self.sizes.kv_heads, self.sizes.dk)
        return self.advance(x, q, k, v, lambda h: gate[h // self.sizes.group][:, None])


class RetNet(Grouped):
    BASE = 10000.0

    def __init__(self, config, tensors):
        super().__init__(config, tensors, Sizes(config, 8, 1.0, 2.0), 0)
        self.position = 0

    def step(self, x):
        q, k, v = self.qkv(x)
        q, k = [rotate(y, self.position, self.BASE) for y in (q, k)]
        self.position += 1
        return self.advance(x, q, k, v, lambda h: 1 - 2.0 ** (-5 - h))


class Hgrn2:
    NORM_EPS = 1e-5

    def __init__(self, config, tensors, bound):
        """bound: this layer's lower bounds of the forget gate [hidden], zeros where it has none."""
        hidden = config["hidden_size"]
        ratio = config.get("expand_ratio", 128)
        self.heads = hidden // ratio if ratio else config["num_heads"]
        self.dim = hidden // self.heads
        conv = config.get("conv_size", 4) if config.get("use_short_conv", False) else 0
        self.maps = Maps(tensors, hidden)
        for name in ("q", "f", "i"):
            self.maps.add(name, hidden, hidden, conv, spread=1.5)
        self.maps.add("o", hidden, hidden)
        self.norm = tensors("g_norm.weight", (hidden,), center=1.0, spread=0.3)
        self.bound = bound
        self.state = np.zeros((self.heads, self.dim, self.dim))

    def step(self, x):
        shape = (self.heads, self.dim)
        q = silu(self.maps("q", x)).reshape(shape)
        forget = (self.bound + (1 - self.bound) * sigmoid(self.maps("f", x))).reshape(shape)
        v = self.maps("i", x).reshape(shape)
        out = []
        for h in range(self.heads):
            self.state[h] = forget[h][:, None] * self.state[h] + np.outer(1 - forget[h], v[h])
            out.append((q[h] / np.sqrt(self.dim)) @ self.state[h])
        return self.maps("o", rms(np.concatenate(out), self.norm, self.NORM_EPS))


class GatedSlots:
    NORM_EPS = 1e-5

    def __init__(self, config, tensors):
        self.sizes = s = Sizes(config, 4, 1.0, 1.0)
        self.slots = config.get("num_slots", 64) or s.dk
        self.divisor = config.get("gate_logit_normalizer", 8)
        conv = config.get("conv_size", 4) if config.get("use_short_conv", False) else 0
        self.convolved = silu if conv else lambda x: x
        self.maps = Maps(tensors, s.hidden)
        self.maps.add("q", s.heads * s.dk, s.hidden, conv, spread=2.0)
        self.maps.add("k", s.kv_heads * s.dk, s.hidden, conv, spread=2.0)
        self.maps.add("v", s.kv_heads * s.dv, s.hidden, conv, spread=1.5)
        self.maps.add("f", s.kv_heads * self.slots, s.hidden, spread=4.0)
        self.maps.add("o", s.hidden, s.heads * s.dv)
        self.norm = tensors("g_norm.weight", (s.heads * s.dv,), center=1.0, spread=0.3)
        self.feature = config.get("feature_map", "swish")
        self.layer = tensors("feature_map.layer.weight", (s.dk, s.dk),
                             spread=1.5) if self.feature == "t2r" else None
        self.keys = np.zeros((s.heads, s.dk, self.slots))
        self.values = np.zeros((s.heads, self.slots, s.dv))

    def phi(self, x):
        return ACTIVATIONS[self.feature](x) if self.layer is None else relu(x @ self.layer.T)

    def step(self, x):
        s = self.sizes
        q = self.phi(self.convolved(self.maps("q", x)).reshape(s.heads, s.dk))
        k = self.phi(self.convolved(self.maps("k", x)).reshape(s.kv_heads, s.dk))
        v = silu(self.convolved(self.maps("v", x))).reshape(s.kv_heads, s.dv)
        gate = log_sigmoid(self.maps("f", x)).reshape(s.kv_heads, self.slots) / self.divisor
        out = []
        for h in range(s.heads):
            kv = h // s.group
            keep, take = np.exp(gate[kv]), 1 - np.exp(gate[kv])
            self.keys[h] = self.keys[h] * keep[None, :] + np.outer(k[kv], take)
            p = softmax(q[h] @ self.keys[h])
            self.values[h] = self.values[h] * keep[:, None] + np.outer(take, v[kv])
            out.append(p @ self.values[h])
        return self.maps("o", rms(silu(np.concatenate(out)), self.norm, self.NORM_EPS))


class FeatureMap:
    """φ of linear attention over one head, with the linear layers it needs."""

    def __init__(self, kind, tensors, dim):
        self.kind = kind
        names = {"elementwise_product": ["layer1", "layer2"], "hedgehog": ["layer"],
                 "t2r": ["layer"]}.get(kind, [])
        self.layers = [(tensors(name + ".weight", (dim, dim), spread=1.5),
                        0.0 if kind == "t2r" else tensors(name + ".bias", (dim,), spread=0.5))
                       for name in names]

    def __call__(self, x):
        ys = [x @ weight.T + bias for weight, bias in self.layers]
        if self.kind == "elementwise_product":
            return ys[0] * ys[1]
        if self.kind == "hedgehog":
            return softmax(np.concatenate([2 * ys[0], -2 * ys[0]], axis=-1))
        if self.kind == "t2r":
            return relu(ys[0])
        if self.kind == "dpfp":
            y = np.concatenate([relu(x), -relu(x)], axis=-1)  # the paper: relu(-x)
            width = y.shape[-1]
            turned = [y[..., [(i - j) % width for i in range(width)]] for j in (1, 2, 3, 4)]
            return np.concatenate([y * t for t in turned], axis=-1)
        return ACTIVATIONS[self.kind](x)


class LinearAttention:
    def __init__(self, config, tensors):
        self.sizes = s = Sizes(config, 4, 1.0, 1.0)
        kind = config.get("feature_map", "elementwise_product")
        self.maps = Maps(tensors, s.hidden)
        self.maps.add("q", s.heads * s.dk, s.hidden)
        self.maps.add("k", s.kv_heads * s.dk, s.hidden)
        self.maps.add("v", s.kv_heads * s.dv, s.hidden)
        self.maps.add("o", s.hidden, s.heads * s.dv)

        def inside(prefix):
            return lambda name, shape, **how: tensors(prefix + name, shape, **how)

        tied = config.get("tie_feature_map_qk", False)
        try:
            self.phi_q = FeatureMap(kind, inside("feature_map_q."), s.dk)
        except KeyError:
            if not tied:
                raise
            self.phi_q = FeatureMap(kind, inside("feature_map_k."), s.dk)
        self.phi_k = self.phi_q if tied else FeatureMap(kind, inside("feature_map_k."), s.dk)
        self.norms = [config.get(key, False) for key in ("norm_q", "norm_k", "norm_feature_map")]
        self.out_norm = OutputNorm(tensors, "norm.weight", s.dv, config["norm_eps"])
        self.state, self.key_sum = [0.0] * s.heads, [0.0] * s.heads

    def step(self, x):
        s = self.sizes
        q = self.phi_q(self.maps("q", x).reshape(s.heads, s.dk))
        k = self.phi_k(self.maps("k", x).reshape(s.kv_heads, s.dk))
        v = self.maps("v", x).reshape(s.kv_heads, s.dv)
        if self.norms[0]:
            q = q / (q.sum(axis=-1, keepdims=True) + 1e-4)
        if self.norms[1]:
            k = k / (k.sum(axis=-1, keepdims=True) + 1e-4)
        q = q / np.sqrt(q.shape[-1])
        out = []
        for h in range(s.heads):
            kv = h // s.group
            self.state[h] = self.state[h] + np.outer(k[kv], v[kv])
            self.key_sum[h] = self.key_sum[h] + k[kv]
            o = q[h] @ self.state[h]
            out.append(o / (q[h] @ self.key_sum[h] + 1e-10) if self.norms[2] else o)
        return self.maps("o", self.out_norm(np.array(out)))


class Linears:
    """Linear maps with a bias on all of them, or on none."""

    def __init__(self, tensors, bias):
        self.tensors, self.bias = tensors, bias

    def __call__(self, name, rows, columns):
        weight = self.tensors(name + ".weight", (rows, columns))
        bias = self.tensors(name + ".bias", (rows,), spread=0.3) if self.bias else 0.0
        return lambda x: weight @ x + bias


class Mamba2:
    def __init__(self, config, tensors):
        hidden = config["hidden_size"]
        self.inner = int(config.get("expand", 2) * hidden)
        self.dim = config.get("head_dim", 64)
        self.heads = self.inner // self.dim
        self.groups = config.get("n_groups", 1)
        self.size = config.get("state_size", 128)
        self.eps = config.get("norm_eps", config.get("layer_norm_epsilon", 1e-5))
        self.limit = config.get("dt_limit", config.get("time_step_limit", (0.0, np.inf)))
        self.norm_first = config.get("norm_before_gate", False)
        channels = self.inner + 2 * self.groups * self.size
        bias = config.get("use_bias", False)
        self.maps = Linears(tensors, bias)
        self.in_proj = self.maps("in_proj", self.inner + channels + self.heads, hidden)
        self.out_proj = self.maps("out_proj", hidden, self.inner)
        if config.get("use_conv_bias", True):
            tensors("conv1d.bias", (channels,), spread=0.3)
        self.conv = ShortConv(tensors, "conv1d", channels, config.get("conv_kernel", 4))
        self.dt_bias = tensors("dt_bias", (self.heads,), center=-1.0)
        self.a_log = tensors("A_log", (self.heads,), center=-0.3, spread=0.7, exact=True)
        wide = config.get("D_has_hdim", False)
        self.skip = tensors("D", (self.inner if wide else self.heads,), center=0.5, exact=True)
        self.skip = self.skip.reshape(self.heads, -1)
        self.norm = tensors("norm.weight", (self.inner,), center=1.0,
                            spread=0.3) if config.get("rmsnorm", True) else None
        self.state = np.zeros((self.heads, self.size, self.dim))

    def normalised(self, y):
        parts = y.reshape(self.groups, -1)
        return rms(parts, self.norm.reshape(self.groups, -1), self.eps).reshape(-1)

    def step(self, x):
        parts = self.in_proj(x)
        z, dt = parts[:self.inner], parts[-self.heads:]
        mixed = silu(self.conv.step(parts[self.inner:-self.heads]))
        values = mixed[:self.inner].reshape(self.heads, self.dim)
        b, c = mixed[self.inner:].reshape(2, self.groups, self.size)
        dt = np.clip(softplus(dt + self.dt_bias), *self.limit)
        out = np.zeros((self.heads, self.dim))
        for h in range(self.heads):
            group = h // (self.heads // self.groups)
            decay = np.exp(-np.exp(self.a_log[h]) * dt[h])
            self.state[h] = decay * self.state[h] + np.outer(b[group], dt[h] * values[h])
            out[h] = c[group] @ self.state[h] + self.skip[h] * values[h]
        y = out.reshape(-1)
        if self.norm is None:
            y = y * silu(z)
        elif self.norm_first:
            y = self.normalised(y) * silu(z)
        else:
            y = self.normalised(y * silu(z))
        return self.out_proj(y)
