"""Progress bars on terminals and in notebooks."""

import importlib.util

import rich.console
import rich.progress


def bar(
    name: str, count: rich.progress.ProgressColumn, console: rich.console.Console
) -> rich.progress.Progress:
    """A progress bar of rich: name, bar, count, time elapsed and time remaining.

    Notebooks need `ipywidgets` to show it. Without it, the bar is left out with a note.

    Args:
      name: a format of the name, e.g. "{task.description}".
      count: how much is done.
      console: where it is shown.
    """
    disable = console.is_jupyter and importlib.util.find_spec("ipywidgets") is None
    if disable:
        console.print(
            "No progress bar: it needs pip install '.[notebook]' in a clone of mupax.",
            highlight=False,
            markup=False,
        )
    return rich.progress.Progress(
        rich.progress.TextColumn(name),
        rich.progress.BarColumn(),
        count,
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=disable,
    )
