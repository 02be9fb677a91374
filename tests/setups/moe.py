"""Mixtures of experts: experts are copies, a router reads out."""

from .kit import F, H, I, O, Setup, V


def body(n):
    return {"embed/kernel": I(32, n), "mix/kernel": H(n, n), "norm/scale": V(n)}


def switch(n, e=8, head=True):
    """flaxformer's Switch layers: kernels (experts, n, f), a router (n, experts)."""
    tree = body(n) | {
        "mlp/router/router_weights/w/kernel": O(n, e),
        "mlp/expert/wi/kernel": H(e, n, 4 * n),
        "mlp/expert/wo/kernel": H(e, 4 * n, n),
    }
    return tree | ({"logits_dense/kernel": O(n, 50)} if head else {})


def switch_biases(n, e=8):
    """Each expert with biases (experts, f), the router with one of its own."""
    return switch(n, e) | {
        "mlp/router/router_weights/w/bias": F(e),
        "mlp/expert/wi/bias": V(e, 4 * n),
        "mlp/expert/wo/bias": V(e, n),
    }


def switch_more(n, e):
    """8 experts to 32: copies of the kernels; the router's outputs are no width."""
    return body(n) | {
        "mlp/router/router_weights/w/kernel": O(n, e, copies=4),
        "mlp/expert/wi/kernel": H(e, n, 4 * n, copies=4),
        "mlp/expert/wo/kernel": H(e, 4 * n, n, copies=4),
        "logits_dense/kernel": O(n, 50),
    }


def switch_more_biases(n, e):
    return switch_more(n, e) | {
        "mlp/expert/wi/bias": V(e, 4 * n, copies=4),
        "mlp/expert/wo/bias": V(e, n, copies=4),
    }


MORE = {"e": (8, 32)}
ROUTER = {"readout": "logits_dense|router_weights"}
# Named by axes, whose rest counts copies: a router that gains experts is a readout.
EXPERTS = {
    r"expert/w[io]/kernel$": ((1,), (2,)),
    r"router_weights/w/kernel$": ((0,), ()),
}
MORE_AXES = ROUTER | {"axes": EXPERTS}
MORE_BIASES = ROUTER | {"axes": EXPERTS | {r"expert/w[io]/bias$": ((), (1,))}}


def mixtral_list(n, e=4):
    """Hugging Face's Mixtral in torch's layout: a module for each expert."""
    tree = {"model.embed_tokens.weight": I(1000, n)}
    at = "model.layers.0.block_sparse_moe"
    tree |= {f"{at}.gate.weight": O(e, n), "model.layers.0.q_proj.weight": H(n, n)}
    for i in range(e):
        tree |= {
            f"{at}.experts.{i}.w1.weight": H(3 * n, n),
            f"{at}.experts.{i}.w2.weight": H(n, 3 * n),
            f"{at}.experts.{i}.w3.weight": H(3 * n, n),
        }
    return tree | {"model.norm.weight": V(n), "lm_head.weight": O(1000, n)}


def experts_list(n, e):
    """A list of experts in plain JAX, of which there are more in the target."""
    tree = body(n) | {"router/w": O(n, e, copies=4)}
    for i in range(e):
        tree |= {f"experts/{i}/up": H(n, 2 * n), f"experts/{i}/down": H(2 * n, n)}
    return tree | {"head/w": O(n, 10)}


def maxtext_moe(n, L, e=8):
    """MaxText scans over axis 1 of what is not an expert: gate (n, L, experts)."""
    at = "decoder/layers/MoeBlock_0"
    return {
        "token_embedder/embedding": I(1000, n),
        f"{at}/gate/kernel": O(n, L, e),
        f"{at}/wi_0": H(e, L, n, 2 * n),
        f"{at}/wi_1": H(e, L, n, 2 * n),
        f"{at}/wo": H(e, L, 2 * n, n),
        "decoder/layers/norm/scale": V(n, L),
        "decoder/decoder_norm/scale": V(n),
        "decoder/logits_dense/kernel": O(n, 1000),
    }


MAXTEXT_MOE = {
    "readout": "logits_dense|gate/kernel",
    "axes": {
        r"gate/kernel$": ((0,), (2,)),
        r"MoeBlock_0/w": ((2,), (3,)),
        r"layers/norm/scale$": ((), (0,)),
    },
}


def scanned(n, L, e=8):
    """Layers first, then experts: (L, experts, n, f)."""
    return {
        "embed/embedding": I(1000, n),
        "layers/attn/qkv/kernel": H(L, n, 3 * n),
        "layers/attn/out/kernel": H(L, n, n),
        "layers/norm/scale": V(L, n),
        "layers/moe/router/kernel": O(L, n, e),
        "layers/moe/wi": H(L, e, n, 2 * n),
        "layers/moe/wo": H(L, e, 2 * n, n),
        "layers/moe/bi": V(L, e, 2 * n),
        "head/kernel": O(n, 1000),
    }


SCANNED = {"depth": (2, 8), "branch": "^layers/"}
SCANNED_ROUTER = {"readout": "^head/|router/kernel"}


def deepseek(n, e=8):
    """Shared experts, routed ones, a bias for balance, a gate of one output."""
    return body(n) | {
        "moe/gate/kernel": O(n, e),
        "moe/gate/e_score_correction_bias": F(e),
        "moe/shared_gate/kernel": O(n, 1),
        "moe/shared/up/kernel": H(n, 2 * n),
        "moe/shared/down/kernel": H(2 * n, n),
        "moe/routed/up/kernel": H(e, n, n),
        "moe/routed/down/kernel": H(e, n, n),
        "head/kernel": O(n, 50),
    }


def noisy_router(n):
    return switch(n) | {"mlp/router/w_noise/kernel": O(n, 8)}


def soft_moe(n):
    """google-research/vmoe Soft MoE: mu (n, experts, slots) gives fixed outputs."""
    return body(n) | {
        "moe/mu": O(n, 8, 4),
        "moe/scale": F(),
        "moe/mlp/wi/kernel": H(8, n, 4 * n),
        "moe/mlp/wi/bias": V(8, 4 * n),
        "moe/mlp/wo/kernel": H(8, 4 * n, n),
        "moe/mlp/wo/bias": V(8, n),
        "head/kernel": O(n, 10),
    }


def tied_router(n):
    """A tied GPT with a mixture: the router is no readout of the model."""
    tree = {"wte/embedding": I(1000, n), "wpe/embedding": I(64, n), "ln_f/scale": V(n)}
    return tree | {
        "h/0/attn/kernel": H(n, n),
        "h/0/moe/router/kernel": O(n, 8),
        "h/0/moe/wi": H(8, n, 4 * n),
        "h/0/moe/wo": H(8, 4 * n, n),
    }


def vmoe_merged(n, e=8):
    """Experts merged into one axis of outputs: each still sums over n alone."""
    return body(n) | {
        "moe/gate/kernel": O(n, e),
        "moe/up/kernel": H(n, e * n),
        "moe/down/kernel": H(e, n, n),
        "head/kernel": O(n, 10),
    }


def product_keys(n):
    """Lample et al.: keys (2, 128, n/2) are scored by a sum over n/2."""
    return body(n) | {
        "memory/query/kernel": H(n, n),
        "memory/keys": O(2, 128, n // 2),
        "memory/values/embedding": I(128 * 128, n),
        "head/kernel": O(n, 10),
    }


def branches_of_heads(n, e):
    """An ensemble: independent networks stacked on axis 0, of which there are more."""
    return {
        "w0": I(e, 8, n, copies=4),
        "b0": V(e, n, copies=4),
        "w1": H(e, n, n, copies=4),
        "b1": V(e, n, copies=4),
        "out": O(e, n, 2, copies=4),
    }


def ensemble(n):
    """Five members, five stay: the critics of REDQ or SAC."""
    return {
        "critics/Dense_0/kernel": I(5, 17, n),
        "critics/Dense_0/bias": V(5, n),
        "critics/Dense_1/kernel": H(5, n, n),
        "critics/Dense_1/bias": V(5, n),
        "critics/Dense_2/kernel": O(5, n, 1),
        "critics/Dense_2/bias": F(5, 1),
    }


SETUPS = [
    Setup("switch_named", "google/flaxformer", switch, ROUTER),
    Setup(
        "switch_not_named",
        "google/flaxformer: the router beside the readout",
        switch,
        asks="router_weights/w/kernel",
        remedies=(ROUTER,),
    ),
    Setup(
        "switch_head_named",
        "google/flaxformer: the pattern forgets the router",
        switch,
        {"readout": "logits_dense"},
        asks="router_weights/w/kernel",
        remedies=(ROUTER,),
    ),
    Setup("switch_biases", "google/flaxformer", switch_biases, ROUTER),
    Setup(
        "switch_more_experts",
        "google/flaxformer, 8 to 32 experts",
        switch_more,
        MORE_AXES,
        grow=MORE,
    ),
    Setup(
        "switch_more_experts_not_named",
        "google/flaxformer, 8 to 32 experts, which are no fan-in",
        switch_more,
        grow=MORE,
        asks="expert/w[io]/kernel|router_weights",
        remedies=(MORE_AXES,),
    ),
    Setup(
        "switch_more_experts_one_of_the_pair",
        "google/flaxformer, 8 to 32 experts, the second kernel forgotten",
        switch_more,
        ROUTER
        | {
            "axes": {
                r"expert/wi/kernel$": ((1,), (2,)),
                r"router_weights/w/kernel$": ((0,), ()),
            }
        },
        grow=MORE,
        asks="expert/wo/kernel",
        either=True,
        remedies=(MORE_AXES,),
    ),
    Setup(
        "switch_more_experts_router_forgotten",
        "google/flaxformer, 8 to 32 experts: (n, experts) reads as a hidden kernel",
        switch_more,
        {"axes": {r"expert/w[io]/kernel$": ((1,), (2,))}},
        grow=MORE,
        asks="router_weights/w/kernel",
        either=True,
        remedies=(MORE_AXES,),
    ),
    Setup(
        "switch_more_experts_biases",
        "google/flaxformer, 8 to 32 experts with biases",
        switch_more_biases,
        MORE_BIASES,
        grow=MORE,
    ),
    Setup(
        "switch_more_experts_biases_forgotten",
        "google/flaxformer: biases (experts, f) read as kernels",
        switch_more_biases,
        MORE_AXES,
        grow=MORE,
        asks="expert/w[io]/bias",
        either=True,
        remedies=(MORE_BIASES,),
    ),
    Setup(
        "mixtral_torch",
        "Hugging Face Mixtral",
        mixtral_list,
        {
            "layout": "out_in",
            "readout": r"lm_head|\.gate\.",
            "embeddings": "embed_tokens",
        },
        style="flat",
    ),
    Setup(
        "mixtral_torch_not_named",
        "Hugging Face Mixtral: the gate beside the readout",
        mixtral_list,
        {"layout": "out_in", "embeddings": "embed_tokens"},
        style="flat",
        asks="gate",
        remedies=({"readout": r"lm_head|\.gate\."},),
    ),
    Setup(
        "experts_list_more",
        "a list of experts, 4 to 16: the base has no fifth; a base of 16 has",
        experts_list,
        grow={"e": (4, 16)},
        asks="experts/",
        instead=lambda n, e: experts_list(n, 16),
        remedies=({"readout": "^(head|router)/w"},),
    ),
    Setup(
        "maxtext_moe",
        "AI-Hypercomputer/maxtext, scanned on axis 1",
        maxtext_moe,
        {"depth": (2, 2), "branch": "decoder/layers/"} | MAXTEXT_MOE,
        grow={"L": (2, 2)},
    ),
    Setup(
        "maxtext_moe_deeper",
        "AI-Hypercomputer/maxtext, scanned on axis 1",
        maxtext_moe,
        {"depth": (2, 8), "branch": "decoder/layers/"} | MAXTEXT_MOE,
        grow={"L": (2, 8)},
    ),
    Setup(
        "maxtext_moe_deeper_not_named",
        "AI-Hypercomputer/maxtext, scanned on axis 1",
        maxtext_moe,
        {"depth": (2, 8), "branch": "decoder/layers/"},
        grow={"L": (2, 8)},
        asks="decoder/layers/",
        remedies=(MAXTEXT_MOE,),
    ),
    Setup(
        "moe_scanned",
        "(layers, experts, n, f)",
        scanned,
        SCANNED | SCANNED_ROUTER,
        grow={"L": (2, 8)},
    ),
    Setup(
        "moe_scanned_not_named",
        "(layers, experts, n, f)",
        scanned,
        SCANNED,
        grow={"L": (2, 8)},
        asks="moe/router/kernel",
        remedies=(SCANNED_ROUTER,),
    ),
    Setup(
        "moe_scanned_same_depth",
        "(layers, experts, n, f)",
        scanned,
        {"depth": (4, 4), "branch": "^layers/"} | SCANNED_ROUTER,
        grow={"L": (4, 4)},
    ),
    Setup(
        "deepseek_moe",
        "DeepSeek-V3 in MaxText",
        deepseek,
        {"readout": "^head|gate/kernel"},
    ),
    Setup(
        "deepseek_moe_gate_forgotten",
        "DeepSeek-V3 in MaxText",
        deepseek,
        {"readout": "^head|moe/gate/kernel"},
        asks="shared_gate/kernel",
        remedies=({"readout": "^head|gate/kernel"},),
    ),
    Setup(
        "noisy_router",
        "lucidrains/mixture-of-experts: a second kernel for the noise",
        noisy_router,
        {"readout": "logits_dense|router_weights|w_noise"},
    ),
    Setup(
        "soft_moe",
        "google-research/vmoe",
        soft_moe,
        {"readout": "^head/", "axes": {"moe/mu$": ((0,), (1, 2))}},
        asks="moe/mu",
        either=True,
        remedies=({"readout": "^head/|moe/mu$"},),
    ),
    Setup(
        "soft_moe_named",
        "google-research/vmoe",
        soft_moe,
        {"readout": "^head/|moe/mu$", "axes": {"moe/mu$": ((0,), (1, 2))}},
    ),
    Setup(
        "soft_moe_not_named",
        "google-research/vmoe: (n, experts, slots)",
        soft_moe,
        asks="moe/mu",
        remedies=({"readout": "^head/|moe/mu$", "axes": {"moe/mu$": ((0,), (1, 2))}},),
    ),
    Setup(
        "tied_gpt_with_router",
        "a tied GPT with a mixture of experts",
        tied_router,
        {"tied": "^wte/", "readout": "router"},
    ),
    Setup(
        "tied_gpt_with_router_not_named",
        "a tied GPT with a mixture of experts: the router is not its readout",
        tied_router,
        asks="wte|router",
        remedies=({"tied": "^wte/", "readout": "router"},),
    ),
    Setup(
        "experts_merged",
        "experts merged into the outputs",
        vmoe_merged,
        {"readout": "^head/|gate/kernel"},
    ),
    Setup(
        "product_keys",
        "facebookresearch/XLM product-key memory",
        product_keys,
        {
            "axes": {"memory/keys$": ((2,), (1,))},
            "readout": "^head/|memory/keys$",
            "embeddings": "memory/values",
        },
    ),
    Setup("ensemble", "critics stacked by nn.vmap (REDQ)", ensemble),
    Setup(
        "ensemble_grows_named",
        "an ensemble stacked on axis 0, 2 to 8 members",
        branches_of_heads,
        {
            "axes": {
                "^(w0|w1|out)$": ((1,), (2,)),
                "^b[01]$": ((), (1,)),
            }
        },
        grow={"e": (2, 8)},
    ),
    Setup(
        "ensemble_grows_not_named",
        "an ensemble stacked on axis 0, 2 to 8 members",
        branches_of_heads,
        grow={"e": (2, 8)},
        asks=r"\b(w0|w1|out|b0|b1)\b",
        remedies=(
            {
                "axes": {
                    "^(w0|w1|out)$": ((1,), (2,)),
                    "^b[01]$": ((), (1,)),
                }
            },
        ),
    ),
]
