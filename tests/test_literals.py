"""Names that an editor completes are those that are known."""

import typing

from mupax import optim
from mupax.optim.rules import multipliers, parametrizations


def names(annotation: object) -> tuple[str, ...]:
    return typing.get_args(annotation)


def test_an_editor_completes_every_parametrization():
    assert sorted(names(parametrizations.Name)) == optim.list_parametrizations()


def test_an_editor_completes_every_optimizer():
    assert set(names(multipliers.OptimizerName)) == set(multipliers.RECIPES)
