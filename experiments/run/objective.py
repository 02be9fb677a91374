"""The loss that a run minimizes, and the scores of an evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32, Key

Batch = dict[str, Array]


class Objective(Protocol):
    """A loss, and the scores of an evaluation; both are traced."""

    def loss(
        self, model: nnx.Module, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The mean loss of a training batch, and the same without label smoothing."""

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        """Sums over a test batch: loss, hits, and how many were counted."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """Cross-entropy of images and labels, in nats.

    Attributes:
      normalize: raw pixels to what the model takes.
      classes: how many there are.
      mix: (key, images, one-hot labels) to mixed ones, as mixup; None for none.
      label_smoothing: share of each label that is spread over all classes.
    """

    normalize: Callable[[Array], Array]
    classes: int
    mix: Callable[[Key[Array, ""], Array, Array], tuple[Array, Array]] | None = None
    label_smoothing: float = 0.0

    def loss(
        self, model: nnx.Module, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Mean cross-entropy, and the same without label smoothing."""
        images, labels = self.normalize(batch["image"]), batch["label"]
        if self.mix is None:
            logits = model(images)
            plain = cross_entropy(logits, labels).mean()
            if _is_zero(self.label_smoothing):
                return plain, plain
            return _smoothed(logits, labels, self.label_smoothing), plain
        images, soft = self.mix(key, images, jax.nn.one_hot(labels, self.classes))
        logits = model(images)
        plain = optax.softmax_cross_entropy(logits, soft).mean()
        if _is_zero(self.label_smoothing):
            return plain, plain
        soft = optax.smooth_labels(soft, self.label_smoothing)
        return optax.softmax_cross_entropy(logits, soft).mean(), plain

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        """Loss, hits and count of the examples that count."""
        logits = model(self.normalize(batch["image"]))
        return _sums(logits, batch["label"], batch["counts"])


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of each token given those before it, in nats a token.

    Attributes:
      label_smoothing: share of each target that is spread over the vocabulary.
    """

    label_smoothing: float = 0.0

    def loss(
        self, model: nnx.Module, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Mean cross-entropy, and the same without label smoothing."""
        tokens = batch["tokens"]
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        plain = cross_entropy(logits, targets).mean()
        if _is_zero(self.label_smoothing):
            return plain, plain
        return _smoothed(logits, targets, self.label_smoothing), plain

    def score(self, model: nnx.Module, batch: Batch) -> Float[Array, " 3"]:
        """Loss, hits and count of the tokens that count."""
        tokens = batch["tokens"]
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        counts = jnp.broadcast_to(batch["counts"][:, None], targets.shape)
        return _sums(logits, targets, counts)


def cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Int32[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Cross-entropy of each example, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _is_zero(smoothing: Any) -> bool:
    """Whether there is none; a traced value may be anything."""
    return isinstance(smoothing, int | float) and not smoothing


def _smoothed(
    logits: Float[Array, "*batch classes"],
    labels: Int32[Array, "*batch"],
    smoothing: Any,
) -> Float[Array, ""]:
    soft = jax.nn.one_hot(labels, logits.shape[-1])
    soft = optax.smooth_labels(soft, smoothing)
    return optax.softmax_cross_entropy(logits, soft).mean()


def _sums(
    logits: Float[Array, "*batch classes"],
    labels: Int32[Array, "*batch"],
    counts: Float[Array, "*batch"],
) -> Float[Array, " 3"]:
    losses = cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels).astype(losses.dtype)
    return jnp.stack([(x * counts).sum() for x in (losses, hits, jnp.ones_like(hits))])
