"""Scale an optimizer's hyperparameters with batch size and training length.

κ is the base's number of steps over the target's: κ_B/κ_D, the ratio of batch sizes
over that of training lengths in examples. A gradient that is mostly noise shrinks by
κ^-½ in a batch that is κ times as large. The noise of κ steps adds up to κ^½ times that
of one step. So a step must be κ^½ times as large, and the rules follow:

    desired update Δ      κ^½
    raw gradient g        κ^-½
    memory β              β^κ
    decay of a step       κ
    number of steps       1/κ

With `length_exponent` e, Δ has κ_B^½ κ_D^-e in place of κ^½.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

_LENGTH = "Mlodozeniec et al. 2025 (arXiv:2512.22382)"
SOURCES: Mapping[str, str] = {
    "sgd": "linear rule: Goyal et al. 2017 (arXiv:1706.02677), section 2.1",
    "adam": "square-root rule: Malladi et al. 2022 (arXiv:2205.10287)",
    "relative": "square-root rule: You et al. 2020 (arXiv:1904.00962)",
}
_EXTENSION = "square-root rule, our extension: no SDE of this optimizer is known"


@dataclasses.dataclass(frozen=True)
class TrainingScale:
    """Ratios of batch size and training length, target over base.

    The rules keep the stochastic differential equation of training the same. They hold
    while gradients are mostly noise, i.e. below the critical batch size, and for small
    learning rates.

    Args:
      batch: κ_B, ratio of the batch sizes in examples (or tokens).
      examples: κ_D, ratio of the numbers of examples (or tokens) in the whole training.
      length_exponent: e, by which the desired update falls with length, as κ_D^-e. ½
        keeps the equation the same. Measured were 0.32 (Ren et al. 2026,
        arXiv:2603.28743, Muon on a sphere) and 0.3 (Marin's Delphi,
        openathena.ai/blog/delphi, AdamH).

    Raises:
      ValueError: a ratio is not positive and finite, or the exponent not between 0 and
        1.

    Source: Malladi et al. 2022 (arXiv:2205.10287), section 5 (batch size); Mlodozeniec
    et al. 2025 (arXiv:2512.22382) (length); Wang & Aitchison 2024 (arXiv:2405.13698)
    (weight decay); Busbridge et al. 2023 (arXiv:2307.13813) (EMA).

    Examples:
      >>> larger = TrainingScale(batch=4.0)
      >>> larger.kappa, larger.update, larger.gradient
      (4.0, 2.0, 0.5)
      >>> round(larger.beta(0.9), 4), larger.steps(1000)
      (0.6561, 250.0)
      >>> round(TrainingScale(examples=16.0, length_exponent=0.32).update, 4)
      0.4118
    """

    batch: float = 1.0
    examples: float = 1.0
    length_exponent: float = 0.5

    def __post_init__(self) -> None:
        for name in ("batch", "examples"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"the ratio {name}={value} must be positive")
        exponent = self.length_exponent
        if not isinstance(exponent, numbers.Real) or not 0 <= exponent <= 1:
            raise ValueError(f"length_exponent={exponent!r} must be from 0 to 1")

    @property
    def kappa(self) -> float:
        """κ = κ_B/κ_D: the base's number of steps over the target's."""
        return self.batch / self.examples

    @property
    def update(self) -> float:
        """Multiplier of the desired update per step, κ_B^½ κ_D^-e; κ^½ at e = ½."""
        return math.sqrt(self.kappa) * self._slower

    @property
    def linear(self) -> float:
        """Multiplier of SGD's learning rate: κ at e = ½."""
        return self.kappa * self._slower

    @property
    def _slower(self) -> float:
        return math.pow(self.examples, 0.5 - self.length_exponent)

    @property
    def gradient(self) -> float:
        """Size of a raw gradient that is mostly noise, relative to the base's: κ^-½."""
        return 1 / math.sqrt(self.kappa)

    def beta(self, value: Any) -> Any:
        """The target's β of a moving average, of moments, momentum or parameters: β^κ.

        Over the same share of training the average then decays by the same factor. To
        first order in 1-β this is the 1-κ(1-β) of Malladi et al., which is negative for
        κ(1-β) > 1.

        Args:
          value: β of the base, a number or a traced value.
        """
        return value if self.kappa == 1 else value**self.kappa

    def weight_decay(self, value: Any) -> Any:
        """The target's decoupled weight decay, κ times the base's.

        The optimizers of `mupax.optim` multiply it by the base's learning rate, not the
        scaled one. Each weight then decays by the same factor over training.

        Args:
          value: weight decay of the base: None, a number, a traced value or a schedule.
        """
        if value is None or self.kappa == 1:
            return value
        if callable(value):
            return lambda step: self.kappa * value(step)
        return self.kappa * value

    def steps(self, value: float) -> float:
        """The target's number of steps, e.g. of warm-up, for the base's `value`."""
        return value / self.kappa

    def describe(self, family: str) -> list[str]:
        """The rules for the family of an optimizer, one line per rule, with sources."""
        if self == SAME:
            return []
        power, rate = (1, self.linear) if family == "sgd" else (0.5, self.update)
        length = self.length_exponent + power - 0.5
        lines = [
            f"batch size times {self.batch:.4g}, examples times {self.examples:.4g}: "
            f"κ = {self.kappa:.4g}, steps times {1 / self.kappa:.4g}; the columns "
            "include it",
            f"lr times {rate:.4g} (κ_B^{power:g} κ_D^-{length:g}; "
            f"{SOURCES.get(family, _EXTENSION)}; examples: {_LENGTH})",
            f"lr·wd times {self.kappa:.4g} (κ; Wang & Aitchison 2024, "
            "arXiv:2405.13698); warm-up: the same share of the steps",
        ]
        if family != "sgd":
            lines.append(
                f"eps times {self.gradient:.4g} (κ^-½); b1, b2, beta to the power of "
                f"κ, e.g. 0.9 -> {self.beta(0.9):.4g}, 0.999 -> {self.beta(0.999):.4g}"
            )
        if family != "sgd" and self.kappa * 0.1 > 1:
            lines.append(
                "β = 0.9 of the base averages over less than one step of the target: "
                "the rule holds to first order in κ(1-β) only"
            )
        return lines


SAME = TrainingScale()
