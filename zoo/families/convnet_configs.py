"""Map convolutional networks of timm and transformers to models of the zoo."""

from collections.abc import Callable, Mapping
from typing import Any

from . import convnext, efficientnet, regnet, resnet
from .decoder_configs import Architecture, whole


def convnet(name: str) -> Architecture | None:
    """Find a network of timm by its architecture's name; None if the zoo lacks it.

    Examples:
      >>> convnet("wide_resnet50_2")
      Architecture(model='wide_resnet50_2', options={})
      >>> convnet("seresnext101_32x8d").options["groups"]
      32
    """
    for family in (resnet, convnext, efficientnet, regnet):
        if name in family.NAMES:
            return Architecture(name, {})
    # A base model of the zoo, with every option that differs from its defaults.
    options = resnet.variant(name)
    if options is not None:
        rest = {k: v for k, v in options.items() if k not in ("width", "depth")}
        return Architecture("resnet50", rest)
    for base, variants in (
        ("convnext_tiny", convnext.VARIANTS),
        ("efficientnet_b0", efficientnet.VARIANTS),
        ("regnety_002", regnet.VARIANTS),
    ):
        if name in variants:
            return Architecture(base, dict(variants[name]))
    return None


def transformers_convnet(config: Mapping[str, Any], where: str) -> Architecture | None:
    """Find a network of transformers by its `config.json`; None for other types.

    Raises:
      ValueError: the zoo lacks an option of the network, or the config is damaged.
    """
    read = _TRANSFORMERS.get(str(config["model_type"]))
    return None if read is None else read(config, where)


def _classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The number of classes as an option; {} for a backbone without a head."""
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith("ForImageClassification"):
        return {}
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels")
    return {"out_features": count} if count else {}


def _refuse(kind: str, where: str, key: str, value: Any, only: Any) -> None:
    if value != only:
        raise ValueError(
            f"{where} holds a {kind} with {key}={value!r}; this zoo has only "
            f"{key}={only!r}"
        )


def _whole_list(config: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = config.get(key)
    if not isinstance(value, list | tuple) or not value:
        value = [value]
    return tuple(whole(n, key, where) for n in value)


def _doubling(sizes: tuple[int, ...], key: str, kind: str, where: str) -> None:
    expected = tuple(sizes[0] * 2**i for i in range(len(sizes)))
    if sizes != expected:
        raise ValueError(
            f"{where} holds a {kind} with {key}={list(sizes)}; this zoo only has "
            "networks whose number of channels doubles from stage to stage"
        )


def _resnet(config: Mapping[str, Any], where: str) -> Architecture:
    kind = "resnet"
    for key, only in (
        ("hidden_act", "relu"),
        ("downsample_in_first_stage", False),
        ("downsample_in_bottleneck", False),
    ):
        _refuse(kind, where, key, config.get(key, only), only)
    block = config.get("layer_type", "bottleneck")
    if block not in ("basic", "bottleneck"):
        raise ValueError(
            f"{where} holds a resnet with layer_type={block!r}; this zoo has 'basic' "
            "and 'bottleneck'"
        )
    width = whole(config.get("embedding_size", 64), "embedding_size", where)
    sizes = _whole_list(config, "hidden_sizes", where)
    blocks = _whole_list(config, "depths", where)
    _doubling(sizes, "hidden_sizes", kind, where)
    expansion = 4 if block == "bottleneck" else 1
    _refuse(kind, where, "hidden_sizes[0]", sizes[0], expansion * width)
    channels = whole(config.get("num_channels", 3), "num_channels", where)
    more = _classes(config)
    if channels != 3:
        more["input_shape"] = (224, 224, channels)
    usual = {"width": width, "depth": 1, "block": block, "blocks": blocks}
    for name in resnet.NAMES:
        if resnet.variant(name) == usual:
            return Architecture(name, more)
    return Architecture("resnet50", {**usual, **more})


def _convnext(config: Mapping[str, Any], where: str) -> Architecture:
    kind = str(config["model_type"])
    second = kind == "convnextv2"
    act = config.get("hidden_act", "gelu")
    _refuse(kind, where, "hidden_act", act, "gelu")
    sizes = _whole_list(config, "hidden_sizes", where)
    _doubling(sizes, "hidden_sizes", kind, where)
    scale = float(config.get("layer_scale_init_value", 1e-6))
    options: dict[str, Any] = {
        "width": sizes[0],
        "depth": 1,
        "blocks": _whole_list(config, "depths", where),
    }
    if second:
        options |= {"grn": True, "layer_scale": None}
    elif scale != 1e-6:
        options["layer_scale"] = scale if scale > 0 else None
    more = {"head_eps": float(config.get("layer_norm_eps", 1e-12)), **_classes(config)}
    patch = whole(config.get("patch_size", 4), "patch_size", where)
    if patch != 4:
        more["patch_size"] = patch
    channels = whole(config.get("num_channels", 3), "num_channels", where)
    if channels != 3:
        more["input_shape"] = (224, 224, channels)
    for name in convnext.NAMES:
        if convnext.VARIANTS[name] == options:
            return Architecture(name, more)
    return Architecture("convnext_tiny", {**options, **more})


_TRANSFORMERS: Mapping[str, Callable[[Mapping[str, Any], str], Architecture]] = {
    "resnet": _resnet,
    "convnext": _convnext,
    "convnextv2": _convnext,
}
