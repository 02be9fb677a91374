"""`shape_for`: depth for a given width, by Yaida's emergent scale."""

import math


def shape_for(
    *,
    s: float,
    gamma: float | None = None,
    width: float | None = None,
    depth: float | None = None,
) -> float:
    """Compute depth, width or emergent scale from the other two.

    The emergent scale γ = L / n^(1-s) measures how much a network of width n and
    depth L learns representations under `meta_principled(s)`. Keep γ fixed when you
    change the size: under NTK (s = 0) that fixes the aspect ratio L/n, under μP
    (s = 1) the depth, and in between depth grows as n^(1-s).

    Args:
      s: metaparameter of `optim.meta_principled`, in [0, 1].
      gamma: emergent scale γ, in layers at s = 1 and in layers per unit at s = 0.
      width: number of units n of a hidden layer.
      depth: number of layers L.

    Returns:
      The value that was left out, not rounded.

    Raises:
      ValueError: not exactly two of gamma, width and depth are given; one of them is
        not positive and finite; s is outside [0, 1]; or the width is missing at s = 1,
        where γ does not depend on it.

    Source: Yaida 2022 (arXiv:2210.04909), eq. 1.1.

    Examples:
      A network of width 256 and depth 8 was tuned at s = 1/2. A network that is 16x as
      wide should be 4x as deep.

      >>> gamma = shape_for(s=0.5, width=256, depth=8)
      >>> gamma
      0.5
      >>> shape_for(gamma=gamma, s=0.5, width=4096)
      32.0
      >>> shape_for(gamma=gamma, s=0.5, depth=32)
      4096.0
    """
    if not 0 <= s <= 1:
        raise ValueError(
            f"s={s} must lie in [0, 1]: 0 is NTK, 1 is μP (Yaida eq. 3.15)"
        )
    given = {"gamma": gamma, "width": width, "depth": depth}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise ValueError(
            "shape_for needs exactly two of gamma, width and depth; got "
            f"{', '.join(name for name in given if name not in missing) or 'none'}"
        )
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be positive and finite")
    if gamma is None:
        assert width is not None
        assert depth is not None
        ratio: float = depth / width ** (1 - s)
        return ratio
    if depth is None:
        assert width is not None
        layers: float = gamma * width ** (1 - s)
        return layers
    if s == 1:
        raise ValueError(
            "at s=1 the emergent scale is the depth, at any width; pass s < 1 or "
            "choose the width yourself"
        )
    channels: float = (depth / gamma) ** (1 / (1 - s))
    return channels
