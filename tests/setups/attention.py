"""Attention: what its kernels sum over, and its parameters that sum over nothing."""

from .kit import F, H, I, O, Setup, V


def around(extra):
    """A transformer's other parameters around those of one attention layer."""

    def tree(n, **sizes):
        return (
            {"embed/kernel": I(32, n), "embed/bias": V(n)}
            | extra(n, **sizes)
            | {
                "norm/scale": V(n),
                "mlp/wi/kernel": H(n, 4 * n),
                "mlp/wo/kernel": H(4 * n, n),
                "head/kernel": O(n, 10),
                "head/bias": F(10),
            }
        )

    return tree


def heads_grow(n):
    heads = n // 16
    tree = {f"attn/{k}/kernel": H(n, heads, 16) for k in ("query", "key", "value")}
    tree |= {f"attn/{k}/bias": V(heads, 16) for k in ("query", "key", "value")}
    return tree | {"attn/out/kernel": H(heads, 16, n), "attn/out/bias": V(n)}


def head_dim_grows(n):
    tree = {f"attn/{k}/kernel": H(n, 4, n // 4) for k in ("query", "key", "value")}
    tree |= {f"attn/{k}/bias": V(4, n // 4) for k in ("query", "key", "value")}
    return tree | {"attn/out/kernel": H(4, n // 4, n), "attn/out/bias": V(n)}


def both_grow(n):
    """(4 heads of 16) to (8 heads of 32)."""
    heads, dim = (4, 16) if n == 64 else (8, 32)
    tree = {f"attn/{k}/kernel": H(n, heads, dim) for k in ("query", "key", "value")}
    tree |= {f"attn/{k}/bias": V(heads, dim) for k in ("query", "key", "value")}
    return tree | {"attn/out/kernel": H(heads, dim, n), "attn/out/bias": V(n)}


def grouped(kv_heads, bias=True):
    """Queries of n // 16 heads; keys and values of a fixed number of heads of 16.

    A key sums over n and has a fixed number of outputs: like a readout.
    """

    def tree(n):
        heads = n // 16
        out = {
            "attn/query/kernel": H(n, heads, 16),
            "attn/out/kernel": H(heads, 16, n),
        }
        for name in ("key", "value"):
            out[f"attn/{name}/kernel"] = O(n, kv_heads, 16)
            if bias:
                out[f"attn/{name}/bias"] = F(kv_heads, 16)
        return out

    return tree


def grouped_growing(n):
    heads, groups = n // 16, n // 32
    return {
        "attn/query/kernel": H(n, heads, 16),
        "attn/key/kernel": H(n, groups, 16),
        "attn/value/kernel": H(n, groups, 16),
        "attn/out/kernel": H(heads, 16, n),
    }


def one_wide_head(n):
    """MQA whose one head of keys widens with the model."""
    return {
        "attn/query/kernel": H(n, 4, n // 4),
        "attn/key/kernel": H(n, 1, n // 4),
        "attn/value/kernel": H(n, 1, n // 4),
        "attn/out/kernel": H(4, n // 4, n),
    }


def gemma_heads(n):
    """Einsum "BTD,NDH->BTNH": q (heads, n, 16) sums over axis 1 alone."""
    heads = n // 16
    return {
        "attn/q_einsum/w": H(heads, n, 16),
        "attn/kv_einsum/w": H(2, heads, n, 16),
        "attn/attn_vec_einsum/w": H(heads, 16, n),
        "gate/gating_einsum": H(2, n, 4 * n),
        "gate/linear": H(4 * n, n),
    }


def gemma_dim(n):
    """Heads stay, the head dimension grows: fan-in grows by n's ratio either way."""
    dim = n // 4
    return {
        "attn/q_einsum/w": H(4, n, dim),
        "attn/kv_einsum/w": H(2, 1, n, dim),
        "attn/attn_vec_einsum/w": H(4, dim, n),
        "gate/gating_einsum": H(2, n, 4 * n),
        "gate/linear": H(4 * n, n),
    }


EINSUM = {r"/q_einsum/w$": ((1,), (0, 2)), r"/kv_einsum/w$": ((2,), (1, 3))}


def qkv_heads(n):
    """Gemma's qkv_einsum (3, heads, n, 16)."""
    heads = n // 16
    return {
        "attn/qkv_einsum/w": H(3, heads, n, 16),
        "attn/attn_vec_einsum/w": H(heads, 16, n),
    }


def mla_fixed(n):
    """DeepSeek's latent attention of fixed ranks: down reads out, up is an input."""
    heads = n // 16
    return {
        "attn/wq_a/kernel": O(n, 24),
        "attn/q_norm/scale": F(24),
        "attn/wq_b/kernel": I(24, heads, 24),
        "attn/wkv_a/kernel": O(n, 32 + 8),
        "attn/kv_norm/scale": F(32),
        "attn/wkv_b/kernel": I(32, heads, 32),
        "attn/out/kernel": H(heads, 16, n),
    }


def mla_growing(n):
    """Ranks grow with the model; the rotary part of the keys (8) is projected apart."""
    heads = n // 16
    return {
        "attn/wq_a/kernel": H(n, n // 2),
        "attn/q_norm/scale": V(n // 2),
        "attn/wq_b/kernel": H(n // 2, heads, 24),
        "attn/wkv_a/kernel": H(n, n // 4),
        "attn/kv_norm/scale": V(n // 4),
        "attn/wkv_b/kernel": H(n // 4, heads, 32),
        "attn/wk_rope/kernel": O(n, 8),
        "attn/out/kernel": H(heads, 16, n),
    }


def plus(**extra):
    """Attention with growing heads, and these parameters."""

    def tree(n):
        out = heads_grow(n)
        for path, leaf in extra.items():
            out[f"attn/{path}"] = leaf(n)
        return out

    return around(tree)


def fused(n):
    return {
        "attn/qkv/kernel": H(n, 3 * n),
        "attn/qkv/bias": V(3 * n),
        "attn/proj/kernel": H(n, n),
        "attn/proj/bias": V(n),
    }


def qkv_general(n):
    heads = n // 16
    return {
        "attn/qkv/kernel": H(n, 3, heads, 16),
        "attn/qkv/bias": V(3, heads, 16),
        "attn/out/kernel": H(heads, 16, n),
        "attn/out/bias": V(n),
    }


def qkv_stack(n):
    """An einsum over (3, n, n): the three are copies, each sums over n."""
    return {"attn/qkv": H(3, n, n), "attn/qkv_bias": V(3, n), "attn/out": H(n, n)}


def map_head(n):
    """big_vision's MAPHead: a learnt probe attends to the tokens."""
    heads = n // 16
    tree = {"MAPHead_0/probe": V(1, 1, n)}
    for k in ("query", "key", "value"):
        tree[f"MAPHead_0/MultiHeadDotProductAttention_0/{k}/kernel"] = H(n, heads, 16)
    tree["MAPHead_0/MultiHeadDotProductAttention_0/out/kernel"] = H(heads, 16, n)
    return tree | {"MAPHead_0/LayerNorm_0/scale": V(n)}


def evoformer(pair, heads):
    """The pair representation biases the logits of each head."""

    def tree(n):
        z = n // 2 if pair == "grows" else 32
        h = n // 16 if heads == "grows" else 4
        kind = {
            ("grows", "grows"): H,
            ("grows", "fixed"): O,
            ("fixed", "grows"): I,
        }[pair, heads]
        return {
            "pair_in/kernel": I(20, z) if pair == "grows" else F(20, z),
            "attn/pair_bias/kernel": kind(z, h),
            "attn/q/kernel": H(n, n),
            "attn/k/kernel": H(n, n),
            "attn/v/kernel": H(n, n),
            "attn/out/kernel": H(n, n),
        }

    return around(tree)


# Of an unbiased (32, heads, 32), shapes do not say whether 32 goes in or comes out.
MLA = {
    "readout": r"^head/kernel|wq_a|wkv_a",
    "axes": {r"attn/w(q|kv)_b/kernel$": ((0,), (1, 2))},
}
KEY_VALUE = {"readout": r"^head/kernel|/(key|value)/kernel"}


SETUPS = [
    Setup("attn_heads_grow", "Flax MultiHeadDotProductAttention", around(heads_grow)),
    Setup(
        "attn_dim_grows", "Flax MultiHeadDotProductAttention", around(head_dim_grows)
    ),
    Setup("attn_both_grow", "Flax MultiHeadDotProductAttention", around(both_grow)),
    Setup("attn_mqa_named", "Flax, one head of keys", around(grouped(1)), KEY_VALUE),
    Setup(
        "attn_mqa_not_named",
        "Flax, one head of keys",
        around(grouped(1)),
        asks="attn/(key|value)/kernel",
        remedies=(KEY_VALUE,),
    ),
    Setup(
        "attn_mqa_head_named_only",
        "Flax, one head of keys: the pattern forgets the keys",
        around(grouped(1)),
        {"readout": "^head/kernel"},
        asks="attn/(key|value)/kernel",
        remedies=(KEY_VALUE,),
    ),
    Setup(
        "attn_mqa_no_bias",
        "PaLM-like, one head of keys, unbiased",
        around(grouped(1, bias=False)),
        KEY_VALUE,
    ),
    Setup(
        "attn_gqa_fixed_groups",
        "Llama in Flax, two heads of keys",
        around(grouped(2)),
        KEY_VALUE,
    ),
    Setup(
        "attn_gqa_fixed_groups_not_named",
        "Llama in Flax, two heads of keys",
        around(grouped(2, bias=False)),
        asks="attn/(key|value)/kernel",
        remedies=(KEY_VALUE,),
    ),
    Setup("attn_gqa_growing_groups", "Llama in Flax", around(grouped_growing)),
    Setup("attn_mqa_head_widens", "Flax, one head that widens", around(one_wide_head)),
    Setup(
        "gemma_heads_named",
        "google-deepmind/gemma modules: heads in front",
        around(gemma_heads),
        {"axes": EINSUM},
    ),
    Setup(
        "gemma_heads_not_named",
        "google-deepmind/gemma: (heads, n, 16) reads as a kernel of fan-in heads·n",
        around(gemma_heads),
        asks=r"(q|kv)_einsum/w",
        either=True,
        remedies=({"axes": EINSUM},),
    ),
    Setup("gemma_dim_grows", "google-deepmind/gemma", around(gemma_dim)),
    Setup(
        "gemma_qkv_heads_named",
        "google-deepmind/gemma",
        around(qkv_heads),
        {"axes": {r"qkv_einsum/w$": ((2,), (1, 3))}},
    ),
    Setup(
        "gemma_qkv_heads_not_named",
        "google-deepmind/gemma",
        around(qkv_heads),
        asks="qkv_einsum/w",
        either=True,
        remedies=({"axes": {r"qkv_einsum/w$": ((2,), (1, 3))}},),
    ),
    Setup(
        "mla_fixed_ranks",
        "DeepSeek-V2 in MaxText",
        around(mla_fixed),
        MLA,
    ),
    Setup(
        "mla_fixed_ranks_not_named",
        "DeepSeek-V2 in MaxText",
        around(mla_fixed),
        asks="w(q|kv)_[ab]",
        remedies=(MLA,),
    ),
    Setup(
        "mla_growing_ranks",
        "DeepSeek-V2 in MaxText",
        around(mla_growing),
        {"readout": r"^head/kernel|wk_rope"},
        asks="w(q|kv)_b/kernel",
        either=True,
        remedies=({"axes": {r"attn/w(q|kv)_b/kernel$": ((0,), (1, 2))}},),
    ),
    Setup("attn_fused_qkv", "timm-like in Flax", around(fused)),
    Setup("attn_qkv_general", "Flax DenseGeneral (3, heads, dim)", around(qkv_general)),
    Setup(
        "attn_qkv_stack",
        "an einsum over (3, n, n)",
        around(qkv_stack),
        asks="attn/qkv",
        either=True,
        remedies=({"axes": {"attn/qkv$": ((1,), (2,))}},),
    ),
    Setup("attn_map_head", "big_vision MAPHead", around(map_head)),
    Setup(
        "t5_bias_table_hf",
        "Hugging Face FlaxT5: (buckets, heads) is a lookup with an output per head",
        plus(relative_attention_bias=lambda n: I(32, n // 16)),
    ),
    Setup(
        "swin_bias_table",
        "Swin: (positions, heads)",
        plus(relative_position_bias_table=lambda n: I(169, n // 16)),
    ),
    Setup(
        "transformer_xl_biases",
        "Transformer-XL: r_w_bias (heads, 16) is added to queries",
        plus(r_w_bias=lambda n: V(n // 16, 16), r_r_bias=lambda n: V(n // 16, 16)),
        asks="r_[wr]_bias",
        either=True,
        remedies=({"axes": {r"r_[wr]_bias$": ((), (0, 1))}},),
    ),
    Setup(
        "conformer_pos_biases",
        "Conformer: u and v (heads, 16) are added to queries, no name says it",
        plus(u=lambda n: V(n // 16, 16), v=lambda n: V(n // 16, 16)),
        asks="attn/[uv]",
        remedies=({"axes": {r"attn/[uv]$": ((), (0, 1))}},),
    ),
    Setup(
        "transformer_xl_biases_named",
        "Transformer-XL",
        plus(r_w_bias=lambda n: V(n // 16, 16), r_r_bias=lambda n: V(n // 16, 16)),
        {"axes": {r"r_[wr]_bias$": ((), (0, 1))}},
    ),
    Setup(
        "alibi_learnt_slopes",
        "ALiBi, learnt: (heads,)",
        plus(slopes=lambda n: V(n // 16)),
    ),
    Setup(
        "alibi_learnt_slopes_broadcast",
        "lucidrains x-transformers: learned_logslopes (heads, 1, 1)",
        plus(learned_logslopes=lambda n: V(n // 16, 1, 1)),
        asks="learned_logslopes",
        either=True,
        remedies=({"axes": {"learned_logslopes": ((), (0,))}},),
    ),
    Setup(
        "swin_v2_logit_scale",
        "Swin v2: logit_scale (heads, 1, 1)",
        plus(logit_scale=lambda n: V(n // 16, 1, 1)),
        asks="logit_scale",
        either=True,
        remedies=({"axes": {"logit_scale": ((), (0,))}},),
    ),
    Setup(
        "qk_norm_shared",
        "ViT-22B: a scale of 16 for all heads",
        plus(q_norm=lambda n: F(16)),
    ),
    Setup(
        "qk_norm_per_head",
        "lucidrains: q_scale (heads, 1, 16)",
        plus(q_scale=lambda n: V(n // 16, 1, 16), k_scale=lambda n: V(n // 16, 1, 16)),
        asks="[qk]_scale",
        either=True,
        remedies=({"axes": {"[qk]_scale$": ((), (0,))}},),
    ),
    Setup(
        "talking_heads",
        "lucidrains: (heads, heads) mixes logits, both grow",
        plus(talking_heads=lambda n: H(n // 16, n // 16)),
    ),
    Setup(
        "memory_keys",
        "lucidrains x-transformers: mem_k (heads, 4, 16)",
        plus(mem_k=lambda n: V(n // 16, 4, 16), mem_v=lambda n: V(n // 16, 4, 16)),
        asks="mem_[kv]",
        either=True,
        remedies=({"axes": {"mem_[kv]$": ((), (0,))}},),
    ),
    Setup(
        "null_keys",
        "lucidrains imagen: null_kv (2, 16)",
        plus(null_kv=lambda n: F(2, 16)),
    ),
    Setup(
        "attention_sinks", "gpt-oss: sinks (heads,)", plus(sinks=lambda n: V(n // 16))
    ),
    Setup(
        "shaw_relative_keys",
        "Shaw et al.: (2k + 1, 16), the same for all heads",
        plus(relative_keys=lambda n: F(33, 16)),
    ),
    Setup(
        "nystrom_residual_conv",
        "Nyströmformer: a depthwise convolution (33, 1, 1, heads)",
        plus(res_conv=lambda n: I(33, 1, 1, n // 16)),
    ),
    Setup(
        "cross_attention_fixed_context",
        "Stable Diffusion in Flax: text of 768 channels",
        plus(
            to_k=lambda n: I(768, n), to_v=lambda n: I(768, n), to_out=lambda n: H(n, n)
        ),
    ),
    Setup(
        "evoformer_pair_bias_both",
        "AlphaFold in Haiku: pair_bias (c_z, heads)",
        evoformer("grows", "grows"),
    ),
    Setup(
        "evoformer_pair_bias_heads_fixed",
        "AlphaFold: pair_bias sums over c_z, 4 heads",
        evoformer("grows", "fixed"),
        {"readout": "^head/kernel|pair_bias"},
    ),
    Setup(
        "evoformer_pair_bias_heads_fixed_not_named",
        "AlphaFold: pair_bias sums over c_z, 4 heads",
        evoformer("grows", "fixed"),
        asks="pair_bias",
        remedies=({"readout": "^head/kernel|pair_bias"},),
    ),
    Setup("evoformer_pair_fixed", "AlphaFold: c_z stays", evoformer("fixed", "grows")),
    Setup(
        "gat_attention_vector",
        "PyG GAT: att (1, 4, dim) is summed with the features over dim",
        plus(att=lambda n: O(1, 4, n // 4)),
        {"axes": {"attn/att$": ((2,), ())}, "readout": r"head/kernel|attn/att$"},
    ),
    Setup(
        "bahdanau_vector",
        "additive attention: v (n,) is summed with tanh over n",
        plus(v=lambda n: O(n)),
        {"axes": {"attn/v$": ((0,), ())}, "readout": r"head/kernel|attn/v$"},
    ),
    Setup(
        "bahdanau_kernel",
        "additive attention: a kernel (n, 1)",
        plus(score=lambda n: O(n, 1)),
        asks="attn/score",
        remedies=({"readout": r"head/kernel|attn/score"},),
    ),
]
