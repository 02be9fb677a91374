"""Names that an editor completes are those that are known."""

import typing

from mupax import optim, zoo
from mupax.optim.rules import multipliers, parametrizations
from mupax.zoo import registry


def names(annotation: object) -> tuple[str, ...]:
    return typing.get_args(annotation)


def test_an_editor_completes_every_parametrization():
    assert sorted(names(parametrizations.Name)) == optim.list_parametrizations()


def test_an_editor_completes_every_optimizer():
    assert set(names(multipliers.OptimizerName)) == set(multipliers._FAMILIES)


def test_an_editor_completes_every_model_and_knows_its_class():
    completed = {}
    for signature in typing.get_overloads(registry.create):
        given = signature.__annotations__
        for name in names(given["name"]):
            completed[name] = given["return"]
    assert completed == {
        name: registry.options_of(name)[0].__name__ for name in zoo.list_models()
    }, "a new model goes into a Literal of zoo/registry.py too"
