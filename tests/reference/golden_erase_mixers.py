"""Mixers that take out and write along directions of their own, in float64: see golden_mixers.py."""

import numpy as np

from golden_mixers import Maps, OutputNorm, sigmoid, silu, softplus, unit


class HeadsOf:
    """Sizes, projections and the per-head decay of gated_deltaproduct and comba."""

    def __init__(self, config, tensors, updates, decay, gate):
        hidden = config["hidden_size"]
        self.heads = config.get("num_heads", 6)
        self.dk = config.get("head_dim", 256)
        self.dv = int(self.dk * config.get("expand_v", 2.0))
        self.updates, self.use_decay, self.use_gate = updates, decay, gate
        conv = config.get("conv_size", 4) if config.get("use_short_conv", True) else 0
        self.maps = Maps(tensors, hidden)
        self.maps.add("q", self.heads * self.dk, hidden, conv)
        self.maps.add("k", updates * self.heads * self.dk, hidden, conv)
        self.maps.add("v", updates * self.heads * self.dv, hidden, conv)
        self.maps.add("b", updates * self.heads, hidden)
        self.maps.add("o", hidden, self.heads * self.dv)
        if decay:
            self.maps.add("a", self.heads, hidden)
            self.a_log = tensors("A_log", (self.heads,), center=-1.5, exact=True)
            self.dt_bias = tensors("dt_bias", (self.heads,))
        if gate:
            self.maps.add("g", self.heads * self.dv, hidden)
        self.out_norm = OutputNorm(tensors, "o_norm.weight", self.dv, config["norm_eps"])
        self.state = np.zeros((self.heads, self.dk, self.dv))

    def decays(self, x):
        """What each head's state is multiplied by."""
        if not self.use_decay:
            return np.ones(self.heads)
        return np.exp(-np.exp(self.a_log) * softplus(self.maps("a", x) + self.dt_bias))

    def activated(self, name, x, *shape):
        return silu(self.maps(name, x)).reshape(shape)

    def answer(self, x, out, activation):
        gate = self.maps("g", x) if self.use_gate else None
        return self.maps("o", self.out_norm(out, gate, activation))


class DeltaProduct(HeadsOf):
    def __init__(self, config, tensors):
        super().__init__(config, tensors, config.get("num_householder", 1),
                         config.get("use_forget_gate", False), config.get("use_output_gate", True))
        self.doubled = 2.0 if config.get("allow_neg_eigval", False) else 1.0

    def step(self, x):
        q = unit(self.activated("q", x, self.heads, self.dk))
        keys = unit(self.activated("k", x, self.updates, self.heads, self.dk))
        values = self.activated("v", x, self.updates, self.heads, self.dv)
        betas = self.doubled * sigmoid(self.maps("b", x)).reshape(self.updates, self.heads)
        decay = self.decays(x)
        out = np.zeros((self.heads, self.dv))
        for h in range(self.heads):
            state = decay[h] * self.state[h]
            for k, v, beta in zip(keys[:, h], values[:, h], betas[:, h]):
                state = state + np.outer(k, beta * (v - k @ state))
            self.state[h] = state
            out[h] = q[h] @ state / np.sqrt(self.dk)
        return self.answer(x, out, silu)


class Comba(HeadsOf):
    def __init__(self, config, tensors):
        gate = config.get("use_output_gate", config.get("use_gate", True))
        super().__init__(config, tensors, 1, True, gate)
        self.inner = sigmoid(tensors("decay", (self.heads,), center=0.5))[:, None]
        self.correction = tensors("D", (self.heads,), center=1.0, spread=0.3)[:, None]

    def step(self, x):
        q, k = [self.activated(name, x, self.heads, self.dk) for name in ("q", "k")]
        v = self.activated("v", x, self.heads, self.dv)
        p = self.inner * k
        q, k, p = unit(q - self.correction * p), unit(k), unit(p)
        beta, decay = sigmoid(self.maps("b", x)), self.decays(x)
        out = np.zeros((self.heads, self.dv))
        for h in range(self.heads):
            wanted = beta[h] * (v[h] - p[h] @ self.state[h])  # of what was there before the decay
            self.state[h] = decay[h] * self.state[h] + np.outer(k[h], wanted)
            out[h] = q[h] @ self.state[h] / np.sqrt(self.dk)
        return self.answer(x, out, sigmoid)
