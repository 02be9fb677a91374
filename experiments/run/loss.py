"""The loss that a run minimizes, and the sums that an evaluation counts."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32, Key

from mupax.zoo.families.decoder import Decoder

Batch = dict[str, Array]
Losses = tuple[Float[Array, ""], Float[Array, ""]]

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels
# Logits of a device that are computed at once (2 GiB in float32); more in chunks.
_AT_ONCE = 2**29


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

    def loss(self, model: Any, batch: Batch, key: Key[Array, ""]) -> Losses:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        chunks = _chunks(model, targets)
        if chunks == 1:
            return _mean_losses(model(tokens), targets, self.label_smoothing)

        def part(features: Array, targets: Array) -> Losses:
            return _mean_losses(model.logits(features), targets, self.label_smoothing)

        features = _split(model.features(tokens), chunks)
        return _mean_over_chunks(part, features, _split(targets, chunks))

    def score(self, model: Any, batch: Batch) -> Float[Array, " 3"]:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        counts = jnp.broadcast_to(batch["counts"][:, None], targets.shape)
        chunks = _chunks(model, targets)
        if chunks == 1:
            return _sums(model(tokens), targets, counts)

        def part(features: Array, targets: Array, counts: Array) -> Array:
            return _sums(model.logits(features), targets, counts)

        parts = (_split(x, chunks) for x in (model.features(tokens), targets, counts))
        return jax.lax.map(lambda part_: part(*part_), tuple(parts)).sum(0)


def _chunks(model: nnx.Module, targets: Int32[Array, "batch time"]) -> int:
    """Number of chunks of tokens whose logits are computed one after another."""
    if not isinstance(model, Decoder):
        return 1
    batch, time = targets.shape
    devices = max(1, jax.sharding.get_abstract_mesh().size)
    needed = batch * time * model.plan["vocab"].size / (devices * _AT_ONCE)
    # Chunks of time, so that each device keeps its own examples.
    return next(
        n for n in range(1, time + 1) if n >= min(needed, time) and time % n == 0
    )


def _split(x: Float[Array, "batch time *n"], chunks: int) -> Array:
    """Chunks of time, shape (chunks, batch, time / chunks, ...)."""
    batch, time, *rest = x.shape
    return x.reshape(batch, chunks, time // chunks, *rest).swapaxes(0, 1)


def _mean_over_chunks(
    part: Callable[[Array, Array], Losses],
    features: Float[Array, "chunks batch time n"],
    targets: Int32[Array, "chunks batch time"],
) -> Losses:
    """The mean losses over chunks, which never holds the logits of two chunks.

    The gradient of a chunk is computed beside its loss, while its logits exist, so that
    no product of the readout is computed twice. The second loss has no gradient.

    Args:
      part: the losses of a chunk, from its features and targets. It may close over
        parameters.
      features: from `_split`.
      targets: the same.
    """
    part, weights = jax.closure_convert(part, features[0], targets[0])

    @jax.custom_vjp
    def losses(weights: Any, features: Array, targets: Array) -> Losses:
        every = jax.lax.map(lambda chunk: part(*chunk, *weights), (features, targets))
        return jax.tree.map(jnp.mean, every)

    def forward(weights: Any, features: Array, targets: Array) -> Any:
        def of_chunk(weights: Any, features: Array, targets: Array) -> Losses:
            return part(features, targets, *weights)

        def add(sums: Any, chunk: Any) -> tuple[Any, Any]:
            grad = jax.value_and_grad(of_chunk, (0, 1), has_aux=True)
            losses, (of_weights, of_features) = grad(weights, *chunk)
            return jax.tree.map(jnp.add, sums, of_weights), (losses, of_features)

        zeros = jax.tree.map(jnp.zeros_like, weights)
        sums, (every, of_features) = jax.lax.scan(add, zeros, (features, targets))
        return jax.tree.map(jnp.mean, every), (sums, of_features)

    def backward(grads: Any, cotangents: Any) -> Any:
        factor = cotangents[0] / len(features)
        return *jax.tree.map(lambda x: (factor * x).astype(x.dtype), grads), None

    losses.defvjp(forward, backward)
    value, plain = losses(weights, features, targets)
    return value, jax.lax.stop_gradient(plain)


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
