"""The Megatron family in Weir's own layout (engine/weir_layout.md), in float64.

The recurrent layers are written in their unified form (arXiv 2607.07953): the state decays, is read
with an erase key, and the plain key writes the residual u = z - read. What crosses layers inside one
token lives in `Token`.
"""

import numpy as np

from golden_mixers import (LowRank, Maps, OutputNorm, rms, rotate, sigmoid, silu, softmax, softplus,
                           unit)
from golden_store import Under


def unit_max(x):
    return x / np.maximum(np.sqrt((x * x).sum(axis=-1, keepdims=True)), 1e-6)


def rms_unit(x, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


class Token:
    """What layers leave for each other while one token passes."""

    def __init__(self):
        self.residuals = []   # the u of every recurrent layer so far
        self.values = self.residual = None   # of the layer at hand


class Softmax:
    def __init__(self, config, tensors):
        hidden = config["hidden_size"]
        self.heads, self.kv_heads = config["num_heads"], config["num_kv_heads"]
        self.dim, self.base = config["head_dim"], config.get("rope_theta", 500000.0)
        self.maps = Maps(tensors, hidden)
        self.maps.add("q", self.heads * self.dim, hidden, spread=1.5)
        for name in ("k", "v"):
            self.maps.add(name, self.kv_heads * self.dim, hidden, spread=1.5)
        self.gated = config.get("attention_output_gate", False)
        if self.gated:
            self.maps.add("g", self.heads * self.dim, hidden)
        self.maps.add("o", hidden, self.heads * self.dim)
        self.keys, self.values = [], []

    def step(self, x, raw, token):
        position = len(self.keys)
        q = rotate(self.maps("q", x).reshape(self.heads, self.dim), position, self.base)
        k = self.maps("k", x).reshape(self.kv_heads, self.dim)
        self.keys.append(rotate(k, position, self.base))
        self.values.append(self.maps("v", x).reshape(self.kv_heads, self.dim))
        keys, values = np.array(self.keys), np.array(self.values)
        per = self.heads // self.kv_heads
        out = [softmax(keys[:, head // per] @ q[head] / np.sqrt(self.dim)) @ values[:, head // per]
               for head in range(self.heads)]
        out = np.concatenate(out)
        return self.maps("o", out * sigmoid(self.maps("g", x)) if self.gated else out)


class Injection:
    """CLER: what lower layers' residuals do to one layer's values, or to its answer."""

    def __init__(self, config, tensors, heads, dim):
        self.config, self.eps = config, config.get("eps", 1e-6)
        self.mode, self.dynamic = config.get("mode", "latest"), config.get("dynamic", False)
        self.site = config.get("site", "value")
        if self.mode in ("dense_softmax", "attnres"):
            self.query = tensors("cler_query", (heads, dim), spread=2.0)
        gate = "cler_self_gate" if self.mode == "attnres" else "cler_gate"
        if self.dynamic:
            self.gate = tensors(gate + ".weight", (1, dim), spread=2.0)[0]
            self.bias = tensors(gate + ".bias", (1,))[0]
        elif self.mode == "attnres":
            self.self_bias = tensors("cler_self_bias", (heads,))
        else:
            shape = {"scalar": (1,), "head": (heads,), "channel": (heads, dim)}
            gamma = tensors("cler_gamma", shape[config.get("gamma", "scalar")], center=0.4,
                            spread=0.5)
            self.gamma = gamma[:, None] if gamma.ndim == 1 else gamma

    def mix(self, sources, first_bias=0.0):
        logits = (rms_unit(sources, self.eps) * self.query).sum(axis=-1)
        logits[0] = logits[0] + first_bias
        return (softmax(logits, axis=0)[..., None] * sources).sum(axis=0)

    def __call__(self, v, residuals):
        """The new values, and what is added to the answer."""
        u = np.array(residuals)
        if self.mode == "attnres":
            bias = v @ self.gate + self.bias if self.dynamic else self.self_bias
            return self.mix(np.concatenate([v[None], u]), bias), 0.0
        r = {"latest": lambda: u[-1], "dense_mean": lambda: u.mean(axis=0),
             "dense_softmax": lambda: self.mix(u)}[self.mode]()
        if self.config.get("normalize", False):
            r = rms_unit(r, self.eps)
        gamma = sigmoid(v @ self.gate + self.bias)[:, None] if self.dynamic else self.gamma
        add = gamma * r
        return (v + add if self.site != "output" else v), (add if self.site != "value" else 0.0)


class Recurrent:
    def __init__(self, config, tensors, kind, first):
        self.kind, hidden = kind, config["hidden_size"]
        self.heads, self.v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.dk, self.dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.unit = unit_max if config.get("linear_qk_norm", "l2") == "l2_max" else unit
        self.low_rank = kind == "kda" or kind == "gdn2" and config.get("gdn2_low_rank", False)
        keys, values = self.heads * self.dk, self.v_heads * self.dv
        conv = config.get("linear_conv_kernel_dim", 4)
        self.maps = maps = Maps(tensors, hidden)
        maps.add("q", keys, hidden, conv)
        maps.add("k", keys, hidden, conv)
        maps.add("v", values, hidden, conv)
        if kind != "linear":
            maps.add("b", keys if kind == "gdn2" else self.v_heads, hidden)
        if kind == "gdn2":
            maps.add("w", values, hidden)
        decays = {"gdn": self.v_heads, "kda": self.v_heads * self.dk, "gdn2": keys}.get(kind)
        if self.low_rank:
            self.f = LowRank(tensors, "f_proj", decays, self.dv, hidden, False)
            self.g = LowRank(tensors, "g_proj", values, self.dv, hidden, True)
        elif decays:
            maps.add("a", decays, hidden)
            maps.add("g", values, hidden)
        if decays:
            heads = self.heads if kind == "gdn2" else self.v_heads
            self.a_log = tensors("A_log", (heads,), center=-1.0, spread=0.7, exact=True)
            self.dt_bias = tensors("dt_bias", (decays,))
        cler = config.get("cler")
        self.inject = None if not cler or first else Injection(cler, tensors, self.v_heads, self.dv)
        self.out_norm = OutputNorm(tensors, "o_norm.weight", self.dv, config.get("norm_eps", 1e-5))
        maps.add("o", hidden, values)
        self.state = np.zeros((self.v_heads, self.dk, self.dv))

    def gates(self, x, raw):
        """decay [v_heads, dk], output gate or None. Low-rank gdn2 reads what has no norm yet."""
        if self.kind in ("delta", "linear"):
            return np.ones((self.v_heads, self.dk)), None
        y = raw if self.low_rank and self.kind == "gdn2" else x
        logits = self.f(y) if self.low_rank else self.maps("a", x)
        gate = self.g(y) if self.low_rank else self.maps("g", x)
        rate = softplus(logits + self.dt_bias).reshape(len(self.a_log), -1)
        decay = np.exp(-np.exp(self.a_log)[:, None] * rate)
        decay = np.repeat(decay, self.v_heads // len(self.a_log), axis=0)
        return np.broadcast_to(decay, (self.v_heads, self.dk)), gate

    def erase_and_write(self, x, k, v):
        group = self.v_heads // self.heads
        if self.kind == "linear":
            return np.zeros_like(k), v
        b = sigmoid(self.maps("b", x))
        if self.kind == "gdn2":
            b = np.repeat(b.reshape(self.heads, self.dk), group, axis=0)
            return b * k, sigmoid(self.maps("w", x)).reshape(v.shape) * v
        return b[:, None] * k, b[:, None] * v

    def step(self, x, raw, token):
        group = self.v_heads // self.heads
        q, k = [np.repeat(self.unit(silu(self.maps(name, x)).reshape(self.heads, self.dk)), group,
                          axis=0) for name in ("q", "k")]
        v = silu(self.maps("v", x)).reshape(self.v_heads, self.dv)
        add = 0.0
        if self.inject:
            v, add = self.inject(v, token.residuals)
        decay, gate = self.gates(x, raw)
        erase, write = self.erase_and_write(x, k, v)
        self.state = decay[:, :, None] * self.state
        u = write - np.einsum("hkv,hk->hv", self.state, erase)
        self.state = self.state + k[:, :, None] * u[:, None, :]
        out = np.einsum("hkv,hk->hv", self.state, q) / np.sqrt(self.dk) + add
        token.values, token.residual = v, u
        token.residuals.append(u)
        return self.maps("o", self.out_norm(out, gate, sigmoid if self.kind == "kda" else silu))


class HiddenRoute:
    """What a layer adds to the residual stream after its MLP."""

    def __init__(self, config, tensors, hidden, values):
        self.signal, self.normalize = config["signal"], config.get("normalize", False)
        width = {"both": 2 * values, "self": hidden}.get(self.signal, values)
        rank = config.get("rank", 0)
        if rank:
            self.maps = [tensors("route_proj.0.weight", (rank, width)),
                         tensors("route_proj.1.weight", (hidden, rank))]
        else:
            self.maps = [tensors("route_proj.weight", (hidden, width))]
        if self.signal == "gated_value":
            self.gate = tensors("route_gate", (2,))

    def __call__(self, h, token):
        u, v = token.residual, token.values
        if self.signal == "gated_value":
            surprise = np.linalg.norm(u, axis=-1) / (np.linalg.norm(v, axis=-1) + 1e-6)
            v = v * sigmoid(self.gate[0] * surprise + self.gate[1])[:, None]
        x = {"error": u, "both": np.concatenate([u, v], axis=-1), "self": h}.get(self.signal, v)
        x = x.reshape(-1)
        if self.normalize:
            x = rms_unit(x, 1e-6)
        for matrix in self.maps:
            x = matrix @ x
        return x


class DepthQueries:
    """Attention residuals: one source for each half of a layer, and the embedding."""

    def __init__(self, config, body, hidden, layers):
        self.eps = config.get("eps", 1e-6)
        names = [f"layers.{layer}.{half}_res_proj.weight" for layer in range(layers)
                 for half in ("attn", "mlp")][1:] + ["res_proj.weight"]
        self.queries = [None] + [body(name, (hidden,), spread=0.5) for name in names]

    def __call__(self, sources):
        if len(sources) == 1:
            return sources[0]
        stacked = np.array(sources)
        logits = rms_unit(stacked, self.eps) @ self.queries[len(sources) - 1]
        return softmax(logits) @ stacked


class WeirModel:
    def __init__(self, config, store, mlp):
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.eps, body = config.get("norm_eps", 1e-5), Under(store, "model.")
        tied = config.get("tie_word_embeddings", False)
        self.embeddings = body("embeddings.weight", (vocab, hidden),
                               spread=1.0 if tied else hidden ** 0.5)
        self.layers, first = [], True
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        for layer, kind in enumerate(config["layer_types"]):
            inside = Under(body, f"layers.{layer}.")
            tensors, route = Under(inside, "attn."), None
            if kind == "softmax":
                mixer = Softmax(config, tensors)
            else:
                mixer = Recurrent(config, tensors, kind, first)
                first = False
                if config.get("route"):
                    route = HiddenRoute(config["route"], inside, hidden, values)
            norms = [inside(name + "_norm.weight", (hidden,), center=1.0, spread=0.3)
                     for name in ("attn", "mlp")]
            self.layers.append((norms, mixer, mlp(config, Under(inside, "mlp.")), route))
        self.depth = None
        if config.get("attention_residuals") is not None:
            self.depth = DepthQueries(config["attention_residuals"], body, hidden, len(self.layers))
        self.norm = body("norm.weight", (hidden,), center=1.0, spread=0.3)
        self.head = self.embeddings if tied else store("lm_head.weight", (vocab, hidden))

    def step(self, number):
        sources, token = [self.embeddings[number]], Token()

        def read():
            return self.depth(sources) if self.depth else sum(sources)

        for norms, mixer, mlp, route in self.layers:
            raw = read()
            sources.append(mixer.step(rms(raw, norms[0], self.eps), raw, token))
            raw = read()
            sources.append(mlp.step(rms(raw, norms[1], self.eps)))
            if route:
                sources[-1] = sources[-1] + route(read(), token)
        return self.head @ rms(read(), self.norm, self.eps)
