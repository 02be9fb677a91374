"""What a prompt shows: a short line."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
import rich.progress

import mupax
from mupax import optim
from mupax.experiments import progress
from mupax.experiments.errors import UserError
from mupax.optim.check.coord_verdict import CoordCheck


def model(n: int) -> dict[str, jax.Array]:
    return {
        "<in>": jnp.ones((8, n)),
        "hidden": jnp.ones((n, n)),
        "out": jnp.ones((n, 2)),
    }


def scales() -> optim.Scales:
    return optim.infer_scales(model(4), model(16), axes={".": "i -> o"})


def coord() -> CoordCheck:
    change = np.array([[1.0, 1.1], [2.0, 2.1], [4.0, 4.3]])[:, None]  # of two seeds
    return CoordCheck({"width": (64, 128, 256)}, {"width": {"readout": change}})


@pytest.fixture(scope="module")
def swept():
    def make_model(key, width, depth):
        return {"w": jax.random.normal(key, (2, width))}

    def loss(model, x):
        return jnp.mean((x @ model["w"]) ** 2)

    def optimizer(model, learning_rate, **sizes):
        return optax.sgd(learning_rate)

    return mupax.sweep(
        make_model,
        optimizer,
        loss,
        jnp.ones((64, 2)),
        grid={"learning_rate": "2**[-3:1:1]"},
        widths=(4, 8),
        depths=(1,),
        seeds=2,
        steps=3,
        batch_size=8,
    )


def test_an_explanation_fits_on_a_line_and_names_what_was_explained():
    explanation = optim.explain(scales(), "adamw")
    assert repr(explanation) == (
        "<Explanation: mup, adamw, 3 parameters (1 input, 1 hidden, 1 output); "
        "print it for the table>"
    )


def test_blocks_of_the_same_settings_share_a_row():
    def model(width, depth):
        blocks = [{"w": jnp.ones((width, width))} for _ in range(depth)]
        blocks[1] = {"w": jnp.ones((width, 3 * width))}
        return {"in": jnp.ones((8, width)), "blocks": blocks}

    scales = optim.infer_scales(
        model(4, 3),
        model(16, 12),
        axes=optim.declare({".": "i -> o"}, branches="blocks"),
        parametrization="depth_mup",
    )
    found = optim.explain(scales)
    paths = [line.split()[0] for line in str(found).splitlines()[4:7]]
    assert paths == ["blocks/#/w", "blocks/1/w", "in"]
    assert len(found.rows) == 13
    assert "must multiply branches (*) by 0.5·a (a·M^-0.5, M = 4)" in str(found)


def test_two_rows_of_blocks_name_the_numbers_of_each():
    def model(n):
        blocks = [{"w": jnp.ones((n, n + n * (i % 2)))} for i in range(4)]
        return {"in": jnp.ones((8, n)), "blocks": blocks}

    found = optim.explain(optim.infer_scales(model(4), model(16), axes={".": "i -> o"}))
    paths = [line.split()[0] for line in str(found).splitlines()[4:7]]
    assert paths == ["blocks/0,2/w", "blocks/1,3/w", "in"]


def test_scales_of_many_parameters_are_short():
    big = optim.infer_scales(
        {f"w{i}": jnp.ones((4, 4)) for i in range(200)},
        {f"w{i}": jnp.ones((8, 8)) for i in range(200)},
        axes={".": "i -> o"},
    )
    assert "... 194 more" in repr(big)
    assert len(repr(big)) < 160


def test_a_coordinate_check_says_its_verdict_in_a_line():
    line = repr(coord())
    assert line.startswith("<CoordCheck over width (64, 128, 256): wrong: 1 of 1")
    assert "\n" not in line


def test_a_sweep_says_its_verdict_and_its_runs(swept):
    assert str(swept).startswith("learning_rate over ")
    (population, *_) = swept.populations
    assert repr(population) == (
        "<Population w4-d1: model 4 x 1, 2 seeds x 5 learning_rate>"
    )
    assert repr(population.cell()).startswith(
        "<Cell model 4 x 1: 10 runs over learning"
    )


def test_a_sweep_draws_figures(swept):
    (figure,) = swept.plot()
    assert figure.get_size_inches()[0] > 5
    with pytest.raises(UserError, match="no values of 'momentum' to compare"):
        swept.plot("momentum")


def test_a_notebook_without_ipywidgets_gets_a_line_instead_of_a_bar(monkeypatch):
    shown = io.StringIO()
    console = rich.console.Console(file=shown, force_jupyter=False, width=80)
    console.is_jupyter = True
    monkeypatch.setattr(console, "print", lambda text, **_: shown.write(text))
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    count = rich.progress.TaskProgressColumn()
    assert progress.bar("", count, console).disable
    assert "pip install '.[notebook]' in a clone of mupax" in shown.getvalue()
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name)
    assert not progress.bar("", count, console).disable
