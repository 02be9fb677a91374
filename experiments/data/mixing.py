"""Images mixed with their neighbours in the batch, on the device, under jit.

Partners are the rows 2i and 2i+1 of a batch, whose order is random as it is: on a mesh
both lie on one device, so that mixing moves nothing between devices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray


def smooth_labels(
    labels: Int32[Array, " batch"], num_classes: int, smoothing: float = 0.1
) -> Float[Array, "batch classes"]:
    """One-hot labels that keep `smoothing` for all classes alike.

    Label smoothing (Szegedy et al. 2016, section 7): q = (1 - s) δ + s / K.

    Args:
      labels: classes 0..num_classes-1, shape (batch,).
      num_classes: K.
      smoothing: s, 0..1.

    Returns:
      Shape (batch, num_classes); each row sums to 1.

    Raises:
      ValueError: s is not in 0..1.

    >>> import jax.numpy as jnp
    >>> smooth_labels(jnp.array([1]), 4, 0.2)
    Array([[0.05, 0.85, 0.05, 0.05]], dtype=float32)
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing is {smoothing}, and must lie in 0..1")
    return (1 - smoothing) * jax.nn.one_hot(labels, num_classes) + (
        smoothing / num_classes
    )


def mixup(
    key: PRNGKeyArray,
    images: Float[Array, "batch height width channels"],
    labels: Float[Array, "batch classes"],
    alpha: float = 0.8,
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """λ of each image and 1 - λ of its partner, and the labels in the same shares.

    mixup (Zhang et al. 2018, eq. 1): λ ~ Beta(α, α), drawn for each row.

    Args:
      key: random.
      images: normalized, shape (batch, height, width, channels); batch even.
      labels: rows that sum to 1, shape (batch, classes).
      alpha: α > 0; 0.2 in the paper's ImageNet runs, 0.8 in those of DeiT.

    Raises:
      ValueError: an odd batch, or α that is not positive.
    """
    return mix(key, images, labels, mixup_alpha=alpha, cutmix_alpha=0.0)


def cutmix(
    key: PRNGKeyArray,
    images: Float[Array, "batch height width channels"],
    labels: Float[Array, "batch classes"],
    alpha: float = 1.0,
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """A box of each image replaced by its partner's, and the labels by its area.

    CutMix (Yun et al. 2019, eq. 1 and 2): sides √(1-λ) of the image's, λ ~ Beta(α, α),
    centre uniform, cut off at the border; the labels take the area that is left.

    Args:
      key: random.
      images: shape (batch, height, width, channels); batch even.
      labels: rows that sum to 1, shape (batch, classes).
      alpha: α > 0; 1 in the paper.

    Raises:
      ValueError: an odd batch, or α that is not positive.
    """
    return mix(key, images, labels, mixup_alpha=0.0, cutmix_alpha=alpha)


def mix(
    key: PRNGKeyArray,
    images: Float[Array, "batch height width channels"],
    labels: Float[Array, "batch classes"],
    *,
    mixup_alpha: float = 0.8,
    cutmix_alpha: float = 1.0,
    probability: float = 1.0,
    switch: float = 0.5,
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """mixup or CutMix, chosen for each row, as timm does it for each batch.

    Args:
      key: random.
      images: normalized, shape (batch, height, width, channels); batch even.
      labels: rows that sum to 1 (`smooth_labels`), shape (batch, classes).
      mixup_alpha: α of mixup; 0 for CutMix alone.
      cutmix_alpha: α of CutMix; 0 for mixup alone.
      probability: share of the rows that are mixed at all.
      switch: where both are on, the share of these that CutMix mixes.

    Returns:
      Images of the same dtype, and labels whose rows sum to 1.

    Raises:
      ValueError: an odd batch, a negative α, both 0, or a share outside of 0..1.
    """
    _check(images.shape[0], mixup_alpha, cutmix_alpha, probability, switch)
    batch, height, width, _ = images.shape
    keys = jax.random.split(key, 5)
    if mixup_alpha and cutmix_alpha:
        cuts = jax.random.bernoulli(keys[0], switch, (batch,))
    else:
        cuts = jnp.full((batch,), bool(cutmix_alpha))
    blend = _beta(keys[1], mixup_alpha or cutmix_alpha, batch)
    kept = _outside_box(
        keys[2], _beta(keys[3], cutmix_alpha or 1.0, batch), height, width
    )
    mixed = jax.random.bernoulli(keys[4], probability, (batch,))

    share = jnp.where(cuts, kept.mean((1, 2)), blend)
    share = jnp.where(mixed, share, 1.0)[:, None]
    weight = jnp.where(cuts[:, None, None], kept, blend[:, None, None])
    weight = jnp.where(mixed[:, None, None], weight, 1.0)[..., None]
    weight = weight.astype(images.dtype)
    return (
        weight * images + (1 - weight) * _partners(images),
        share * labels + (1 - share) * _partners(labels),
    )


def _partners(rows: Float[Array, "batch *rest"]) -> Float[Array, "batch *rest"]:
    pairs = rows.reshape(-1, 2, *rows.shape[1:])
    return pairs[:, ::-1].reshape(rows.shape)


def _beta(key: PRNGKeyArray, alpha: float, batch: int) -> Float[Array, " batch"]:
    """Draws of Beta(α, α)."""
    if alpha <= 0.5:
        return jax.random.beta(key, alpha, alpha, (batch,), jnp.float32)
    # Ulrich (1984): exact, and without the rejection loops that take long to compile.
    radius, angle = jax.random.uniform(key, (2, batch))
    squared = 1 - radius ** (2 / (2 * alpha - 1))
    return 0.5 + 0.5 * jnp.sqrt(squared) * jnp.cos(2 * jnp.pi * angle)


def _outside_box(
    key: PRNGKeyArray, share: Float[Array, " batch"], height: int, width: int
) -> Float[Array, "batch height width"]:
    """1 outside of a box of area 1 - share, before the border cuts it; 0 inside."""
    centres = jax.random.uniform(key, (2, share.shape[0]))

    def inside(size: int, centre: Float[Array, " batch"]) -> Array:
        half = jnp.floor(size * jnp.sqrt(1 - share)).astype(jnp.int32) // 2
        middle = jnp.floor(size * centre).astype(jnp.int32)
        places = jnp.arange(size)[None]
        low, high = (middle - half)[:, None], (middle + half)[:, None]
        return (places >= low) & (places < high)

    box = inside(height, centres[0])[:, :, None] & inside(width, centres[1])[:, None, :]
    return 1 - box.astype(jnp.float32)


def _check(
    batch: int,
    mixup_alpha: float,
    cutmix_alpha: float,
    probability: float,
    switch: float,
) -> None:
    if batch % 2:
        raise ValueError(f"mixing pairs the rows of a batch: {batch} is odd; use even")
    if min(mixup_alpha, cutmix_alpha) < 0 or mixup_alpha == cutmix_alpha == 0:
        raise ValueError(
            f"mixup_alpha {mixup_alpha} and cutmix_alpha {cutmix_alpha} must be 0 or "
            "more, and one of them positive"
        )
    for name, value in (("probability", probability), ("switch", switch)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, and must lie in 0..1")
