"""What Tensor Programs VI, section 7, claims of a depth parametrization (α, γ).

Branches of a residual network with mean subtraction are multiplied by L^-α, and the
learning rates of their weights by L^-γ. `papers/plane.py` measures the same properties.
"""

Verdicts = dict[str, bool]


def predicted(alpha: float, gamma: float) -> Verdicts:
    """Claims 7.1 to 7.6 at a point.

    Args:
      alpha: exponent of the branch multiplier L^-α.
      gamma: exponent of the learning rate L^-γ.

    Returns:
      Whether the network has a property, by name. x are features, h preactivations and
      f the output; λ and ε are shares of the depth L.

      - "stable at initialization" (Def. 7.2): x^L = O(1).
      - "stable in training" (Def. 7.2): Δx, Δf = O(1).
      - "nontrivial" (Def. 7.4): Δf does not vanish.
      - "faithful" (Def. 7.3): h = Θ(1) before and in training.
      - "feature learning" (Def. 7.5): Δh = Θ(1).
      - "diverse" (Def. 7.6): |x^{(λ+ε)L} - x^{λL}| ~ ε^½, not ~ ε.
      - "linearizes" (Def. 7.7): the part of a block's change that is not linear in ΔW
        is o(1/L).

      The claims about the last four cover only stable and nontrivial points. Elsewhere
      these keys are missing.

    Source: Yang et al. 2023 (arXiv:2310.02244), section 7.

    Examples:
      >>> predicted(0.5, 0.5)["diverse"], predicted(1.0, 0.0)["diverse"]
      (True, False)
    """
    both = alpha + gamma
    properties = {
        "stable at initialization": alpha >= 0.5,
        "stable in training": both >= 1,
        "nontrivial": both <= 1,
    }
    if alpha < 0.5:
        # Claim 7.2 and later claims need stability at initialization.
        return {"stable at initialization": False}
    if both == 1:
        properties |= {"faithful": alpha <= 1, "linearizes": alpha < 1}
    if both == 1 and alpha <= 1:
        properties |= {"diverse": alpha == 0.5, "feature learning": True}
    return properties
