"""The random checkpoints: each a small model of one type with options that trained ones lack."""

import dataclasses
import math


@dataclasses.dataclass
class Case:
    type: str
    architecture: str
    keys: dict
    extra: dict = dataclasses.field(default_factory=dict)    # optional tensors: name -> shape
    renamed: dict = dataclasses.field(default_factory=dict)  # parts of names as the file has them

    def config(self):
        common = {"architectures": [self.architecture], "model_type": self.type, "hidden_size": 32,
                  "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False,
                  "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
        if self.type == "weir":
            common["intermediate_size"] = 16
        elif self.type != "mamba2":
            common |= {"intermediate_size": 16, "hidden_act": "swish", "norm_eps": 1e-2}
        return common | self.keys


def retnet(**keys):
    return Case("retnet", "RetNetForCausalLM", keys)


def hgrn2(**keys):
    return Case("hgrn2", "HGRN2ForCausalLM", keys)


def gsa(**keys):
    return Case("gsa", "GSAForCausalLM", keys)


def gla(**keys):
    return Case("gla", "GLAForCausalLM", keys)


def linear_attn(**keys):
    return Case("linear_attn", "LinearAttentionForCausalLM", keys)


def mamba2(**keys):
    return Case("mamba2", "Mamba2ForCausalLM", keys)


def gated_deltanet(**keys):
    return Case("gated_deltanet", "GatedDeltaNetForCausalLM", keys)


def delta_net(**keys):
    return Case("delta_net", "DeltaNetForCausalLM", keys)


def comba(**keys):
    return Case("comba", "CombaForCausalLM", keys)


def delta_product(**keys):
    return Case("gated_deltaproduct", "GatedDeltaProductForCausalLM", keys)


def rwkv7(**keys):
    ranks = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 4,
             "v_low_rank_dim": 2, "hidden_act": "sqrelu"}
    return Case("rwkv7", "RWKV7ForCausalLM", ranks | keys)


def kda(**keys):
    return Case("kda", "KDAForCausalLM", keys)


def gdn2(**keys):
    return Case("gdn2", "GDN2ForCausalLM", keys)


def swila(**keys):
    inner = {"conv_size": 3, "router_low_rank_dim": 5, "beta_low_rank_dim": 3,
             "gate_low_rank_dim": 7, "attn": None}
    return Case("swila", "SwiLAForCausalLM", inner | keys)


def transformer(**keys):
    return Case("transformer", "TransformerForCausalLM", keys)


def fox(**keys):
    return Case("forgetting_transformer", "ForgettingTransformerForCausalLM", keys)


def mom(**keys):
    return Case("mom", "MomForCausalLM", {"num_heads": 2, "head_dim": 8, "use_short_conv": True,
                                          "tie_word_embeddings": True} | keys)


def weir(layer_types, dim=8, **keys):
    sizes = {"layer_types": layer_types, "num_hidden_layers": len(layer_types), "num_heads": 4,
             "num_kv_heads": 2, "head_dim": 6, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "linear_key_head_dim": dim,
             "linear_value_head_dim": dim - 2, "tie_word_embeddings": True, "norm_eps": 1e-3}
    return Case("weir", "WeirForCausalLM", sizes | keys)


def stored_as(case, usual, found):
    """Of two names for one tensor, a file may keep either."""
    case.renamed[usual] = found
    return case


def with_conv_bias(case, layers, channels):
    """Short convolutions with a bias: no configuration names it, the tensors alone say so."""
    for layer in range(layers):
        for name, count in channels.items():
            case.extra[f"model.layers.{layer}.attn.{name}_conv1d.bias"] = (count,)
    return case


def with_one_mix_table(case):
    """Old RWKV-7 files keep the six mixes of a layer in one tensor."""
    for layer in range(2):
        case.extra[f"model.layers.{layer}.attn.x_x"] = (6, 32)
    return case


CASES = {
    "retnet": retnet(num_heads=4, expand_v=1.5, tie_word_embeddings=True),
    "retnet-groups": retnet(num_heads=4, num_kv_heads=2, expand_k=0.5, expand_v=2.0,
                            feature_map="silu", use_output_gate=False),
    "retnet-unfused": retnet(num_heads=2, num_kv_heads=1, expand_v=1.0, feature_map="sqrelu",
                             fuse_norm=False, tie_word_embeddings=True),
    "hgrn2": hgrn2(expand_ratio=8, num_hidden_layers=3),
    "hgrn2-conv": hgrn2(expand_ratio=16, use_short_conv=True, conv_size=3),
    "hgrn2-unbounded": hgrn2(expand_ratio=None, num_heads=2, use_lower_bound=False,
                             num_hidden_layers=1, tie_word_embeddings=True),
    "gsa": gsa(num_heads=4, num_kv_heads=2, num_slots=12, expand_v=0.5),
    "gsa-conv-t2r": gsa(num_heads=4, num_kv_heads=1, num_slots=5, use_short_conv=True,
                        feature_map="t2r", gate_logit_normalizer=3),
    "gsa-relu": gsa(num_heads=2, num_slots=None, exapnd_k=0.5, exapnd_v=1.0, feature_map="relu",
                    tie_word_embeddings=True),
    "gla-groups-conv": with_conv_bias(
        gla(num_heads=4, num_kv_heads=2, use_short_conv=True, clamp_min=-0.4), 2,
        {"q": 16, "k": 8, "v": 16}),
    "gla-feature": gla(num_heads=2, num_kv_heads=1, expand_k=1.0, expand_v=2.0, feature_map="gelu",
                       use_output_gate=False),
    "gla-unfused": gla(num_heads=2, feature_map="logsigmoid", clamp_min=-0.1, fuse_norm=False,
                       num_hidden_layers=1, tie_word_embeddings=True),
    "gla-hybrid": gla(num_heads=2, feature_map="sigmoid", num_hidden_layers=3,
                      tie_word_embeddings=True,
                      attn=[{"layers": [1], "num_heads": 4, "num_kv_heads": 2,
                             "qkv_bias": True, "window_size": 5},
                            {"layers": [2], "num_heads": 2, "rope_theta": 500.0}]),
    "linear-hedgehog": linear_attn(num_heads=4, num_kv_heads=2, expand_v=0.5,
                                   feature_map="hedgehog", num_hidden_layers=1),
    "linear-dpfp": linear_attn(num_heads=4, expand_k=0.5, feature_map="dpfp",
                               norm_feature_map=True),
    "linear-elu": linear_attn(num_heads=2, num_kv_heads=1, expand_k=0.5, feature_map="elu",
                              norm_q=True, norm_k=True, norm_feature_map=True),
    "linear-t2r": linear_attn(num_heads=4, feature_map="t2r", tie_feature_map_qk=True, norm_k=True,
                              num_hidden_layers=1),
    "linear-product": stored_as(
        linear_attn(num_heads=2, num_kv_heads=1, expand_v=2.0, norm_q=True,
                    tie_feature_map_qk=True, num_hidden_layers=1),
        "feature_map_q.", "feature_map_k."),
    "linear-identity": linear_attn(num_heads=4, num_kv_heads=2, feature_map="identity", norm_q=True,
                                   norm_k=True, norm_feature_map=True, num_hidden_layers=1),
    "linear-relu": linear_attn(num_heads=4, expand_v=0.5, feature_map="relu", norm_feature_map=True,
                               num_hidden_layers=1),
    "mamba2-groups": mamba2(head_dim=8, state_size=12, n_groups=2, D_has_hdim=True,
                            norm_before_gate=True, use_bias=True, norm_eps=1e-3,
                            dt_limit=[0.05, 0.6], tie_word_embeddings=True),
    "mamba2-plain": mamba2(head_dim=16, state_size=5, rmsnorm=False, use_conv_bias=False,
                           norm_eps=1e-3, dt_limit=[0.0, math.inf], conv_kernel=3,
                           num_hidden_layers=1),
    "mamba2-transformers": mamba2(num_heads=8, head_dim=6, expand=1.5, state_size=10, n_groups=4,
                                  layer_norm_epsilon=1e-3, time_step_limit=[0.2, 0.9],
                                  intermediate_size=24, rms_norm=True, tie_word_embeddings=True),
    "gdn-groups": gated_deltanet(num_heads=2, num_v_heads=4, head_dim=12, expand_v=0.5,
                                 allow_neg_eigval=True, tie_word_embeddings=True),
    "gdn-plain": gated_deltanet(num_heads=2, head_dim=18, expand_v=1.5, use_gate=False,
                                use_short_conv=False, tie_word_embeddings=True),
    "gdn-hybrid": gated_deltanet(num_heads=1, num_v_heads=3, head_dim=8, expand_v=1.0, conv_size=2,
                                 num_hidden_layers=3, tie_word_embeddings=True,
                                 attn={"layers": [1], "num_heads": 4, "num_kv_heads": 1,
                                       "qkv_bias": True, "window_size": 7,
                                       "rope_theta": 1000.0}),
    "delta-gate": delta_net(num_heads=2, expand_k=0.75, use_gate=True, allow_neg_eigval=True,
                            qk_activation="relu"),
    "delta-sum": delta_net(num_heads=2, expand_v=1.5, qk_norm="sum", qk_activation="elu",
                           tie_word_embeddings=True),
    "delta-plain": delta_net(num_heads=4, expand_v=0.5, use_beta=False, use_short_conv=False,
                             qk_activation="identity", num_hidden_layers=1),
    "delta-silu": delta_net(num_heads=2, expand_k=0.75, use_beta=False, allow_neg_eigval=True,
                            use_short_conv=False, num_hidden_layers=1),
    "comba": comba(num_heads=2, head_dim=12, expand_v=1.5, tie_word_embeddings=True),
    "comba-plain": comba(num_heads=3, head_dim=9, expand_v=1.0, use_output_gate=False,
                         use_short_conv=False, num_hidden_layers=1),
    "comba-hybrid": with_conv_bias(
        comba(num_heads=2, head_dim=8, expand_v=2.0, conv_size=3, use_gate=False,
              num_hidden_layers=3, tie_word_embeddings=True,
              attn={"layers": [2], "num_heads": 4, "window_size": 9}), 2,
        {"q": 16, "k": 16, "v": 32}),
    "product": delta_product(num_heads=2, head_dim=12, expand_v=1.5, num_householder=2,
                             use_forget_gate=True, allow_neg_eigval=True,
                             tie_word_embeddings=True),
    "product-plain": delta_product(num_heads=3, head_dim=10, expand_v=1.0, num_householder=3,
                                   use_output_gate=False, use_short_conv=False,
                                   num_hidden_layers=1),
    "product-hybrid": with_conv_bias(
        delta_product(num_heads=2, head_dim=7, expand_v=2.0, num_householder=2, conv_size=3,
                      num_hidden_layers=3, tie_word_embeddings=True,
                      attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2}), 1,
        {"q": 14, "k": 28, "v": 56}),
    "product-one": delta_product(num_heads=2, head_dim=9, expand_v=1.0, use_output_gate=False,
                                 allow_neg_eigval=True, num_hidden_layers=1),
    "product-one-decay": delta_product(num_heads=2, head_dim=10, expand_v=2.0, num_householder=1,
                                       use_forget_gate=True, tie_word_embeddings=True),
    "rwkv7": rwkv7(head_dim=8, num_heads=4, value_dim=[48, 48, 48], num_hidden_layers=3,
                   fuse_norm=False, tie_word_embeddings=True),
    "rwkv7-plain": rwkv7(head_dim=None, num_heads=2, norm_first=False, norm_bias=False,
                         tie_word_embeddings=True),
    "rwkv7-old": with_one_mix_table(rwkv7(head_dim=16, value_dim=32, tie_word_embeddings=True)),
    "kda-groups": kda(num_heads=2, num_v_heads=4, head_dim=8, expand_v=1.5, allow_neg_eigval=True,
                      tie_word_embeddings=True),
    "kda-bounded": kda(num_heads=2, head_dim=20, expand_v=0.5, safe_gate=True, lower_bound=-3.0,
                       use_short_conv=False),
    "kda-bounded-groups": kda(num_heads=1, num_v_heads=3, head_dim=8, lower_bound=-5,
                              tie_word_embeddings=True),
    "gdn2-groups": gdn2(num_heads=2, num_v_heads=4, head_dim=8, expand_v=1.5, allow_neg_eigval=True,
                        tie_word_embeddings=True),
    "gdn2-plain": gdn2(num_heads=1, num_v_heads=2, head_dim=10, expand_v=1.5, use_short_conv=False,
                       tie_word_embeddings=True),
    "swila": swila(num_heads=2, num_mixtures=3, head_dim=6, temporal=True, gated=True),
    "swila-one": swila(num_heads=3, num_mixtures=1, head_dim=10, temporal=False, gated=False,
                       num_hidden_layers=1),
    "transformer-window": transformer(num_heads=4, num_kv_heads=2, qk_norm=True, window_size=6,
                                      qkv_bias=True, rope_theta=300.0, num_hidden_layers=3),
    "fox-groups": fox(num_heads=4, num_kv_heads=2, qk_norm=True, use_output_gate=True,
                      qkv_bias=True, num_hidden_layers=3, tie_word_embeddings=True),
    "fox-plain": fox(num_heads=2),
    "fox-one-kv-head": fox(num_heads=32, num_kv_heads=1, qk_norm=True, attnres_block_size=1,
                           tie_word_embeddings=True),
    # Heads that CUDA's fast kernels of attention take.
    "transformer-64": transformer(hidden_size=128, num_heads=2, num_kv_heads=1, qk_norm=True,
                                  num_hidden_layers=1, tie_word_embeddings=True),
    "transformer-64-window": transformer(hidden_size=64, num_heads=1, window_size=6,
                                         qkv_bias=True, tie_word_embeddings=True),
    "fox-64": fox(hidden_size=128, num_heads=2, use_output_gate=True, num_hidden_layers=1,
                  tie_word_embeddings=True),
    "mom": mom(expand_v=1.5),
    "mom-unshared": mom(shared_mem=False, num_memories=5, topk=3, use_output_gate=False,
                        conv_size=3),
    "mom-single": mom(single_kv_proj=True, num_memories=3, topk=1),
    "mom-single-unshared": with_conv_bias(
        mom(single_kv_proj=True, shared_mem=False, expand_v=0.5, num_memories=6, topk=2), 2,
        {"q": 16, "k": 16, "v": 8}),
    "mom-all": mom(num_memories=2, topk=2, num_hidden_layers=1, attnres_block_size=2),
    "depth-gdn": gated_deltanet(num_heads=2, head_dim=8, expand_v=1.0, attnres_block_size=1,
                                num_hidden_layers=2, tie_word_embeddings=True,
                                attn={"layers": [1], "num_heads": 2, "window_size": 9}),
    "depth-gla-pairs": gla(num_heads=2, attnres_block_size=2, num_hidden_layers=3,
                           tie_word_embeddings=True),
    "depth-transformer-blocks": transformer(num_heads=2, num_kv_heads=1, attnres_block_size=4,
                                            num_hidden_layers=5, tie_word_embeddings=True),
    "transformer-norm": transformer(num_heads=2, num_kv_heads=1, qk_norm=True,
                                    tie_word_embeddings=True),
    "weir-kinds": weir(["linear", "kda", "softmax", "gdn2", "delta", "gdn"], rope_theta=100.0,
                       attention_output_gate=True, linear_qk_norm="l2_max",
                       linear_conv_kernel_dim=3),
    "weir-low-rank": weir(["gdn2", "softmax", "gdn2"], gdn2_low_rank=True,
                          attention_residuals={"eps": 1e-4}),
    "weir-clvr": weir(["gdn", "softmax", "delta"], route={"signal": "value"},
                      tie_word_embeddings=False, attention_output_gate=True),
    "weir-cler-h": weir(["delta", "gdn"], route={"signal": "error", "rank": 3, "normalize": True}),
    "weir-cler-g": weir(["gdn", "delta"], route={"signal": "gated_value"},
                        attention_residuals={}),
    "weir-cler-rv": weir(["gdn", "softmax"], route={"signal": "both", "normalize": True, "rank": 5}),
    "weir-self": weir(["softmax", "gdn"], route={"signal": "self"}),
    "weir-cler-both": weir(["gdn", "delta", "softmax", "gdn"],
                           cler={"gamma": "channel", "normalize": True, "site": "both",
                                 "eps": 1e-3}),
    "weir-cler-softmax": weir(["gdn", "softmax", "delta", "gdn"],
                              cler={"mode": "dense_softmax", "dynamic": True, "eps": 1e-3}),
    "weir-cler-mean": weir(["gdn", "gdn", "gdn"], attention_residuals={"eps": 1e-3},
                           cler={"mode": "dense_mean", "site": "output", "gamma": "head"}),
    "weir-cler-attnres": weir(["delta", "softmax", "delta", "delta"],
                              cler={"mode": "attnres", "eps": 1e-3}),
    "weir-cler-attnres-dynamic": weir(["gdn", "gdn", "gdn"],
                                      cler={"mode": "attnres", "dynamic": True},
                                      attention_residuals={"eps": 1e-3}),
}
