"""docs/zoo.md holds what its command prints, and the command counts right."""

import jax
import pytest

from benchmarks import timm_coverage, zoo_table
from mupax import zoo

PAGE = zoo_table.PAGE.read_text()


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    """(parameters, FLOPs) of networks that the literature counts."""
    names = ("resnet18", "resnet50", "vit_base_patch16_224", "gpt2")
    models = {name: zoo_table.build(name) for name in names}
    return {
        name: (
            zoo_table.parameters(model),
            zoo_table.flops(model, zoo_table.input_of(name)),
        )
        for name, model in models.items()
    }


@pytest.mark.long
def test_the_page_holds_what_the_command_prints():
    held = PAGE.split(zoo_table.BEGIN)[1].split(zoo_table.END)[0]
    assert held.strip() == zoo_table.page().strip(), (
        "docs/zoo.md is out of date; run: python -m benchmarks.zoo_table --write"
    )


@pytest.mark.long
def test_the_list_of_models_has_their_sizes():
    assert zoo_table.SIZES_FILE.read_text() == zoo_table.sizes_json(), (
        "zoo/model_sizes.json is out of date; run: "
        "python -m benchmarks.zoo_table --write"
    )


def test_every_model_and_every_option_is_on_the_page():
    assert zoo_table.options() in PAGE
    for name in zoo.list_models():
        assert f"| `{name}` |" in PAGE, (
            f"{name} is missing; see benchmarks/zoo_table.py"
        )
    for key in zoo_table.SHARED:
        assert f"`{key}`" in PAGE


COVERAGE = zoo_table.PAGE.parent / "zoo" / "coverage.md"


def test_of_timms_thirty_most_downloaded_models_at_least_24_are_read():
    downloads = list(timm_coverage.MOST_USED.values())
    assert len(downloads) == 30
    assert downloads == sorted(downloads, reverse=True)
    table = timm_coverage.most_used()
    assert table in COVERAGE.read_text(), (
        "docs/zoo/coverage.md is out of date; run: "
        "python -m benchmarks.timm_coverage --most_used"
    )
    read = table.count("| yes |")
    assert read >= 24
    assert f"{read} of the thirty" in COVERAGE.read_text()
    assert f"{read} of timm's thirty most downloaded" in PAGE
    assert table.count("| no |") == 30 - read


def test_parameters_are_those_of_the_papers(counted):
    """torchvision's and timm's tables: 11,689,512, 25,557,032, 86,567,656; GPT-2's."""
    parameters_of = {name: parameters for name, (parameters, _) in counted.items()}
    assert parameters_of == {
        "resnet18": 11_689_512,
        "resnet50": 25_557_032,
        "vit_base_patch16_224": 86_567_656,
        "gpt2": 124_439_808,
    }


def test_flops_are_twice_the_multiplications_of_the_papers(counted):
    """torchvision's tables: 1.81, 4.09 and 17.56 GFLOPS, which count products once."""
    for name, billions in {
        "resnet18": 1.814,
        "resnet50": 4.089,
        "vit_base_patch16_224": 17.564,
    }.items():
        assert counted[name][1] / 2e9 == pytest.approx(billions, rel=2e-3)


def test_a_scanned_block_is_counted_as_often_as_it_runs():
    def count(depth: int) -> int:
        model = zoo_table.build("resmlp", width=32, depth=depth)
        return zoo_table.flops(model, zoo_table.input_of("resmlp"))

    ends = 2 * 32 * (64 + 10)
    for depth in (1, 7, 512):
        assert count(depth) == ends + depth * 2 * 32**2


def test_what_comes_round_in_a_loop_of_unknown_length_is_not_guessed():
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x)

    jaxpr = jax.make_jaxpr(loop)(jax.numpy.ones((3, 3)))
    with pytest.raises(ValueError, match="while"):
        zoo_table._count(jaxpr.jaxpr)


@pytest.mark.parametrize(
    ("n", "text"), [(5, "5"), (543_210, "543 k"), (1_558_000_000, "1.56 G")]
)
def test_numbers_are_shown_by_three_digits(n, text):
    assert zoo_table._short(n) == text
