"""Count how many of timm's pretrained models the zoo can load, by family.

    python -c "import timm; print('\\n'.join(timm.list_pretrained()))" > ids.txt
    python -m benchmarks.timm_coverage ids.txt
    python -m benchmarks.timm_coverage --most_used

Run the first command in an environment with timm. The last one prints the table of
timm's thirty most downloaded models. Only names are compared; nothing is downloaded.
"""

import argparse
import collections
import pathlib
import re

from mupax.zoo.weights.architectures import identify

# The longest name that an architecture begins with is its family.
FAMILIES = (
    *("beit", "cait", "convnext", "deit", "densenet", "dm_nfnet", "eca_nfnet", "eva"),
    *("efficientnet", "flexivit", "inception", "maxvit", "mixer", "mobilenetv2"),
    *("mobilenetv3", "mobilenetv4", "regnet", "repvgg", "resmlp", "resnet", "resnetv2"),
    *("swin", "vgg", "vit", "xcit"),
)
# What timm puts in front of a family's name for another kind of it.
_BEFORE = re.compile(r"^(tf_|wide_|se|eca(?=resn)|resnext|samvit|vitamin)")
_SAME = {"resnext": "resnet", "samvit": "other", "vitamin": "other"}

#: timm's thirty most downloaded models, with their downloads from the Hugging Face hub
#: in the 30 days before 2025-03-21, as its API reported them.
#:
#: Source: github.com/TheExGenesis/hugingface-data, commit cb3b55b, which has the hub's
#: 1,000 most downloaded models (top_1000_hf_models.csv) and the 100 most downloaded of
#: each task (models_by_task.csv). Taken are repositories of the organization "timm"
#: with the tag "timm". Every such model with the task image-classification or
#: image-feature-extraction and at least 28,057 downloads is in the source, and every
#: one without a task and with at least 154,180.
MOST_USED = {
    "mobilenetv3_small_100.lamb_in1k": 76_954_404,
    "resnet50.a1_in1k": 19_667_291,
    "resnet18.a1_in1k": 6_133_333,
    "efficientnet_b3.ra2_in1k": 4_642_670,
    "mobilenetv3_large_100.ra_in1k": 1_231_806,
    "deit_tiny_patch16_224.fb_in1k": 884_580,
    "vit_base_patch16_clip_224.openai": 848_228,
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": 681_213,
    "tf_mobilenetv3_large_minimal_100.in1k": 523_750,
    "tf_efficientnetv2_s.in21k_ft_in1k": 395_790,
    "mobilenetv2_100.ra_in1k": 351_483,
    "convnext_tiny.in12k_ft_in1k": 316_027,
    "tf_mobilenetv3_small_minimal_100.in1k": 287_118,
    "vit_large_patch14_clip_224.openai": 224_588,
    "efficientnet_b0.ra_in1k": 159_818,
    "wide_resnet50_2.racm_in1k": 151_624,
    "vit_base_patch8_224.augreg2_in21k_ft_in1k": 143_713,
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 143_477,
    "resnet101.a1h_in1k": 143_307,
    "beitv2_base_patch16_224.in1k_ft_in22k": 135_773,
    "resnet34.a1_in1k": 130_685,
    "eva_giant_patch14_560.m30m_ft_in22k_in1k": 125_620,
    "mobilenetv3_large_100.miil_in21k_ft_in1k": 118_761,
    "tf_efficientnet_lite0.in1k": 115_090,
    "vit_large_patch14_reg4_dinov2.lvd142m": 105_070,
    "vit_base_patch16_224.augreg_in21k": 104_030,
    "swin_base_patch4_window7_224.ms_in22k_ft_in1k": 99_795,
    "tf_efficientnetv2_s.in21k": 89_514,
    "convnext_tiny.in12k": 84_230,
    "maxvit_nano_rw_256.sw_in1k": 82_618,
}


def family(architecture: str) -> str:
    """The family of an architecture of timm.

    Examples:
      >>> family("tf_efficientnetv2_s"), family("seresnext50_32x4d")
      ('efficientnet', 'resnet')
    """
    name = architecture
    while found := _BEFORE.match(name):
        if found[0] in _SAME:
            return _SAME[found[0]]
        name = name.removeprefix(found[0])
    known = [f for f in FAMILIES if name.startswith(f)]
    return max(known, key=len, default="other")


def is_read(architecture: str) -> bool:
    """Whether a `config.json` with this architecture is one that the zoo reads."""
    try:
        identify({"architecture": architecture}, architecture)
    except ValueError:
        return False
    return True


def most_used() -> str:
    """Markdown: timm's most downloaded models, and whether the zoo reads them."""
    lines = ["| model | downloads | supported |", "|---|---|---|"]
    for name, downloads in MOST_USED.items():
        try:
            identify({"architecture": name.split(".")[0]}, name)
            read = "yes"
        except ValueError:
            read = "no"
        lines.append(f"| `{name}` | {downloads:,} | {read} |")
    return "\n".join(lines)


def table(ids: list[str]) -> str:
    """Markdown: architectures and sets of weights, of timm and of those read."""
    weights = collections.Counter(name.split(".")[0] for name in ids)
    rows: dict[str, list[int]] = {}
    for architecture, count in weights.items():
        read = is_read(architecture)
        for name in (family(architecture), "all"):
            row = rows.setdefault(name, [0, 0, 0, 0])
            for i, more in enumerate((read, 1, read * count, count)):
                row[i] += more
    order = sorted(rows, key=lambda name: (name in ("other", "all"), -rows[name][3]))
    order = [name for name in order if name not in ("other", "all")]
    lines = ["| family | architectures | sets of weights |", "|---|---|---|"]
    for name in (*order, "other", "all"):
        read, of, sets, of_sets = rows.get(name, [0, 0, 0, 0])
        lines.append(f"| {name} | {read} of {of} | {sets} of {of_sets} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "ids", type=pathlib.Path, nargs="?", help="a file with an id a line"
    )
    given.add_argument(
        "--most_used", action="store_true", help="print timm's most downloaded models"
    )
    arguments = parser.parse_args()
    if arguments.most_used:
        print(most_used())
    else:
        print(table(arguments.ids.read_text().split()))


if __name__ == "__main__":
    main()
