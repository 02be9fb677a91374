"""Map architectures of other libraries to models of the zoo and their options.

The keys of a file do not determine the architecture: timm's resnetblur50 has the keys
and shapes of resnet50, but computes something else. So the architecture is read from
the repository's `config.json`, and only those of a `Record` are accepted.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mupax.optim.rules.parametrizations import closest

from ..registry import Record, class_options, default_options, records
from .configs import Config, whole


class Architecture(NamedTuple):
    """A model of the zoo that computes what another library's network computes.

    Attributes:
      model: a name of `zoo.list_models()`.
      options: for `zoo.create`, where they differ from that model's defaults.
    """

    model: str
    options: dict[str, Any]


def identify(config: Mapping[str, Any], where: str) -> Architecture | None:
    """Find the architecture that a `config.json` describes.

    Args:
      config: contents of the config.json of a repository of timm, or of transformers.
      where: the repository or directory, for messages.

    Returns:
      The architecture; None if the config names none.

    Raises:
      ValueError: the zoo lacks the architecture or one of its options, or a value has
        the wrong type.

    Examples:
      >>> from mupax.zoo.weights.architectures import identify
      >>> identify({"architecture": "resnet50", "num_classes": 1000}, "timm/x")
      Architecture(model='resnet50', options={'out_features': 1000})
      >>> identify({"model_type": "vit", "qkv_bias": False}, "x").options
      {'norm_eps': 1e-12, 'out_features': 0, 'qkv_bias': False}
    """
    try:
        if "architecture" in config:
            return _timm(config, where)
        if "model_type" in config:
            return _transformers(Config(config, where))
    except KeyError as error:
        raise ValueError(f"the config.json of {where} lacks {error}") from None
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(
            f"the config.json of {where} holds a value of the wrong type ({error}); "
            "it may be damaged, so download it again"
        ) from error
    return None


# Options that networks of one name differ in. Others make another network.
_ADJUSTABLE = {
    *("input_shape", "out_features", "norm_eps", "head_eps", "nonlinearity"),
    *("drop_rest", "layer_scale", "qkv_bias", "key_bias", "class_token", "rope_theta"),
    *("readout_bias", "vocab_size", "context", "tied", "head"),
}


def _value(options: Mapping[str, Any], key: str) -> Any:
    """An option, with the value that None stands for."""
    value = options.get(key)
    return 64 if key == "head_dim" and value is None else value


def named(record: Record, options: Mapping[str, Any]) -> Architecture:
    """The model of a family with these options, and the options that it lacks.

    It is the one of `record.sizes` that differs least, in adjustable options only; else
    `record.base` with every option that differs.
    """
    full = {**class_options(record.model), **options}
    fits = []
    for name in record.sizes:
        known = default_options(name)
        other = {k: v for k, v in full.items() if _value(known, k) != _value(full, k)}
        scaled = [o.get("layer_scale") is not None for o in (known, full)]
        if other.keys() <= _ADJUSTABLE and scaled[0] == scaled[1]:
            fits.append(Architecture(name, other))
    if fits:
        return min(fits, key=lambda fit: len(fit.options))
    base = _base(record)
    known = default_options(base)
    return Architecture(base, {k: v for k, v in full.items() if known.get(k) != v})


def timm_architecture(name: str) -> Architecture | None:
    """The model that timm's architecture of this name is; None if the zoo lacks it."""
    for record in records():
        if name in record.sizes and name in record.timm:
            return Architecture(name, {})
        if name in record.timm:
            return named(record, record.timm[name])
    return None


def timm_names() -> dict[str, list[str]]:
    """By model of the zoo, timm's names of the same architecture.

    Networks of timm that no model is named after are left out.
    """
    by_model: dict[str, list[str]] = {}
    for record in records():
        for name in record.timm:
            model = named(record, record.timm[name]).model
            if name == model or model != _base(record):
                by_model.setdefault(model, []).append(name)
    return by_model


def _base(record: Record) -> str:
    return record.base or next(iter(record.sizes))


# --- transformers ---


def _transformers(config: Config) -> Architecture:
    if "quantization_config" in config.given:
        raise ValueError(
            f"{config.where} holds quantized weights, which are not supported; pass "
            "the repository of the original weights"
        )
    for record in records():
        if config.kind in record.transformers:
            return named(record, record.transformers[config.kind](config))
    known = sorted(kind for record in records() for kind in record.transformers)
    raise ValueError(
        f"{config.where} holds a {config.kind!r} of transformers; the supported types "
        f"are {', '.join(known)}; for another image model pass timm's repository, e.g. "
        "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
    )


# --- timm ---

# Names of pooling: ours to timm's.
_POOLINGS = {"token": "token", "mean": "avg", "norm_mean": "avg", "attention": "map"}
# Arguments of timm's networks that are read here. Others would change the function.
_KNOWN_ARGUMENTS = {"img_size", "num_classes", "in_chans", "global_pool"}


def _timm(config: Mapping[str, Any], where: str) -> Architecture:
    name = str(config["architecture"])
    known = timm_architecture(name)
    if known is None:
        raise ValueError(_refusal(name, where))
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

    options, usual = dict(known.options), default_options(known.model)
    pool = {**usual, **options}.get("pool")  # of a ViT, which may lack a readout
    classes = get("num_classes")
    if classes:  # 0 for a backbone without a head
        options["out_features"] = whole(classes, "num_classes", where)
    elif pool and classes == 0:
        options["out_features"] = 0
    size = cfg.get("input_size")
    if size is not None:
        channels, height, width = _sizes(size, where)
        side = arguments.get("img_size")
        if side is not None:
            height, width = (side, side) if isinstance(side, int) else side
        if pool is None:  # takes images of any size
            height, width, _ = usual["input_shape"]
        options["input_shape"] = (height, width, channels)
        if options["input_shape"] == usual["input_shape"]:
            del options["input_shape"]
    pooling, ours = get("global_pool"), _POOLINGS[pool] if pool else "avg"
    if ours == "token" and pooling == "avg":
        # timm keeps the class token, which the patches attend to.
        options |= {"pool": "mean", "class_token": True}
    elif pooling not in (None, "", ours):
        raise ValueError(
            f"{where} holds a {name!r} with global_pool={pooling!r}; this zoo supports "
            f"{'token and avg' if ours == 'token' else ours}"
        )
    return Architecture(known.model, options)


def _refusal(name: str, where: str) -> str:
    close = closest(name, [known for record in records() for known in record.timm])
    near = f"; the nearest is {close!r}" if close else ""
    return (
        f"{where} holds a {name!r}; this zoo has no such model{near}; `mupax models` "
        "lists the networks of timm that it reads"
    )


def _sizes(value: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        value = [None]
    channels, height, width = (whole(v, "input_size", where) for v in value)
    return channels, height, width
