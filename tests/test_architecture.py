"""The rooms of mupax: imports run one way, and never in a circle."""

import ast
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]

# A room may import from those before it, and from itself.
ROOMS = (
    "optim.rules",
    "optim.scales",
    "optim.reading",
    "optim.apply",
    "optim.check",
    "optim",
    "zoo",
    "experiments.errors",
    "experiments.checks",
    "experiments.io",
    "experiments.loading",
    "experiments.progress",
    "experiments.memory",
    "experiments.data",
    "experiments.estimate.flops",
    "experiments.estimate.hardware",
    "experiments.run",
    "experiments.estimate",
    "experiments.sweep.grids",
    "experiments.sweep.results",
    "experiments.sweep.optima",
    "experiments.sweep.statistics",
    "experiments.sweep.regret",
    "experiments.sweep.verdict",
    "experiments.sweep.transfers",
    "experiments.report",
    "experiments.sweep",
    "experiments.coord_check",
    "experiments.transfer",
    "experiments.convert",
    "experiments.predict",
    "experiments.generate",
    "experiments.theory",
    "experiments.cli",
    "papers",
)


def modules() -> dict[str, pathlib.Path]:
    """Every module of the library, by its name below `mupax`."""
    paths = {}
    for room in ("optim", "zoo", "experiments", "papers"):
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(p for p in parts if p != "__init__")] = path
    return paths


MODULES = modules()


def imported(name: str, path: pathlib.Path) -> set[str]:
    """The modules that a module imports, also within functions and for types only."""
    tree = ast.parse(path.read_text())
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("mupax.") for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            origin = origin.removeprefix("mupax.") if not node.level else origin
            for alias in node.names:
                whole = f"{origin}.{alias.name}" if origin != "mupax" else alias.name
                names.add(whole if whole in MODULES else origin)
    return {x for x in names if x in MODULES and x != name}


def room(name: str) -> int:
    """The place of a module's room; the most specific one counts."""
    fits = [r for r in ROOMS if name == r or name.startswith(f"{r}.")]
    assert fits or name == "experiments", f"{name} is in no room"
    return ROOMS.index(max(fits, key=len)) if fits else len(ROOMS)


def test_no_import_points_upwards():
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imported(name, path)
        if room(other) > room(name)
    ]
    assert not wrong


def test_the_wheel_has_no_papers_and_never_imports_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not any("papers" in x for x in project["tool"]["setuptools"]["packages"])
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imported(name, path)
        if other.split(".")[0] == "papers" != name.split(".")[0]
    ]
    assert not wrong


def test_no_imports_run_in_a_circle():
    graph = {name: imported(name, path) for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_importing_mupax_needs_the_core_alone():
    code = (
        "import sys\n"
        "for name in ('ml_collections', 'grain', 'matplotlib', 'tfds'):\n"
        "    sys.modules[name] = None\n"
        "import mupax\n"
        "mupax.optim, mupax.zoo, mupax.coord_check\n"
        "assert not any(n.startswith('mupax.experiments') for n in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_are_there():
    import mupax
    from mupax import experiments

    assert callable(mupax.sweep)
    assert callable(mupax.coord_check)
    for name in experiments.__all__:
        assert getattr(experiments, name) is not None
