"""`Config`: the config.json of a network of another library, read with checks."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from .files import is_finite

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The contents of a config.json.

    Attributes:
      given: the contents.
      where: the repository or directory, for messages.
    """

    given: Mapping[str, Any]
    where: str

    @property
    def kind(self) -> str:
        """The model type of transformers."""
        return str(self.given["model_type"])

    def __getitem__(self, key: str) -> Any:
        return self.given[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default without one."""
        return self.given.get(key, default)

    def over(self, defaults: Mapping[str, Any]) -> "Config":
        """The config with defaults for what is missing or None."""
        given = {k: v for k, v in self.given.items() if v is not None}
        return dataclasses.replace(self, given={**defaults, **given})

    def whole(self, key: str, default: Any = None) -> int:
        """A whole number, at least 1; without a default it must be there.

        Raises:
          KeyError: it is missing.
          ValueError: the value is something else; the message names the key.
        """
        return whole(self._value(key, default), key, self.where)

    def _value(self, key: str, default: Any) -> Any:
        return self[key] if default is None else self.get(key, default)

    def number(self, key: str, default: Any = None) -> float:
        """A positive number.

        Raises:
          ValueError: the value is something else; the message names the key.
        """
        return positive(self._value(key, default), key, self.where)

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, at least 1.

        Raises:
          ValueError: the value is something else; the message names the key.
        """
        value = self.get(key)
        values = value if isinstance(value, list | tuple) and value else [value]
        return tuple(whole(n, key, self.where) for n in values)

    def doubling(self, key: str) -> tuple[int, ...]:
        """A list of channels, which double from stage to stage.

        Raises:
          ValueError: the value is something else; the message names the key.
        """
        sizes = self.wholes(key)
        if sizes != tuple(sizes[0] * 2**i for i in range(len(sizes))):
            raise self.refusal(
                f"{key}={list(sizes)}",
                "only networks whose number of channels doubles from stage to stage",
            )
        return sizes

    def images(self) -> dict[str, Any]:
        """The options of a network for images: channels, and classes if it has any."""
        channels, classes = self.whole("num_channels", 3), self.classes()
        return {
            **({"input_shape": (224, 224, channels)} if channels != 3 else {}),
            **({"out_features": classes} if classes else {}),
        }

    def only(self, **values: Any) -> None:
        """Raise a `ValueError` if an option has another value than these."""
        for key, only in values.items():
            if self.get(key, only) != only:
                raise self.refusal(
                    f"{key}={reprlib.repr(self[key])}", f"only {key}={only!r}"
                )

    def refusal(self, has: str, ours: str) -> ValueError:
        """The error for an option of the network that the zoo lacks."""
        return ValueError(
            f"{self.where} holds a {self.kind} with {has}; this zoo has {ours}"
        )

    def activation(self, key: str, default: str) -> str:
        """Our name of a nonlinearity.

        Raises:
          ValueError: the zoo lacks it.
        """
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            raise self.refusal(f"{key}={reprlib.repr(name)}", ", ".join(_ACTIVATIONS))
        return _ACTIVATIONS[name]

    @property
    def written_by(self) -> str:
        """The class in transformers that wrote the files; "" if unknown."""
        return str((self.get("architectures") or [""])[0])

    def classes(self, default: int | None = None) -> int:
        """Number of classes; 0 for a network without a head."""
        if not self.written_by.endswith("ForImageClassification"):
            return 0
        labels, key = self.get("id2label"), "num_labels"
        if isinstance(labels, Mapping):
            return whole(len(labels), key, self.where)
        count = self.get(key, default)
        return 0 if count is None else whole(count, key, self.where)


def whole(value: Any, key: str, where: str) -> int:
    """Return a value of a config after checking that it is an int, at least 1.

    Raises:
      ValueError: it is not; the message names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the config.json of {where} says {key}={reprlib.repr(value)}, which must "
            "be a whole number, at least 1; it may be damaged, so download it again"
        )
    return value


def positive(value: Any, key: str, where: str) -> float:
    """Return a value of a config after checking that it is a positive number.

    Raises:
      ValueError: it is not; the message names the key.
    """
    if not is_finite(value) or value <= 0:
        raise ValueError(
            f"the config.json of {where} says {key}={reprlib.repr(value)}, which must "
            "be a positive number; it may be damaged, so download it again"
        )
    return float(value)
