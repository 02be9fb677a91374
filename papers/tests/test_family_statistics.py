"""NTK, dNTK and ddNTK: their definitions, and how they scale with n, L and s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.experiments.errors import UserError
from papers import family_statistics

FIELDS = ("z_dntk", "ddntk_1", "ddntk_2")


def linear(z):
    return z


def small_network(params, x):
    first, last = params
    return last @ jnp.tanh(first @ x)


def small_params(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, 2)), rng.normal(size=3)


def log_slope(sizes, results, name):
    """The slope of log |statistic| against log size, and its standard error."""
    x = np.log(sizes)
    x = x - x.mean()
    y = np.log([abs(getattr(r, name)) for r in results])
    error = np.array([r.error[name] / abs(getattr(r, name)) for r in results])
    weights = x / (x**2).sum()
    return weights @ y, np.sqrt((weights**2) @ error**2)


def test_the_differentials_are_the_contractions_of_their_definitions():
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, small_params())
        flat, rebuild = jax.flatten_util.ravel_pytree(params)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2)))

        def f(p):
            return jax.vmap(lambda x: small_network(rebuild(p), x))(x)

        @jax.jit
        def contractions(flat):
            g, hess = jax.jacobian(f)(flat), jax.hessian(f)(flat)
            cube = jax.jacobian(jax.hessian(f))(flat)
            return {
                "ntk": jnp.einsum("ip,jp->ij", g, g),
                "dntk": jnp.einsum("ipq,jp,kq->ijk", hess, g, g),
                "ddntk_1": jnp.einsum("ipqr,jp,kq,lr->ijkl", cube, g, g, g),
                "ddntk_2": jnp.einsum("ipq,jpr,kq,lr->ijkl", hess, hess, g, g),
            }

        computed = jax.jit(
            lambda params: family_statistics.differentials(small_network, params, x)
        )(params)
        expected = contractions(flat)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(computed, name), value, rtol=1e-9)


def test_the_ntk_moves_as_equation_2_14_says():
    # What is left after the second order falls with the cube of the step.
    left = []
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, small_params())
        x = jnp.asarray([[0.3, -0.8]])
        now = family_statistics.differentials(small_network, params, x)
        gradient = jax.grad(small_network)(params, x[0])
        for eta in (0.02, 0.01):  # η dL/df
            moved = jax.tree.map(lambda p, g, eta=eta: p - eta * g, params, gradient)
            then = family_statistics.differentials(small_network, moved, x)
            second = now.ddntk_1.sum() + now.ddntk_2.sum()
            predicted = now.ntk.sum() - 2 * eta * now.dntk.sum() + eta**2 * second
            left.append(abs(float(then.ntk.sum() - predicted)))
    assert left[0] / left[1] == pytest.approx(8, rel=0.2)


@pytest.mark.parametrize("biases", [{}, {"bias_scale": 0.3, "bias_rate": 0.7}])
def test_s_moves_the_second_differentials_by_n_to_the_s_and_nothing_else(biases):
    # Seed by seed, hence to rounding: eq. 4.3 is free of s, 4.6 and 4.9 are not.
    start = family_statistics.statistics(16, 3, 0.0, **biases, seeds=256)
    for s in (0.5, 1.0):
        computed = family_statistics.statistics(16, 3, s, **biases, seeds=256)
        assert computed.ntk == pytest.approx(start.ntk)
        assert computed.z_dntk == pytest.approx(start.z_dntk)
        assert computed.ddntk_1 == pytest.approx(start.ddntk_1 * 16**s)
        assert computed.ddntk_2 == pytest.approx(start.ddntk_2 * 16**s)
        assert computed.output_variance == pytest.approx(start.output_variance / 16**s)
        assert computed.gamma == pytest.approx(start.gamma * 16**s)


@pytest.mark.parametrize("s", [0.0, 1.0])
def test_one_hidden_linear_layer_has_its_exact_values(s):
    # f is bilinear: E[ηH] = 2, E[z η²dH] = 2/n, η³ddH^I = 0, E[η³ddH^II] = 2 n^(s-1).
    n = 16
    computed = family_statistics.statistics(n, 2, s, activation=linear, seeds=800)
    assert abs(computed.ntk - 2) < 4 * computed.error["ntk"]
    assert abs(computed.z_dntk - 2 / n / 4) < 4 * computed.error["z_dntk"]
    assert computed.ddntk_1 == 0
    expected = 2 * n ** (s - 1) / 8
    assert abs(computed.ddntk_2 - expected) < 4 * computed.error["ddntk_2"]
    assert max(computed.error["z_dntk"] * n, computed.error["ntk"]) < 0.03


@pytest.mark.parametrize("s", [0.0, 1.0])
def test_one_hidden_linear_layer_with_biases_has_its_exact_values(s):
    # Of z = W (U x + b) + b', with C_b = c and λ_b = r where all else is 1.
    n, c, r = 16, 0.5, 0.25
    computed = family_statistics.statistics(
        n, 2, s, activation=linear, bias_scale=c, bias_rate=r, seeds=800
    )
    kernel = 1 + c + r + (1 + r)
    expected = {
        "output_variance": (1 + 2 * c) / n**s,
        "ntk": kernel,
        "z_dntk": 2 * (1 + r) * (1 + c) / n / kernel**2,
    }
    for name, value in expected.items():
        assert abs(getattr(computed, name) - value) < 4 * computed.error[name]
        assert computed.error[name] < 0.1 * value
    assert computed.ddntk_1 == 0


@pytest.mark.parametrize("biases", [{}, {"bias_rate": 1.0}])
def test_the_effects_fall_as_one_over_the_width(biases):
    sizes = (16, 64)
    computed = [family_statistics.statistics(n, 3, **biases, seeds=256) for n in sizes]
    for name in ("ntk_variance", *FIELDS):
        slope, error = log_slope(sizes, computed, name)
        assert error < 0.2
        assert abs(slope + 1) < 3 * error


@pytest.mark.long
def test_the_effects_are_proportional_to_depth():
    depths = (8, 16, 32)
    computed = [family_statistics.statistics(128, depth, seeds=512) for depth in depths]
    for name in FIELDS:
        slope, error = log_slope(depths, computed, name)
        assert error < 0.15
        assert abs(slope - 1) < 3 * error


@pytest.mark.long
def test_networks_of_one_emergent_scale_learn_alike():
    # Within four standard errors.
    one = family_statistics.statistics(64, 8, seeds=256)
    other = family_statistics.statistics(128, 16, seeds=256)
    assert one.gamma == other.gamma
    for name in FIELDS:
        gap = getattr(one, name) - getattr(other, name)
        assert abs(gap) < 4 * np.hypot(one.error[name], other.error[name])


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="depth=1"):
        family_statistics.statistics(8, 1)
    with pytest.raises(UserError, match="give bias_rate too"):
        family_statistics.statistics(8, 2, bias_scale=0.1)
    with pytest.raises(UserError, match=r"s=1\.5"):
        family_statistics.statistics(8, 2, 1.5)
    with pytest.raises(UserError, match=r"would take [\d.e+]+ GiB"):
        family_statistics.statistics(10**6, 3)
