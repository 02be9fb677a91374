"""What a run minimizes, and what an evaluation counts."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

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
    ) -> Float[Array, ""]:
        """The mean loss of a training batch."""

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
    ) -> Float[Array, ""]:
        """Mean cross-entropy."""
        images, labels = self.normalize(batch["image"]), batch["label"]
        if self.mix is None and not self.label_smoothing:
            return cross_entropy(model(images), labels).mean()
        soft = jax.nn.one_hot(labels, self.classes)
        if self.mix is not None:
            images, soft = self.mix(key, images, soft)
        soft = optax.smooth_labels(soft, self.label_smoothing)
        return optax.softmax_cross_entropy(model(images), soft).mean()

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
    ) -> Float[Array, ""]:
        """Mean cross-entropy."""
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1])
        if not self.label_smoothing:
            return cross_entropy(logits, tokens[:, 1:]).mean()
        soft = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
        soft = optax.smooth_labels(soft, self.label_smoothing)
        return optax.softmax_cross_entropy(logits, soft).mean()

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


def _sums(
    logits: Float[Array, "*batch classes"],
    labels: Int32[Array, "*batch"],
    counts: Float[Array, "*batch"],
) -> Float[Array, " 3"]:
    losses = cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels).astype(losses.dtype)
    return jnp.stack([(x * counts).sum() for x in (losses, hits, jnp.ones_like(hits))])
