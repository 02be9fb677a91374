"""Progress bars on terminals and in notebooks."""

import importlib.util
from typing import Any

import rich.console
import rich.progress


def bar(*columns: Any, console: rich.console.Console) -> rich.progress.Progress:
    """A progress bar of rich.

    Notebooks need `ipywidgets` (`pip install 'mupax[notebook]'`) to show it. Without
    `ipywidgets`, the bar is left out with a note.
    """
    disable = console.is_jupyter and importlib.util.find_spec("ipywidgets") is None
    if disable:
        console.print(
            "No progress bar: it needs pip install 'mupax[notebook]'.",
            highlight=False,
            markup=False,
        )
    return rich.progress.Progress(*columns, console=console, disable=disable)
