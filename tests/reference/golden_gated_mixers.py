"""The Forgetting Transformer in float64, one token at a time; see golden_mixers."""

import numpy as np

from golden_mixers import Maps, log_sigmoid, rms, sigmoid, softmax


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
