"""The claims of Tensor Programs VI, section 7, at points of the (α, γ) plane."""

from mupax.experiments.theory.plane import predicted


def test_predictions_follow_the_claims():
    assert all(predicted(0.5, 0.5).values())
    assert predicted(0.3, 0.7) == {"stable at initialization": False}
    assert not predicted(1.5, -0.5)["faithful"]
    assert not predicted(0.5, 1.0)["nontrivial"]
