"""`DataConfig`: the preprocessing of images that a model's weights expect."""

import contextlib
import dataclasses
import logging
import math
import numbers
import reprlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from flax import nnx

from .family import Count, Range, check_values
from .registry import default_options, recipe

LARGEST_SIDE = 2**15  # pixels, as codecs and resizing support
_Size = Annotated[
    tuple[int, int, int],
    Range(
        f"(height, width, channels), each a whole number from 1 to {LARGEST_SIDE}",
        lambda size: (
            len(size) == 3
            and all(type(n) is int and 0 < n <= LARGEST_SIDE for n in size)
        ),
    ),
]
_Labels = Annotated[
    tuple[str, ...],
    Range("a tuple of strings", lambda names: all(isinstance(n, str) for n in names)),
]
_Crop = Annotated[float, Range("a number from 0.01 to 1", lambda x: 0.01 <= x <= 1)]
#: Lowest and highest mean and std, where white is 1; pixels are normalized in float32.
STATISTICS = {"mean": (-1e6, 1e6), "std": (1e-6, 1e6)}
logger = logging.getLogger("mupax.zoo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The preprocessing of images that a model's weights expect, and class names.

    Pixels are scaled to [0, 1] (black to white); the input is (pixel - mean) / std.

    Attributes:
      size: (height, width, channels) of the input.
      mean: per channel, on the [0, 1] scale, e.g. 0.485.
      std: per channel, on the [0, 1] scale.
      interpolation: filter for resizing: "nearest", "bilinear", "bicubic" or "lanczos".
      crop: fraction of the shorter side that the center crop of evaluation keeps. Both
        sides of `size` over `crop`, rounded down, are the size before the crop.
      crop_mode: "center" keeps the aspect ratio; "squash" resizes both sides; "border"
        fits the longer side and pads with the mean.
      crop_rounding: where the crop is if it cuts off an odd number n of pixels: "even"
        for round(n / 2) before it, as in timm and torchvision; "down" for n // 2, as
        in transformers.
      labels: names of the classes, in order; None if they are not known.
      projection: size of the embedding that the readout projects to, where it was
        trained to be compared with embeddings of text, as in CLIP; None for a readout
        that gives logits of classes, and for no readout.

    Raises:
      ValueError: a value is out of range; the message names the field.

    Examples:
      >>> config = DataConfig(size=(224, 224, 3), mean=(0.485, 0.456, 0.406),
      ...                     std=(0.229, 0.224, 0.225), interpolation="bicubic",
      ...                     crop=0.875)
      >>> config.crop_mode
      'center'
    """

    size: _Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    crop: _Crop = 1.0
    crop_mode: Literal["center", "squash", "border"] = "center"
    crop_rounding: Literal["even", "down"] = "even"
    labels: _Labels | None = None
    projection: Count | None = None

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std", "labels"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_values(self)
        for name, (low, high) in STATISTICS.items():
            value = getattr(self, name)
            if len(value) != self.size[2] or not all(
                _lies(v, low, high) for v in value
            ):
                raise ValueError(
                    f"{name}={reprlib.repr(value)} must be one number for each of "
                    f"{self.size[2]} channels, from {low:g} to {high:g}, where white "
                    "is 1"
                )
        if self.projection is not None and self.labels is not None:
            raise ValueError(
                "a readout is a projection or has labels, not both: projection="
                f"{self.projection} and {len(self.labels)} labels were given"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON-ready data."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
            if value is not None
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "DataConfig":
        """Build from the data of `to_json`.

        Raises:
          ValueError: a key is unknown or missing, or a value out of range.
        """
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"the preprocessing cannot be read: {error}") from None

    def differences(self, other: "DataConfig") -> list[str]:
        """List differences from another config, e.g. "crop 0.95 (not 0.875)".

        Labels and projections are not compared. Means and standard deviations differ
        from 1% of a standard deviation on.
        """
        different = []
        for name in ("size", "interpolation", "crop", "crop_mode", "crop_rounding"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and (name != "crop" or abs(mine - theirs) > 1e-3):
                different.append(f"{name} {_short(mine)} (not {_short(theirs)})")
        if self.size[2] == other.size[2]:
            for name in ("mean", "std"):
                mine, theirs = getattr(self, name), getattr(other, name)
                apart = (
                    abs(a - b) / std
                    for a, b, std in zip(mine, theirs, self.std, strict=True)
                )
                if max(apart) > 0.01:
                    different.append(f"{name} {_short(mine)} (not {_short(theirs)})")
        return different


def _lies(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number, not NaN, from `low` to `high`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_short, value)) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# Not an attribute: a model's static parts are compared whenever it is traced.
_KNOWN: weakref.WeakKeyDictionary[nnx.Module, DataConfig] = weakref.WeakKeyDictionary()


def data_config(model: nnx.Module) -> DataConfig:
    """Return the preprocessing that a model's weights expect.

    Args:
      model: from `zoo.load_pretrained`, if the source states its preprocessing, or one
        for which `set_data_config` was called.

    Returns:
      The config. After loading with another `input_shape`, its size is that of the
      model; after loading with another `out_features`, it has no labels and no
      projection.

    Raises:
      ValueError: the preprocessing is unknown.

    Examples:
      >>> from mupax import zoo
      >>> config = zoo.data_config(zoo.load_pretrained("cnn_mnist"))
      >>> config.size, config.interpolation, config.crop
      ((28, 28, 1), 'bilinear', 1.0)
    """
    known = known_data_config(model)
    if known is None:
        raise ValueError(
            f"the preprocessing of this {type(model).__name__} is not known, because "
            "it was not loaded from a source that states it; call "
            "zoo.set_data_config(model, zoo.DataConfig(...))"
        )
    return known


def known_data_config(model: nnx.Module) -> DataConfig | None:
    """`data_config`, or None if the preprocessing is unknown."""
    return _KNOWN.get(model)


def set_data_config(model: nnx.Module, config: DataConfig) -> None:
    """Set the preprocessing that a model's weights expect; `zoo.save` writes it.

    Args:
      model: of the zoo. Copies of the model do not keep the config.
      config: replaces the previous one.

    Raises:
      ValueError: a model that does not take images of that many channels, or a number
        of labels or a projection that is not its number of outputs.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=8, depth=2, rngs=nnx.Rngs(0))
      >>> config = zoo.DataConfig(size=(8, 8, 1), mean=(0.3,), std=(0.4,))
      >>> zoo.set_data_config(model, config)
      >>> zoo.data_config(model).mean
      (0.3,)
    """
    if not isinstance(config, DataConfig):
        raise ValueError(f"{config!r} must be a zoo.DataConfig")
    shape = input_shape(model)
    for what, ours, theirs in (
        ("channels", config.size[2], shape[2] if shape else None),
        ("labels", config.labels and len(config.labels), _classes(model)),
        ("outputs as projection", config.projection, _classes(model)),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(
                f"the preprocessing has {ours} {what}, but the model has {theirs}; "
                "pass the config that belongs to the model"
            )
    _KNOWN[model] = config


def remember(
    model: nnx.Module, config: DataConfig | None, *, resized: bool = False
) -> None:
    """Set a model's config from that of its source, adapted to the model's sizes.

    Args:
      model: loaded from the source.
      config: of the source; None if it has none.
      resized: whether the user gave the model another input shape.
    """
    if config is None:
        return
    shape = input_shape(model)
    if shape is not None and shape[2] != config.size[2]:
        logger.warning(
            f"the preprocessing of the source is for {config.size[2]} channels, but "
            f"the model takes {shape[2]}; the preprocessing is ignored"
        )
        return
    labels, projection, outputs = config.labels, config.projection, _classes(model)
    if labels is not None and outputs != len(labels):
        labels = None
    if outputs != projection:
        projection = None
    size = config.size if shape is None or not resized else shape
    _KNOWN[model] = dataclasses.replace(
        config, size=size, labels=labels, projection=projection
    )


def input_shape(model: nnx.Module) -> tuple[int, int, int] | None:
    """The image shape that a model was created for; None for other models."""
    try:
        name, options = recipe(model)
    except ValueError:
        return None
    shape = {**default_options(name), **options}.get("input_shape")
    return tuple(shape) if shape is not None and len(shape) == 3 else None


def _classes(model: nnx.Module) -> int | None:
    plan = getattr(model, "plan", None)
    return plan["classes"].size if plan is not None and plan.has("classes") else None


# --- configs of other libraries ---


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn the errors of damaged data into a `ValueError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        name = type(error).__name__
        raise ValueError(f"{what} is damaged ({name}: {error})") from None


@_reading("the preprocessing of timm")
def read_timm(config: Mapping[str, Any]) -> DataConfig | None:
    """Read the preprocessing from a `config.json` of timm; None if it states none.

    As in timm, separate sizes and crops for testing are ignored.

    Args:
      config: the whole file. `pretrained_cfg` may be a section of it, or its top level.

    Raises:
      ValueError: a value is out of range.

    Examples:
      >>> cfg = {"input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.5] * 3,
      ...        "interpolation": "bicubic", "crop_pct": 0.9}
      >>> read_timm({"pretrained_cfg": cfg}).crop
      0.9
    """
    inner = config.get("pretrained_cfg")
    cfg = inner if isinstance(inner, Mapping) else config
    if not {"mean", "std", "input_size"} <= cfg.keys():
        return None
    channels, height, width = cfg["input_size"]
    crop = cfg.get("crop_pct")
    interpolation: Any = cfg.get("interpolation") or "bilinear"
    mode: Any = cfg.get("crop_mode") or "center"
    if interpolation == "random":
        interpolation = "bilinear"
    names = config.get("label_names", cfg.get("label_names"))
    described = config.get("label_descriptions", cfg.get("label_descriptions"))
    if names and isinstance(described, Mapping):
        names = [described.get(name, name) for name in names]
    return DataConfig(
        size=(height, width, channels),
        mean=_floats(cfg["mean"], channels),
        std=_floats(cfg["std"], channels),
        interpolation=interpolation,
        crop=0.875 if crop is None else float(crop),
        crop_mode=mode,
        labels=tuple(map(str, names)) if names else None,
        projection=None if names else _timm_projection(config, cfg),
    )


# Sizes of the embeddings of all CLIP towers of timm.
_PROJECTIONS = (512, 640, 768, 1024, 1152, 1280)


def _timm_projection(config: Mapping[str, Any], cfg: Mapping[str, Any]) -> int | None:
    """The size of the projection of a CLIP tower of timm; None for other networks.

    timm writes it as a number of classes. Networks that were fine-tuned from a tower
    have its architecture and other numbers of classes, such as 1000.
    """
    name = f"{config.get('architecture')} {cfg.get('architecture')} {cfg.get('tag')}"
    size = config.get("num_classes", cfg.get("num_classes"))
    return size if "clip" in name and size in _PROJECTIONS else None


# Numbers of Pillow's filters.
_FILTERS: Mapping[int, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@_reading("the preprocessing of transformers")
def read_transformers(
    config: Mapping[str, Any], processor: Mapping[str, Any]
) -> DataConfig | None:
    """Read the preprocessing from a `preprocessor_config.json` of transformers.

    Args:
      config: contents of the `config.json` in the same directory, for the labels.
      processor: contents of the `preprocessor_config.json`.

    Returns:
      The config; None if the file states no size.

    Raises:
      ValueError: a value is out of range.

    Examples:
      >>> config = read_transformers({"id2label": {"0": "cat", "1": "dog"}}, {
      ...     "size": {"height": 224, "width": 224}, "resample": 2,
      ...     "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
      >>> config.crop_mode, config.labels
      ('squash', ('cat', 'dog'))
    """
    given = processor.get("size")
    if given is None:
        return None
    size: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    edge = size.get("shortest_edge")
    if isinstance(given, int):
        # Old files: the shorter side for CLIP and ConvNeXt, which crop, else both.
        cropping = "crop_pct" in processor or processor.get("crop_size")
        edge, size = (given, {}) if cropping else (None, {"height": given})
    crop_size = processor.get("crop_size")
    mode: Any = "center"
    crop, side = 1.0, _pair(size) if edge is None else (edge, edge)
    if processor.get("do_center_crop", crop_size is not None) and crop_size:
        both = crop_size if isinstance(crop_size, Mapping) else {"height": crop_size}
        cut = _pair(both)
        crop = _crop_of(cut, side)
        if edge is not None and cut[0] != cut[1]:
            raise ValueError(
                f"a crop of {cut[0]} x {cut[1]} pixels after resizing the shorter side "
                f"to {edge} is not supported"
            )
        mode = "center" if edge is not None else "squash"
        side = cut
    elif edge is None:
        mode = "squash"
    elif "crop_pct" in processor:
        # ConvNeXt: images below 384 pixels are cut out of larger ones.
        crop = float(processor["crop_pct"]) if edge < 384 else 1.0
        mode = "center" if edge < 384 else "squash"
    channels = int(config.get("num_channels") or 3)
    mean, std = [0.0] * channels, [1.0] * channels
    if processor.get("do_normalize", True) and "image_mean" in processor:
        mean, std = list(processor["image_mean"]), list(processor["image_std"])
    factor = 255 * processor.get("rescale_factor", 1 / 255)
    if not processor.get("do_rescale", True):
        factor = 255.0
    if processor.get("rescale_offset"):
        mean = [x + 1 for x in mean]
    # As many outputs as the network has are what `remember` keeps.
    is_clip = config.get("model_type") in ("clip", "clip_vision_model")
    projection = int(config.get("projection_dim", 512)) if is_clip else None
    number = processor.get("resample", 2)
    if number not in _FILTERS:
        raise ValueError(f"resample={number} is not a filter of the data pipeline")
    return DataConfig(
        size=(*side, channels),
        mean=_floats([x / factor for x in mean], channels),
        std=_floats([x / factor for x in std], channels),
        interpolation=_FILTERS[number],
        crop=crop,
        crop_mode=mode,
        crop_rounding="even" if (mode, crop) == ("squash", 1) else "down",
        labels=None if projection else read_id2label(config),
        projection=projection,
    )


def read_id2label(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Read the labels from a `config.json` of transformers, in order; None without.

    Without names, transformers writes LABEL_0, LABEL_1, ..., which count as none.
    """
    table = config.get("id2label")
    if not isinstance(table, Mapping) or not table:
        return None
    by_number = {int(key): str(value) for key, value in table.items()}
    if set(by_number) != set(range(len(by_number))):
        return None
    labels = tuple(by_number[i] for i in range(len(by_number)))
    made_up = all(label == f"LABEL_{i}" for i, label in enumerate(labels))
    return None if made_up else labels


def _pair(size: Mapping[str, Any]) -> tuple[int, int]:
    height = size.get("height", size.get("width"))
    if height is None:
        raise ValueError(f"size={dict(size)} must have height and width")
    return height, size.get("width", height)


def _crop_of(cut: tuple[int, int], sides: tuple[int, int]) -> float:
    """The `crop` of a `DataConfig` whose sides before the crop are exactly these."""
    crop = cut[0] / sides[0]
    if math.floor(cut[0] / crop) < sides[0]:  # the quotient was rounded up
        crop = math.nextafter(crop, 0)
    if crop > 1 or sides != tuple(math.floor(n / crop) for n in cut):
        raise ValueError(
            f"a crop of {cut[0]} x {cut[1]} pixels of an image of {sides[0]} x "
            f"{sides[1]} is not supported"
        )
    return crop


def _floats(values: Iterable[Any], channels: int) -> tuple[float, ...]:
    rounded = tuple(round(float(v), 10) for v in values)
    # Some files hold three means, for RGB, although the model has one channel.
    return rounded[:1] if channels == 1 else rounded
