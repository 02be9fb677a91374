"""Copies of units change no function, if a program is read rightly.

This needs no answer by hand. Each unit of the base becomes several with the same
weights, times the factor of a desired update (that of Adam's learning rate). What sums
over units has as many equal terms then, each smaller by their number. So base and
target compute the same numbers, unless a role, a segment, or a factor of logits, of a
branch or of the readout is wrong.
"""

import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_reading  # noqa: F401, fills the table
from programs import kit

from mupax import optim
from mupax.optim.reading.models import trace
from mupax.optim.rules.multipliers import multipliers, shift

# How copies of units lie: in turn, or beside each other; perhaps within each head.
WAYS = ("in turn", "beside", "in turn within heads", "beside within heads")
# Programs that copies change, and why.
_NORM = "a norm divides a kernel, whose entries have the size of random ones"
_PLACE = "units have places: in a Fourier transform, in pairs that turn, in a triangle"
_SEVERAL = "an axis holds several, each of which has copies of its own"
INEXACT = {
    "hypernetwork_of_one_layer": _SEVERAL,
    "slstm_with_block_diagonal_recurrence": _SEVERAL,
    "bayesian_layer_with_sampled_weights": "its random numbers are no copies",
    "features_times_a_matrix_that_is_added_to_the_identity": "an identity is no copy",
    "weight_normalization": _NORM,
    "weight_norm_at_the_end_of_a_branch": _NORM,
    "nfnet_with_scaled_weight_standardization": _NORM,
    "branches_that_end_in_standardized_kernels": _NORM,
    "norm_over_inputs": _NORM,
    "demodulated_convolution": _NORM,
    "fft_of_units": _PLACE,
    "fourier_mixing_after_the_gain_of_a_norm": _PLACE,
    "distances_projected_by_the_keys_of_each_layer": _PLACE,
    "kernel_as_a_product_of_triangles": _PLACE,
    "more_experts_with_gates_by_one_hot": "the number of experts grows, too",
    "retention_with_a_norm_of_each_head": "what its norm adds to a variance matters",
    "fast_weights_after_an_inner_step": "the inner step has one rate for all weights",
}
ROWS = [x for x in kit.ALL if not x.asks and x.name not in INEXACT]
ROWS = [x for x in ROWS if not x.name.startswith("composed")]
# A fixed fourth of the table, as each row takes seconds.
ROWS = [x for x in ROWS if zlib.crc32(x.name.encode()) % 4 == 0]


def sources(before, after, way, head=(0, 0)):
    """Of which entry of an axis of the base each entry of the target's is a copy."""
    at = np.arange(after)
    if "heads" in way and head[1] not in (0, after):
        within = sources(*head, way.removesuffix(" within heads"))
        return at // head[1] % (before // head[0]) * head[0] + within[at % head[1]]
    return at % before if way.startswith("in turn") else at * before // after


def copied(array, shape, way, heads=((), ())):
    """An array of copies of another's entries."""
    each = zip(*heads, strict=True) if all(heads) else [(0, 0)] * len(shape)
    sizes = zip(array.shape, shape, each, strict=True)
    return array[np.ix_(*(sources(a, b, way, head) for a, b, head in sizes))]


def of_target(array, scale, way, point):
    """A parameter of the target, from its counterpart in the base."""
    if scale.segments:
        large = np.zeros(scale.shape)
        for part in scale.segments:
            small = array.reshape(part.base_place.view(scale.base_shape))
            views = large.reshape(part.place.view(scale.shape))
            size = views[part.place.index].shape
            views[part.place.index] = copied(small[part.base_place.index], size, way)
            large = views.reshape(scale.shape)
    else:
        heads = scale.base_head_shape, scale.head_shape
        large = copied(array, scale.shape, way, heads)
    return large * multipliers(scale, point).learning_rate - shift(scale, point)


def twins(large, small):
    """Of which parameter of the base each of the target is a copy, in lists, too."""

    def named(paths):
        """{(path without numbers, place of a number): the numbers}, by their order."""
        found = {}
        for path in paths:
            for place, number in enumerate(re.findall(r"\d+", path)):
                found.setdefault((re.sub(r"\d+", "#", path), place), set()).add(number)
        return {key: sorted(numbers, key=int) for key, numbers in found.items()}

    after, before = named(large), named(small)

    def twin(path):
        name, place = re.sub(r"\d+", "#", path), itertools.count()

        def number(match):
            key = name, next(place)
            at = after[key].index(match[0]) * len(before[key]) // len(after[key])
            return before[key][at]

        return re.sub(r"\d+", number, path)

    return {path: twin(path) for path in large}


def drawn(key, like):
    """Values of an input, or of state."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return key
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jax.random.normal(key, like.shape, like.dtype)
    return jax.random.randint(key, like.shape, 0, 3).astype(like.dtype)


def drawn_parameters(leaves):
    """Random parameters of the base, by path."""
    found = {}
    for path, leaf in leaves.items():
        key, shape = jax.random.key(zlib.crc32(path.encode())), leaf.shape
        fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 4
        x = jax.random.normal(key, shape) / fan_in**0.5
        found[path] = np.array(x, float) + 0.4 * (len(shape) < 2)
    return found


def compiled(reading):
    """The forward pass, as a function of parameters by path."""
    program = reading.program
    like = [x.aval for x in program.traced.jaxpr.invars]
    number, state = program.counts
    rest = [jnp.ones(x.shape, x.dtype) for x in like[number:][:state]]
    inputs = enumerate(like[number + state :])
    rest += [drawn(jax.random.key(i), x) for i, x in inputs]
    run = jax.jit(jax.extend.core.jaxpr_as_fun(program.traced))

    def results(params):
        values = zip((params[path] for path in reading.path_of), like, strict=False)
        found = run(*(jnp.asarray(x, y.dtype) for x, y in values), *rest)
        floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
        return [np.array(x, float) for x in floats]

    return results


def difference(one, other, way):
    """The largest difference of results, over their size."""
    each = [(copied(x, y.shape, way), y) for x, y in zip(one, other, strict=True)]
    return max(abs(x - y).max() / (abs(x).max() + 1e-9) for x, y in each)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_copies_of_units_change_no_function(row):
    base, target, inputs, call = row.models(depth=2)
    with jax.numpy_rank_promotion("allow"):
        scales = optim.infer_scales(base, target, inputs=inputs, call=call)
        small = trace(base, inputs, call, "base")
        large = trace(target, inputs, call, "target")
    params = drawn_parameters(small.leaves)
    start, run = compiled(small)(params), compiled(large)
    found = {}
    for way in WAYS:
        copies = {
            path: of_target(params[twin], scales[path], way, scales.parametrization)
            for path, twin in twins(large.path_of, small.path_of).items()
        }
        found[way] = difference(start, run(copies), way)
        if found[way] < 2e-3:
            return
    pytest.fail(f"relative differences: {found}")
