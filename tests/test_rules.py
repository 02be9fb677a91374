"""Every number of docs/rules.md, for every parametrization and family."""

import dataclasses
import doctest
import functools
import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax import optim
from mupax.optim.rules.multipliers import RECIPES

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "rules.md"
FAMILIES = {
    "sgd": ["sgd", "momentum", "nesterov"],
    "adam": "adam adamw lion sign signsgd rmsprop nadam amsgrad".split(),  # noqa: SIM905
    "spectral": ["spectral", "muon", "soap", "shampoo", "scion"],
    "column": ["column"],
    "row": ["row"],
    "relative": ["relative", "lars", "lamb", "adafactor"],
    "sphere": ["sphere", "adam_h", "muon_h"],
}


def tables():
    """The tables of the document: a list of rows, each a dict by heading."""
    all_rows, lines = [], DOCUMENT.read_text().splitlines()
    for is_table, group in itertools.groupby(lines, lambda x: x.startswith("|")):
        if is_table:
            cells = [[c.strip() for c in x.strip("|").split("|")] for x in group]
            head, _, *rows = cells
            all_rows.append([dict(zip(head, row, strict=True)) for row in rows])
    return all_rows


def value(cell, **names):
    """A formula of the document, without its remark, as a number."""
    code = (
        cell.partition(" (")[0]
        .strip("`")
        .replace("^", "**")
        .replace("½", "0.5")
        .replace("·", "*")
    )
    code = code.replace("α", "alpha").replace("γ", "gamma")
    return eval(code, {}, names)


def each(table, key):
    """The rows of a table, one for each name in a column."""
    return [row | {key: name} for row in table for name in row[key].split(", ")]


SIZES, GEOMETRIES, LEARNING_RATES, POINTS, TRAINING = tables()[1:6]
TRAINING = each(TRAINING, "family")
IN_WIDTH = {family: head for head in LEARNING_RATES[0] for family in head.split(", ")}


def scale_of(role, *, m_in=4.0, m_out=2.0, m_last=8.0, depth=1.0, in_branch=False):
    """A parameter of a role; ratios that the role does not have are one."""
    has_in = role in ("hidden", "output")
    has_out = role in ("input", "hidden", "vector")
    fan_in = () if role == "vector" else (0,)
    return optim.ParamScale(
        "w",
        optim.Role(role),
        (16, 16),
        (16, 16),
        fan_in,
        (1,),
        width_in=m_in if has_in else 1.0,
        width_out=m_out if has_out else 1.0,
        # The readout's fan-in is the last hidden width.
        width_last=m_in if role == "output" else m_last,
        depth=depth,
        in_branch=in_branch,
    )


def ratios(scale):
    return {
        "m_in": scale.width_in,
        "m_out": scale.width_out,
        "m_last": scale.width_last,
    }


ROLES = [r.value for r in optim.Role]


def trains(optimizers, role):
    """Those that train a parameter of this role themselves, not by a partner."""
    return [x for x in optimizers if role == "hidden" or not RECIPES[x].partner]


def test_the_document_has_every_role_and_family():
    assert [row["role"] for row in SIZES] == ROLES
    assert [row["role"] for row in LEARNING_RATES] == ROLES
    assert [row["family"] for row in GEOMETRIES] == list(FAMILIES)
    assert set(FAMILIES) == set(optim.Family)
    assert {row["family"] for row in TRAINING} == set(FAMILIES)
    assert len(DOCUMENT.read_text().splitlines()) < 250


def test_the_documents_example_is_what_explain_says():
    result = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: row["family"])
def test_batch_size_and_length_are_the_documents(row):
    clock = optim.TrainingScale(batch=8.0, examples=2.0)
    scale = dataclasses.replace(scale_of("hidden"), training=clock)
    point = optim.parametrization("mup")
    plain = optim.multipliers(scale_of("hidden"), point, row["family"])
    rule = optim.multipliers(scale, point, row["family"])
    names = {"κ": 4.0}
    rate = rule.learning_rate / plain.learning_rate
    assert rate == pytest.approx(value(row["learning rate"], **names))
    decay = rule.weight_decay / plain.weight_decay
    assert decay == pytest.approx(value(row["decay (wd)"], **names))
    assert rate * decay == pytest.approx(value(row["lr·wd"], **names))
    if row["eps"] != "-":
        assert rule.eps / plain.eps == pytest.approx(value(row["eps"], **names))
        slow = 1 - 1e-6
        assert (1 - clock.beta(slow)) / 1e-6 == pytest.approx(
            value(row["1-β"], **names), rel=1e-4
        )


@pytest.mark.parametrize("s", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("row", SIZES, ids=lambda row: row["role"])
def test_sizes_of_the_s_family_are_the_documents(row, s):
    scale = scale_of(row["role"])
    sizes = optim.parametrization("meta_principled", s=s).rows[scale.role]
    names = {**ratios(scale), "s": s}
    assert sizes.init.of(scale) == pytest.approx(value(row["init"], **names))
    assert sizes.update.of(scale) == pytest.approx(value(row["Δ"], **names))
    assert sizes.gradient.of(scale) == pytest.approx(value(row["g"], **names))


@pytest.mark.parametrize("s", [0.0, 0.3, 1.0])
def test_growing_all_widths_together_gives_yaidas_rates(s):
    """Yaida eqs. 3.16-3.20, with every hidden width n: init variance and SGD's rate."""
    n = 8.0
    point = optim.parametrization("meta_principled", s=s)
    yaida = {  # C / n^..., λ / n^... times the global n^s
        "input": (1.0, n**s),
        "hidden": (1 / n, n**s / n),
        "output": (1 / n ** (1 + s), n**s / n**s / n),
        "vector": (1.0, n**s),
        "fixed": (1.0, n**s / n**s),  # the output's bias
    }
    for role, (variance, rate) in yaida.items():
        scale = scale_of(role, m_in=n, m_out=n, m_last=n)
        rule = optim.multipliers(scale, point, "sgd")
        if role != "fixed":  # the library leaves the initial bias of the output alone
            assert rule.init_std**2 == pytest.approx(variance)
        assert rule.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("s", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("row", GEOMETRIES, ids=lambda row: row["family"])
def test_learning_rates_are_the_documents_for_any_sizes(row, role, s):
    scale, point = scale_of(role), optim.parametrization("meta_principled", s=s)
    sizes = point.rows[scale.role]
    init, update, gradient = (powers.of(scale) for powers in sizes)
    names = {**ratios(scale), "init": init, "Δ": update, "g": gradient}
    expected = value(row["learning rate"], **names)
    for optimizer in trains(FAMILIES[row["family"]], role):
        rule = optim.multipliers(scale, point, optimizer)
        assert rule.learning_rate == pytest.approx(expected)


@pytest.mark.parametrize("name", ["mup", "mean_field", "depth_mup", "relu_mlp"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f in IN_WIDTH])
@pytest.mark.parametrize("row", LEARNING_RATES, ids=lambda row: row["role"])
def test_learning_rates_of_mup_in_width_are_the_documents(row, family, name):
    scale = scale_of(row["role"])
    point = optim.parametrization(name, gauge="table3")
    expected = value(row[IN_WIDTH[family]], **ratios(scale))
    for optimizer in trains(FAMILIES[family], row["role"]):
        rule = optim.multipliers(scale, point, optimizer)
        assert rule.learning_rate == pytest.approx(expected)


@pytest.mark.parametrize("row", GEOMETRIES, ids=lambda row: row["family"])
@pytest.mark.parametrize("point", POINTS, ids=lambda row: row["name"])
@pytest.mark.parametrize("role", ROLES)
def test_depth_acts_inside_branches_and_nowhere_else(role, point, row):
    M = 16.0
    alpha, gamma = float(point["α"]), float(point["γ"])
    named = optim.parametrization(point["name"].strip("`"))
    same = optim.parametrization("residual", alpha=alpha, gamma=gamma)
    shallow = optim.multipliers(scale_of(role), same, row["family"])
    factor = value(row["times, in branches"], M=M, alpha=alpha, gamma=gamma)
    for p in (named, same):
        assert p.branch_multiplier(M, a=3.0) == pytest.approx(3 * M**-alpha)
        deep = scale_of(role, depth=M, in_branch=True)
        inside = optim.multipliers(deep, p, row["family"])
        assert inside.learning_rate == pytest.approx(shallow.learning_rate * factor)
        assert inside.gradient == pytest.approx(shallow.gradient * M**-alpha)
        assert inside.init_std == pytest.approx(shallow.init_std)
        deep = scale_of(role, depth=M, in_branch=False)
        assert optim.multipliers(deep, p, row["family"]) == shallow


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
def test_completep_lies_on_the_line_of_stable_and_nontrivial_points(alpha):
    point = optim.parametrization("completep", alpha=alpha)
    assert point.alpha + point.gamma == 1
    bias = scale_of("vector", depth=16.0, in_branch=True)
    rule = optim.multipliers(bias, point, "adam")
    assert rule.learning_rate == pytest.approx(16 ** (alpha - 1))
    # Bordelon et al., appendix M: branches L^-a, SGD's rates L^(2a - 1).
    rule = optim.multipliers(bias, point, "sgd")
    assert rule.learning_rate == pytest.approx(2 * 16 ** (2 * alpha - 1))


# The operator norm of a raw update, in root mean square of outputs over inputs: an
# aligned matrix of entries x has x·n_in. c is the branch multiplier.
RAW_NORMS = {
    "sgd": lambda m_in, m_out, c: c / m_out * m_in,
    "adam": lambda m_in, m_out, c: m_in,
    "spectral": lambda m_in, m_out, c: (m_in / m_out) ** 0.5,
    "sphere": lambda m_in, m_out, c: m_in**-0.5 * m_in,
}


@pytest.mark.parametrize("family", RAW_NORMS)
@pytest.mark.parametrize(("name", "layers"), [("depth_mup", 1), ("completep", 2)])
def test_branches_meet_the_spectral_condition_of_width_and_depth(name, layers, family):
    """arXiv:2603.00541; docs/rules.md section 4 derives it."""
    M, m_in, m_out = 16.0, 4.0, 2.0
    scale = scale_of("hidden", m_in=m_in, m_out=m_out, depth=M, in_branch=True)
    point = optim.parametrization(name)
    c, rule = point.branch_multiplier(M), optim.multipliers(scale, point, family)
    weight = rule.init_std * m_in**0.5  # random, so √n
    change = rule.learning_rate * RAW_NORMS[family](m_in, m_out, c)
    assert weight == pytest.approx(1)
    terms = {1: [change], 2: [change * weight, change**2]}[layers]
    assert [c * M * term for term in terms] == pytest.approx([1] * layers)
    assert c * M**0.5 * weight**layers <= 1
    # Under the other point, branches of one layer vanish at the start, and the last
    # term of two vanishes.
    other = optim.parametrization({1: "completep", 2: "depth_mup"}[layers])
    c, rule = other.branch_multiplier(M), optim.multipliers(scale, other, family)
    change = rule.learning_rate * RAW_NORMS[family](m_in, m_out, c)
    vanishes = {1: c * M**0.5, 2: c * M * change**2}[layers]
    assert vanishes == pytest.approx(M**-0.5)


def test_a_group_gives_embeddings_the_rule_of_large_vocabularies():
    """arXiv:2506.15025: Adam's rate of embeddings over that of hidden weights is √m."""
    ratios = []
    for width in (8, 32, 128):
        base, target = (
            {"embed": jnp.zeros((100, n)), "w": jnp.zeros((n, n))} for n in (8, width)
        )
        delta = {"embed": jnp.zeros((100, 16)), "w": jnp.zeros((16, 16))}
        scales = optim.infer_scales(base, target, axes={".": "i -> o"}, delta=delta)
        factor = scales["embed"].width_out ** -0.5
        grouped = optim.for_modules(scales, {"^embed": {"learning_rate": factor}})
        tx, ones = optim.adam(1.0, grouped), jax.tree.map(jnp.ones_like, target)
        step, _ = tx.update(ones, tx.init(target), target)
        ratios.append(float(step["embed"][0, 0] / step["w"][0, 0]))
    assert ratios == pytest.approx([1, 2, 4])
    assert "embed: also times" in str(optim.explain(grouped, "adam"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ROLES)
def test_relu_mlp_is_mup_times_depth_to_the_minus_3_halves(role, family):
    mup, relu = map(optim.parametrization, ("mup", "relu_mlp"))
    shallow = optim.multipliers(scale_of(role), mup, family)
    deep = optim.multipliers(scale_of(role, depth=16.0), relu, family)
    assert deep.learning_rate == pytest.approx(shallow.learning_rate / 64)
    assert deep.gradient == pytest.approx(shallow.gradient)
    assert relu.branch_multiplier(16.0) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ROLES)
def test_sp_has_one_learning_rate_and_changes_no_eps(role, family):
    scale = scale_of(role, depth=16.0, in_branch=True)
    for gauge in ("table3", "table8", "mean_field"):
        point = optim.parametrization("sp", gauge=gauge)
        rule = optim.multipliers(scale, point, family)
        assert (rule.learning_rate, rule.weight_decay, rule.eps) == (1, 1, 1)
        init = scale.width_in**-0.5 if role in ("hidden", "output") else 1
        assert rule.init_std * rule.forward == pytest.approx(init)


def test_ntk_and_mup_are_the_ends_of_the_family():
    for role, name in itertools.product(ROLES, FAMILIES):
        for s, end in ((0.0, "ntk"), (1.0, "mup"), (1.0, "mean_field")):
            point = optim.parametrization("meta_principled", s=s)
            other = optim.parametrization(end, gauge="table3")
            mine = optim.multipliers(scale_of(role), point, name)
            assert optim.multipliers(scale_of(role), other, name) == mine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ROLES)
def test_richness_multiplies_sgds_rates_by_its_square_and_all_others_by_itself(
    role, family
):
    plain = optim.multipliers(scale_of(role), optim.parametrization("mup"), family)
    point = optim.parametrization("mup", richness=3.0)
    rich = optim.multipliers(scale_of(role), point, family)
    power = 2 if family == "sgd" else 1
    assert rich.learning_rate == pytest.approx(plain.learning_rate * 3**power)
    assert rich.gradient == pytest.approx(plain.gradient / 3)
    assert (rich.init_std, rich.forward) == (plain.init_std, plain.forward)


def test_mean_field_gauge_stores_weights_of_order_one_under_one_sgd_rate():
    """Bordelon et al., Table 1: weights of order one, learning rate ∝ N."""
    point = optim.parametrization("mean_field")
    for role in ("input", "hidden", "output", "vector"):
        scale = scale_of(role, m_in=4.0, m_out=4.0, m_last=4.0)
        rule = optim.multipliers(scale, point, "sgd")
        assert rule.init_std == pytest.approx(1)
        assert rule.learning_rate == pytest.approx(4)


@given(
    role=st.sampled_from(ROLES),
    power=st.floats(-2, 2),
    s=st.floats(0, 1),
    family=st.sampled_from(list(FAMILIES)),
)
def test_a_gauge_of_any_role_keeps_the_effective_weights_and_updates(
    role, power, s, family
):
    scale = scale_of(role)
    plain = optim.parametrization("meta_principled", s=s)
    moved = optim.parametrization(plain, gauge={role: optim.Powers(power, power)})
    a, b = (optim.multipliers(scale, p, family) for p in (plain, moved))
    theta = b.forward
    assert b.init_std * theta == pytest.approx(a.init_std)
    assert b.gradient / theta == pytest.approx(a.gradient)
    # The raw update of a stored weight, times what it is worth in the function.
    raw = {"sgd": theta, "relative": 1 / theta, "sphere": 1 / theta}.get(family, 1)
    assert b.learning_rate * raw * theta == pytest.approx(a.learning_rate)


@given(
    name=st.sampled_from(["mup", "ntk", "depth_mup", "ode", "completep"]),
    role=st.sampled_from(ROLES),
    family=st.sampled_from(list(FAMILIES)),
    depth=st.floats(0.01, 1000),
)
def test_rate_times_decay_is_the_same_at_every_size(name, role, family, depth):
    scale = scale_of(role, depth=depth, in_branch=True)
    rule = optim.multipliers(scale, optim.parametrization(name), family)
    assert rule.learning_rate * rule.weight_decay == pytest.approx(1)


# --- by simulation ---------------------------------------------------------------

INPUTS, BASE, SEEDS = 8, 8, 32
S = (0.0, 0.5, 1.0)


def forward(weights, x):
    """tanh layers and a readout; also the last features."""
    *inner, last = [weights[name] for name in sorted(weights)]
    for w in inner:
        x = jnp.tanh(x @ w)
    return (x @ last)[:, 0], x


def one_step(noise, std, rates):
    """What one step of the library's rates does to a network, linearly in the rates.

    Returns:
      By layer, the rms of its gradient; by family and layer, how far its update alone
      moves the output; by family, the rms of how far all move the last features.
    """
    weights = {p: std[p] * noise[p] for p in noise}
    x = jax.random.normal(jax.random.key(1), (INPUTS, INPUTS))
    # A loss whose gradient by the output is fixed.
    gradients = jax.grad(lambda w: jnp.sum(forward(w, x)[0] * x[0]))(weights)
    size = {p: jnp.sqrt((g**2).mean()) for p, g in gradients.items()}
    shares, features = {}, {}
    for family in ("sgd", "adam"):
        raw = gradients if family == "sgd" else jax.tree.map(jnp.sign, gradients)
        updates = {p: rates[family][p] * u for p, u in raw.items()}
        for path in updates:
            only = {p: u * (p == path) for p, u in updates.items()}
            moved = jax.jvp(lambda w: forward(w, x)[0], (weights,), (only,))[1]
            shares[family, path] = jnp.sqrt((moved**2).mean())
        moved = jax.jvp(lambda w: forward(w, x)[1], (weights,), (updates,))[1]
        features[family] = jnp.sqrt((moved**2).mean())
    return size, shares, features


@functools.cache
def measure(widths):
    """`one_step` at hidden widths `widths`: geometric means over seeds, for each s."""

    def structs(sizes):
        return {
            f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32)
            for i, shape in enumerate(itertools.pairwise((INPUTS, *sizes, 1)))
        }

    scales = optim.infer_scales(
        structs([BASE] * len(widths)), structs(widths), axes={".": "i -> o"}
    )
    points = [optim.parametrization("meta_principled", s=s) for s in S]

    def table(number):
        return {
            path: jnp.array([number(scale, point) for point in points])
            for path, scale in scales.items()
        }

    std = table(
        lambda scale, point: (
            optim.multipliers(scale, point).init_std / scale.base_shape[0] ** 0.5
        )
    )
    rates = {
        family: table(lambda s, p, f=family: optim.multipliers(s, p, f).learning_rate)
        for family in ("sgd", "adam")
    }
    rng = np.random.default_rng(0)
    noise = {
        path: rng.normal(size=(SEEDS, *s.shape)).astype(np.float32)
        for path, s in scales.items()
    }
    run = jax.jit(
        lambda noise: jax.lax.map(
            lambda n: jax.vmap(one_step, (None, 0, 0))(n, std, rates), noise
        ),
        compiler_options={"xla_backend_optimization_level": 1},
    )
    measured = jax.device_get(run(noise))
    return jax.tree.map(lambda a: np.exp(np.log(a).mean(axis=0)), measured)


def exponents(small, large, growth):
    """Of each measured size as a power of width, for each s."""
    first, second = measure(small), measure(large)
    return jax.tree.map(lambda a, b: np.log(b / a) / math.log(growth), first, second)


def test_every_layer_moves_the_output_alike_at_every_width():
    """Yaida's principle of learning-rate equivalence (section III.B), measured."""
    size, shares, features = exponents((128,) * 3, (1024,) * 3, 8)
    for (family, path), slope in shares.items():
        assert slope == pytest.approx(np.zeros(3), abs=0.05), (family, path)
    for path, slope in size.items():
        # The rows of g: the readout's gradient is of order one, the others shrink.
        g = [0.0 if path == "w3" else -(1 + s) / 2 for s in S]
        assert slope == pytest.approx(g, abs=0.05), path
    for slope in features.values():
        # Under μP features move by order one, under NTK not at all.
        assert slope == pytest.approx([-(1 - s) / 2 for s in S], abs=0.05)


def test_of_unequal_ratios_inner_layers_count_m_out_over_m_last():
    """One layer grows by 8, the last one does not, and its share of SGD's step does.

    So Tensor Programs V counts. Yaida's SGD rate, n_last^s over fan-in, would keep
    the shares alike; the two are one where all widths grow together.
    """
    shares = exponents((128, 128, 128), (128, 1024, 128), 8)[1]
    for path, power in {"w0": 0, "w1": 1, "w2": 0, "w3": 0}.items():
        assert shares["sgd", path] == pytest.approx([power] * 3, abs=0.05)


# --- bad input -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("meta_principled", {"s": 1.1}), "must lie in [0, 1]"),
        (("meta_principled", {"s": math.nan}), "must lie in [0, 1]"),
        (("completep", {"alpha": 0.4}), "must lie in [1/2, 1]"),
        (("residual", {"alpha": 0.5}), "missing 1 required"),
        (("residual", {"alpha": math.nan, "gamma": 0}), "alpha=nan"),
        (("mup", {"s": 1.0}), "the options of 'mup' are ()"),
        (("completep", {"s": 1.0}), "the options of 'completep' are (alpha: float"),
        (("mup", {"richness": 0.0}), "must be finite and positive"),
        (("mup", {"richness": math.nan}), "must be finite"),
        (("mup", {"gauge": "table9"}), "nearest is 'table8'"),
        (("mup", {"gauge": {"hiden": optim.Powers()}}), "nearest is 'hidden'"),
    ],
)
def test_bad_parametrizations_are_named(arguments, message):
    name, *options = arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        optim.parametrization(name, **(options[0] if options else {}))


@pytest.mark.parametrize("ratio", [math.nan, math.inf, 0])
def test_a_depth_ratio_is_one_positive_number(ratio):
    point = optim.parametrization("depth_mup")
    with pytest.raises(ValueError, match="pass depth / base depth"):
        point.branch_multiplier(ratio)
    with pytest.raises(TypeError):
        point.branch_multiplier(32, 4)


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (optim.parametrization("depth_mup"), "depth_mup"),
        (optim.parametrization("completep"), "completep(alpha=1)"),
        (optim.parametrization("mup", gauge="table8"), "mup (gauge='table8')"),
    ],
)
def test_a_parametrization_is_printed_in_a_few_words(point, text):
    assert repr(point) == text


def test_every_parametrization_has_a_citation_and_works_for_every_family():
    options = {"residual": {"alpha": 0.5, "gamma": 0.5}}
    for name in optim.list_parametrizations():
        point = optim.parametrization(name, **options.get(name, {}))
        assert re.search(r"arXiv:\d{4}\.\d{5}", point.citation)
        for role, family in itertools.product(ROLES, FAMILIES):
            rule = optim.multipliers(scale_of(role), point, family)
            *numbers, _ = dataclasses.astuple(rule)
            assert all(np.isfinite(x) and x > 0 for x in numbers)
