"""Mix each image of a batch with another one (mixup and CutMix), on the device.

Rows 2i and 2i+1 of a batch are mixed with each other. The order of the examples is
random already, and on a mesh both rows are on one device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def mix(
    key: PRNGKeyArray,
    images: Float[Array, "batch height width channels"],
    labels: Float[Array, "batch classes"],
    *,
    mixup_alpha: float = 0.0,
    cutmix_alpha: float = 0.0,
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """Mixup or CutMix. If both are on, each row uses one of them, at random.

    Mixup (Zhang et al. 2018, eq. 1): λ times each image and label, plus 1 - λ times its
    partner's, with λ ~ Beta(α, α) for each row. CutMix (Yun et al. 2019, eq. 1 and 2):
    a box of each image is replaced by the same box of its partner. The box has √(1-λ)
    times the sides of the image and a uniform centre, and is cut at the border. Labels
    are mixed by area.

    Args:
      key: random.
      images: normalized; the batch must be even.
      labels: rows that sum to 1, as those of the result.
      mixup_alpha: α of mixup, e.g. 0.2 (the paper, ImageNet) or 0.8 (DeiT); 0: off.
      cutmix_alpha: α of CutMix, e.g. 1 (the paper); 0: off.

    Raises:
      ValueError: an odd batch, a negative α, or both 0.

    Examples:
      >>> images, labels = jnp.ones((4, 8, 8, 1)), jnp.eye(4)
      >>> _, mixed = mix(jax.random.key(0), images, labels, mixup_alpha=0.2)
      >>> mixed.sum(1)
      Array([1., 1., 1., 1.], dtype=float32)
    """
    batch, height, width, _ = images.shape
    if batch % 2:
        raise ValueError(f"mixing needs an even batch; {batch} is odd")
    if min(mixup_alpha, cutmix_alpha) < 0 or mixup_alpha == cutmix_alpha == 0:
        raise ValueError(
            f"mixup_alpha {mixup_alpha} and cutmix_alpha {cutmix_alpha} must be 0 or "
            "more, and one of them positive"
        )
    keys = jax.random.split(key, 4)
    if mixup_alpha and cutmix_alpha:
        cuts = jax.random.bernoulli(keys[0], 0.5, (batch,))
    else:
        cuts = jnp.full((batch,), bool(cutmix_alpha))
    blend = _beta(keys[1], mixup_alpha or cutmix_alpha, batch)
    areas = _beta(keys[3], cutmix_alpha or 1.0, batch)
    kept = _outside_box(keys[2], areas, height, width)
    share = jnp.where(cuts, kept.mean((1, 2)), blend)[:, None]
    weight = jnp.where(cuts[:, None, None], kept, blend[:, None, None])[..., None]
    weight = weight.astype(images.dtype)
    return (
        weight * images + (1 - weight) * _partners(images),
        share * labels + (1 - share) * _partners(labels),
    )


def _partners(rows: Float[Array, "batch *rest"]) -> Float[Array, "batch *rest"]:
    pairs = rows.reshape(-1, 2, *rows.shape[1:])
    return pairs[:, ::-1].reshape(rows.shape)


def _beta(key: PRNGKeyArray, alpha: float, batch: int) -> Float[Array, " batch"]:
    """Samples of Beta(α, α)."""
    if alpha <= 0.5:
        return jax.random.beta(key, alpha, alpha, (batch,), jnp.float32)
    # Ulrich (1984): exact, without rejection loops, which compile slowly.
    radius, angle = jax.random.uniform(key, (2, batch))
    squared = 1 - radius ** (2 / (2 * alpha - 1))
    return 0.5 + 0.5 * jnp.sqrt(squared) * jnp.cos(2 * jnp.pi * angle)


def _outside_box(
    key: PRNGKeyArray, share: Float[Array, " batch"], height: int, width: int
) -> Float[Array, "batch height width"]:
    """0 inside of a box of area 1 - share, 1 outside."""
    centres = jax.random.uniform(key, (2, share.shape[0]))

    def inside(size: int, centre: Float[Array, " batch"]) -> Array:
        half = jnp.floor(size * jnp.sqrt(1 - share)).astype(jnp.int32) // 2
        middle = jnp.floor(size * centre).astype(jnp.int32)
        places = jnp.arange(size)[None]
        low, high = (middle - half)[:, None], (middle + half)[:, None]
        return (places >= low) & (places < high)

    box = inside(height, centres[0])[:, :, None] & inside(width, centres[1])[:, None, :]
    return 1 - box.astype(jnp.float32)
