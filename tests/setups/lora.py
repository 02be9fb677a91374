"""Adapters: low ranks, prompts and scales that are learnt beside a network."""

from flax import nnx

from .kit import F, H, I, O, Setup, V


class Lora(nnx.Module):
    def __init__(self, n, rank, rngs):
        self.first = nnx.LoRALinear(32, n, lora_rank=rank, rngs=rngs)
        self.mid = nnx.LoRALinear(n, n, lora_rank=rank, rngs=rngs)
        self.head = nnx.Linear(n, 10, rngs=rngs)


def plain(n, rank, growing=False):
    """An adapted layer: the kernel, a (n, rank) down and a (rank, n) up."""
    down, up = (H, H) if growing else (O, I)
    tree = {"embed/kernel": I(32, n)}
    for i in range(2):
        at = f"blocks/{i}/dense"
        tree |= {
            f"{at}/kernel": H(n, n),
            f"{at}/bias": V(n),
            f"{at}/lora_a": down(n, rank),
            f"{at}/lora_b": up(rank, n),
        }
    return tree | {"head/kernel": O(n, 10), "head/bias": F(10)}


def peft(n, rank=8, growing=False):
    """Hugging Face peft: torch's layout, lora_A (rank, in), lora_B (out, rank)."""
    down, up = (H, H) if growing else (O, I)
    at = "base_model.layers.0.q_proj"
    return {
        "base_model.embed_tokens.weight": I(1000, n),
        f"{at}.base_layer.weight": H(n, n),
        f"{at}.lora_A.default.weight": down(rank, n),
        f"{at}.lora_B.default.weight": up(n, rank),
        "base_model.norm.weight": V(n),
        "base_model.lm_head.weight": O(1000, n),
    }


def dora(n):
    return plain(n, 8) | {f"blocks/{i}/dense/magnitude": V(1, n) for i in range(2)}


def only_adapters(n):
    """The frozen network is kept elsewhere: a tree of adapters alone."""
    return {
        "q/lora_a": O(n, 8),
        "q/lora_b": I(8, n),
        "v/lora_a": O(n, 8),
        "v/lora_b": I(8, n),
    }


def houlsby(n, growing=False):
    width = n // 8 if growing else 16
    tree = {"embed/kernel": I(32, n), "dense/kernel": H(n, n), "dense/bias": V(n)}
    if growing:
        tree |= {
            "adapter/down/kernel": H(n, width),
            "adapter/down/bias": V(width),
            "adapter/up/kernel": H(width, n),
        }
    else:
        tree |= {
            "adapter/down/kernel": O(n, width),
            "adapter/down/bias": F(width),
            "adapter/up/kernel": I(width, n),
        }
    return tree | {"adapter/up/bias": V(n), "head/kernel": O(n, 10), "head/bias": F(10)}


def prompts(n):
    return {
        "embed/embedding": I(1000, n),
        "prompt/prompt": I(20, n),
        "dense/kernel": H(n, n),
        "classifier/kernel": O(n, 3),
    }


def prefixes(n):
    """Prefix tuning: keys and values (2, heads, 20, 16), looked up."""
    return {
        "embed/kernel": I(32, n),
        "prefix": V(2, n // 16, 20, 16),
        "dense/kernel": H(n, n),
        "head/kernel": O(n, 3),
    }


def ia3(n):
    return {
        "embed/kernel": I(32, n),
        "attn/kernel": H(n, n),
        "attn/ia3_l": V(1, n),
        "mlp/kernel": H(n, 4 * n),
        "mlp/ia3_l": V(1, 4 * n),
        "out/kernel": H(4 * n, n),
        "head/kernel": O(n, 3),
    }


def vera(n):
    return {
        "embed/kernel": I(32, n),
        "dense/kernel": H(n, n),
        "dense/vera_A": O(n, 16),
        "dense/vera_B": I(16, n),
        "dense/vera_d": F(16),
        "dense/vera_b": V(n),
        "head/kernel": O(n, 3),
    }


def stacked(n, L):
    return {
        "embed/kernel": I(32, n),
        "layers/kernel": H(L, n, n),
        "layers/bias": V(L, n),
        "layers/lora_a": O(L, n, 8),
        "layers/lora_b": I(L, 8, n),
        "head/kernel": O(n, 3),
    }


def heads(n):
    """LoRA of an attention kernel (n, heads, 16) in einsum form."""
    return {
        "embed/kernel": I(32, n),
        "q/w": H(n, n // 16, 16),
        "q/lora/a": O(n, 8),
        "q/lora/b": I(8, n // 16, 16),
        "out/w": H(n // 16, 16, n),
        "head/kernel": O(n, 3),
    }


NAMED = {"readout": "^head/|lora_a$"}
RANK = {"n": (64, 256), "rank": (8, 32)}

SETUPS = [
    Setup(
        "lora_nnx",
        "flax.nnx.LoRALinear",
        lambda n: Lora(n, 8, nnx.Rngs(0)),
        {"readout": r"head/kernel|mid/lora/lora_a"},
        leaves={
            r"first/kernel": I(),
            r"mid/kernel": H(),
            r"(first|mid)/bias": V(),
            r"first/lora/lora_a": F(),
            r"mid/lora/lora_a": O(),
            r"(first|mid)/lora/lora_b": I(),
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "lora_nnx_not_named",
        "flax.nnx.LoRALinear",
        lambda n: Lora(n, 8, nnx.Rngs(0)),
        asks="mid/lora/lora_a",
        remedies=({"readout": r"head/kernel|mid/lora/lora_a"},),
        leaves={
            r"first/kernel": I(),
            r"mid/kernel": H(),
            r"(first|mid)/bias": V(),
            r"first/lora/lora_a": F(),
            r"mid/lora/lora_a": O(),
            r"(first|mid)/lora/lora_b": I(),
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "lora_nnx_growing_rank",
        "flax.nnx.LoRALinear, rank n/8",
        lambda n: Lora(n, n // 8, nnx.Rngs(0)),
        leaves={
            r"first/kernel": I(),
            r"mid/kernel": H(),
            r"(first|mid)/bias": V(),
            r"first/lora/lora_a": I(),  # 32 inputs stay, the rank grows
            r"mid/lora/lora_a": H(),
            r"(first|mid)/lora/lora_b": H(),  # sums over the rank
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
    Setup("lora_plain", "LoRA in plain JAX", lambda n: plain(n, 8), NAMED),
    Setup(
        "lora_plain_not_named",
        "LoRA in plain JAX",
        lambda n: plain(n, 8),
        asks="lora_a",
        remedies=(NAMED,),
    ),
    Setup(
        "lora_growing_rank",
        "LoRA of growing rank: lora_b sums over the rank and is no bias",
        lambda n, rank: plain(n, rank, growing=True),
        grow=RANK,
    ),
    Setup(
        "lora_peft",
        "Hugging Face peft",
        peft,
        {"layout": "out_in", "embeddings": "embed", "readout": "lm_head|lora_A"},
        style="flat",
    ),
    Setup(
        "lora_peft_not_named",
        "Hugging Face peft",
        peft,
        {"layout": "out_in", "embeddings": "embed"},
        style="flat",
        asks="lora_A",
        remedies=({"readout": "lm_head|lora_A"},),
    ),
    Setup(
        "lora_peft_growing_rank",
        "Hugging Face peft, rank n/8",
        lambda n, rank: peft(n, rank, growing=True),
        {"layout": "out_in", "embeddings": "embed"},
        grow=RANK,
        style="flat",
    ),
    Setup("dora", "DoRA: a magnitude (1, n)", dora, NAMED),
    Setup("lora_only", "adapters alone", only_adapters, {"readout": "lora_a$"}),
    Setup(
        "houlsby", "Houlsby adapters of 16", houlsby, {"readout": "^head|down/kernel"}
    ),
    Setup(
        "houlsby_not_named",
        "Houlsby adapters of 16",
        houlsby,
        asks="adapter/down/kernel",
        remedies=({"readout": "^head|down/kernel"},),
    ),
    Setup("houlsby_growing", "Houlsby adapters of n/8", lambda n: houlsby(n, True)),
    Setup("prompt_tuning", "google-research/prompt-tuning", prompts),
    Setup(
        "prefix_tuning",
        "prefix tuning: (2, heads, 20, 16) sums over nothing",
        prefixes,
        asks="prefix",
        either=True,
        remedies=({"axes": {"^prefix$": ((), (1,))}},),
    ),
    Setup("ia3", "(IA)^3: scales (1, n)", ia3),
    Setup(
        "vera", "VeRA: vectors beside fixed matrices", vera, {"readout": "^head|vera_A"}
    ),
    Setup(
        "lora_scanned",
        "LoRA, scanned over layers",
        stacked,
        NAMED | {"depth": (2, 8), "branch": "^layers/"},
        grow={"L": (2, 8)},
    ),
    Setup(
        "lora_heads",
        "google-deepmind/gemma LoRA einsum",
        heads,
        {"readout": "^head|lora/a$"},
        asks="q/lora/b",
        either=True,
        remedies=({"axes": {"q/lora/b$": ((0,), (1, 2))}},),
    ),
]
