"""Model cards: the README.md of a saved model."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

from mupax import optim

from ..addresses import public
from ..preprocessing import DataConfig

# The folders of an absolute path, which are those of one machine: not those of an
# address (gs://bucket/x, s3:/bucket/x) or of a relative path (runs/x).
_FOLDERS = re.compile(
    r"(?:\bfile:/*|(?:^|(?<=[=:,'\"(\[]))(?<!\bs3:)(?<!\bgs:)~?/)(?!/)(?:[^/]*/)*"
)


def _line(value: Any) -> str:
    """A value as one line of printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def _without_folders(word: str) -> str:
    """A word of a command or a setting, with the last name of an absolute path.

    Examples:
      >>> _without_folders("--source=/home/me/w.npz"), _without_folders("gs://b/w.npz")
      ('--source=w.npz', 'gs://b/w.npz')
    """
    return _FOLDERS.sub("", word.rstrip("/"))


def _command(command: str) -> str:
    """A command, with the last names of absolute paths."""
    try:
        words = shlex.split(_line(command))
    except ValueError:  # not of a shell
        words = _line(command).split()
    return shlex.join(map(_without_folders, words))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How weights were trained, for the model card that `zoo.save` writes.

    Attributes:
      dataset: the training data; None if the weights were not trained here.
      metrics: on the test split, e.g. {"accuracy": 0.98, "loss": 0.1}.
      settings: hyperparameters of the run, e.g. {"steps": 1000}.
      source: the initial weights, e.g. the id of a repository; None for none.
      command: the command that trained the weights.

    Examples:
      >>> from mupax import zoo
      >>> zoo.Training(dataset="mnist", metrics={"accuracy": 0.98}).source is None
      True
    """

    dataset: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str | None = None
    command: str | None = None


def card(
    name: str,
    *,
    parameters: int,
    parametrization: optim.Parametrization,
    task: str,
    data: DataConfig | None,
    notes: str,
    training: Training | None,
) -> str:
    """Write the text of a model card: a YAML header for hubs, then Markdown.

    Its options and its preprocessing are in config.json. Addresses in it lose user,
    password and query, because cards are published.

    Args:
      name: of the model in the zoo.
      parameters: number of parameters and other saved values.
      parametrization: of the model.
      task: as the hub names it: "text-generation", "image-classification" or
        "image-feature-extraction".
      data: its preprocessing, if known.
      notes: free text.
      training: how its weights were trained, if known.
    """
    training = training or Training()
    parts = [
        f"---\nlibrary_name: mupax\npipeline_tag: {task}\ntags: [jax, flax, mup]\n---",
        f"# {name}",
        f"A model of mupax with {parameters:,} values, under {parametrization.name} "
        f"({parametrization.citation}).",
        f"""```python
from mupax import zoo

model = zoo.load_pretrained({name!r}, "path/to/this/directory")
model.eval()  # to predict
```""",
    ]
    if task == "text-generation":
        use = 'mupax generate --model path/to/this/directory --prompt "..."'
        parts.append(f"```sh\n{use}\n```")
    elif data is not None and task == "image-classification":
        use = "mupax predict --model path/to/this/directory image.jpg"
        parts.append(f"```sh\n{use}\n```")
    known = bool(training.dataset or training.source)
    if notes or not known:
        parts.append(notes or "Nothing is known of its training.")
    if known:
        parts += _training(training)
    return str(public("\n\n".join(parts) + "\n"))


def _training(training: Training) -> list[str]:
    """What is known of a training, as a block of code: its texts come from others."""
    rows = {
        "initial weights": training.source,
        "dataset": training.dataset,
        **{f"test {name}": f"{value:.5g}" for name, value in training.metrics.items()},
        **training.settings,
    }
    lines = [
        f"    {_line(name)}: {_without_folders(_line(value))}"
        for name, value in rows.items()
        if value is not None
    ]
    if training.command:
        lines.append(f"    command: {_command(training.command)}")
    return ["## Training", "\n".join(lines)]
