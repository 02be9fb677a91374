"""The verdicts in docs/figures.md and docs/evidence.md, generated from docs/data.

Both pages are made from the same tables by the same functions, so that they agree.
"""

import collections
import io
import pathlib
import shlex
from collections.abc import Iterator

import rich.console

from ... import report
from ...errors import UserError
from ...io import write_durably
from . import draw, job, tables
from .parts import Part
from .registry import BEYOND, SCALES, Drawing, Figure, Request

_COMMAND = "mupax figure pages"
BEGIN, END = f"<!-- begin: {_COMMAND} -->", "<!-- end -->"
_WORDS = {True: "agrees", False: "**does not agree**", None: "cannot tell"}


def write(docs: pathlib.Path) -> None:
    """Draw the pictures and rewrite the generated part of both pages.

    Args:
      docs: the folder of "data", "figures", "figures.md" and "evidence.md".

    Raises:
      UserError: a page or its markers are missing, or a table cannot be read.
    """
    drawn = drawings(docs)
    for figure, drawing in drawn:
        if drawing is not None:
            picture = draw.picture(drawing, "png")
            write_durably(docs / "figures" / f"{figure.id}.png", picture)
    for name, body in (("figures", figures(drawn)), ("evidence", evidence(docs))):
        page = docs / f"{name}.md"
        write_durably(page, replaced(page, body))


Claims = list[tuple[Figure, Drawing | None]]


def drawings(docs: pathlib.Path) -> Claims:
    """Every figure that can be drawn, and its drawing where its tables are there."""
    request = Request("laptop", docs / "figures", tables=docs / "data", from_data=True)
    known = job.figures().values()
    return [(f, job.from_data(f, request)) for f in known if f.draw]


def replaced(page: pathlib.Path, body: str) -> str:
    """A page with another generated part.

    Raises:
      UserError: it is not there, or has no markers.
    """
    try:
        text = page.read_text()
    except OSError as error:
        raise UserError(
            f"{page} cannot be read ({error.strerror}); run `{_COMMAND}` in the "
            "repository's root"
        ) from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{body.strip()}\n\n{END}{after}"


def figures(claims: Claims) -> str:
    """The generated part of figures.md: counts, verdicts, gallery."""
    groups = {
        "Claims of the papers": [c for c in claims if c[0].paper != BEYOND],
        "Claims beyond the papers": [c for c in claims if c[0].paper == BEYOND],
    }
    lines = []
    for title, group in groups.items():
        lines += ["", f"### {title}", "", *_verdicts(group)]
    lines += ["", "### Pictures"]
    for figure, drawing in claims:
        if drawing is None:
            continue
        how = f". {figure.how[0].upper()}{figure.how[1:]}" if figure.how else ""
        lines += ["", f"**{figure.id}**: {figure.paper}, {figure.number}{how}."]
        lines += ["", f"![{figure.claim}](figures/{figure.id}.png)"]
    return "\n".join(lines)


def _verdicts(claims: Claims) -> list[str]:
    """The number of claims of each verdict, and a table of them."""
    drawn = [(f, d) for f, d in claims if d is not None]
    missing = [f for f, d in claims if d is None]
    count = collections.Counter(drawing.agrees for _, drawing in drawn)
    lines = [
        f"{len(drawn)} of {len(claims)} claims have tables. The measurements agree "
        f"with {count[True]}, do not agree with {count[False]}, and cannot tell for "
        f"{count[None]}.",
        "",
        "| | the claim | measured here | trained | verdict |",
        "|---|---|---|---|---|",
    ]
    for figure, drawing in drawn:
        length = f"{drawing.scale}: {drawing.length}" if drawing.length else "solved"
        cells = (
            f"[{figure.id}](figures/{figure.id}.png)",
            f"{figure.number}: {figure.claim}",
            drawing.ours,
            length,
            _WORDS[drawing.agrees],
        )
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    if missing:
        lines += [
            "",
            "Not measured yet: `mupax figure ID --scale medium --tables docs/data`.",
            "",
            "| | the claim |",
            "|---|---|",
        ]
        lines += [f"| {f.id} | {f.number}: {_cell(f.claim)} |" for f in missing]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def evidence(docs: pathlib.Path) -> str:
    """The generated part of evidence.md: the verdicts on each table."""
    lines = []
    for scale in reversed(SCALES):
        at = Request(scale, tables=docs / "data", from_data=True)
        for part in parts():
            table = tables.read(part.path(at))
            if table is None:
                continue
            name = part.path(at).relative_to(docs)
            lines += [
                "",
                f"### {part.name}, {scale}",
                "",
                f"{table.data.subject}: {table.length}; base of width "
                f"{table.data.base.width} and depth {table.data.base.depth}; measured "
                f"{table.facts['measured']}: [{name}]({name}).",
                "",
                *(f"    {line}" for line in command_lines(table.data.command)),
                "",
                "```text",
                *_printed(table.data),
                "```",
            ]
    return "\n".join(lines)


def parts() -> Iterator[Part]:
    """Every sweep of a figure once, each after the one that tunes it."""
    known: set[str] = set()
    for figure in job.figures().values():
        for part in filter(None, (*figure.parts, figure.base)):
            for one in filter(None, (part.tuned, part)):
                if one.name not in known:
                    known.add(one.name)
                    yield one


def _printed(data: report.SweepData) -> list[str]:
    """What `mupax sweep` prints of a sweep."""
    out = io.StringIO()
    report.print_verdicts(data, rich.console.Console(file=out, width=160))
    return [line.rstrip() for line in out.getvalue().strip().splitlines()]


def command_lines(command: str) -> list[str]:
    """A command line in lines of about 90 characters, continued by a backslash."""
    lines = [""]
    for word in map(_quoted, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) > 88:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _quoted(word: str) -> str:
    """A word of a command; its value in double quotes, if it needs quotes."""
    name, sign, value = word.partition("=")
    if not value or shlex.quote(value) == value or set('"$`\\!') & set(value):
        return shlex.quote(word)
    return f'{shlex.quote(name)}{sign}"{value}"'
