"""Map architectures of other libraries to models of the zoo and their options.

The keys of a file do not determine the architecture: timm's resnetblur50 and resnetaa50
have the keys and shapes of resnet50, but compute something else. So the architecture is
read from the repository's `config.json`, and only those listed here are accepted.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..families.convnet_configs import convnet, transformers_convnet
from ..families.decoder_configs import Architecture, decoder, whole
from ..families.vit_configs import MODEL_TYPES, pool_of, timm_table, transformers_vit
from ..registry import options_of


def identify(config: Mapping[str, Any], where: str) -> Architecture | None:
    """Find the architecture that a `config.json` describes.

    Args:
      config: contents of the config.json of a repository of timm, or of transformers
        for GPT-2, Llama, Qwen2, Qwen3, ViT, DINOv2, CLIP, SigLIP, ResNet and ConvNeXt.
      where: the repository or directory, for messages.

    Returns:
      The architecture; None if the config names none.

    Raises:
      ValueError: the zoo lacks the architecture or one of its options, or a value has
        the wrong type.

    Examples:
      >>> identify({"architecture": "resnet50", "num_classes": 1000}, "timm/x")
      Architecture(model='resnet50', options={'out_features': 1000})
    """
    try:
        if "architecture" in config:
            return _timm(config, where)
        if config.get("model_type") in MODEL_TYPES:
            return transformers_vit(config, where)
        if "model_type" in config:
            return transformers_convnet(config, where) or decoder(config, where)
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(
            f"the config.json of {where} holds a value of the wrong type ({error}); "
            "it may be damaged, so download it again"
        ) from error
    return None


# --- timm ---

_VITS = {
    # width, depth, size of a head
    "tiny": (192, 12, 64),
    "small": (384, 12, 64),
    "base": (768, 12, 64),
    "large": (1024, 24, 64),
    "huge": (1280, 32, 80),
}
_VIT_NAMES = (
    *(f"{size}_patch16_{side}" for size in _VITS for side in (224, 384)),
    *(f"{size}_patch32_{side}" for size in _VITS for side in (224, 384)),
    *(f"{size}_patch8_224" for size in _VITS),
    *(f"{size}_patch14_224" for size in ("large", "huge")),
)
_DEITS = (
    *(f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")),
    "deit_base_patch16_384",
)
# (pattern of names, feature that the zoo lacks); the first match is reported.
_VARIANTS = (
    (r"^(wide_|se)?resne(t|xt)\d+(_2)?$", "other numbers of blocks or channels"),
    (r"^(se|eca|gc|cbam|ec)_?resnex?t", "another kind of channel attention"),
    (r"^resnet\d+s", "a deep stem of twice the width"),
    (r"^resnetv2", "normalization before each convolution"),
    (r"_s?gn$", "group normalization"),
    (r"^regnetv", "normalization before each convolution"),
    (r"^regnetz", "blocks without a relu behind them"),
    (r"^beit", "relative position bias"),
    (r"^cait", "class attention"),
    (r"^swin", "attention in shifted windows"),
    (r"^(max|maxx|coat)(vit|net)", "attention in windows and over a grid of pixels"),
    (r"^vgg", "stages of convolutions without shortcuts"),
    (r"^densenet", "blocks that concatenate their inputs"),
    (r"^inception", "blocks of several parallel convolutions"),
    (r"^(eca_|dm_)?nfnet|^nf_", "standardized weights instead of normalization"),
    (r"^mobilenetv4", "inverted bottlenecks with two depthwise convolutions"),
    (
        r"^(tf_)?mobilenet_edgetpu|^(tf_)?efficientnet_(e[sml]|x)",
        "other rows of blocks",
    ),
    (r"_qkvb", "separate biases of queries and values"),
    (r"^eva", "norms behind its branches"),
    (r"distilled", "a distillation token"),
    (r"naflex", "patches of several image sizes in one batch"),
    (r"_relpos|_rpn|_srelpos", "relative position bias"),
    (r"_rope|_pe_", "rotary positions of another kind than DINOv3's"),
)


def _vit(size: str, patch: int, side: int) -> Architecture:
    width, depth, head_dim = _VITS[size]
    if patch == 16 and size != "huge":
        other = {} if side == 224 else {"input_shape": (side, side, 3)}
        return Architecture(f"vit_{size}_patch16_224", other)
    options = {"width": width, "depth": depth, "head_dim": head_dim}
    sizes = {"patch_size": patch, "input_shape": (side, side, 3)}
    return Architecture("vit", {**options, **sizes, "out_features": 1000})


def _timm_table() -> dict[str, Architecture]:
    table = {}
    for name in (*(f"vit_{name}" for name in _VIT_NAMES), *_DEITS):
        size, patch, side = name.split("_", 1)[1].split("_")
        number = int(patch.removeprefix("patch"))
        table[name] = _vit(size, number, int(side))
    return {**table, **timm_table()}


TIMM = _timm_table()
# Names of pooling: ours to timm's.
_POOLINGS = {"token": "token", "mean": "avg", "norm_mean": "avg", "attention": "map"}
# Arguments of timm's networks that are read here. Others would change the function.
_KNOWN_ARGUMENTS = {"img_size", "num_classes", "in_chans", "global_pool"}


def _timm(config: Mapping[str, Any], where: str) -> Architecture:
    name = str(config["architecture"])
    known = TIMM.get(name) or convnet(name)
    if known is None:
        raise ValueError(_refusal(name, where))
    is_vit = name in TIMM
    cfg = config.get("pretrained_cfg")
    cfg = cfg if isinstance(cfg, Mapping) else config
    arguments = config.get("model_args") or {}
    unknown = sorted(set(arguments) - _KNOWN_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"{where} holds a {name!r} created with {unknown[0]}="
            f"{arguments[unknown[0]]!r}, an option that this zoo does not support; "
            "use a network with timm's default options"
        )

    def get(key: str) -> Any:
        return next((d[key] for d in (arguments, config, cfg) if key in d), None)

    options = dict(known.options)
    classes = get("num_classes")
    if classes:  # 0 for a backbone without a head
        options["out_features"] = whole(classes, "num_classes", where)
    elif is_vit and classes == 0:
        options["out_features"] = 0
    size = cfg.get("input_size")
    if size is not None:
        channels, height, width = _sizes(size, where)
        side = arguments.get("img_size")
        if side is not None:
            height, width = (side, side) if isinstance(side, int) else side
        if is_vit:
            options["input_shape"] = (height, width, channels)
            usual = options_of(known.model)[1].get("input_shape")
            if options["input_shape"] == usual:
                del options["input_shape"]
        elif channels != 3:
            options["input_shape"] = (224, 224, channels)
    pooling = get("global_pool")
    usual = _POOLINGS[pool_of(known)] if is_vit else "avg"
    if usual == "token" and pooling == "avg":
        # timm keeps the class token, which the patches attend to.
        options |= {"pool": "mean", "class_token": True}
    elif pooling not in (None, "", usual):
        raise ValueError(
            f"{where} holds a {name!r} with global_pool={pooling!r}; this zoo supports "
            f"{'token and avg' if usual == 'token' else usual}"
        )
    return Architecture(known.model, options)


def _refusal(name: str, where: str) -> str:
    feature = next((f for pattern, f in _VARIANTS if re.search(pattern, name)), None)
    has = f", which has {feature}" if feature else ""
    return (
        f"{where} holds a {name!r}{has}; this zoo has no such model. It supports "
        "resnet, wide_resnet, resnext, seresnet, resnetblur, resnetaa, resnetrs, "
        "regnetx, regnety, "
        "convnext, convnextv2, efficientnet, efficientnet_lite, efficientnetv2, "
        "mobilenetv2, mobilenetv3, "
        "vit_{tiny,small,base,large,huge}_patch* of 224 or 384 pixels, deit, deit3, "
        "vit_*_dinov2, vit_*_dinov3, vit_*_clip_*, vit_*_siglip_*, eva02 and GPT-2"
    )


def _sizes(value: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        value = [None]
    channels, height, width = (whole(v, "input_size", where) for v in value)
    return channels, height, width
