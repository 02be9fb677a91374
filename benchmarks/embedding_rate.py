"""Which learning rate do embeddings need as the width grows: μP's, or √width of it?

    python -m benchmarks.embedding_rate FILE   # trains; FILE is a text
    python -m benchmarks.embedding_rate        # prints the table

μP keeps Adam's rate of the embedding and divides that of hidden weights by the width.
For vocabularies far larger than the width, Hayou & Liu 2025 (arXiv:2506.15025) derive
that the embedding's rate falls too, as 1/√width: by half an octave a doubling. A GPT of
two blocks trains on bytes and on 2,048 tokens of byte-pair encoding, with a factor on
the embedding's rate, at widths 32 to 128. Context 64, batch size 8, 300 steps of Adam
with warm-up and cosine decay, four seeds, fixed before the first run; the grid of
factors was moved up after the first width. Losses are in benchmarks/embedding_rate.csv.
An interrupted call resumes.
"""

import argparse
import itertools
import pathlib

from ml_collections import ConfigDict

from mupax.configs import gpt_sweep
from mupax.experiments.sweep import command
from mupax.experiments.sweep.verdict import Transfer, transfer

from . import losses

TABLE = losses.Table(
    pathlib.Path(__file__).with_suffix(".csv"), ("vocabulary", "width"), "log2_factor"
)
VOCABULARIES, WIDTHS, SEEDS = (256, 2048), (32, 64, 128), 4
FACTOR = "embedding/learning_rate"


def _config(text: pathlib.Path, tokenizer: str, width: int) -> ConfigDict:
    config = gpt_sweep.get_config()
    config.dataset = f"text:{text}"
    config.data.tokenizer = tokenizer
    config.steps = 300
    config.schedule.name = "cosine"
    config.schedule.warmup = 30
    config.model.tied = False
    config.modules = ConfigDict({"embedding": {"pattern": "^embedding$"}})
    rates = "2**[-7.5:-5.5]"  # around the base's best in benchmarks/branch_alpha.csv
    config.sweep.axes = ConfigDict({"learning_rate": rates, FACTOR: "2**[0:7]"})
    config.sweep.widths = sorted({WIDTHS[0], width})
    config.sweep.depths = (2,)
    config.sweep.seeds = SEEDS
    config.sweep.only = ("completep",)
    return config


def _tokenizer(text: pathlib.Path, folder: pathlib.Path, vocabulary: int) -> str:
    """The file of a byte-pair encoding of the text; "bytes" for 256 tokens."""
    if vocabulary == 256:
        return "bytes"
    import tokenizers

    encoding = tokenizers.ByteLevelBPETokenizer()
    encoding.train([str(text)], vocab_size=vocabulary, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    encoding.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def train(text: pathlib.Path, folder: pathlib.Path) -> None:
    """Train what the table lacks, small models first."""
    for width, vocabulary in itertools.product(WIDTHS, VOCABULARIES):
        if TABLE.at(vocabulary, width):
            continue
        tokenizer = _tokenizer(text, folder, vocabulary)
        config = _config(text, tokenizer, width)
        swept = command.run(config, folder / str(vocabulary), [])
        assert swept is not None
        cell = swept.populations[-1].cell(FACTOR)
        found = dict(zip(cell.log2_lr.tolist(), cell.loss.T, strict=True))
        TABLE.add(vocabulary, width, losses=found)


def judged(vocabulary: int) -> Transfer:
    """The verdict on the embedding's factor over the widths that have been trained."""
    cells = [
        TABLE.cell(vocabulary, width, width=width, depth=2, axis=FACTOR)
        for width in WIDTHS
    ]
    return transfer([cell for cell in cells if cell is not None], "width", WIDTHS[0])


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", type=pathlib.Path)
    parser.add_argument("--workdir", type=pathlib.Path, default="runs/embedding_rate")
    given = parser.parse_args()
    if given.text:
        train(given.text, given.workdir)
    for vocabulary in VOCABULARIES:
        one = judged(vocabulary)
        print(
            f"{vocabulary} tokens: {one.words}; best {', '.join(losses.optima(one))}; "
            f"shift {losses.shift(one)} octaves a doubling; cost {losses.cost(one)}"
        )


if __name__ == "__main__":
    main()
