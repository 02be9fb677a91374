"""Scale an optimizer's hyperparameters with batch size and training length.

Section 8 of docs/rules.md derives the rules.
"""

import dataclasses
import math
import numbers
from typing import Any


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

        `value` is β of the base, a number or a traced value. Over the same share of
        training the average then decays by the same factor.
        """
        return value if self.kappa == 1 else value**self.kappa

    def weight_decay(self, value: Any) -> Any:
        """The target's decoupled weight decay, κ times the base's.

        `value` is that of the base: None, a number, a traced value or a schedule. It is
        multiplied by the base's learning rate, not the scaled one, so that each weight
        decays by the same factor over training.
        """
        if value is None or self.kappa == 1:
            return value
        if callable(value):
            return lambda step: self.kappa * value(step)
        return self.kappa * value

    def steps(self, value: float) -> float:
        """The target's number of steps, e.g. of warm-up, for the base's `value`."""
        return value / self.kappa

    def describe(self) -> list[str]:
        """What is different, in a line; no line if nothing is."""
        if self == SAME:
            return []
        return [
            f"batch size times {self.batch:.4g}, examples times {self.examples:.4g} "
            f"(κ = {self.kappa:.4g}; Malladi et al. 2022, arXiv:2205.10287; "
            "docs/rules.md, section 8): the columns include it; steps and warm-up "
            f"times {1 / self.kappa:.4g}; b1, b2, beta (but SGD's momentum) to the "
            f"power of κ, e.g. 0.9 -> {self.beta(0.9):.4g}"
        ]


SAME = TrainingScale()
