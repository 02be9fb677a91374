"""docs/zoo.md holds what its command prints, and the command counts right."""

import pytest

from benchmarks import timm_coverage, zoo_table
from mupax import zoo

PAGE = zoo_table.PAGE.read_text()


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


@pytest.mark.parametrize(
    ("n", "text"), [(5, "5"), (543_210, "543 k"), (1_558_000_000, "1.56 G")]
)
def test_numbers_are_shown_by_three_digits(n, text):
    assert zoo_table._short(n) == text
