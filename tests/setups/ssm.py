"""State-space and linear recurrent models: much in them sums over nothing."""

from .kit import F, H, I, O, Setup, V


def mamba(n, L=2, rank=8):
    """mamba_ssm in Flax's layout: inner width 2n, 16 states, a step of fixed rank."""
    d = 2 * n
    tree = {"embedding/embedding": I(1000, n)}
    for i in range(L):
        at = f"layers_{i}"
        tree |= {
            f"{at}/norm/scale": V(n),
            f"{at}/mixer/in_proj/kernel": H(n, 2 * d),
            f"{at}/mixer/conv1d/kernel": I(4, 1, d),
            f"{at}/mixer/conv1d/bias": V(d),
            # Sums over the channels and gives a fixed number: like a readout.
            f"{at}/mixer/x_proj/kernel": O(d, rank + 32),
            f"{at}/mixer/dt_proj/kernel": I(rank, d),
            f"{at}/mixer/dt_proj/bias": V(d),
            f"{at}/mixer/A_log": V(d, 16),  # every channel has its own 16 decays
            f"{at}/mixer/D": V(d),
            f"{at}/mixer/out_proj/kernel": H(d, n),
        }
    return tree | {"norm_f/scale": V(n), "lm_head/kernel": O(n, 1000)}


MAMBA = {"readout": "lm_head|x_proj", "axes": {"A_log$": ((), (0, 1))}}


def mamba_tied(n):
    return {path: leaf for path, leaf in mamba(n).items() if path != "lm_head/kernel"}


def mamba_torch(n, rank=8):
    """state-spaces/mamba: torch's layout (out, in), one flat dictionary."""
    d = 2 * n
    tree = {"backbone.embedding.weight": I(1000, n)}
    for i in range(2):
        at = f"backbone.layers.{i}"
        tree |= {
            f"{at}.norm.weight": V(n),
            f"{at}.mixer.in_proj.weight": H(2 * d, n),
            f"{at}.mixer.conv1d.weight": I(d, 1, 4),
            f"{at}.mixer.conv1d.bias": V(d),
            f"{at}.mixer.x_proj.weight": O(rank + 32, d),
            f"{at}.mixer.dt_proj.weight": I(d, rank),
            f"{at}.mixer.dt_proj.bias": V(d),
            f"{at}.mixer.A_log": V(d, 16),
            f"{at}.mixer.D": V(d),
            f"{at}.mixer.out_proj.weight": H(n, d),
        }
    return tree | {"backbone.norm_f.weight": V(n), "lm_head.weight": O(1000, n)}


MAMBA_TORCH = {
    "layout": "out_in",
    "embeddings": "embedding",
    "readout": "lm_head|x_proj",
    "axes": {"A_log$": ((), (0, 1))},
}


def mamba2(n):
    """Heads of 16; a decay and a step for each; projections kept apart."""
    d, heads = 2 * n, 2 * n // 16
    tree = {"embedding/embedding": I(1000, n)}
    tree |= {
        "mixer/in_proj_z/kernel": H(n, d),
        "mixer/in_proj_x/kernel": H(n, d),
        "mixer/in_proj_B/kernel": O(n, 16),
        "mixer/in_proj_C/kernel": O(n, 16),
        "mixer/in_proj_dt/kernel": H(n, heads),
        "mixer/conv_x/kernel": I(4, 1, d),
        "mixer/A_log": V(heads),
        "mixer/D": V(heads),
        "mixer/dt_bias": V(heads),
        "mixer/norm/scale": V(d),
        "mixer/out_proj/kernel": H(d, n),
    }
    return tree | {"norm_f/scale": V(n), "lm_head/kernel": O(n, 1000)}


def mamba2_fused(n):
    """One in_proj of 2d + 2·16 + heads outputs, which do not grow by one ratio."""
    d, heads = 2 * n, 2 * n // 16
    width = 2 * d + 32 + heads
    tree = {k: v for k, v in mamba2(n).items() if "in_proj" not in k}
    return tree | {"mixer/in_proj/kernel": H(n, width, out=1088 / 296)}


def s5(n, states="grow", bidirectional=False):
    """lindermanlab/S5: B (P, n, 2) sums over n, C (n, P, 2) over P."""
    p = n // 2 if states == "grow" else 32
    per_state = V if states == "grow" else F
    tree = {"encoder/encoder/kernel": I(3, n), "encoder/encoder/bias": V(n)}
    for i in range(2):
        at = f"encoder/layers_{i}"
        tree |= {
            f"{at}/seq/Lambda_re": per_state(p),
            f"{at}/seq/Lambda_im": per_state(p),
            f"{at}/seq/B": H(p, n, 2) if states == "grow" else O(p, n, 2),
            f"{at}/seq/C": H(n, p, 2) if states == "grow" else I(n, p, 2),
            f"{at}/seq/D": V(n),
            f"{at}/seq/log_step": per_state(p, 1),
            f"{at}/norm/scale": V(n),
            f"{at}/norm/bias": V(n),
            f"{at}/out2/kernel": H(n, n),
            f"{at}/out2/bias": V(n),
        }
        if bidirectional:
            tree |= {
                f"{at}/seq/C1": tree[f"{at}/seq/C"],
                f"{at}/seq/C2": tree[f"{at}/seq/C"],
            }
            del tree[f"{at}/seq/C"]
    return tree | {"decoder/kernel": O(n, 10), "decoder/bias": F(10)}


S5_GROW = {
    "axes": {
        r"seq/(B|C\d?)$": ((1,), (0, 2)),
        "log_step$": ((), (0, 1)),
    }
}
S5_FIXED = {
    "readout": r"decoder/kernel|seq/B$",
    "axes": {r"seq/B$": ((1,), (0, 2)), r"seq/C\d?$": ((1,), (0, 2))},
}


def s5_step_only(n):
    """A diagonal SSM whose only oddity is log_step (n, 1)."""
    return {
        "encoder/kernel": I(3, n),
        "ssm/log_step": V(n, 1),
        "ssm/D": V(n),
        "mix/kernel": H(n, n),
        "mix/bias": V(n),
        "decoder/kernel": O(n, 10),
        "decoder/bias": F(10),
    }


def s4(n):
    """The Annotated S4: one SSM of 64 states for each feature, stacked on axis 1."""
    tree = {"encoder/kernel": I(1, n), "encoder/bias": V(n)}
    for i in range(2):
        at = f"layers_{i}"
        tree |= {
            f"{at}/seq/Lambda_re": I(64, n),
            f"{at}/seq/Lambda_im": I(64, n),
            f"{at}/seq/P": I(64, n),
            f"{at}/seq/B": I(64, n),
            f"{at}/seq/D": V(1, n),
            f"{at}/seq/log_step": V(1, n),
            f"{at}/norm/scale": V(n),
            f"{at}/out/kernel": H(n, n),
            f"{at}/out/bias": V(n),
        }
    return tree | {"decoder/kernel": O(n, 10), "decoder/bias": F(10)}


S4 = {"axes": {r"seq/(B|P|Lambda_\w+)$": ((0,), (1,))}}


def s4_complex(n):
    """C as (64, n, 2), real and imaginary parts last: sums over 64 states."""
    return s4(n) | {f"layers_{i}/seq/C": I(64, n, 2) for i in range(2)}


def s4d_torch(n):
    """s4d.py: C (n, 32, 2), log_A_real and A_imag (n, 32), all of them per channel."""
    return {
        "encoder.weight": I(n, 3),
        "encoder.bias": V(n),
        "layers.0.kernel.C": V(n, 32, 2),
        "layers.0.kernel.log_dt": V(n),
        "layers.0.kernel.log_A_real": V(n, 32),
        "layers.0.kernel.A_imag": V(n, 32),
        "layers.0.D": V(n),
        "layers.0.output_linear.0.weight": H(2 * n, n, 1),
        "layers.0.output_linear.0.bias": V(2 * n),
        "decoder.weight": O(10, n),
        "decoder.bias": F(10),
    }


def lru(n, states="grow"):
    """Orvieto et al.: B (N, n), C (n, N) stand as (out, in)."""
    p = 2 * n if states == "grow" else 32
    per_state = V if states == "grow" else F
    tree = {"encoder/kernel": I(3, n), "encoder/bias": V(n)}
    tree |= {f"lru/{k}": per_state(p) for k in ("nu_log", "theta_log", "gamma_log")}
    for part in ("re", "im"):
        tree |= {
            f"lru/B_{part}": H(p, n) if states == "grow" else O(p, n),
            f"lru/C_{part}": H(n, p) if states == "grow" else I(n, p),
        }
    return tree | {"lru/D": V(n), "decoder/kernel": O(n, 10), "decoder/bias": F(10)}


LRU_FIXED = {
    "readout": "decoder/kernel|lru/B_",
    "axes": {"lru/[BC]_(re|im)$": ((1,), (0,))},
}


def rwkv4(n, L=2):
    """BlinkDL/RWKV-LM v4 in Flax's layout: decays for each channel."""
    tree = {"emb/embedding": I(1000, n), "ln0/scale": V(n), "ln0/bias": V(n)}
    for i in range(L):
        at = f"blocks/{i}"
        tree |= {
            f"{at}/ln1/scale": V(n),
            f"{at}/ln2/scale": V(n),
            f"{at}/att/time_decay": V(n),
            f"{at}/att/time_first": V(n),
            f"{at}/att/time_mix_k": V(1, 1, n),
            f"{at}/att/time_mix_v": V(1, 1, n),
            f"{at}/ffn/time_mix_k": V(1, 1, n),
            f"{at}/ffn/key/kernel": H(n, 4 * n),
            f"{at}/ffn/value/kernel": H(4 * n, n),
            f"{at}/ffn/receptance/kernel": H(n, n),
        }
        for name in ("key", "value", "receptance", "output"):
            tree[f"{at}/att/{name}/kernel"] = H(n, n)
    return tree | {"ln_out/scale": V(n), "head/kernel": O(n, 1000)}


def rwkv5(n, L=2):
    """v5: time_decay and time_faaaa (heads, 16)."""
    tree = rwkv4(n, L)
    for i in range(L):
        del tree[f"blocks/{i}/att/time_first"]
        tree[f"blocks/{i}/att/time_decay"] = V(n // 16, 16)
        tree[f"blocks/{i}/att/time_faaaa"] = V(n // 16, 16)
    return tree


RWKV5 = {"axes": {"time_(decay|faaaa)$": ((), (0, 1))}}


def rwkv5_stacked(n, L):
    """The same, stacked over the layers."""
    tree = {"emb/embedding": I(1000, n)}
    tree |= {
        "blocks/ln1/scale": V(L, n),
        "blocks/att/time_decay": V(L, n // 16, 16),
        "blocks/att/key/kernel": H(L, n, n),
        "blocks/att/output/kernel": H(L, n, n),
        "blocks/ffn/key/kernel": H(L, n, 4 * n),
        "blocks/ffn/value/kernel": H(L, 4 * n, n),
    }
    return tree | {"ln_out/scale": V(n), "head/kernel": O(n, 1000)}


def rwkv6_torch(n):
    """v6: time_maa_w1 is used as x @ w1, so it is (in, out) amid torch's (out, in)."""
    at = "blocks.0.att"
    return {
        "emb.weight": I(1000, n),
        "blocks.0.ln1.weight": V(n),
        "blocks.0.ln1.bias": V(n),
        f"{at}.time_maa_x": V(1, 1, n),
        f"{at}.time_maa_w1": O(n, 160),
        f"{at}.time_maa_w2": I(5, 32, n),
        f"{at}.time_decay": V(1, 1, n),
        f"{at}.time_decay_w1": O(n, 64),
        f"{at}.time_decay_w2": I(64, n),
        f"{at}.time_faaaa": V(n // 16, 16),
        f"{at}.receptance.weight": H(n, n),
        f"{at}.key.weight": H(n, n),
        f"{at}.value.weight": H(n, n),
        f"{at}.output.weight": H(n, n),
        f"{at}.ln_x.weight": V(n),
        f"{at}.ln_x.bias": V(n),
        "blocks.0.ffn.key.weight": H(4 * n, n),
        "blocks.0.ffn.value.weight": H(n, 4 * n),
        "ln_out.weight": V(n),
        "ln_out.bias": V(n),
        "head.weight": O(1000, n),
    }


RWKV6 = {
    "layout": "out_in",
    "embeddings": r"^emb\.",
    "readout": r"^head|_w1$",
    "axes": {
        r"time_(maa_x|decay)$": ((), (2,)),
        r"time_faaaa$": ((), (0, 1)),
        r"_w1$": ((0,), (1,)),
        r"time_maa_w2$": ((1,), (2,)),
        r"time_decay_w2$": ((0,), (1,)),
    },
}


def hyena(n):
    """Implicit filters: an MLP of fixed width whose last layer has a channel each."""
    return {
        "embed/embedding": I(1000, n),
        "hyena/in_proj/kernel": H(n, 3 * n),
        "hyena/in_proj/bias": V(3 * n),
        "hyena/short_filter/kernel": I(3, 1, 3 * n),
        "hyena/short_filter/bias": V(3 * n),
        "hyena/filter/mlp_0/kernel": F(33, 48),
        "hyena/filter/mlp_0/bias": F(48),
        "hyena/filter/mlp_1/kernel": F(48, 48),
        "hyena/filter/mlp_1/bias": F(48),
        "hyena/filter/out/kernel": I(48, n),
        "hyena/filter/freq": F(1, 48),
        "hyena/filter/deltas": V(1, 1, n),
        "hyena/filter/bias": V(n),
        "hyena/out_proj/kernel": H(n, n),
        "hyena/out_proj/bias": V(n),
        "lm_head/kernel": O(n, 1000),
    }


def griffin(n, heads="fixed"):
    """recurrentgemma: gates are block-diagonal, (heads, width, width)."""
    h = 4 if heads == "fixed" else n // 16
    w = n // h
    gate = H(h, w, w) if heads == "fixed" else I(h, w, w)
    return {
        "embedder/input_embedding": I(1000, n),
        "rg_lru/a_param": V(n),
        "rg_lru/input_gate/w": gate,
        "rg_lru/input_gate/b": V(h, w),
        "rg_lru/a_gate/w": gate,
        "rg_lru/a_gate/b": V(h, w),
        "conv_1d/w": V(4, n),  # depthwise: 4 taps for each channel
        "conv_1d/b": V(n),
        "linear_x/kernel": H(n, n),
        "linear_out/kernel": H(n, n),
        "lm_head/kernel": O(n, 1000),
    }


# Each output sums over the 16 inputs of its own block, however many blocks there are.
GRIFFIN = {"axes": {r"gate/w$": ((1,), (0, 2)), r"gate/b$": ((), (0, 1))}}


def deltanet(n):
    """A gate and a step for each of n/16 heads; short depthwise convolutions."""
    heads = n // 16
    tree = {"embed/embedding": I(1000, n)}
    for name in ("q", "k", "v"):
        tree |= {
            f"attn/{name}_proj/kernel": H(n, n),
            f"attn/{name}_conv/kernel": I(4, 1, n),
        }
    return tree | {
        "attn/b_proj/kernel": H(n, heads),
        "attn/a_proj/kernel": H(n, heads),
        "attn/A_log": V(heads),
        "attn/dt_bias": V(heads),
        "attn/o_norm/scale": F(16),
        "attn/o_proj/kernel": H(n, n),
        "lm_head/kernel": O(n, 1000),
    }


SETUPS = [
    Setup("mamba_named", "state-spaces/mamba in Flax", mamba, MAMBA),
    Setup(
        "mamba_not_named",
        "state-spaces/mamba in Flax: A_log and x_proj look like readouts",
        mamba,
        asks="A_log|x_proj",
        remedies=(MAMBA,),
    ),
    Setup(
        "mamba_forgets_a_log",
        "state-spaces/mamba in Flax",
        mamba,
        {"readout": "lm_head|x_proj"},
        asks="A_log",
        either=True,
        remedies=({"axes": {"A_log$": ((), (0, 1))}},),
    ),
    Setup(
        "mamba_deeper",
        "state-spaces/mamba in Flax",
        mamba,
        MAMBA | {"depth": (2, 8), "branch": r"^layers_\d+/"},
        grow={"L": (2, 8)},
    ),
    Setup(
        "mamba_tied_named",
        "state-spaces/mamba, tied",
        mamba_tied,
        {
            "tied": "^embedding/",
            "readout": "x_proj",
            "axes": {"A_log$": ((), (0, 1))},
        },
    ),
    Setup(
        "mamba_tied_not_named",
        "state-spaces/mamba, tied: A_log and x_proj are no readouts of the model",
        mamba_tied,
        asks="A_log|x_proj|embedding",
        remedies=(
            {
                "tied": "^embedding/",
                "readout": "x_proj",
                "axes": {"A_log$": ((), (0, 1))},
            },
        ),
    ),
    Setup(
        "mamba_tied_rest_named",
        "state-spaces/mamba, tied: nothing says where the logits come from",
        mamba_tied,
        {"axes": {"A_log$": ((), (0, 1))}},
        asks="x_proj|embedding",
        remedies=({"tied": "^embedding/", "readout": "x_proj"},),
    ),
    Setup(
        "mamba_torch_named",
        "state-spaces/mamba",
        mamba_torch,
        MAMBA_TORCH,
        style="flat",
    ),
    Setup(
        "mamba_torch_layout_only",
        "state-spaces/mamba: A_log under torch's layout reads as a kernel of 16 inputs,"
        " which is scaled alike",
        mamba_torch,
        {"layout": "out_in"},
        style="flat",
        asks=r"embedding|x_proj",
        remedies=(MAMBA_TORCH,),
    ),
    Setup(
        "mamba2_named",
        "Mamba-2 in Flax, projections apart",
        mamba2,
        {"readout": "lm_head|in_proj_[BC]"},
    ),
    Setup(
        "mamba2_not_named",
        "Mamba-2 in Flax, projections apart",
        mamba2,
        asks="in_proj_[BC]",
        remedies=({"readout": "lm_head|in_proj_[BC]"},),
    ),
    Setup(
        "mamba2_fused",
        "Mamba-2: parts of in_proj's outputs grow, and parts do not",
        mamba2_fused,
        asks="in_proj/kernel",
        remedies=({"fractional": True, "axes": {"in_proj/kernel$": ((0,), (1,))}},),
    ),
    Setup("s5_named", "lindermanlab/S5", s5, S5_GROW),
    Setup(
        "s5_not_named",
        "lindermanlab/S5: a last axis of 2 reads as an output",
        s5,
        asks=r"seq/(B|C)|log_step",
        remedies=(S5_GROW,),
    ),
    Setup(
        "s5_bidirectional",
        "lindermanlab/S5",
        lambda n: s5(n, bidirectional=True),
        S5_GROW,
    ),
    Setup("s5_fixed_states", "lindermanlab/S5", lambda n: s5(n, "fixed"), S5_FIXED),
    Setup(
        "s5_fixed_states_not_named",
        "lindermanlab/S5",
        lambda n: s5(n, "fixed"),
        asks="seq/[BC]",
        remedies=(S5_FIXED,),
    ),
    Setup(
        "ssm_log_step_named",
        "a diagonal SSM",
        s5_step_only,
        {"axes": {"log_step$": ((), (0, 1))}},
    ),
    Setup(
        "ssm_log_step_not_named",
        "a diagonal SSM: log_step (n, 1)",
        s5_step_only,
        asks="log_step",
        either=True,
        remedies=({"axes": {"log_step$": ((), (0, 1))}},),
    ),
    Setup(
        "ssm_log_step_readout_named",
        "a diagonal SSM: log_step (n, 1) is left to be asked about",
        s5_step_only,
        {"readout": "decoder"},
        asks="log_step",
        either=True,
        remedies=({"axes": {"log_step$": ((), (0, 1))}},),
    ),
    Setup("s4_annotated", "srush/annotated-s4", s4, S4),
    Setup(
        "s4_annotated_not_named",
        "srush/annotated-s4: B (64, n) sums over 64; the LRU's B sums over n",
        s4,
        asks="seq/",
        either=True,
        remedies=(S4,),
    ),
    Setup(
        "s4_annotated_complex",
        "srush/annotated-s4: C (64, n, 2)",
        s4_complex,
        S4,
        asks="seq/C",
        either=True,
        remedies=({"axes": S4["axes"] | {"seq/C$": ((0,), (1, 2))}},),
    ),
    Setup(
        "s4d_torch",
        "state-spaces/s4 s4d.py: parameters of a channel read as first layers",
        s4d_torch,
        {"layout": "out_in"},
        style="flat",
        asks=r"layers\.0\.kernel\.",
        either=True,
        remedies=({"axes": {r"kernel\.(C|log_A_real|A_imag)$": ((), (0,))}},),
    ),
    Setup("lru_growing", "LRU in Flax: both axes grow alike", lru),
    Setup("lru_fixed_states", "LRU in Flax", lambda n: lru(n, "fixed"), LRU_FIXED),
    Setup(
        "lru_fixed_states_not_named",
        "LRU in Flax: B and C stand as (out, in)",
        lambda n: lru(n, "fixed"),
        asks="lru/[BC]_",
        remedies=(LRU_FIXED,),
    ),
    Setup("rwkv4", "BlinkDL/RWKV-LM v4 in Flax", rwkv4),
    Setup(
        "rwkv4_deeper",
        "BlinkDL/RWKV-LM v4 in Flax",
        rwkv4,
        {"depth": (2, 8), "branch": r"^blocks/\d+/"},
        grow={"L": (2, 8)},
    ),
    Setup("rwkv5_named", "BlinkDL/RWKV-LM v5 in Flax", rwkv5, RWKV5),
    Setup(
        "rwkv5_not_named",
        "BlinkDL/RWKV-LM v5: time_decay (heads, 16) reads as a readout",
        rwkv5,
        asks="time_(decay|faaaa)",
        either=True,
        remedies=(RWKV5, RWKV5 | {"readout": "^head/"}),
    ),
    Setup(
        "rwkv5_stacked",
        "RWKV v5, scanned over layers",
        rwkv5_stacked,
        {
            "depth": (2, 8),
            "branch": "^blocks/",
            "axes": {"time_decay$": ((), (1, 2))},
        },
        grow={"L": (2, 8)},
    ),
    Setup(
        "rwkv5_stacked_not_named",
        "RWKV v5, scanned over layers",
        rwkv5_stacked,
        {"depth": (2, 8), "branch": "^blocks/"},
        grow={"L": (2, 8)},
        asks="time_decay",
        either=True,
        remedies=({"axes": {"time_decay$": ((), (1, 2))}},),
    ),
    Setup("rwkv6_torch", "BlinkDL/RWKV-LM v6", rwkv6_torch, RWKV6, style="flat"),
    Setup("hyena", "Hyena in Flax", hyena),
    Setup("griffin_fixed_heads", "google-deepmind/recurrentgemma", griffin),
    Setup(
        "griffin_growing_heads",
        "google-deepmind/recurrentgemma",
        lambda n: griffin(n, "grow"),
        GRIFFIN,
    ),
    Setup(
        "griffin_growing_heads_not_named",
        "google-deepmind/recurrentgemma: blocks (heads, 16, 16) whose number grows",
        lambda n: griffin(n, "grow"),
        asks="(input_gate|a_gate)/[wb]",
        remedies=(GRIFFIN,),
    ),
    Setup("gated_deltanet", "flash-linear-attention in Flax", deltanet),
]
