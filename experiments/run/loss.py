"""The loss that a run minimizes, and the sums that an evaluation counts."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32, Key

Batch = dict[str, Array]
Losses = tuple[Float[Array, ""], Float[Array, ""]]

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Objective(Protocol):
    """What a run minimizes and evaluates. Both methods are traced by JAX."""

    def loss(self, model: nnx.Module, batch: Batch, key: Key[Array, ""]) -> Losses:
        """Mean loss of a training batch, with and without label smoothing."""

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        """Sums over a test batch: loss, correct predictions, number of predictions."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """Cross-entropy of images and labels, in nats.

    Attributes:
      normalize: maps raw pixels to model inputs.
      classes: number of classes.
      mix: maps (key, images, one-hot labels) to mixed images and labels, e.g. mixup.
      label_smoothing: probability that is spread over all classes, 0..1.
    """

    normalize: Callable[[Array], Array]
    classes: int
    mix: Callable[[Key[Array, ""], Array, Array], tuple[Array, Array]] | None = None
    label_smoothing: float = 0.0

    def loss(self, model: nnx.Module, batch: Batch, key: Key[Array, ""]) -> Losses:
        images, labels = self.normalize(batch["image"]), batch["label"]
        if self.mix is not None:
            one_hot = jax.nn.one_hot(labels, self.classes)
            images, labels = self.mix(key, images, one_hot)
        return _mean_losses(model(images), labels, self.label_smoothing)

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        logits = model(self.normalize(batch["image"]))
        return _sums(logits, batch["label"], batch["counts"])


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of each token given the tokens before it, in nats per token.

    Attributes:
      label_smoothing: probability that is spread over the vocabulary, 0..1.
    """

    label_smoothing: float = 0.0

    def loss(self, model: nnx.Module, batch: Batch, key: Key[Array, ""]) -> Losses:
        tokens = batch["tokens"]
        return _mean_losses(model(tokens[:, :-1]), tokens[:, 1:], self.label_smoothing)

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        tokens = batch["tokens"]
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        counts = jnp.broadcast_to(batch["counts"][:, None], targets.shape)
        return _sums(logits, targets, counts)


def _mean_losses(
    logits: Float[Array, "*batch classes"], targets: Array, smoothing: Any
) -> Losses:
    """See `Objective.loss`; `targets` are classes, or rows of probabilities."""
    soft = targets.ndim == logits.ndim
    entropy = optax.softmax_cross_entropy if soft else _cross_entropy
    unsmoothed = entropy(logits, targets).mean()
    # The value of a traced smoothing is unknown.
    if isinstance(smoothing, int | float) and not smoothing:
        return unsmoothed, unsmoothed
    rows = targets if soft else jax.nn.one_hot(targets, logits.shape[-1])
    smoothed = optax.smooth_labels(rows, smoothing)
    return optax.softmax_cross_entropy(logits, smoothed).mean(), unsmoothed


def _sums(
    logits: Float[Array, "*batch classes"],
    labels: Int32[Array, "*batch"],
    counts: Float[Array, "*batch"],
) -> Float[Array, " 3"]:
    losses = _cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels).astype(losses.dtype)
    return jnp.stack([(x * counts).sum() for x in (losses, hits, jnp.ones_like(hits))])
