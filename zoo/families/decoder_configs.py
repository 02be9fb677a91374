"""Map decoders of transformers to models of the zoo and their options."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .llama import SIZES as LLAMAS


class Architecture(NamedTuple):
    """A model of the zoo that computes what another library's network computes.

    Attributes:
      model: a name of `zoo.list_models()`.
      options: for `zoo.create`, where they differ from that model's defaults.
    """

    model: str
    options: dict[str, Any]


def decoder(config: Mapping[str, Any], where: str) -> Architecture:
    """Find the architecture that a `config.json` of transformers describes.

    Args:
      config: contents of the config.json, with "model_type".
      where: the repository or directory, for messages.

    Raises:
      ValueError: the zoo lacks the architecture or an option, or the config lacks a
        size.
    """
    kind = config["model_type"]
    if "quantization_config" in config:
        raise ValueError(
            f"{where} holds quantized weights, which are not supported; pass the "
            "repository of the original weights"
        )
    try:
        if kind == "gpt2":
            return _gpt2(config, where)
        if kind in _LLAMAS:
            return _llama(config, where)
    except KeyError as error:
        raise ValueError(f"the config.json of {where} lacks {error}") from None
    raise ValueError(
        f"{where} holds a {kind!r} of transformers; the supported types are "
        f"gpt2, {', '.join(_LLAMAS)}, vit, dinov2, dinov3_vit, clip, "
        "siglip, resnet, convnext and convnextv2; for another image model pass "
        "timm's repository, e.g. "
        "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
    )


def whole(value: Any, key: str, where: str) -> int:
    """Return a value of a config after checking that it is an int, at least 1.

    Raises:
      ValueError: it is not; the message names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the config.json of {where} says {key}={value!r}, which must be a whole "
            "number, at least 1; it may be damaged, so download it again"
        )
    return value


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(
            f"the config.json of {where} says {key}={value!r}, which must be a "
            "positive number; it may be damaged, so download it again"
        )
    return float(value)


def _fixed(
    config: Mapping[str, Any], values: Mapping[str, Any], kind: str, where: str
) -> None:
    """Raise a `ValueError` if an option has another value than the supported one."""
    for key, only in values.items():
        if config.get(key, only) != only:
            raise ValueError(
                f"{where} holds a {kind} with {key}={config[key]!r}; this zoo has only "
                f"{key}={only!r}"
            )


def _readout(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The options of the readout; `tied` is the default of transformers."""
    tied = bool(config.get("tie_word_embeddings", tied))
    name = str((config.get("architectures") or [""])[0])
    is_base = name.endswith("Model") and not name.endswith("LMHeadModel")
    return {"tied": tied, **({"head": False} if is_base and not tied else {})}


_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def _activation(name: Any, key: str, kind: str, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{where} holds a {kind} with {key}={name!r}; this zoo has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


# --- GPT-2 ---

_GPT2_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_GPT2_SIZES = {
    (768, 12): "gpt2",
    (1024, 24): "gpt2_medium",
    (1280, 36): "gpt2_large",
    (1600, 48): "gpt2_xl",
}


def _gpt2(config: Mapping[str, Any], where: str) -> Architecture:
    _fixed(config, _GPT2_FIXED, "GPT-2", where)
    sizes = {
        "width": config["n_embd"],
        "depth": config["n_layer"],
        "heads": config["n_head"],
        "vocab_size": config["vocab_size"],
        "context": config.get("n_positions", config.get("n_ctx")),
    }
    sizes = {key: whole(value, key, where) for key, value in sizes.items()}
    key = "activation_function"
    inner = config.get("n_inner")
    # Values that the zoo's named sizes share.
    usual = {
        "vocab_size": 50257,
        "context": 1024,
        "nonlinearity": "gelu_tanh",
        "norm_eps": 1e-5,
        "mlp_ratio": 4.0,
        "tied": True,
    }
    options = {
        **sizes,
        **_readout(config, tied=True),
        "nonlinearity": _activation(config.get(key, "gelu_new"), key, "GPT-2", where),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "mlp_ratio": 4.0 if inner is None else inner / sizes["width"],
    }
    name = _GPT2_SIZES.get((sizes["width"], sizes["depth"]))
    if name is None or sizes["width"] != 64 * sizes["heads"]:
        return Architecture("gpt", options)
    other = {k: v for k, v in options.items() if usual.get(k, v) != v}
    return Architecture(name, other)


# --- Llama, Qwen2, Qwen3, and those with experts ---

# Options of each type, with the only value that is supported here.
_LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def _llama(config: Mapping[str, Any], where: str) -> Architecture:
    kind = config["model_type"]
    _fixed(config, _LLAMAS[kind], kind, where)
    keys = {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "intermediate_size": config[
            "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
        ],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }
    size = {key: whole(value, key, where) for key, value in keys.items()}
    width, heads = size["hidden_size"], size["num_attention_heads"]
    shared = config.get("num_key_value_heads")
    key_heads = whole(heads if shared is None else shared, "num_key_value_heads", where)
    given = config.get("head_dim")
    head_dim = whole(width // heads if given is None else given, "head_dim", where)
    if heads % key_heads:
        raise ValueError(
            f"the config.json of {where} says num_attention_heads={heads} and "
            f"num_key_value_heads={key_heads}, which must divide it"
        )
    theta, scaling = _rope(config, kind, where)
    phi = config.get("hidden_act", "silu")
    options = {
        "width": width,
        "depth": size["num_hidden_layers"],
        "head_dim": head_dim,
        "attention_ratio": heads * head_dim / width,
        "queries_per_key": heads // key_heads,
        "mlp_ratio": size["intermediate_size"] / width,
        "vocab_size": size["vocab_size"],
        "context": size["max_position_embeddings"],
        **_readout(config, tied=False),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "norm_eps": _number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        "nonlinearity": _activation(phi, "hidden_act", kind, where),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    if kind in ("mixtral", "qwen3_moe"):
        return Architecture("llama", {**options, **_experts(config, kind, where)})
    # Values that the zoo's named sizes share.
    usual = {
        "attention_ratio": 1.0,
        "tied": True,
        "qkv_bias": False,
        "qk_norm": False,
        "norm_eps": 1e-5,
        "nonlinearity": "silu",
        "rope_scaling": None,
    }
    for name, known in LLAMAS.items():
        if {**usual, **known} == options:
            return Architecture(name, {})
    return Architecture("llama", options)


def _experts(config: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The options of a mixture of experts."""
    # Qwen's own files say num_experts; files of newer transformers, as Mixtral's, say
    # num_local_experts.
    count = config.get("num_experts", config.get("num_local_experts"))
    chosen = config["num_experts_per_tok"]
    normalizes = kind == "mixtral" or bool(config.get("norm_topk_prob", False))
    return {
        "experts": whole(count, "num_experts", where),
        "experts_per_token": whole(chosen, "num_experts_per_tok", where),
        "normalize_gates": normalizes,
    }


def _rope(
    config: Mapping[str, Any], kind: str, where: str
) -> tuple[float, tuple[float, float, float, float] | None]:
    """Base and scaling of the rotary frequencies, from new or old configs."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    theta = _number(theta, "rope_theta", where)
    how = given.get("rope_type", given.get("type", "default"))
    if how == "default":
        return theta, None
    if how != "llama3":
        raise ValueError(
            f"{where} holds a {kind} with rotary positions of type {how!r}; this zoo "
            "has 'default' and 'llama3'"
        )
    names = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )
    factor, low, high, context = (_number(given[n], n, where) for n in names)
    return theta, (factor, low, high, context)
