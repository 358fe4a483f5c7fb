"""Forgetting Transformer and Mixture-of-Memories in float64, token by token; see golden_mixers."""

import numpy as np

from golden_mixers import (Maps, OutputNorm, delta_step, log_sigmoid, rms, sigmoid, silu, softmax,
                           softplus, unit)


class Forgetting:
    """Softmax attention whose scores lose the log forget gates of all tokens in between."""

    def __init__(self, config, tensors):
        hidden, self.heads = config["hidden_size"], config["num_heads"]
        self.kv_heads = config.get("num_kv_heads") or self.heads
        self.dim = hidden // self.heads
        self.maps = Maps(tensors, hidden)
        bias = bool(config.get("qkv_bias"))
        self.maps.add("q", hidden, hidden, bias=bias, spread=1.5)
        for name in ("k", "v"):
            self.maps.add(name, self.kv_heads * self.dim, hidden, bias=bias, spread=1.5)
        self.maps.add("f", self.heads, hidden, bias=True, spread=2.0)
        self.maps.add("o", hidden, hidden)
        self.gated = config.get("use_output_gate", False)
        if self.gated:
            self.maps.add("g", hidden, hidden)
        self.norms = [tensors(f"{name}_norm.weight", (count * self.dim,), center=1.2, spread=0.4)
                      for name, count in (("q", self.heads), ("k", self.kv_heads))
                      ] if config.get("qk_norm") else None
        self.keys, self.values, self.gates = [], [], []

    def step(self, x):
        q = self.maps("q", x).reshape(self.heads, self.dim)
        k = self.maps("k", x).reshape(self.kv_heads, self.dim)
        if self.norms:
            q, k = [rms(y, weight.reshape(y.shape), 1e-5) for y, weight in zip((q, k), self.norms)]
        self.keys.append(k)
        self.values.append(self.maps("v", x).reshape(self.kv_heads, self.dim))
        self.gates.append(log_sigmoid(self.maps("f", x)))
        # What each token has lost by now: the gates after it, its own left out.
        gates = np.array(self.gates)
        lost = gates[::-1].cumsum(axis=0)[::-1] - gates
        out = []
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            keys = np.array([key[kv] for key in self.keys])
            values = np.array([value[kv] for value in self.values])
            scores = keys @ q[head] / np.sqrt(self.dim) + lost[:, head]
            out.append(softmax(scores) @ values)
        y = np.concatenate(out)
        return self.maps("o", y * sigmoid(self.maps("g", x)) if self.gated else y)


class Memory:
    """One memory: a gated delta rule over the tokens that it is given, and its own histories."""

    def __init__(self, heads, dk, dv, taps):
        self.taps = taps
        self.history = {name: np.zeros_like(one) for name, one in taps.items()}
        self.state = np.zeros((heads, dk, dv))

    def conv(self, name, x, bias):
        self.history[name] = np.concatenate([self.history[name][:, 1:], x[:, None]], axis=1)
        return silu((self.history[name] * self.taps[name]).sum(axis=1) + bias)

    def step(self, q, k, v, beta, decay):
        out = np.zeros(v.shape)
        for h in range(len(q)):
            decayed = decay[h] * self.state[h]
            self.state[h], out[h] = delta_step(decayed, k[h], beta[h] * k[h], beta[h] * v[h], q[h])
        return out


class MixtureOfMemories:
    """A router gives each token to some memories; one more may see them all."""

    NAMES = ("k", "v", "b", "a")

    def __init__(self, config, tensors):
        hidden, self.heads = config["hidden_size"], config["num_heads"]
        self.dk = config["head_dim"]
        self.dv = int(self.dk * config.get("expand_v", 1.0))
        count, self.chosen = config.get("num_memories", 4), config.get("topk", 2)
        keys, values = self.heads * self.dk, self.heads * self.dv
        self.q = tensors("q_proj.weight", (keys, hidden))
        self.router = tensors("gate.weight", (count, hidden), spread=2.0)
        rows = dict(zip(self.NAMES, (keys, values, self.heads, self.heads)))
        single, shared = config.get("single_kv_proj", False), config.get("shared_mem", True)
        common = {}
        if single or shared:
            common = {n: tensors(f"shared_{n}.weight", (rows[n], hidden)) for n in self.NAMES}
        self.maps = [common if single else
                     {n: tensors(f"{n}_proj.{e}.weight", (rows[n], hidden)) for n in self.NAMES}
                     for e in range(count)]
        width = config.get("conv_size", 4)
        channels = {"q": keys, "k": keys, "v": values}
        taps = {n: tensors(f"{n}_conv1d.weight", (c, 1, width), spread=1.4)[:, 0, :]
                for n, c in channels.items()}
        self.bias = {}
        for n, c in channels.items():
            bias = tensors.maybe(f"{n}_conv1d.bias", (c,))
            self.bias[n] = 0.0 if bias is None else bias
        self.memories = [Memory(self.heads, self.dk, self.dv, taps) for _ in range(count)]
        self.shared = (Memory(self.heads, self.dk, self.dv, taps), common) if shared else None
        self.a_log = tensors("A_log", (self.heads,), center=-1.5, exact=True)
        self.dt_bias = tensors("dt_bias", (self.heads,))
        self.gate = tensors("g_proj.weight", (values, hidden)
                            ) if config.get("use_output_gate", True) else None
        self.norm = OutputNorm(tensors, "o_norm.weight", self.dv, config["norm_eps"])
        self.out = tensors("o_proj.weight", (hidden, values))

    def read(self, memory, maps, x):
        def heads(name, matrix):
            return memory.conv(name, matrix @ x, self.bias[name]).reshape(self.heads, -1)

        q, k, v = heads("q", self.q), heads("k", maps["k"]), heads("v", maps["v"])
        decay = np.exp(-np.exp(self.a_log) * softplus(maps["a"] @ x + self.dt_bias))
        return memory.step(unit(q), unit(k), v, sigmoid(maps["b"] @ x), decay)

    def step(self, x):
        scores = softmax(self.router @ x)
        chosen = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:self.chosen]
        total = sum(scores[e] for e in chosen)
        y = sum(scores[e] / total * self.read(self.memories[e], self.maps[e], x) for e in chosen)
        if self.shared:
            y = y + self.read(*self.shared, x)
        return self.out @ self.norm(y, None if self.gate is None else self.gate @ x)
