"""Plain arrays of NNX modules are no parameters; nor are those of a whole state."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import optim


def frequencies(n):
    return 1.0 / 10000 ** (jnp.arange(0, n, 2) / n)


BUFFERS = {
    "plain": frequencies,
    "numpy": lambda n: 10000.0 ** -(np.arange(n, dtype=np.float32) / n),
    "data": lambda n: nnx.data(frequencies(n)),
    "like a readout": lambda n: jnp.ones((n, 5)),
    "sinusoids": lambda n: jnp.ones((7, n)),
    "list": lambda n: nnx.data([frequencies(n), frequencies(n)]),
    "dictionary": lambda n: nnx.data({"sin": frequencies(n), "cos": frequencies(n)}),
}


class Model(nnx.Module):
    def __init__(self, n, buffer):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(8, n, rngs=rngs)
        self.hidden = nnx.Linear(n, n, rngs=rngs)
        self.buffer = BUFFERS[buffer](n)
        self.head = nnx.Linear(n, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(nnx.relu(self.embed(x)))))


PARAMETERS = {
    f"{layer}/{array}"
    for layer in ("embed", "hidden", "head")
    for array in ("kernel", "bias")
}
X = (jnp.ones((1, 8)),)
AXES = {"kernel": "i -> o", "bias": "d"}
FORMS = {
    "functions": lambda build: build,
    "instances": lambda build: build(),
    "states": lambda build: nnx.state(build()),
    "states of parameters": lambda build: nnx.state(build(), nnx.Param),
    "states of a split": lambda build: nnx.split(build())[1],
    "in a dictionary": lambda build: {"net": build()},
}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_plain_array_of_a_module_is_no_parameter(form, buffer):
    base, target = (FORMS[form](lambda n=n: Model(n, buffer)) for n in (16, 64))
    scales = optim.infer_scales(base, target, axes=AXES)
    assert {path.removeprefix("net/") for path in scales} == PARAMETERS


@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_scales_fit_the_parameters_of_a_module_with_buffers(buffer):
    base, model = (lambda: Model(16, buffer)), Model(64, buffer)
    # A built model is what a user has at hand.
    scales = optim.infer_scales(base, model, inputs=X)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, optim.rescale_init(params, scales, base=base))
    tx = optim.adam(1e-2, scales)
    nnx.Optimizer(model, tx, wrt=nnx.Param)
    check = optim.check_chain(tx, scales)
    assert set(check.factors) == PARAMETERS


def test_the_scales_of_a_weight_norm_are_no_parameters():
    """They are bare arrays in Flax 0.12."""

    class Normed(Model):
        def __init__(self, n):
            super().__init__(n, "plain")
            self.hidden = nnx.WeightNorm(self.hidden, rngs=nnx.Rngs(0))

    scales = optim.infer_scales(Normed(16), Normed(64), axes=AXES)
    assert "hidden/layer_instance/kernel" in scales
    assert len(scales) == len(PARAMETERS)


def test_a_state_of_arrays_without_variables_is_one_of_parameters():
    def state(n):
        return nnx.State({"in": jnp.ones((8, n)), "head": jnp.ones((n, 3))})

    axes = {".": "i -> o"}
    assert set(optim.infer_scales(state(16), state(64), axes=axes)) == {"in", "head"}


def test_a_module_of_plain_arrays_only_is_told_to_wrap_them():
    class Plain(nnx.Module):
        def __init__(self, n):
            self.kernel = jnp.ones((8, n))

    for models in ((Plain(16), Plain(64)), (lambda: Plain(16), lambda: Plain(64))):
        with pytest.raises(ValueError, match=r"wrap .* trained: nnx.Param\(array\)"):
            optim.infer_scales(*models, axes=AXES)


def test_arrays_of_a_users_own_tree_stay_parameters():
    def tree(n):
        return {"net": nnx.Linear(8, n, rngs=nnx.Rngs(0)), "head": jnp.ones((n, 3))}

    axes = {"bias": "d", ".": "i -> o"}
    assert "head" in optim.infer_scales(tree(16), tree(64), axes=axes)
