"""Switching linear attention in float64, one token at a time: see golden_mixers.py."""

import numpy as np

from golden_mixers import LowRank, Maps, rms, sigmoid, silu, softmax, softplus, unit


class SwitchingLinear:
    """Per head, `mixtures` states S[j][value][key] share one write by how well each predicts."""

    def __init__(self, config, tensors):
        hidden = config["hidden_size"]
        self.eps = config["norm_eps"]
        self.temporal, self.gated = config["temporal"], config["gated"]
        self.shape = heads, mixtures, dim = (config["num_heads"], config["num_mixtures"],
                                             config["head_dim"])
        rows = heads * mixtures * dim
        self.maps = Maps(tensors, hidden)
        for name in ("q", "k", "v"):
            self.maps.add(name, heads * dim, hidden, config["conv_size"], spread=1.5)
        self.maps.add("o", hidden, heads * dim)
        self.k_router, self.q_router = [
            LowRank(tensors, name, rows, config["router_low_rank_dim"], hidden, False, spread=1.5)
            for name in ("k_router", "q_router")]
        self.beta = LowRank(tensors, "b_proj", rows, config["beta_low_rank_dim"], hidden, False)
        if self.temporal:
            self.maps.add("gk", heads * dim, hidden, bias=True)
            self.maps.add("gq", heads * dim, hidden, bias=True)
        if self.gated:
            self.f = LowRank(tensors, "f_proj", rows, config["gate_low_rank_dim"], hidden, False)
            self.a_log = tensors("A_log", (heads * mixtures,), center=-1.5, exact=True)
            self.dt_bias = tensors("dt_bias", (rows,))
        self.norm = tensors("o_norm.weight", (dim,), center=1.0, spread=0.3)
        self.state = np.zeros((heads, mixtures, dim, dim))
        self.posterior = np.full(self.shape, 1.0 / mixtures)
        self.mixed = np.full(self.shape, 1.0 / mixtures)

    def prior(self, gate, x, before, router):
        now = softmax(router(x).reshape(self.shape), axis=1)
        if not self.temporal:
            return now
        g = sigmoid(self.maps(gate, x)).reshape(self.shape[0], 1, self.shape[2])
        return (1 - g) * before + g * now

    def step(self, x):
        heads, mixtures, dim = self.shape
        q, k, v = [silu(self.maps(name, x)).reshape(heads, dim) for name in ("q", "k", "v")]
        q, k = unit(q), unit(k)
        if self.gated:
            rate = softplus(self.f(x) + self.dt_bias).reshape(self.shape)
            rate = rate * np.exp(self.a_log).reshape(heads, mixtures, 1)
            self.state = self.state * np.exp(-rate)[:, :, None, :]
        delta = v[:, None, :] - np.einsum("hjde,he->hjd", self.state, k)
        prior = self.prior("gk", x, self.posterior, self.k_router)
        self.posterior = softmax(np.log(prior) - delta ** 2 / 2, axis=1)
        write = sigmoid(self.beta(x)).reshape(self.shape) * self.posterior * delta
        self.state = self.state + np.einsum("hjd,he->hjde", write, k)
        self.mixed = self.prior("gq", x, self.mixed, self.q_router)
        out = (self.mixed * np.einsum("hjde,he->hjd", self.state, q)).sum(axis=1)
        return self.maps("o", rms(out, self.norm, self.eps).reshape(-1))
