"""Map ViTs of timm and transformers to models of the zoo and their options."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ..registry import default_options, list_models, options_of
from .decoder_configs import Architecture, whole
from .vit import EVA02, SIZES, ViT, eva02_size

# Options that define a registered model; others may differ and are passed to `create`.
_STRUCTURE = (
    *("width", "depth", "head_dim", "mlp_ratio", "patch_size", "registers", "gated"),
    *("pool", "pre_norm", "patch_bias", "class_position", "position", "rotary"),
    "inner_norm",
)


def named(options: Mapping[str, Any]) -> Architecture:
    """Find the registered ViT that matches options, and the options that differ.

    Args:
      options: of `ViT`, with `head_dim`.

    Returns:
      The architecture; the model "vit" with all options if no registered one matches.
    """
    options = {"head_dim": 64, **options}
    usual = {k: v for k, v in default_options("vit").items() if k in _STRUCTURE}
    structure = {**usual, **{k: v for k, v in options.items() if k in _STRUCTURE}}
    fits = []
    for name, known in _known().items():
        scaled = known["layer_scale"] is not None
        is_scaled = options.get("layer_scale") is not None
        if {**known, **structure} == known and scaled == is_scaled:
            other = {k: v for k, v in options.items() if known[k] != v}
            fits.append(Architecture(name, other))
    if fits:
        return min(fits, key=lambda fit: len(fit.options))
    return Architecture("vit", options)


@functools.cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    """The options of every registered ViT but "vit" itself, by name."""
    known = {}
    for name in list_models():
        if issubclass(options_of(name)[0], ViT) and name != "vit":
            options = default_options(name)
            known[name] = {**options, "head_dim": options["head_dim"] or 64}
    return known


# --- timm ---

_TIMM_SIZES: Mapping[str, Mapping[str, Any]] = {
    **SIZES,
    "xsmall": {"width": 256, "depth": 10},
    "mediumd": {"width": 512, "depth": 20},
    "betwixt": {"width": 640, "depth": 12},
    "wee": {"width": 256, "depth": 14, "mlp_ratio": 5.0},
    "little": {"width": 320, "depth": 14, "mlp_ratio": 5.6},
    # CLIP's giant, which differs from DINOv2's.
    "giant_clip": {"width": 1408, "depth": 40, "head_dim": 88, "mlp_ratio": 48 / 11},
    "giant_eva": {"width": 1408, "depth": 40, "head_dim": 88, "mlp_ratio": 48 / 11},
    "gigantic": {"width": 1664, "depth": 48, "head_dim": 104, "mlp_ratio": 64 / 13},
}
_CLIP = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5}
_QUICK = {**_CLIP, "nonlinearity": "quick_gelu"}
_DINO = {"layer_scale": 1e-5, "out_features": 0}
_REGISTERS = {**_DINO, "registers": 4, "class_position": False}
_DINOV3 = {
    "registers": 4,
    "position": False,
    "rotary": True,
    "qkv_bias": False,
    "norm_eps": 1e-5,
    "pool": "norm_mean",
    "class_token": True,
}
_SWIGLU = {"gated": True, "nonlinearity": "silu", "mlp_ratio": 8 / 3}
_SIGLIP = {"class_token": False, "pool": "attention", "out_features": 0}
_TANH = {"nonlinearity": "gelu_tanh"}
_GAP = {"class_token": False, "pool": "norm_mean"}


def _rows() -> Iterator[tuple[str, str, int, int, Mapping[str, Any]]]:
    """(name, size, patch, side, options) of timm's ViTs beyond the plain ones."""
    deit3 = {"layer_scale": 1e-6, "class_position": False}
    for size, patch, side in (
        *((s, 16, 224) for s in ("small", "medium", "base", "large")),
        *((s, 16, 384) for s in ("small", "base", "large")),
        ("huge", 14, 224),
    ):
        yield f"deit3_{size}_patch{patch}_{side}", size, patch, side, deit3
    for size in ("small", "base", "large", "giant"):
        more = _SWIGLU if size == "giant" else {}
        start = f"vit_{size}_patch14"
        yield f"{start}_dinov2", size, 14, 518, {**_DINO, **more}
        yield f"{start}_reg4_dinov2", size, 14, 518, {**_REGISTERS, **more}
    for size, patch, side in (
        *(("base", 32, side) for side in (224, 256, 384, 448)),
        *(("base", 16, side) for side in (224, 384)),
        *(("large", 14, side) for side in (224, 336)),
        *(("huge", 14, side) for side in (224, 336, 378)),
        ("xsmall", 16, 224),
        ("medium", 16, 224),
        ("medium", 32, 224),
        ("betwixt", 32, 224),
        ("giant", 14, 224),
        ("gigantic", 14, 224),
        ("gigantic", 14, 378),
    ):
        kind = "giant_clip" if size == "giant" else size
        yield f"vit_{size}_patch{patch}_clip_{side}", kind, patch, side, _CLIP
        quick = f"vit_{size}_patch{patch}_clip_quickgelu_{side}"
        if (size, side) in _QUICK_SIZES:
            yield quick, kind, patch, side, _QUICK
    for size, patch, side, phi in (
        ("base", 32, 256, _TANH),
        *(("base", 16, side, {}) for side in (224, 256, 384, 512)),
        *(("large", 16, side, {}) for side in (256, 384)),
        ("large", 16, 512, _TANH),
        *(("so400m", 14, side, {}) for side in (224, 378, 384)),
        *(("so400m", 16, side, _TANH) for side in (256, 384, 512)),
    ):
        start = f"vit_{size}_patch{patch}_siglip"
        yield f"{start}_{side}", size, patch, side, {**_SIGLIP, **phi}
        if (size, side) != ("so400m", 224):
            gap = {**_GAP, **phi, "out_features": 0}
            yield f"{start}_gap_{side}", size, patch, side, gap
    for size, registers, side in (
        *(("wee", 1, 256), ("little", 1, 256), ("little", 4, 256), ("medium", 1, 256)),
        *(("medium", 4, 256), ("mediumd", 4, 256), ("mediumd", 4, 384)),
        *(("betwixt", 1, 256), ("betwixt", 4, 256), ("betwixt", 4, 384)),
        ("base", 4, 256),
    ):
        options = {"class_token": False, "pool": "mean", "registers": registers}
        if size != "base":
            options["layer_scale"] = 1e-5
        name = f"vit_{size}_patch16_reg{registers}_gap_{side}"
        yield name, size, 16, side, options
    for size in ("small", "small_plus", "base", "large", "huge_plus"):
        plus = {"gated": True, "nonlinearity": "silu"} if "plus" in size else {}
        options = {**_DINO, **_DINOV3, **plus}
        yield f"vit_{size}_patch16_dinov3", size, 16, 256, options
    for size in ("small", "base", "large"):
        yield f"flexivit_{size}", size, 16, 240, {"class_position": False}
    for size, patch, side in (
        *((s, 14, n) for s in ("tiny", "small") for n in (224, 336)),
        *((s, 14, n) for s in ("base", "large") for n in (224, 448)),
    ):
        options = {**EVA02, **eva02_size(size)}
        yield f"eva02_{size}_patch{patch}_{side}", size, patch, side, options
    for size, patch, side in (
        ("base", 16, 224),
        ("large", 14, 224),
        ("large", 14, 336),
    ):
        options = {**EVA02, **eva02_size(size), "inner_norm": "both", "pool": "token"}
        name = f"eva02_{size}_patch{patch}_clip_{side}"
        yield name, size, patch, side, options
    for side in (224, 336, 560):
        options = {"key_bias": False, "pool": "mean", "class_token": True}
        yield f"eva_giant_patch14_{side}", "giant_eva", 14, side, options
    for side in (196, 336):  # in timm a plain ViT
        options = {"pool": "mean", "class_token": True}
        yield f"eva_large_patch14_{side}", "large", 14, side, options
    name = "eva_giant_patch14_clip_224"
    yield name, "giant_eva", 14, 224, {"key_bias": False}
    yield "vit_base_patch16_224_miil", "base", 16, 224, {"qkv_bias": False}


_QUICK_SIZES = (
    *(("base", 224), ("large", 224), ("large", 336), ("huge", 224), ("huge", 378)),
    ("gigantic", 224),
)


def timm_table() -> dict[str, Architecture]:
    """timm's ViTs that the zoo has, beyond the plain ones, by timm's names."""
    return {
        name: named(
            {
                **_TIMM_SIZES[size],
                "patch_size": patch,
                "input_shape": (side, side, 3),
                "out_features": 1000,
                "drop_rest": side % patch > 0,
                **options,
            }
        )
        for name, size, patch, side, options in _rows()
    }


def pool_of(architecture: Architecture) -> str:
    """The default pooling of a ViT."""
    given = {**options_of(architecture.model)[1], **architecture.options}
    return str(given.get("pool", "token"))


# --- transformers ---

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
_VIT_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
# Defaults of transformers for values that a config leaves out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "vit": {**_VIT_BASE, "layer_norm_eps": 1e-12},
    "dinov2": {**_VIT_BASE, "mlp_ratio": 4, "use_swiglu_ffn": False},
    "dinov2_with_registers": {
        **_VIT_BASE,
        "mlp_ratio": 4,
        "use_swiglu_ffn": False,
        "num_register_tokens": 4,
    },
    "dinov3_vit": {
        **_VIT_BASE,
        **{"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        **{"layer_norm_eps": 1e-5, "num_register_tokens": 0, "rope_theta": 100.0},
        **{"use_gated_mlp": False, "key_bias": False},
        **{"query_bias": True, "value_bias": True, "proj_bias": True, "mlp_bias": True},
    },
    "clip": {
        **_VIT_BASE,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip": {**_VIT_BASE, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True},
}
MODEL_TYPES = (
    *("vit", "dinov2", "dinov2_with_registers", "dinov3_vit"),
    *("clip", "clip_vision_model", "siglip", "siglip_vision_model"),
)


def transformers_vit(config: Mapping[str, Any], where: str) -> Architecture:
    """Find the ViT or image tower that a `config.json` of transformers describes.

    Args:
      config: with a "model_type" of `MODEL_TYPES`.
      where: the repository or directory, for messages.

    Raises:
      ValueError: the zoo lacks an option, or a size is not a whole number.

    Examples:
      >>> transformers_vit({"model_type": "vit", "qkv_bias": False}, "x").options
      {'norm_eps': 1e-12, 'qkv_bias': False, 'out_features': 0}
    """
    given = config["model_type"]
    kind = given.removesuffix("_vision_model")
    tower = config.get("vision_config") or {} if given in ("clip", "siglip") else config
    if not isinstance(tower, Mapping):
        raise ValueError(f"the config.json of {where} has no vision_config to read")
    full = {**_DEFAULTS[kind], **{k: v for k, v in tower.items() if v is not None}}
    options = _body(full, kind, where)
    match kind:
        case "vit":
            options["out_features"] = _classes(config, where)
        case "dinov2" | "dinov2_with_registers":
            options |= _dinov2(full, kind, where)
            classes = _classes(config, where)
            more = {"pool": "token_and_mean"} if classes else {}
            options |= {"out_features": classes, **more}
        case "dinov3_vit":
            options |= _dinov3(full, where)
        case "clip":
            options |= {"pre_norm": True, "patch_bias": False, "out_features": 0}
            if given == "clip" or "WithProjection" in _class(config):
                size = config.get("projection_dim", 512)
                size = whole(size, "projection_dim", where)
                options |= {"out_features": size, "readout_bias": False}
        case "siglip":
            pool = "attention" if full["vision_use_head"] else "none"
            options |= {"class_token": False, "pool": pool, "out_features": 0}
    return named(options)


def _body(config: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Sizes and options that all types share."""
    keys = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size"),
        *("image_size", "num_channels", "intermediate_size"),
    )
    size = {key: whole(config[key], key, where) for key in keys}
    width, heads = size["hidden_size"], size["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"the config.json of {where} says hidden_size={width} and "
            f"num_attention_heads={heads}, which must divide it"
        )
    phi = config["hidden_act"]
    if phi not in _ACTIVATIONS:
        raise ValueError(
            f"{where} holds a {kind} with hidden_act={phi!r}; this zoo has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    side = size["image_size"]
    return {
        "width": width,
        "depth": size["num_hidden_layers"],
        "head_dim": width // heads,
        "mlp_ratio": size["intermediate_size"] / width,
        "patch_size": size["patch_size"],
        "input_shape": (side, side, size["num_channels"]),
        "drop_rest": side % size["patch_size"] > 0,
        "nonlinearity": _ACTIVATIONS[phi],
        "norm_eps": float(config["layer_norm_eps"]),
        "qkv_bias": bool(config["qkv_bias"]),
    }


def _dinov2(config: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    width, ratio = config["hidden_size"], config["mlp_ratio"]
    options: dict[str, Any] = {"layer_scale": 1.0, "mlp_ratio": float(ratio)}
    if config["use_swiglu_ffn"]:
        # DINOv2 takes two thirds, rounded up to a multiple of 8.
        inner = (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8
        options |= {"gated": True, "nonlinearity": "silu", "mlp_ratio": inner / width}
    if kind == "dinov2_with_registers":
        key = "num_register_tokens"
        options["registers"] = whole(config[key], key, where)
    return options


def _dinov3(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in ("query_bias", "value_bias", "proj_bias", "mlp_bias"):
        if not config[key]:
            raise ValueError(
                f"{where} holds a dinov3_vit with {key}=False; this zoo has only "
                f"{key}=True"
            )
    options: dict[str, Any] = {
        "layer_scale": 1.0,
        "position": False,
        "rotary": True,
        "rope_theta": float(config["rope_theta"]),
        "key_bias": bool(config["key_bias"]),
        "gated": bool(config["use_gated_mlp"]),
        "out_features": 0,
    }
    if config["num_register_tokens"]:
        key = "num_register_tokens"
        options["registers"] = whole(config[key], key, where)
    return options


def _class(config: Mapping[str, Any]) -> str:
    """The class in transformers that wrote the files."""
    return str((config.get("architectures") or [""])[0])


def _classes(config: Mapping[str, Any], where: str) -> int:
    """Number of classes; 0 for a network without a head."""
    if not _class(config).endswith("ForImageClassification"):
        return 0
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    return whole(count, "num_labels", where)
