"""Count how many of timm's pretrained models the zoo can load, by family.

    python -c "import timm; print('\\n'.join(timm.list_pretrained()))" > ids.txt
    python -m benchmarks.timm_coverage ids.txt

Run the first command in an environment with timm. Only names are compared; nothing is
downloaded.
"""

import argparse
import collections
import pathlib
import re

from mupax.zoo.architectures import identify

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
    parser.add_argument("ids", type=pathlib.Path, help="a file with an id a line")
    print(table(parser.parse_args().ids.read_text().split()))


if __name__ == "__main__":
    main()
