"""Run commands of `mupax` in the process of the tests. Not a test."""

import pathlib

from mupax.experiments import cli

HERE = pathlib.Path(__file__).parent
TOY_TRAIN = f"--config={HERE / 'toy_train.py'}"
TOY_CONFIG = f"--config={HERE / 'toy_config.py'}"  # of a transfer


def mupax(*words: object) -> int:
    """The status of a command."""
    return cli.main(["mupax", *map(str, words)])


def refused(capsys, *words: object) -> str:
    """The one sentence with which a command is refused."""
    capsys.readouterr()
    assert mupax(*words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("mupax: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in out + err
    return err
