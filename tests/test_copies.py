"""Copies of units or layers change no function, if a program is read rightly.

This needs no answer by hand. Each unit of the base becomes several with the same
weights, times the factor of a desired update (that of Adam's learning rate). What sums
over units has as many equal terms then, each smaller by their number. So base and
target compute the same numbers, unless a role, a segment, or a factor of logits, of a
branch or of the readout is wrong.

Likewise each layer of the base becomes several, with weights times the same factor for
α = 1. While branches are small, they add up to what the one layer adds. So base and
target, and their derivatives by the size of what ends the branches, are the same,
unless a branch, its end or its depth is wrong.
"""

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
_PLACE = "units have places: in sinusoids, Fourier transforms, pairs that turn"
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
    "filter_of_the_fourier_transform_of_units": _PLACE,
    "diffusion_mlp_with_time_embedding": _PLACE,
    "distances_projected_by_the_keys_of_each_layer": _PLACE,
    "kernel_after_a_fixed_matrix": "the entries of its fixed matrix are no copies",
    "kernel_as_a_product_of_triangles": _PLACE,
    "transformer_xl_attention_with_heads_that_get_larger": _PLACE,
    "more_experts_with_gates_by_one_hot": "the number of experts grows, too",
    "equilibrium_by_anderson_acceleration": "its Gram matrix is singular at the end",
    "retention_with_a_norm_of_each_head": "what its norm adds to a variance matters",
}
# Programs that copies of layers change, and why.
_NUMBER = "a layer's constants or weights depend on its number"
_TURNS = "layers take turns, with halves of the stream or by their kind"
_BESIDE = "an axis holds what all layers read"
_LAYERS = "layers read, or return, what others compute"
_AGAIN = "later layers add its values again, as often as there are such layers"
_MULTIPLIED = "it multiplies its branches by itself"
INEXACT_IN_DEPTH = {
    "adams_bashforth_of_layers_in_a_scan": _AGAIN,
    "additive_couplings_with_biases_after_them": _TURNS,
    **dict.fromkeys(
        (
            "boxes_that_layers_refine_through_their_logits_in_a_list",
            "boxes_that_layers_refine_through_their_logits_in_a_scan",
            "boxes_that_layers_refine_through_their_logits_in_a_scan_of_logs",
        ),
        "no gradient passes its layers",
    ),
    "early_exit_by_cond_on_the_layer_number": _NUMBER,
    "kernels_of_all_layers_stacked_by_rows": _BESIDE,
    "kinds_of_blocks_alternate_of_which_one_splits_a_kernel": _TURNS,
    "linear_attention_whose_values_are_divided_by_the_depth": _MULTIPLIED,
    "linen_compact_transformer": _TURNS,
    "linen_resnet_whose_shortcuts_have_batch_statistics": (
        "the first layer of a stage has shapes of its own"
    ),
    "logits_that_a_scan_over_layers_adds_up": _LAYERS,
    "mean_velocity_by_its_derivative": _NUMBER,
    "modulations_of_all_layers_by_one_kernel": _BESIDE,
    "outputs_of_all_layers_beside_the_stream_in_a_list": _LAYERS,
    "scan_of_layers_with_kv_cache_as_carry_and_outputs": _LAYERS,
    "shares_of_two_values_of_layers_in_a_list": _AGAIN,
    "stages_of_numbered_layers_in_one_list": _TURNS,
    "symplectic_layers_in_a_scan": "momenta that start at zero act to second order",
    "targets_of_the_last_branches_of_a_teacher": _LAYERS,
    "top_down_layers_whose_latents_are_in_the_loss": "a loss adds up over layers",
    "what_each_branch_adds_in_a_scan_is_returned_by_layers": _LAYERS,
    "windows_that_the_last_stage_does_not_shift": _TURNS,
}


def chosen(rows, exceptions):
    """A fixed fourth of the table, as each row takes seconds."""
    rows = [x for x in rows if not x.asks and x.name not in exceptions]
    rows = [x for x in rows if not x.name.startswith("composed")]
    return [x for x in rows if zlib.crc32(x.name.encode()) % 4 == 0]


ROWS = chosen(kit.ALL, INEXACT)
# What acts on the stream itself in each layer is a power, and no sum, of copies.
DEEP = [x for x in kit.ALL if x.deep and not any("m" in y for y in x.right.values())]
DEEP = chosen(DEEP, INEXACT_IN_DEPTH)


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


def places(scale, way):
    """Of which entry of a parameter of the base each of the target's is a copy."""
    small = np.arange(np.prod(scale.base_shape, dtype=int)).reshape(scale.base_shape)
    if not scale.segments:
        heads = scale.base_head_shape, scale.head_shape
        return copied(small, scale.shape, way, heads)
    large = np.zeros(scale.shape, int)
    for part in scale.segments:
        before = small.reshape(part.base_place.view(scale.base_shape))
        after = large.reshape(part.place.view(scale.shape))  # shares its memory
        size = after[part.place.index].shape
        after[part.place.index] = copied(before[part.base_place.index], size, way)
    return large


def of_target(array, scale, way, point):
    """A parameter of the target, from its counterpart in the base."""
    large = jnp.ravel(array)[places(scale, way)]
    return large * multipliers(scale, point).learning_rate - shift(scale, point)


def copies(scales, params, way):
    """The target's parameters, by path, from those of the base."""
    return {
        path: of_target(params[twin], scales[path], way, scales.parametrization)
        for path, twin in twins(scales, params).items()
    }


def twins(large, small):
    """Of which parameter of the base each of the target is a copy, in lists, too."""

    def numbers(paths):
        """{(path up to a number, what follows without numbers): the numbers}."""
        found = {}
        for path in paths:
            for x in re.finditer(r"\d+", path):
                rest = re.sub(r"\d+", "#", path[x.end() :])
                found.setdefault((path[: x.start()], rest), set()).add(x[0])
        return {key: sorted(each, key=int) for key, each in found.items()}

    after, before = numbers(large), numbers(small)

    def twin(path):
        built, at = "", 0
        for x in re.finditer(r"\d+", path):
            built, rest = built + path[at : x.start()], path[x.end() :]
            rest = re.sub(r"\d+", "#", rest)
            many, few = after[path[: x.start()], rest], before[built, rest]
            built += few[many.index(x[0]) * len(few) // len(many)]
            at = x.end()
        return built + path[at:]

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


def forward(reading):
    """The forward pass, as a function of parameters by path."""
    program = reading.program
    like = [x.aval for x in program.traced.jaxpr.invars]
    number, state = program.counts
    rest = [jnp.ones(x.shape, x.dtype) for x in like[number:][:state]]
    inputs = enumerate(like[number + state :])
    rest += [drawn(jax.random.key(i), x) for i, x in inputs]
    run = jax.extend.core.jaxpr_as_fun(program.traced)

    def results(params):
        values = zip((params[path] for path in reading.path_of), like, strict=False)
        found = run(*(jnp.asarray(x, y.dtype) for x, y in values), *rest)
        return [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]

    return results


def difference(one, other, way):
    """The largest difference of results, over their size."""
    pairs = (map(np.asarray, pair) for pair in zip(one, other, strict=True))
    each = [(copied(x, y.shape, way), y) for x, y in pairs]
    return max(abs(x - y).max() / (abs(x).max() + 1e-9) for x, y in each)


def read(models, **point):
    """The scales of a target, and the readings of base and target."""
    base, target, inputs, call = models
    with jax.numpy_rank_promotion("allow"):
        scales = optim.infer_scales(base, target, inputs=inputs, call=call, **point)
        small = trace(base, inputs, call, "base")
        return scales, small, trace(target, inputs, call, "target")


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_copies_of_units_change_no_function(row):
    scales, small, large = read(row.models(depth=2))
    params = drawn_parameters(small.leaves)
    start, run = jax.jit(forward(small))(params), jax.jit(forward(large))
    found = {}
    for way in WAYS:
        found[way] = difference(start, run(copies(scales, params, way)), way)
        if found[way] < 2e-3:
            return
    pytest.fail(f"relative differences: {found}")


@pytest.mark.long
@pytest.mark.parametrize("row", DEEP, ids=lambda row: row.name)
def test_copies_of_layers_with_small_branches_change_no_function(row):
    scales, small, large = read(row.models(width=8), parametrization="ode")
    params = drawn_parameters(small.leaves)
    ends = {}
    for path, twin in twins(scales, params).items():
        scale = scales[path]
        is_end = np.full(scale.base_shape, scale.ends_branch)
        for part in scale.segments:
            view = is_end.reshape(part.base_place.view(scale.base_shape))
            view[part.base_place.index] = part.ends_branch
        ends[twin] = is_end, scale.offset

    def of_base(size):
        """The base's parameters, what ends its branches times a number."""
        found = {}
        for path, (is_end, offset) in ends.items():
            scaled = size * (params[path] + offset) - offset
            found[path] = jnp.where(is_end, scaled, params[path])
        return found

    def derived(function):
        """The values where branches are small, and their derivatives."""
        return jax.jit(lambda x: jax.jvp(function, (x,), (1.0,)))(1e-4)

    run, rerun = forward(small), forward(large)
    one = derived(lambda x: run(of_base(x)))
    other = derived(lambda x: rerun(copies(scales, of_base(x), "beside")))
    each = zip(one, other, strict=True)
    found = [difference(x, y, "beside") for x, y in each]
    assert max(found) < 2e-3, f"relative differences of values and slopes: {found}"
    assert max(abs(x).max() for x in one[1]) > 0
