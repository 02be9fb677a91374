"""Helpers of the report's templates: embedded files, durations, rows of settings."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
import markupsafe

# A larger table would make the page slow to open: it is linked instead.
_EMBEDDED = 4_000_000


def environment(labels: Iterable[str]) -> jinja2.Environment:
    """The templates of this folder; the filter `whole` keeps `labels` on one line."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [str(markupsafe.escape(label)) for label in labels]

    def whole(text: str) -> markupsafe.Markup:
        """Text whose lines break neither inside a label nor before "octaves"."""
        escaped = str(markupsafe.escape(text))
        for name in names:
            escaped = escaped.replace(name, f'<span class="whole">{name}</span>')
        return markupsafe.Markup(escaped.replace(" octaves", "&nbsp;octaves"))

    env.filters["whole"] = whole
    return env


def inline(kind: str, content: bytes) -> markupsafe.Markup:
    """A file as a data URL."""
    coded = base64.b64encode(content).decode()
    return markupsafe.Markup("data:{};base64,{}").format(kind, coded)


def download(text: str) -> markupsafe.Markup:
    """A table as a data URL; the file's name if the table is large."""
    content = text.encode()
    if len(content) > _EMBEDDED:
        return markupsafe.Markup("results.csv")
    return inline("text/csv", content)


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as rows of a table."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value))
        else:
            yield name, "–" if value is None else str(value)
