"""The verdicts in figures.md and evidence.md, generated from papers/data.

Both pages are made from the same tables by the same functions, so that they agree.
"""

import collections
import io
import pathlib
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping

import rich.console

from mupax.experiments import report
from mupax.experiments.errors import UserError
from mupax.experiments.io import write_durably
from mupax.experiments.report import sentences
from mupax.experiments.sweep import grids
from mupax.experiments.sweep.verdict import Transfer, listed

from . import catalogue, draw, summaries, tables
from .parts import Part
from .registry import BEYOND, Drawing, Figure, Label, judged
from .request import DRAWN, SCALES, Request

_COMMAND = "python -m papers pages"
END = "<!-- end -->"
Claims = list[tuple[Figure, Drawing | None]]
_WIDTH = 100  # of printed lines


def write(folder: pathlib.Path, data: pathlib.Path) -> None:
    """Draw the pictures and rewrite the generated parts of both pages.

    Args:
      folder: the folder of "figures", "figures.md" and "evidence.md".
      data: the folder of the tables.

    Raises:
      UserError: a page or its markers are missing, or a table cannot be read.
    """
    drawn = drawings(data)
    for figure, drawing in drawn:
        if drawing is not None:
            picture = draw.picture(drawing, "png")
            write_durably(folder / "figures" / f"{figure.id}.png", picture)
    for name, bodies in generated(data, drawn).items():
        page = folder / f"{name}.md"
        write_durably(page, replaced(page, bodies))


def generated(data: pathlib.Path, drawn: Claims) -> dict[str, dict[str, str]]:
    """The generated parts of each page, by the name in their markers."""
    return {
        "figures": {"": figures(drawn)},
        "evidence": {"": evidence(data, drawn), **summaries.sections(data)},
    }


def drawings(data: pathlib.Path) -> Claims:
    """Every figure that can be drawn, and its drawing where its tables are there."""
    request = Request("laptop", tables=data, from_data=True)
    known = catalogue.figures().values()
    return [(f, catalogue.from_data(f, request)) for f in known if f.draw]


def begin(name: str = "", command: str = _COMMAND) -> str:
    """The line before a generated part; the main part of a page has no name."""
    return f"<!-- begin: {command}{f', {name}' if name else ''} -->"


def replaced(
    page: pathlib.Path, bodies: Mapping[str, str], command: str = _COMMAND
) -> str:
    """A page with other generated parts.

    Args:
      page: its file.
      bodies: the parts, by the name in their markers.
      command: what generates them, as their markers say.

    Raises:
      UserError: it is not there, or lacks a marker.
    """
    try:
        text = page.read_text()
    except OSError as error:
        raise UserError(
            f"{page} cannot be read ({error.strerror}); run `{command}` in the "
            "repository's root"
        ) from None
    for name, body in bodies.items():
        before, start, rest = text.partition(begin(name, command))
        _, end, after = rest.partition(END)
        if not start or not end:
            raise UserError(
                f"{page} lacks the lines {begin(name, command)!r} and {END!r}"
            )
        text = f"{before}{start}\n\n{body.strip()}\n\n{end}{after}"
    return text


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
    count = collections.Counter(judged(*claim)[0] for claim in drawn)
    found = (f"{label}: {count[label]}" for label in Label if count[label])
    lines = [
        f"{len(drawn)} of {len(claims)} claims have tables. {'; '.join(found)}.",
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
            catalogue.word(figure, drawing),
        )
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    if missing:
        lines += [
            "",
            "Not measured yet: `python -m papers figure ID --scale medium --tables "
            "papers/data`.",
            "",
            "| | the claim |",
            "|---|---|",
        ]
        lines += [f"| {f.id} | {f.number}: {_cell(f.claim)} |" for f in missing]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# What a table's facts do not say, by scale and sweep.
_NOTES = {
    ("long", "cnn"): (
        "At depth 3, the base's, μP and Depth-μP are one network. We trained 56 runs "
        "of depth 3 with both, whose losses are equal, and copied 28 others."
    ),
}


def evidence(data: pathlib.Path, claims: Claims) -> str:
    """The main generated part of evidence.md: the verdicts on each table."""
    lines = []
    for scale in reversed(SCALES):
        at = Request(scale, tables=data, from_data=True)
        for part in parts():
            table = tables.read(part.path(at))
            if table is None:
                continue
            note = _NOTES.get((scale, part.name))
            lines += [
                "",
                f"### {part.name}, {scale}",
                "",
                f"{table.data.subject}: {table.length}; base of width "
                f"{table.data.base.width} and depth {table.data.base.depth}; measured "
                f"{table.facts['measured']}: `papers/data/{scale}/{part.name}.csv`.",
                "",
                _used(part.name, at, claims),
                *(["", note] if note else []),
                "",
                *(f"    {line}" for line in command_lines(table.data.command)),
                "",
                "```text",
                *_printed(table.data),
                "```",
            ]
    return "\n".join(lines)


def _used(sweep: str, at: Request, claims: Claims) -> str:
    """Which figures use a table, in a line.

    A picture is drawn from the tables of one scale; other figures can be drawn from
    the tables of this scale if these have all of their runs.
    """
    pictured, others, tuned = [], [], []
    for figure, drawing in claims:
        own = {part.name for part in figure.parts}
        bases = {part.tuned.name for part in figure.parts if part.tuned is not None}
        if figure.base is not None:
            bases.add(figure.base.name)
        if sweep not in own | bases:
            continue
        shown = drawing is not None and drawing.scale == at.scale
        if sweep in bases:
            if shown or _complete(figure, at):
                tuned.append(figure)
        elif shown:
            pictured.append(figure)
        elif _complete(figure, at):
            others.append(figure)
    links = listed([f"[`{f.id}`](figures/{f.id}.png)" for f in pictured])
    ids = listed([f"`{f.id}`" for f in others])
    texts = []
    if pictured:
        texts.append(f"Figures: {links}{f', and at this scale {ids}' if ids else ''}.")
    elif others:
        texts.append(f"Figures, at this scale: {ids}.")
    if tuned:
        ids = listed([f"`{f.id}`" for f in tuned])
        use = "use" if tuned[1:] else "uses"
        texts.append(f"{ids} {use} its best branch multiplier.")
    return " ".join(texts) or "No figure has all of its runs at this scale."


def _complete(figure: Figure, at: Request) -> bool:
    """Whether the tables of a scale have every run of a figure."""
    if not figure.parts:
        return at.scale in DRAWN and figure.path(at).exists()
    return all(part.is_complete(at) for part in figure.parts)


def parts() -> Iterator[Part]:
    """Every sweep of a figure once, each after the one that tunes it."""
    known: set[str] = set()
    for figure in catalogue.figures().values():
        for part in filter(None, (*figure.parts, figure.base)):
            for one in filter(None, (part.tuned, part)):
                if one.name not in known:
                    known.add(one.name)
                    yield one


def _printed(data: report.SweepData) -> list[str]:
    """What `mupax sweep` prints of a sweep.

    Its headline is about one parametrization. If the table has several, a sentence
    about all of them replaces it.
    """
    out = io.StringIO()
    report.print_verdicts(data, rich.console.Console(file=out, width=_WIDTH))
    lines = [line.rstrip() for line in out.getvalue().strip().splitlines()]
    judged = [t for t in data.shown if t.sizes[1:]]
    if len({t.key for t in judged}) < 2:
        return lines
    return [*_headlines(data, judged), *lines[lines.index("") :]]


def _headlines(data: report.SweepData, judged: Iterable[Transfer]) -> list[str]:
    """A sentence for each hyperparameter and axis, about every parametrization."""
    clauses: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in judged:
        own = clauses.setdefault((one.name, one.axis), {})
        own.setdefault(sentences.phrase([one]), []).append(_label(data, one.key))
    lines = []
    for (name, _), own in clauses.items():
        texts = [f"with {listed(keys)} it {text}" for text, keys in own.items()]
        lines.append(f"The best {grids.noun(name)}: {'; '.join(texts)}.")
    return [line for one in lines for line in textwrap.wrap(one, _WIDTH)]


def _label(data: report.SweepData, key: str) -> str:
    """A parametrization and its choices: "mup (norm batch)"."""
    name = key.partition(", ")[0]
    name = data.labels.get(name, name)
    choices = data.all_labels[key].removeprefix(name).removeprefix(", ")
    return f"{name} ({choices})" if choices else name


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
