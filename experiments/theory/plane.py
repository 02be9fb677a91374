"""What Tensor Programs VI, section 7, claims of a depth parametrization (α, γ).

Branches of a residual network with mean subtraction are multiplied by L^-α, and the
learning rates of their weights by L^-γ. `papers/plane.py` measures the same properties.
"""

Verdicts = dict[str, bool]


def predicted(alpha: float, gamma: float) -> Verdicts:
    """Claims 7.1 to 7.6 at a point.

    The claims about faithfulness, diversity and linearization cover only stable and
    nontrivial points. Elsewhere these keys are missing.

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
