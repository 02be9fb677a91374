"""Explain why a file of weights does not fit a model, by its keys."""

import re
from collections.abc import Callable, Collection, Mapping

from flax import nnx


class Misfit(ValueError):
    """Weights do not fit a model; other options of the model may help.

    Args:
      *parts: of the message. A dict is {option: value as Python code}.

    Examples:
      >>> error = Misfit("it has register tokens: pass ", {"registers": "4"})
      >>> print(error)
      it has register tokens: pass registers=4
      >>> error.as_flags("--option ")
      'it has register tokens: pass --option registers=4'
    """

    def __init__(self, *parts: str | Mapping[str, str]):
        super().__init__(*parts)
        self.parts = parts

    def __str__(self) -> str:
        return self._with("{}={}", ", ")

    def as_flags(self, start: str) -> str:
        """The message with each option as a flag of a shell that starts like this."""
        return self._with(start + "{}={}", " ", _in_shell)

    def _with(self, form: str, between: str, quoted: Callable[[str], str] = str) -> str:
        words = [
            part
            if isinstance(part, str)
            else between.join(form.format(k, quoted(v)) for k, v in part.items())
            for part in self.parts
        ]
        return "".join(words)


def _in_shell(value: str) -> str:
    """A value as a word of a shell: strings bare, others in quotes if need be."""
    if value[:1] == "'":
        return value.strip("'") or '""'
    return f'"{value}"' if re.search(r"[^\w.+-]", value) else value


def explain_mismatch(
    model: nnx.Module,
    keys: Collection[str],
    unexpected: Collection[str],
    missing: Collection[str],
    needed: Collection[str],
) -> ValueError | None:
    """Explain in one sentence why keys do not fit a model; None if they fit.

    Args:
      model: the model, possibly abstract.
      keys: of the file.
      unexpected: keys of the file that the model does not use.
      missing: keys that the model needs and the file lacks.
      needed: all keys that the model needs.
    """
    name, found = type(model).__name__, []
    if missing and not set(needed) & set(keys):
        return ValueError(
            f"the file holds {min(keys)!r}, in place of {min(missing)!r}: it is of "
            f"another network than {name}, or of a library or format that is not read; "
            "use the network's weights of timm or transformers, with adapters merged"
        )
    if missing:
        found.append(f"lacks {min(missing)!r}, which a {name} of this size has")
    if unexpected:
        found.append(f"holds {min(unexpected)!r}, which this {name} does not have")
    if not found:
        return None
    return ValueError(
        f"the file {' and '.join(found)}; check the model's size and options, or load "
        "the directory or repository with its config.json, which states them"
    )
