"""Run the tutorials and store them as notebooks, with their outputs.

    python docs/run_notebooks.py --python .venv/bin/python [NAME ...]

The sources are docs/tutorials/*.py, in the percent format of jupytext. They are run by
the given Python, which need not have Jupyter: the kernel takes what it lacks from the
Python that runs this script. A notebook that fails is not written.
"""

import argparse
import pathlib
import re
import sys
import sysconfig
import time

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent / "tutorials"
KERNEL = (
    "import sys; sys.path.append({path!r}); "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
LIMIT = 100_000  # bytes of a stored notebook


def run(source: pathlib.Path, python: str) -> nbformat.NotebookNode:
    """A notebook with outputs, without what differs from run to run by itself."""
    notebook = jupytext.read(source)
    manager = AsyncKernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[
            python,
            *("-c", KERNEL.format(path=sysconfig.get_path("purelib"))),
            *("-f", "{connection_file}"),
        ],
        env={
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        },
    )
    NotebookClient(notebook, km=manager, timeout=900, record_timing=False).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        for output in cell.get("outputs", []):
            if "execution_count" in output:
                output.execution_count = None
            _clean(output)
        if "execution_count" in cell:
            cell.execution_count = None
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


def _clean(output: nbformat.NotebookNode) -> None:
    """Without addresses of objects and folders of this machine."""
    texts = output.get("data", output)
    for kind in ("text", "text/plain"):
        if isinstance(texts.get(kind), str):
            shown = re.sub(r" at 0x[0-9a-f]+", "", texts[kind])
            texts[kind] = re.sub(r"/tmp/\w+", "/tmp/folder", shown)


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    # Not resolved: the link in a virtual environment is what makes it one.
    python = str(pathlib.Path(given.python).absolute())
    for source in sorted(FOLDER.glob("*.py")):
        if given.names and source.stem not in given.names:
            continue
        start = time.monotonic()
        notebook = run(source, python)
        text = nbformat.writes(notebook)
        if len(text) > LIMIT:
            sys.exit(
                f"{source.stem} is {len(text):,} bytes; show less, at most {LIMIT:,}"
            )
        source.with_suffix(".ipynb").write_text(text + "\n")
        seconds = time.monotonic() - start
        print(f"{source.stem}: {seconds:.0f} s, {len(text) / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
