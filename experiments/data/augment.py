"""Random augmentations of images: Pillow's operations with random arguments.

An operation is a pure function of an image and of `draws` uniform random numbers.
Grain's `random_map` draws them for each example from the seed and the example's place
in the run, so that they do not depend on processes and restarts. Pixels are 0..255.

No maintained library fits: dm-pix has neither RandAugment nor crops of images of
different sizes, albumentations is no longer maintained under a free licence, and
torchvision and Keras need their frameworks.
"""

import abc
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from mupax.zoo.preprocessing import DataConfig

from .. import checks
from ..checks import number, one_of, whole
from ..errors import UserError

#: Filters for resizing.
FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class Operation(abc.ABC):
    """A random operation on an image, which uses `draws` random numbers."""

    draws: ClassVar[int]

    @abc.abstractmethod
    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        """The new image; `u` are `draws` numbers in [0, 1)."""


# ----- Checks of options.


def _interval(name: str, value: Sequence[float]) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1]:
        raise UserError(f"{name} is {value}; it must be (low, high), 0 < low <= high")


# ----- Arithmetic of points.


def _between(low: float, high: float, u: float) -> float:
    return low + (high - low) * u


def _signed(magnitude: float, u: float) -> float:
    return magnitude * (2 * u - 1)


def _affine(
    image: Image.Image,
    a: float,
    b: float,
    d: float,
    e: float,
    fill: int,
    dx: float = 0.0,
    dy: float = 0.0,
) -> Image.Image:
    """Transform an image about its centre, then move it by dx and dy pixels.

    (a b; d e) maps points of the result to points of the image.
    """
    x, y = image.width / 2, image.height / 2
    to_x, to_y = x + dx, y + dy
    source = a, b, x - a * to_x - b * to_y, d, e, y - d * to_x - e * to_y
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        source,
        Image.Resampling.BILINEAR,
        fillcolor=_colour(image, fill),
    )


def _colour(image: Image.Image, fill: int) -> int | tuple[int, int, int]:
    return fill if image.mode == "L" else (fill,) * 3


# ----- Geometry.


@dataclasses.dataclass(frozen=True)
class Flip(Operation):
    """Flip left and right with this probability."""

    probability: float = 0.5
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        number(0, 1)("probability", self.probability)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        if u[0] >= self.probability:
            return image
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


@dataclasses.dataclass(frozen=True)
class Rotate(Operation):
    """Rotate about the centre, by an angle uniform in -degrees..degrees.

    Attributes:
      degrees: the largest angle; 10 as in the papers (Bordelon et al., App. A).
      fill: value of pixels from outside of the image.
    """

    degrees: float = 10.0
    fill: int = 0
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        number(0)("degrees", self.degrees)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        angle, fill = _signed(self.degrees, u[0]), _colour(image, self.fill)
        return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=fill)


@dataclasses.dataclass(frozen=True)
class AffineMap(Operation):
    """Shear, zoom and shift about the centre. See `Rotate` for rotations.

    The defaults are ours: the papers give no magnitudes (Bordelon et al., App. A).

    Attributes:
      shear: the largest angle, in degrees, along the horizontal.
      scale: the zoom is uniform between these two.
      translate: the largest shift, as a share of each side.
      fill: value of pixels from outside of the image.
    """

    shear: float = 10.0
    scale: tuple[float, float] = (0.8, 1.2)
    translate: float = 0.0
    fill: int = 0
    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        number(0)("shear", self.shear)
        number(0)("translate", self.translate)
        _interval("scale", self.scale)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        zoom = 1 / _between(*self.scale, u[0])
        slope = math.tan(math.radians(_signed(self.shear, u[1])))
        dx = _signed(self.translate * image.width, u[2])
        dy = _signed(self.translate * image.height, u[3])
        return _affine(image, zoom, zoom * slope, 0, zoom, self.fill, dx=dx, dy=dy)


@dataclasses.dataclass(frozen=True)
class PadCrop(Operation):
    """A random window, of the image's size, of the image with a black border.

    Attributes:
      pad: width of the border in pixels; 4 for CIFAR (He et al. 2016, 4.2).
    """

    pad: int = 4
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        whole(0)("pad", self.pad)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        x, y = (int(v * (2 * self.pad + 1)) - self.pad for v in u)
        return image.crop((x, y, x + image.width, y + image.height))


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Operation):
    """A box of random area and shape, resized to the size of the model's input.

    The crop of Inception (Szegedy et al. 2015), with torchvision's defaults and ten
    attempts. As the first operation, it decodes JPEG files at a reduced scale if the
    box is at least twice as large as the result.

    Attributes:
      scale: area of the box as a share of the image's, uniform between these two.
      ratio: width by height of the box, log-uniform between these two.
      interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
      size: (height, width) of the result; `Transform` sets it.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    size: tuple[int, int] | None = None
    draws: ClassVar[int] = 22

    def __post_init__(self) -> None:
        _interval("scale", self.scale)
        _interval("ratio", self.ratio)
        if self.scale[1] > 1:
            raise UserError(f"scale is {self.scale}; it must not exceed 1")
        one_of(*FILTERS)("interpolation", self.interpolation)

    def box(
        self, size: tuple[int, int], u: Sequence[float]
    ) -> tuple[float, float, float, float]:
        """(left, upper, right, lower) in an image of this (width, height)."""
        width, height = size
        low, high = map(math.log, self.ratio)
        for area, ratio in zip(u[2::2], u[3::2], strict=True):
            target = width * height * _between(*self.scale, area)
            aspect = math.exp(_between(low, high, ratio))
            w, h = math.sqrt(target * aspect), math.sqrt(target / aspect)
            if w <= width and h <= height:
                x, y = u[0] * (width - w), u[1] * (height - h)
                return x, y, x + w, y + h
        # No attempt fits: the largest central box of an allowed ratio.
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, height * aspect), min(height, width / aspect)
        x, y = (width - w) / 2, (height - h) / 2
        return x, y, x + w, y + h

    def draft(self, image: Image.Image, u: Sequence[float]) -> None:
        """Reduce the scale at which a JPEG file will be decoded."""
        assert self.size is not None
        left, upper, right, lower = self.box(image.size, u)
        shrink = min((lower - upper) / self.size[0], (right - left) / self.size[1])
        if shrink >= 2:
            width, height = image.size
            image.draft(None, (int(width / shrink), int(height / shrink)))

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        assert self.size is not None
        return image.resize(
            (self.size[1], self.size[0]),
            FILTERS[self.interpolation],
            box=self.box(image.size, u),
        )


# ----- Colour.


@dataclasses.dataclass(frozen=True)
class ColorJitter(Operation):
    """Random brightness, contrast and saturation, one after another.

    They are Pillow's enhancements. The defaults are ours: the papers give no magnitudes
    (Bordelon et al., App. A).

    Attributes:
      brightness: the factor is uniform in 1 - brightness..1 + brightness; 0 at least.
      contrast: the same, about the mean grey of the image.
      saturation: the same, about the grey of each pixel.
    """

    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number(0)(field.name, getattr(self, field.name))

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        for kind, most, draw in (
            (ImageEnhance.Brightness, self.brightness, u[0]),
            (ImageEnhance.Contrast, self.contrast, u[1]),
            (ImageEnhance.Color, self.saturation, u[2]),
        ):
            if most:
                image = kind(image).enhance(max(0.0, 1 + _signed(most, draw)))
        return image


@dataclasses.dataclass(frozen=True)
class RandAugment(Operation):
    """`num` random operations of fourteen, of one magnitude (Cubuk et al. 2020).

    Attributes:
      num: number of operations.
      magnitude: 0..30; 9 in the paper's ImageNet runs.
      fill: value of pixels from outside of the image.
    """

    num: int = 2
    magnitude: float = 9.0
    fill: int = 0
    draws: ClassVar[int] = 2 * 8

    def __post_init__(self) -> None:
        whole(1, 8)("num", self.num)
        number(0, 30)("magnitude", self.magnitude)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        for choice, sign in zip(u[: self.num], u[8 : 8 + self.num], strict=True):
            change = _CHANGES[int(choice * len(_CHANGES))]
            level = self.magnitude / 30
            image = change(image, level, -1.0 if sign < 0.5 else 1.0, self.fill)
        return image


Change = Callable[[Image.Image, float, float, int], Image.Image]


def _enhancer(kind: Any) -> Change:
    def enhance(image: Image.Image, level: float, sign: float, _: int) -> Image.Image:
        return kind(image).enhance(1 + sign * 0.9 * level)

    return enhance


def _mover(move: Callable[[Image.Image, float, int], Image.Image]) -> Change:
    return lambda image, level, sign, fill: move(image, sign * level, fill)


_SHIFT = 150 / 331  # of a side

# The paper's operations, with the magnitudes of its code (and of torchvision) at 30.
_CHANGES: tuple[Change, ...] = (
    lambda image, level, sign, fill: image,
    lambda image, level, sign, fill: ImageOps.autocontrast(image),
    lambda image, level, sign, fill: ImageOps.equalize(image),
    lambda image, level, sign, fill: ImageOps.solarize(image, 255 - int(255 * level)),
    lambda image, level, sign, fill: ImageOps.posterize(image, 8 - round(4 * level)),
    _enhancer(ImageEnhance.Color),
    _enhancer(ImageEnhance.Contrast),
    _enhancer(ImageEnhance.Brightness),
    _enhancer(ImageEnhance.Sharpness),
    _mover(lambda image, x, fill: Rotate(30, fill)(image, [(1 + x) / 2])),
    _mover(lambda image, x, fill: _affine(image, 1, 0.3 * x, 0, 1, fill)),
    _mover(lambda image, x, fill: _affine(image, 1, 0, 0.3 * x, 1, fill)),
    _mover(lambda i, x, fill: _affine(i, 1, 0, 0, 1, fill, dx=_SHIFT * i.width * x)),
    _mover(lambda i, x, fill: _affine(i, 1, 0, 0, 1, fill, dy=_SHIFT * i.height * x)),
)


# ----- Operations of a config.

OPERATIONS: dict[str, type[Operation]] = {
    "flip": Flip,
    "rotate": Rotate,
    "affine": AffineMap,
    "pad_crop": PadCrop,
    "random_resized_crop": RandomResizedCrop,
    "color_jitter": ColorJitter,
    "rand_augment": RandAugment,
}


def parse(augment: Iterable[str | Mapping[str, Any]]) -> tuple[Operation, ...]:
    """The operations of a config, in order.

    Args:
      augment: names of `OPERATIONS`, or {"name": ..., option: value, ...}.

    Raises:
      UserError: an unknown name or option, or a value out of range.

    Examples:
      >>> parse(["flip", {"name": "rotate", "degrees": 15}])
      (Flip(probability=0.5), Rotate(degrees=15, fill=0))
    """
    if isinstance(augment, str):
        raise UserError(
            f"augment is {augment!r}; it must be a tuple, e.g. ({augment!r},)"
        )
    return tuple(_operation(entry) for entry in augment)


def _operation(entry: str | Mapping[str, Any]) -> Operation:
    named = {"name": entry} if isinstance(entry, str) else entry
    options = checks.options("a value in augment", named)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in OPERATIONS:
        raise UserError(
            f"there is no augmentation {checks.shown(name)}; choose one of "
            f"{', '.join(OPERATIONS)}"
        )
    kind = OPERATIONS[name]
    options_of_kind = [p for p in inspect.signature(kind).parameters if p != "size"]
    for option in options:
        if option not in options_of_kind:
            raise UserError(
                f"the augmentation {name!r} has no option {option!r}; its options are "
                f"{', '.join(options_of_kind)}"
            )
    try:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return kind(**values)
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"the augmentation {name!r}: {error}") from error


# ----- From an image of any size to an example of a batch.

#: Modes of grey images in Pillow.
GREY = ("1", "L", "I;16", "I;16L", "I;16B", "I;16N")


def eight_bits(image: Image.Image) -> Image.Image:
    """An image as grey ("L") or "RGB"; what is transparent becomes white.

    Raises:
      ValueError: its pixels have 32 bits.
    """
    if image.mode.startswith("I;16"):  # Pillow would clip it to 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels have 32 bits (mode {image.mode!r} of Pillow), whose value "
            "of white is unknown; save it with 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
    return image.convert("L" if image.mode in GREY else "RGB")


def unnormalized(shape: tuple[int, int, int], **options: Any) -> DataConfig:
    """The preprocessing of images whose mean and standard deviation are not known."""
    channels = shape[2]
    return DataConfig(
        size=shape, mean=(0.0,) * channels, std=(1.0,) * channels, **options
    )


class Transform:
    """Decodes, augments and resizes one image.

    Args:
      operations: from `parse`; none for evaluation.
      config: size, crop and filter, if no operation crops. 1 channel is grey, 3 are
        RGB. Its mean pads images for the crop mode "border".
      white: the raw value of a white pixel.

    As in timm and transformers, an image is resized to a whole number of pixels and
    then cropped at whole pixels.
    """

    def __init__(
        self, operations: Sequence[Operation], config: DataConfig, white: int = 255
    ):
        self._config, self._size = config, config.size[:2]
        self._mode = "L" if config.size[2] == 1 else "RGB"
        mean = np.rint(white * np.asarray(config.mean))
        fill = np.clip(mean, 0, 255).astype(int).tolist()
        self._fill = fill[0] if self._mode == "L" else tuple(fill)
        self._filter = FILTERS[config.interpolation]
        self.operations = tuple(
            dataclasses.replace(op, size=self._size)
            if isinstance(op, RandomResizedCrop)
            else op
            for op in operations
        )
        self._resizes = any(isinstance(op, RandomResizedCrop) for op in operations)
        #: Number of random numbers per example.
        self.draws = sum(op.draws for op in operations)

    def __call__(self, image: Image.Image, u: Sequence[float]) -> Image.Image:
        """The image for a batch; `u` are `draws` numbers in [0, 1)."""
        if self.operations and isinstance(self.operations[0], RandomResizedCrop):
            self.operations[0].draft(image, u[: self.operations[0].draws])
        image = eight_bits(image)
        if image.mode != self._mode:
            image = image.convert(self._mode)
        if not self._resizes:
            image = self._fit(image)
        start = 0
        for op in self.operations:
            image = op(image, u[start : start + op.draws])
            start += op.draws
        return image

    def _fit(self, image: Image.Image) -> Image.Image:
        height, width = self._size
        if image.size == (width, height) and self._config.crop == 1:
            return image
        wide, high = self._resized(*image.size)
        left, upper = self._cut(wide - width), self._cut(high - height)
        if self._config.crop_mode == "border":
            canvas = Image.new(self._mode, (width, height), self._fill)
            canvas.paste(image.resize((wide, high), self._filter), (-left, -upper))
            return canvas
        box = (left, upper, left + width, upper + height)
        return image.resize((wide, high), self._filter).crop(box)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) to which an image is resized before it is cropped."""
        high, wide = (math.floor(side / self._config.crop) for side in self._size)
        if self._config.crop_mode == "squash":
            return wide, high
        if self._config.crop_mode == "center" and wide == high:  # torchvision's Resize
            longer = int(wide * max(width, height) / min(width, height))
            return (wide, longer) if width <= height else (longer, wide)
        # timm's ResizeKeepRatio.
        closest = max if self._config.crop_mode == "border" else min
        ratio = closest(width / wide, height / high)
        return max(round(width / ratio), 1), max(round(height / ratio), 1)

    def _cut(self, spare: int) -> int:
        """Pixels that are cut off before the crop, or, if negative, added."""
        if spare < 0:
            return -(-spare // 2)
        rounds_down = self._config.crop_rounding == "down"
        return spare // 2 if rounds_down else round(spare / 2)
