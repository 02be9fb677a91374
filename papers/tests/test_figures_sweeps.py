"""Figures that are sweeps: they plan, draw, and judge made populations as they are."""

import csv
import dataclasses
import functools
import io
import itertools
import math
import shutil

import numpy as np
import pytest
from PIL import Image

from mupax.experiments.errors import UserError
from mupax.experiments.sweep import engine, grids, space
from mupax.experiments.sweep.results import Population, Sizes
from papers import __main__ as cli
from papers import (
    catalogue,
    curves,
    draw,
    parts,
    sizes,
    tables,
    training,
)
from papers import claims_bordelon as bordelon
from papers import claims_tp6 as tp6
from papers.request import DRAWN, SCALES, Request
from tests.sweep_populations import population, swept

TRAINED = {name: f for name, f in catalogue.figures().items() if f.parts}
GRIDS = {
    "learning_rate": "2**[-12:-1:1]",
    "branch_multiplier": "2**[-2:2]",
    "richness": "2**[-2:2]",
    "momentum": "1-2**[-5:-1]",
    "weight_decay": "2**[-4:4:2]",
    "hidden/weight_decay": "2**[-2:0:1]",
}
RATE, DEPTHS, BASE = -6.3, (8, 32, 128), Sizes(64, 8)


def bowl(places, grid):
    return sum(0.1 * (grid[name] - place) ** 2 for name, place in places.items())


def made(
    key,
    depth,
    *,
    width=64,
    level=1.0,
    early=1.0,
    drift=0.0,
    choices=None,
    shape=None,
    noise=1e-3,
    **places,
):
    """A population whose loss is least at `places`.

    `early` times the level, and `drift` octaves away, for the first half of the run.
    """
    places = {"learning_rate": RATE, **places}
    shape = shape or functools.partial(bowl, places)
    axes = {name: list(grids.parse(name, GRIDS[name])) for name in places}
    values = [[grids.coordinate(n, x) for x in found] for n, found in axes.items()]
    grid = dict(zip(axes, np.meshgrid(*values, indexing="ij"), strict=True))
    rng = np.random.default_rng([depth, width, len(key)])
    seeds = np.exp(rng.normal(0, noise, (3, *grid["learning_rate"].shape)))
    loss = level * np.exp(shape(grid)) * seeds
    before = {**grid, "learning_rate": grid["learning_rate"] - drift}
    first = early * level * np.exp(shape(before)) * seeds
    both = np.stack([first] * 20 + [loss] * 20, axis=-1)
    name = f"{key}-w{width}-d{depth}"
    return Population(name, key, width, depth, choices or {}, axes, loss, both, 1.0)


def found(*populations, base=BASE, **changes):
    return swept(list(populations), base=base, **changes)


def depths(key, shift=0.0, gain=0.05, *, sizes=DEPTHS, **options):
    """Of each doubling the optimum moves by `shift`, the log loss falls by `gain`."""
    return [
        made(
            key,
            d,
            level=options.get("level", 1.0) * math.exp(-gain * math.log2(d / sizes[0])),
            learning_rate=RATE + shift * math.log2(d / sizes[0]),
            **{k: v for k, v in options.items() if k != "level"},
        )
        for d in sizes
    ]


def widths(key, shift=0.0):
    return [
        made(key, 8, width=w, learning_rate=RATE + shift * math.log2(w / 64))
        for w in (32, 128)
    ]


def axis_over_depth(name, shift, start=0.2):
    places = {d: start + shift * math.log2(d / 8) for d in DEPTHS}
    return found(*(made("depth_mup", d, **{name: x}) for d, x in places.items()))


def batch_sizes(shift):
    """A sweep over batch sizes; of each doubling the optimum moves by `shift`."""
    return found(
        *(
            made(
                "depth_mup",
                8,
                choices={"batch_size": size},
                learning_rate=RATE + shift * math.log2(size / 64),
            )
            for size in (16, 64, 256, 512)
        ),
        settings={"config": {"batch_size": 64}},
    )


def decayed(product, constant):
    """Shares of decay over width; the optimum of two of them moves by so much."""
    share = "hidden/weight_decay"
    populations = []
    for width in (16, 32, 64):
        octaves = math.log2(width / 16)

        def shape(grid, octaves=octaves):
            # The share of constant decay is base width/width, 2**-octaves.
            part = -grid[share] / octaves if octaves else 0.0
            move = (product + part * (constant - product)) * octaves
            return 0.1 * (grid["learning_rate"] - RATE - move) ** 2

        populations.append(
            made("completep", 2, width=width, shape=shape, **{share: 0.0})
        )
    none = [made("completep", 2, width=w) for w in (16, 32, 64)]
    base = {"base": Sizes(16, 2), "featured": "completep"}
    return found(*populations, **base), found(*none, **base)


def norms(mup_batch, depth_batch, depth_none, mup_none):
    keys = {
        ("mup", "batch"): mup_batch,
        ("depth_mup", "batch"): depth_batch,
        ("depth_mup", "none"): depth_none,
        ("mup", "none"): mup_none,
    }
    return found(
        *itertools.chain.from_iterable(
            depths(key, shift, choices={"model.norm": norm})
            for (key, norm), shift in keys.items()
        )
    )


def vits(shift=0.0, gain=0.1):
    return found(
        *itertools.chain.from_iterable(
            depths(key, shift, more, choices={"model.layer_norm": norm})
            for key, more in (("mup", 0.05), ("depth_mup", gain))
            for norm in (True, False)
        )
    )


def valleys(*slopes):
    """Quadratics whose long axes have these slopes, at depths 2, 4, ..."""

    def shape(slope, grid):
        x, y = grid["learning_rate"] - RATE, grid["branch_multiplier"]
        across, along = slope * x - y, x + slope * y
        return (0.3 * across**2 + 0.01 * along**2) / (1 + slope**2)

    return found(
        *(
            made(
                "depth_mup",
                2 ** (i + 1),
                shape=functools.partial(shape, slope),
                branch_multiplier=0.0,
            )
            for i, slope in enumerate(slopes)
        ),
        base=Sizes(64, 2),
    )


def equal_sizes(best):
    """Sweeps of one depth each, at two widths; the loss is least at depth `best`."""
    return tuple(
        found(
            *(
                made(
                    "depth_mup",
                    depth,
                    width=width,
                    noise=0.001,
                    level=math.exp(0.1 * math.log2(depth / best) ** 2),
                )
                for width in (8 * 2**i, 16 * 2**i)
            ),
            base=Sizes(8 * 2**i, depth),
            settings={"config": {"model": {"name": "cnn"}, "data": {"image_size": 16}}},
        )
        for i, depth in ((2, 4), (1, 16), (0, 64))
    )


def early_late(early, drift=0.0, key="depth_mup", gain=0.05, shift=0.0):
    """Early levels at each depth, as a factor."""
    return [
        made(
            key,
            d,
            level=math.exp(-gain * i),
            early=e,
            drift=drift * math.log2(d / 8),
            learning_rate=RATE + shift * math.log2(d / 8),
        )
        for i, (d, e) in enumerate(zip(DEPTHS, early, strict=True))
    ]


def rates(deep=0.0, half=-0.5, gain=0.05):
    return (found(*depths("depth_mup", deep, gain), *depths("half_alpha", half)),)


def odes(shift=-0.5, level=2.0):
    return (found(*depths("ode", shift, level=level), *depths("depth_mup")),)


def one(shift=0.0, gain=0.05, level=1.0, sizes=DEPTHS):
    base = Sizes(64, sizes[0])
    return found(*depths("depth_mup", shift, gain, sizes=sizes, level=level), base=base)


def cnns(mup=-0.5, deep=0.0, width=0.0):
    return (
        found(
            *depths("mup", mup),
            *depths("depth_mup", deep),
            *widths("depth_mup", width),
            *widths("mup", width),
        ),
    )


def standards(mup):
    return found(*depths("mup", mup), *widths("mup")), found(*widths("sp"))


def branches(ode, sde):
    return (found(*early_late(ode, key="ode"), *early_late(sde, key="depth_mup")),)


TWO = (4, 16, 64)
BATCH = {"norm": "batch", "label": "batch norm"}
RISING, FALLING = (1.0, 1.2, 1.4), (1.4, 1.2, 1.0)
CASES = {
    "stays, gains, others move": (tp6.rate_over_depth, rates(), True),
    "Depth-μP moves": (tp6.rate_over_depth, rates(deep=0.5), False),
    "the others stay": (tp6.rate_over_depth, rates(half=0.0), False),
    "depth is a loss": (tp6.rate_over_depth, rates(gain=-0.05), False),
    "depth is no gain": (tp6.rate_over_depth, rates(gain=0.0), False),
    "ode moves": (tp6.ode_moves, odes(), True),
    "ode stays": (tp6.ode_moves, odes(shift=0.0), False),
    "ode is better": (tp6.ode_moves, odes(level=0.5), False),
    "a settles": (
        tp6.multiplier_settles,
        (axis_over_depth("branch_multiplier", 0.0),),
        True,
    ),
    "a moves": (
        tp6.multiplier_settles,
        (axis_over_depth("branch_multiplier", 0.5, -0.8),),
        False,
    ),
    "no gain": (tp6.weights_last, (one(gain=0.0, level=2.0), one()), True),
    "a gain": (tp6.weights_last, (one(level=2.0), one()), False),
    "as good": (tp6.weights_last, (one(gain=0.0), one(gain=0.0)), False),
    "abs is better": (tp6.absolute_gains, (one(), one(level=1.2)), True),
    "abs is worse": (tp6.absolute_gains, (one(level=1.2), one()), False),
    "two layers lose": (
        tp6.two_layers_lose,
        (one(level=1.2, sizes=TWO), one()),
        True,
    ),
    "they win with the mean of each layer": (
        tp6.two_layers_lose,
        (one(level=1.2, sizes=TWO), one(), one(level=0.8, sizes=TWO)),
        True,
    ),
    "two layers win": (
        tp6.two_layers_lose,
        (one(level=0.8, sizes=TWO), one()),
        False,
    ),
    "two layers move": (tp6.two_layers_move, (one(0.5), one(-0.5)), True),
    "two layers stay": (tp6.two_layers_move, (one(0.5), one()), False),
    "the valley turns": (tp6.valley_turns, (valleys(-2, -1.5, -1),), True),
    "the valley stays": (tp6.valley_turns, (valleys(-1, -1, -1),), False),
    "there is no valley": (
        tp6.valley_turns,
        (axis_over_depth("branch_multiplier", 0.0),),
        None,
    ),
    "a is free": (
        tp6.multiplier_is_free,
        (
            found(
                *(
                    made(
                        "depth_mup",
                        d,
                        branch_multiplier=0.0,
                        shape=lambda g: 0.1 * (g["learning_rate"] - RATE) ** 2,
                    )
                    for d in DEPTHS
                )
            ),
        ),
        True,
    ),
    "a is not free": (
        tp6.multiplier_is_free,
        (axis_over_depth("branch_multiplier", 0.0),),
        False,
    ),
    "starts worse": (tp6.deeper_starts_worse, (found(*early_late(RISING)),), True),
    "starts better": (tp6.deeper_starts_worse, (found(*early_late(FALLING)),), False),
    "1/√L at the end": (
        tp6.root_law_at_the_end,
        (found(*early_late(RISING, drift=0.5)),),
        True,
    ),
    "1/√L at once": (tp6.root_law_at_the_end, (found(*early_late(RISING)),), False),
    "1/√L neither": (  # both shifts are at the ends of their tolerances
        tp6.root_law_at_the_end,
        (found(*early_late(RISING, shift=0.25)),),
        False,
    ),
    "both sizes": (bordelon.both_sizes, cnns(), True),
    "μP stays": (bordelon.both_sizes, cnns(mup=0.0), False),
    "widths move": (bordelon.both_sizes, cnns(width=1.0), False),
    "μP moves": (bordelon.without_scaling, standards(-0.5), True),
    "μP does not": (bordelon.without_scaling, standards(0.0), False),
    "norm alone moves": (
        bordelon.norm_is_not_enough,
        (norms(-0.5, 0.0, 0.0, -1.0),),
        True,
    ),
    "norm and 1/√L move": (
        bordelon.norm_is_not_enough,
        (norms(-0.5, -0.6, 0.0, -1.0),),
        False,
    ),
    "norm helps": (
        functools.partial(bordelon.norm_helps, **BATCH),
        (norms(-0.5, 0.0, 0.0, -1.0),),
        True,
    ),
    "norm hurts": (
        functools.partial(bordelon.norm_helps, **BATCH),
        (norms(-1.0, 0.0, 0.0, -0.5),),
        False,
    ),
    "vits stay": (bordelon.transformers, (vits(),), True),
    "vits move": (bordelon.transformers, (vits(shift=0.5),), False),
    "vits gain less": (bordelon.transformers, (vits(gain=0.0),), False),
    "momentum stays": (
        bordelon.other_axes,
        (axis_over_depth("momentum", 0.0, 3.2), axis_over_depth("richness", 0.0)),
        True,
    ),
    "momentum moves": (
        bordelon.other_axes,
        (axis_over_depth("momentum", 0.4, 2.2), axis_over_depth("richness", 0.0)),
        False,
    ),
    "decay stays": (
        bordelon.decay_stays,
        (axis_over_depth("weight_decay", 0.0, -4.0),),
        True,
    ),
    "decay moves": (
        bordelon.decay_stays,
        (axis_over_depth("weight_decay", 0.5, -4.0),),
        False,
    ),
    "a middle depth": (bordelon.middle_depth, equal_sizes(16), True),
    "the deepest": (bordelon.middle_depth, equal_sizes(256), False),
    "two depths alike": (bordelon.middle_depth, equal_sizes(8), False),
    "decided early": (
        bordelon.decided_early,
        (found(*early_late(FALLING, drift=0.02)),),
        True,
    ),
    "decided late": (
        bordelon.decided_early,
        (found(*early_late(FALLING, drift=0.5)),),
        False,
    ),
    "the rule holds": (training.follows, (batch_sizes(0.5), batch_sizes(0.0)), True),
    "no rule holds": (training.follows, (batch_sizes(0.0), batch_sizes(0.0)), False),
    "the rule fails": (training.follows, (batch_sizes(0.5), batch_sizes(0.5)), False),
    "constant decay moves": (training.decays, decayed(0.0, 1.0), True),
    "no decay moves": (training.decays, decayed(0.0, 0.0), False),
    "the product moves": (training.decays, decayed(1.0, 1.0), False),
    "1/L gains": (bordelon.long_branches, branches(FALLING, RISING), True),
    "1/√L gains too": (bordelon.long_branches, branches(FALLING, FALLING), False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_claim_is_judged_by_the_numbers(case):
    check, given, agrees = CASES[case]
    drawing = check(*given)
    assert drawing.agrees is agrees, drawing.ours
    assert "nan" not in drawing.ours
    assert all(panel.lines for panel in drawing.panels)


def test_more_than_three_panels_make_two_rows():
    three, four = (
        Image.open(io.BytesIO(draw.picture(check(*given), "png"))).size
        for check, given, _ in (CASES["both sizes"], CASES["vits stay"])
    )
    assert four[0] < three[0]
    assert four[1] > 1.5 * three[1]


def test_an_optimum_at_the_end_of_the_grid_is_not_known():
    beyond = [made("depth_mup", d, learning_rate=-15.0) for d in DEPTHS]
    moved = curves.judge(found(*beyond), "depth_mup")
    assert curves.stays(moved) is None
    assert "lies at the lower end of the grid" in curves.shift(moved)


def test_an_optimum_that_the_seeds_dispute_is_not_known():
    loose = [made("depth_mup", d, noise=0.6) for d in DEPTHS]
    assert curves.stays(curves.judge(found(*loose), "depth_mup")) is None


def test_a_size_that_does_not_train_is_said_and_moves():
    *small, large = depths("depth_mup")
    lost = dataclasses.replace(large, loss=large.loss * np.nan)
    moved = curves.judge(found(*small, lost), "depth_mup")
    assert curves.moves(moved)
    assert "nothing trained at depth 128" in curves.shift(moved)
    assert "depth 128: none trained" in [
        x.label for x in curves.panel("", moved.cells).lines
    ]


def test_a_loss_of_nothing_is_the_higher():
    nothing, some = curves.Least(np.empty(0)), curves.Least(np.array([0.0, 0.1, 0.2]))
    assert curves.lower([some], [nothing]) == [True]
    assert curves.lower([nothing], [some]) == [False]
    assert curves.lower([nothing], [nothing]) == [None]


def test_losses_are_compared_seed_by_seed():
    """Seeds differ by ten times the gap, and the gap is known."""
    seeds = np.array([0.0, 0.1, 0.2])
    other = curves.Least(seeds + np.array([0.011, 0.010, 0.009]))
    assert curves.lower([curves.Least(seeds)], [other]) == [True]
    shuffled = curves.Least(np.roll(other.log_loss, 1))
    assert curves.lower([curves.Least(seeds)], [shuffled]) == [None]
    # One of them was trained with one seed more, which says nothing about the gap.
    more = curves.Least(np.append(other.log_loss, 9.0))
    assert curves.lower([curves.Least(seeds)], [more]) == [True]


def test_the_variance_of_pairs_is_pooled_over_sizes():
    """Two seeds say little about one pair, and more about four pairs."""
    rng = np.random.default_rng(0)
    wide = []
    for _ in range(50):
        pairs = [
            tuple(curves.Least(x + rng.normal(0, 0.01, 2)) for x in (1.0, 1.04))
            for _ in range(4)
        ]
        wide.append((curves.gaps(pairs[:1])[0].wide, curves.gaps(pairs)[0].wide))
    alone, together = np.median(wide, axis=0)
    assert together < 0.6 * alone


def test_a_pair_of_the_same_networks_says_nothing_about_the_noise():
    """At the base's depth, two parametrizations are the same network."""
    rng = np.random.default_rng(0)
    one, other = (curves.Least(rng.normal(0, 0.1, 4)) for _ in range(2))
    same = curves.Least(np.zeros(4)), curves.Least(np.zeros(4))
    alone, beside = curves.gaps([(one, other)])[0], curves.gaps([same, (one, other)])
    assert beside[1] == alone
    assert beside[0].negative is None


def test_a_least_loss_is_as_uncertain_as_its_fit():
    seeds = np.array([0.0, 0.1, 0.2])
    other = seeds + np.array([0.011, 0.010, 0.009])
    rough = curves.Least(other, slip=0.02)
    assert curves.lower([curves.Least(seeds)], [rough]) == [None]


def test_weight_decays_are_compared_without_a_ratio():
    """The rise over weight decay of a few seeds is itself uncertain."""
    rise = np.array([0.0, 0.1, 0.2])
    spans = np.array([1.0, 1.02, 0.98, 1.0])[:, None]
    alike = np.stack([spans * rise, spans * rise * 1.05])
    share, agrees = bordelon._difference(alike)
    assert share == pytest.approx(0.05)
    assert agrees
    loose = np.array([0.2, 1.8, 0.4, 1.6])[:, None]
    assert bordelon._difference(np.stack([spans * rise, loose * rise]))[1] is None
    assert bordelon._difference(np.stack([spans * rise, spans * rise * 2]))[1] is False


def planned(part, request):
    """What a part would train, checked as the engine takes it."""
    return space.parse_sweep(part.parsed(request, 0.25 if part.tuned else None))


@pytest.mark.parametrize("scale", DRAWN)
@pytest.mark.parametrize("name", TRAINED)
def test_every_sweep_of_a_figure_parses_and_plans(name, scale, tmp_path):
    figure = TRAINED[name]
    request = Request(scale, tmp_path, dataset="text:some.txt")
    found = [planned(part, request) for part in figure.parts]
    assert sum(len(space.tasks(one)) for one in found) > 1
    names = [part.name for part in figure.parts]
    assert len(set(names)) == len(names)


def test_long_has_the_sizes_of_medium_and_the_steps_of_the_paper():
    medium = {"steps": "10", "sweep.depths": "(2,)", "sweep.seeds": "3"}
    paper = {"steps": "500", "sweep.depths": "(8,)"}
    given = {"medium": medium, "paper": paper, "long": {"sweep.seeds": "2"}}
    assert sizes.at_scale(given, "long") == {
        "steps": "500",
        "sweep.depths": "(2,)",
        "sweep.seeds": "2",
        "sweep.average_last": "50",
    }


@pytest.mark.parametrize("name", ["tp6-4", "tp6-14", "tp6-15", "bordelon-b.1"])
def test_wide_is_larger_and_no_longer_than_long(name, tmp_path):
    for part in TRAINED[name].parts:
        long, wide = (
            planned(part, Request(scale, tmp_path, dataset="text:some.txt"))
            for scale in ("long", "wide")
        )
        assert wide.base.steps <= long.base.steps
        assert wide.average_last == wide.base.steps // 10
        assert min(wide.widths) > max(long.widths)
        assert set(wide.depths) <= set(long.depths)


@pytest.mark.parametrize("name", ["tp6-9", "tp6-10", "tp6-17"])
def test_a_figure_without_wide_sizes_says_so(name, tmp_path):
    request = Request("wide", tmp_path, tables=tmp_path)
    with pytest.raises(UserError, match="no sizes of its own at --scale wide"):
        catalogue.run(name, request)


def test_parts_of_one_name_are_one_sweep():
    """Figures share tables by name; another sweep under it would replace the table."""
    known = {}
    for figure in TRAINED.values():
        for part in figure.parts:
            for one in filter(None, (part.tuned, part)):
                plain = dataclasses.replace(one, keys=())
                assert known.setdefault(one.name, plain) == plain


@pytest.mark.parametrize("scale", DRAWN)
@pytest.mark.parametrize("name", ["tp6-4", "tp6-5"])
def test_two_layers_are_compared_at_as_many_layers_of_one(name, scale, tmp_path):
    request = Request(scale, tmp_path)
    two, one, *each = (planned(p, request) for p in TRAINED[name].parts)
    for deep in (two, *each):
        shared = {2 * depth for depth in deep.depths} & set(one.depths)
        assert len(shared) >= (2 if (name, scale) == ("tp6-5", "long") else 3)


@pytest.mark.parametrize("scale", SCALES)
def test_models_of_equal_size_have_as_many_parameters(scale, tmp_path):
    """Of three depths, within 5 % of each other (Figure B.1)."""
    counts = []
    for part in TRAINED["bordelon-b.1"].parts:
        plan = planned(part, Request(scale, tmp_path))
        (depth,) = plan.depths
        data = found(settings={"config": plan.settings()})
        counts.append([bordelon.parameters(data, n, depth) for n in plan.widths])
    for of_size in zip(*counts, strict=True):
        assert max(of_size) < 1.05 * min(of_size)


def pretended(part, request):
    """What a part's sweep would find, were every loss a bowl."""
    given = planned(part, request)
    populations = []
    for task in space.tasks(given):
        places = dict.fromkeys(task.grid, 0.0) | {"learning_rate": RATE}
        values = [[grids.coordinate(n, x) for x in v] for n, v in task.grid.items()]
        grid = dict(zip(task.grid, np.meshgrid(*values, indexing="ij"), strict=True))
        seeds = np.array([0.999, 1.001]).reshape(2, *[1] * len(values))
        loss = np.exp(bowl(places, grid)) * seeds
        both = np.stack([loss] * 40, axis=-1)
        sizes = task.parametrization, task.width, task.depth
        axes = {name: list(x) for name, x in task.grid.items()}
        populations.append(
            Population(task.name, *sizes, dict(task.choices), axes, loss, both, 1.0)
        )
    settings = {"config": given.settings()}
    return found(*populations, base=given.sizes, settings=settings)


def seen(part, request):
    data = pretended(part, request)
    return part.shown(tables.Table(data, {})).data


@pytest.mark.parametrize("name", TRAINED)
def test_a_figure_draws_what_its_own_sweeps_find(name, tmp_path):
    request = Request("laptop", tmp_path, dataset="text:some.txt")
    figure = TRAINED[name]
    drawing = figure.draw(*(seen(part, request) for part in figure.parts))
    assert drawing.agrees in (True, False, None)
    assert all(len(line.x) for line in drawing.panels[0].lines)


@pytest.mark.parametrize("name", ["tp6-10", "tp6-15", "bordelon-2"])
def test_data_that_is_not_there_is_one_sentence(name, tmp_path, capsys):
    flags = ["--workdir", str(tmp_path / "figure"), "--data_dir", str(tmp_path)]
    if name == "tp6-15":
        flags += ["--dataset", f"text:{tmp_path}/none.txt"]
    assert cli.main(["figure", name, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("papers: ")
    assert error.count("\n") == 1
    assert str(tmp_path) in error


def test_a_transformer_asks_for_its_text(tmp_path, capsys):
    assert cli.main(["figure", "tp6-16", "--workdir", str(tmp_path)]) == 2
    assert "--dataset=text:FILE" in capsys.readouterr().err


def test_a_theory_figure_takes_no_data(tmp_path, capsys):
    words = ["figure", "jelassi-1", "--dataset", "digits", "--workdir", str(tmp_path)]
    assert cli.main(words) == 2
    assert "no data" in capsys.readouterr().err


TINY = {
    "sweep.depths": "(1,2)",
    "sweep.widths": "(8,)",
    "model.width": "8",
    "model.depth": "1",
    "batch_size": "8",
    "data.image_size": "8",
    "sweep.axes.learning_rate": "2**[-9:-5:2]",
    "steps": "8",
    "sweep.average_last": "4",
    "sweep.only": "('ode','depth_mup')",
}


def tiny_figure():
    """Figure 11 of Tensor Programs VI, so small that it trains in seconds."""
    base = TINY | {
        "sweep.depths": "(1,)",
        "sweep.only": "('depth_mup',)",
        "sweep.axes.branch_multiplier": "(0.5, 1.0)",
    }
    tuned = parts.Part("resmlp_sweep", "tiny-base", base)
    part = parts.Part("resmlp_sweep", "tiny", TINY, tuned=tuned)
    return dataclasses.replace(TRAINED["tp6-11"], parts=(part,))


def tiny_words(folder):
    words = ["figure", "tp6-11", "--workdir", str(folder)]
    return [*words, "--dataset", "digits", "--data_dir", str(folder / "data")]


def test_a_figure_trains_what_it_is_about_and_the_next_adds_the_rest(tmp_path):
    (part,) = tiny_figure().parts
    request = Request("laptop", tmp_path, dataset="digits")
    request = dataclasses.replace(request, tables=tmp_path / "tables")
    first = part.about("ode").train(request).data
    assert {p.parametrization for p in first.populations} == {"ode"}
    both = part.train(request).data
    assert {p.parametrization for p in both.populations} == {"ode", "depth_mup"}
    assert both.featured == "depth_mup"
    for old, new in zip(first.populations, both.populations[-2:], strict=True):
        np.testing.assert_array_equal(new.loss, old.loss)


def test_the_base_of_a_sweep_over_depth_tunes_another(tmp_path):
    alone = TINY | {"sweep.only": "('depth_mup',)"}
    grid = {"sweep.axes.branch_multiplier": "(0.5, 1.0)", "sweep.depths": "(1,3)"}
    both = parts.Part("resmlp_sweep", "tiny-both", alone | {"model.depth": "3"} | grid)
    deeper = alone | {"model.depth": "3", "sweep.depths": "(3,4)"}
    part = parts.Part("resmlp_sweep", "tiny", deeper, tuned=both)
    request = Request("laptop", tmp_path, dataset="digits")
    request = dataclasses.replace(request, tables=tmp_path / "tables")
    both.train(request)
    # Of the shallower network, which is not the base, another multiplier is the best.
    path = both.path(request)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    worse = [[*r[:6], "9", *r[7:]] if r[2] == "1" and r[4] == "1" else r for r in rows]
    path.write_text("\n".join(map(",".join, worse)) + "\n")
    model = part.train(request).facts["settings"]["model"]
    shallow, base = both.read(request).data.populations
    assert shallow.best()["branch_multiplier"] == 0.5
    assert base.best()["branch_multiplier"] == 1.0 == model["branch_multiplier"]
    assert {p.depth for p in part.read(request).data.populations} == {3, 4}


def test_a_figure_about_one_choice_trains_no_other(tmp_path):
    overrides = TINY | {"sweep.choices": "(('model.layer_norm', (False, True)),)"}
    part = parts.Part("resmlp_sweep", "tiny", overrides)
    one = part.about("ode, model.layer_norm=True")
    request = Request("laptop", tmp_path, dataset="digits")
    request = dataclasses.replace(request, tables=tmp_path / "tables")
    found = one.train(request)
    chosen = {"model.layer_norm": True}
    assert [p.choices for p in found.data.populations] == [chosen, chosen]
    assert one.is_complete(request)
    assert not part.is_complete(request)
    assert not part.about("ode").is_complete(request)
    with pytest.raises(UserError, match=r'no runs of "ode, model.layer_norm=False";'):
        part.about("ode").read(request)
    # The next figure keeps them, and this one goes on to see no others.
    assert len(part.train(request).data.populations) == 8
    assert len(one.shown(one.read(request)).data.populations) == 2


def test_a_table_gets_more_seeds_without_training_its_own_again(tmp_path):
    def trained(seeds, name):
        overrides = TINY | {"sweep.seeds": str(seeds)}
        part = parts.Part("resmlp_sweep", "tiny", overrides)
        request = Request("laptop", tmp_path / name, dataset="digits")
        return part.train(dataclasses.replace(request, tables=tmp_path / name))

    trained(1, "grown")
    shutil.rmtree(tmp_path / "grown/laptop/tiny")
    grown, whole = trained(3, "grown"), trained(3, "whole")
    runs = (tmp_path / "grown/laptop/tiny-seed1/results.csv").read_text()
    assert len(runs.splitlines()) == 1 + 2 * sum(
        p.loss[0].size for p in grown.data.populations
    )
    assert grown.facts["settings"] == whole.facts["settings"]
    for one, other in zip(grown.data.populations, whole.data.populations, strict=True):
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-4)
        np.testing.assert_allclose(one.curves, other.curves, rtol=1e-4)


def test_a_table_gets_another_size_without_training_the_others_again(tmp_path):
    def rows(depths, seeds):
        overrides = TINY | {"sweep.depths": depths, "sweep.seeds": str(seeds)}
        part = parts.Part("resmlp_sweep", "tiny", overrides)
        request = Request("laptop", tmp_path / "runs", dataset="digits")
        part.train(dataclasses.replace(request, tables=tmp_path))
        text = (tmp_path / "laptop/tiny.csv").read_text()
        return list(csv.DictReader(text.splitlines()[1:]))

    before = rows("(1,2)", 2)
    shutil.rmtree(tmp_path / "runs")
    after = rows("(1,2,4)", 1)
    cells = (tmp_path / "runs/laptop/tiny/runs").glob("*.runs.jsonl")
    assert {path.name.split(".")[0][-2:] for path in cells} == {"d1", "d4"}
    assert [row for row in after if row["depth"] != "4"] == before
    assert sum(row["depth"] == "4" for row in after) == len(before) // 4


@pytest.mark.long
def test_a_figure_trains_draws_judges_and_does_nothing_twice(
    tmp_path, capsys, monkeypatch
):
    figure = tiny_figure()
    monkeypatch.setattr(catalogue, "figures", lambda: {"tp6-11": figure})
    words = tiny_words(tmp_path)
    assert cli.main(words) == 0
    first = capsys.readouterr().out.splitlines()[-1]
    assert first.startswith("tp6-11: ")
    assert first.endswith("undecided: two seeds")
    assert (tmp_path / "tp6-11.png").read_bytes().startswith(b"\x89PNG")
    (folder,) = (tmp_path / "laptop").glob("tiny-a*")
    assert (folder / "report.html").exists()
    picture = (tmp_path / "tp6-11.png").read_bytes()
    # The tables alone give the same verdict and picture.
    again = [*words, "--from_data", "--tables", str(tmp_path / "data")]
    shutil.rmtree(tmp_path / "laptop")
    assert cli.main(again) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first
    assert (tmp_path / "tp6-11.png").read_bytes() == picture
    monkeypatch.setattr(engine, "Chunks", None)
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first
    # Another batch size is another experiment, which replaces the table.
    part = figure.parts[0].tuned
    other = dataclasses.replace(part, overrides=part.overrides | {"batch_size": "4"})
    data_dir = tmp_path / "data"
    request = Request("laptop", tmp_path, str(data_dir), "digits", data_dir)
    assert not tables.same_settings(
        part.read(request), planned(other, request).settings()
    )


@pytest.mark.parametrize(("steep", "expected"), [(-2.0, -2.0), (2.0, np.nan)])
def test_level_sets_slope_where_the_loss_falls_with_both(steep, expected):
    one = population("p", 64, 8, pair=True)
    names = ("learning_rate", "branch_multiplier")
    x, y = np.meshgrid(*(one.coordinates(name) for name in names), indexing="ij")
    tilted = dataclasses.replace(one, loss=np.exp2(0.1 * (steep * x - y))[None])
    at, slopes = tp6.level_slopes(tilted, names)
    np.testing.assert_allclose(at, (x[1:, 0] + x[:-1, 0]) / 2)
    np.testing.assert_allclose(slopes, expected)
