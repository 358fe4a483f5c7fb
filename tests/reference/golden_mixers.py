"""Token mixers in float64, one token at a time, as their formulas are written.

A mixer is made from (config, tensors); step(x) takes the normalised input of one token and returns
what is added to the residual. States are S[key][value].
"""

import numpy as np


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def softplus(x):
    return np.logaddexp(0, x)


def silu(x):
    return x * sigmoid(x)


def relu(x):
    return np.maximum(x, 0)


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def unit(x):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


ACTIVATIONS = {None: lambda x: x, "identity": lambda x: x, "silu": silu, "swish": silu,
               "relu": relu, "elu": elu_plus_one, "sigmoid": sigmoid, "logsigmoid": log_sigmoid,
               "sqrelu": lambda x: relu(x) ** 2, "gelu": gelu}


def rotate(x, position, base):
    """x [heads, d]: the pairs (i, i + d/2) turned by position * base^(-2i/d)."""
    half = x.shape[-1] // 2
    angle = position * base ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)], axis=1)


class ShortConv:
    """Depthwise and causal; the last tap meets the newest input."""

    def __init__(self, tensors, name, channels, width):
        self.taps = tensors(name + ".weight", (channels, 1, width), spread=1.4)[:, 0, :]
        self.bias = tensors.maybe(name + ".bias", (channels,), spread=0.3)
        self.history = np.zeros((channels, width))

    def step(self, x):
        self.history = np.concatenate([self.history[:, 1:], x[:, None]], axis=1)
        y = (self.history * self.taps).sum(axis=1)
        return y if self.bias is None else y + self.bias


class Maps:
    """The projections of a mixer by name, each with a short convolution where the model has one."""

    def __init__(self, tensors, width):
        self.tensors, self.width = tensors, width
        self.linear, self.conv = {}, {}

    def add(self, name, rows, columns, conv=0, bias=False, spread=1.0):
        matrix = self.tensors(name + "_proj.weight", (rows, columns), spread=spread)
        shift = self.tensors(name + "_proj.bias", (rows,), spread=0.5) if bias else 0.0
        self.linear[name] = (matrix, shift)
        if conv:
            self.conv[name] = ShortConv(self.tensors, name + "_conv1d", rows, conv)

    def __call__(self, name, x):
        matrix, shift = self.linear[name]
        y = matrix @ x + shift
        return self.conv[name].step(y) if name in self.conv else y


class LowRank:
    """Two matrices without an activation between them; the second may have a bias."""

    def __init__(self, tensors, name, rows, inner, columns, bias, spread=1.0):
        self.first = tensors(name + ".0.weight", (inner, columns))
        self.second = tensors(name + ".1.weight", (rows, inner), spread=spread)
        self.bias = tensors(name + ".1.bias", (rows,), spread=0.5 * spread) if bias else 0.0

    def __call__(self, x):
        return self.second @ (self.first @ x) + self.bias


class Attention:
    """Softmax attention with rotary positions; a window sees itself and what came just before."""

    def __init__(self, config, tensors, hidden, qk_norm=False):
        self.heads = config["num_heads"]
        self.kv_heads = config.get("num_kv_heads") or self.heads
        self.dim = hidden // self.heads
        self.window = config.get("window_size")
        self.base = config.get("rope_theta") or 10000.0
        self.maps = Maps(tensors, hidden)
        bias = bool(config.get("qkv_bias"))
        self.maps.add("q", hidden, hidden, bias=bias, spread=1.5)
        for name in ("k", "v"):
            self.maps.add(name, self.kv_heads * self.dim, hidden, bias=bias, spread=1.5)
        self.maps.add("o", hidden, hidden)
        self.norms = [tensors(f"{name}_norm.weight", (self.dim,), center=1.2, spread=0.4)
                      for name in ("q", "k")] if qk_norm else None
        self.keys, self.values = [], []

    def step(self, x):
        q = self.maps("q", x).reshape(self.heads, self.dim)
        k = self.maps("k", x).reshape(self.kv_heads, self.dim)
        if self.norms:
            q, k = rms(q, self.norms[0], 1e-5), rms(k, self.norms[1], 1e-5)
        position = len(self.keys)
        self.keys.append(rotate(k, position, self.base))
        self.values.append(self.maps("v", x).reshape(self.kv_heads, self.dim))
        q = rotate(q, position, self.base)
        first = max(0, position + 1 - self.window) if self.window else 0
        out = []
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            keys = np.array([key[kv] for key in self.keys[first:]])
            values = np.array([value[kv] for value in self.values[first:]])
            out.append(softmax(keys @ q[head] / np.sqrt(self.dim)) @ values)
        return self.maps("o", np.concatenate(out))


class OutputNorm:
    """The norm of each head's output, with or without a gate computed from the layer's input."""

    def __init__(self, tensors, name, dim, eps):
        self.weight = tensors(name, (dim,), center=1.0, spread=0.3)
        self.eps = eps

    def __call__(self, out, gate=None, activation=silu):
        y = rms(out, self.weight, self.eps)
        return (y if gate is None else y * activation(gate.reshape(y.shape))).reshape(-1)


def delta_step(state, k, erase, write, q):
    """One head: the erase direction is read from the (decayed) state, then k is written."""
    state = state + np.outer(k, write - erase @ state)
    return state, (q / np.sqrt(len(q))) @ state


class DeltaNet:
    def __init__(self, config, tensors):
        hidden, self.heads = config["hidden_size"], config["num_heads"]
        self.dk = int(hidden * config.get("expand_k", 1.0)) // self.heads
        self.dv = int(hidden * config.get("expand_v", 1.0)) // self.heads
        self.doubled = bool(config.get("allow_neg_eigval", False))
        self.use_beta = config.get("use_beta", True)
        self.use_gate = config.get("use_gate", False)
        self.activation = config.get("qk_activation", "silu")
        self.norm = config.get("qk_norm", "l2")
        conv = config.get("conv_size", 4) if config.get("use_short_conv", True) else 0
        self.maps = Maps(tensors, hidden)
        self.maps.add("q", self.heads * self.dk, hidden, conv)
        self.maps.add("k", self.heads * self.dk, hidden, conv)
        self.maps.add("v", self.heads * self.dv, hidden, conv)
        if self.use_beta:
            self.maps.add("b", self.heads, hidden)
        if self.use_gate:
            self.maps.add("g", self.heads * self.dv, hidden)
        self.maps.add("o", hidden, self.heads * self.dv)
        self.out_norm = OutputNorm(tensors, "o_norm.weight", self.dv, config["norm_eps"])
        self.state = np.zeros((self.heads, self.dk, self.dv))

    def step(self, x):
        q, k = [ACTIVATIONS[self.activation](self.maps(name, x)).reshape(self.heads, self.dk)
                for name in ("q", "k")]
        if self.norm == "sum":
            q, k = [y / y.sum(axis=-1, keepdims=True) for y in (q, k)]
        else:
            q, k = unit(q), unit(k)
        v = silu(self.maps("v", x)).reshape(self.heads, self.dv)
        beta = sigmoid(self.maps("b", x)) if self.use_beta else np.ones(self.heads)
        beta = beta * (2 if self.doubled else 1)
        out = np.zeros((self.heads, self.dv))
        for h in range(self.heads):
            self.state[h], out[h] = delta_step(self.state[h], k[h], beta[h] * k[h],
                                               beta[h] * v[h], q[h])
        return self.maps("o", self.out_norm(out, self.maps("g", x) if self.use_gate else None))


class GatedDelta:
    """What gated_deltanet, kda and gdn2 share: sizes, projections, value heads in groups."""

    def __init__(self, config, tensors, heads, head_dim, expand_v):
        self.hidden = config["hidden_size"]
        self.heads = config.get("num_heads", heads)
        self.v_heads = config.get("num_v_heads") or self.heads
        self.group = self.v_heads // self.heads
        self.dk = config.get("head_dim", head_dim)
        self.dv = int(self.dk * config.get("expand_v", expand_v))
        self.doubled = 2.0 if config.get("allow_neg_eigval", False) else 1.0
        conv = config.get("conv_size", 4) if config.get("use_short_conv", True) else 0
        self.maps = Maps(tensors, self.hidden)
        self.maps.add("q", self.heads * self.dk, self.hidden, conv)
        self.maps.add("k", self.heads * self.dk, self.hidden, conv)
        self.maps.add("v", self.v_heads * self.dv, self.hidden, conv)
        self.maps.add("o", self.hidden, self.v_heads * self.dv)
        self.out_norm = OutputNorm(tensors, "o_norm.weight", self.dv, config["norm_eps"])
        self.state = np.zeros((self.v_heads, self.dk, self.dv))

    def qkv(self, x):
        q = unit(silu(self.maps("q", x)).reshape(self.heads, self.dk))
        k = unit(silu(self.maps("k", x)).reshape(self.heads, self.dk))
        return q, k, silu(self.maps("v", x)).reshape(self.v_heads, self.dv)

    def advance(self, j, log_decay, k, erase, write, q):
        decay = np.broadcast_to(np.exp(log_decay), (self.dk,))
        self.state[j], out = delta_step(decay[:, None] * self.state[j], k, erase, write, q)
        return out


class GatedDeltaNet(GatedDelta):
    def __init__(self, config, tensors):
        super().__init__(config, tensors, 6, 256, 2.0)
        self.maps.add("a", self.v_heads, self.hidden)
        self.maps.add("b", self.v_heads, self.hidden)
        self.use_gate = config.get("use_gate", True)
        if self.use_gate:
            self.maps.add("g", self.v_heads * self.dv, self.hidden)
        self.a_log = tensors("A_log", (self.v_heads,), center=-1.5, exact=True)
        self.dt_bias = tensors("dt_bias", (self.v_heads,))

    def step(self, x):
        q, k, v = self.qkv(x)
        beta = sigmoid(self.maps("b", x)) * self.doubled
        g = -np.exp(self.a_log) * softplus(self.maps("a", x) + self.dt_bias)
        out = []
        for j in range(self.v_heads):
            i = j // self.group
            out.append(self.advance(j, g[j], k[i], beta[j] * k[i], beta[j] * v[j], q[i]))
        gate = self.maps("g", x) if self.use_gate else None
        return self.maps("o", self.out_norm(np.array(out), gate))


class KimiDelta(GatedDelta):
    def __init__(self, config, tensors):
        super().__init__(config, tensors, 16, 128, 1.0)
        self.lower_bound = config.get("lower_bound")
        self.maps.add("b", self.v_heads, self.hidden)
        self.f = LowRank(tensors, "f_proj", self.v_heads * self.dk, self.dv, self.hidden, False)
        self.g = LowRank(tensors, "g_proj", self.v_heads * self.dv, self.dv, self.hidden, True)
        self.a_log = tensors("A_log", (self.v_heads,), center=-1.0, spread=0.7, exact=True)
        self.dt_bias = tensors("dt_bias", (self.v_heads * self.dk,),
                               center=-2.0 if self.lower_bound else 0.0, exact=True)

    def step(self, x):
        q, k, v = self.qkv(x)
        beta = sigmoid(self.maps("b", x)) * self.doubled
        z = (self.f(x) + self.dt_bias).reshape(self.v_heads, self.dk)
        rate = np.exp(self.a_log)[:, None]
        if self.lower_bound is None:
            g = -rate * softplus(z)
        else:
            g = self.lower_bound * sigmoid(rate * z)
        out = []
        for j in range(self.v_heads):
            i = j // self.group
            out.append(self.advance(j, g[j], k[i], beta[j] * k[i], beta[j] * v[j], q[i]))
        return self.maps("o", self.out_norm(np.array(out), self.g(x), sigmoid))


class GatedDeltaNet2(GatedDelta):
    def __init__(self, config, tensors):
        super().__init__(config, tensors, 16, 128, 1.0)
        self.maps.add("b", self.heads * self.dk, self.hidden)
        self.maps.add("w", self.v_heads * self.dv, self.hidden)
        self.f = LowRank(tensors, "f_proj", self.heads * self.dk, self.dv, self.hidden, False)
        self.g = LowRank(tensors, "g_proj", self.v_heads * self.dv, self.dv, self.hidden, True)
        self.a_log = tensors("A_log", (self.heads,), center=-1.0, spread=0.7, exact=True)
        self.dt_bias = tensors("dt_bias", (self.heads * self.dk,))

    def step(self, x):
        q, k, v = self.qkv(x)
        erase = sigmoid(self.maps("b", x)).reshape(self.heads, self.dk) * self.doubled
        write = sigmoid(self.maps("w", x)).reshape(self.v_heads, self.dv)
        z = (self.f(x) + self.dt_bias).reshape(self.heads, self.dk)
        g = -np.exp(self.a_log)[:, None] * softplus(z)
        out = []
        for j in range(self.v_heads):
            i = j // self.group
            out.append(self.advance(j, g[i], k[i], erase[i] * k[i], write[j] * v[j], q[i]))
        return self.maps("o", self.out_norm(np.array(out), self.g(x), sigmoid))
