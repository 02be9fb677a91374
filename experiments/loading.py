"""Load the model that a command names: a run, a directory, a file or a hub id."""

import pathlib

from flax import nnx

from mupax import zoo
from mupax.zoo import registry
from mupax.zoo.weights import foreign, hub, remote

from .errors import UserError, nearest


def find_model(source: str) -> str:
    """Find the model of a run directory; returns any other source unchanged.

    Raises:
      UserError: there is no such source, or the run has not saved a model yet.
    """
    if not source:
        raise UserError(
            "--model is missing; give a run directory, a directory of zoo.save, a file "
            "of weights, a hub id, or a name of zoo.list_pretrained()"
        )
    if remote.is_remote(source):
        try:  # a run, or else a model
            source = str(remote.local(f"{source.rstrip('/')}/model"))
        except remote.RemoteError:
            source = str(remote.local(source))
    folder = pathlib.Path(source)
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    # The target of a transfer has its model beside its run.
    if folder.name == "target" and (folder.parent / "model/config.json").is_file():
        return str(folder.parent / "model")
    if (folder / "experiment.json").is_file():
        raise UserError(
            f"the run in {source} has not saved a model yet; finish it with the "
            "command that started it"
        )
    shipped = zoo.list_pretrained()
    known = source in shipped or hub.is_id(source)
    if not known and not folder.exists():
        raise UserError(
            f"there is no model {source!r}: it is neither a directory or file, nor the "
            "id of a hub repository (owner/name), nor one of "
            f"{', '.join(shipped)}{nearest(source, shipped) or '; check the path'}"
        )
    return source


def load_model(source: str, *, name: str | None = None) -> nnx.Module:
    """A trained model, in evaluation mode.

    Args:
      source: the directory of a run, a directory that `zoo.save` wrote, a file of
        weights (each may be in object storage), the id of a repository on the hub, or
        the name of a model that comes with the package.
      name: of the model; needed only for files of weights.

    Raises:
      UserError: the model cannot be loaded.
    """
    place = find_model(source)
    try:
        if name is None and hub.is_file_name(place):
            raise UserError(
                f"{source} holds weights without a model's name; give --name, one of "
                "`mupax models`"
            )
        if name in registry.list_models() and hub.is_file_name(place):
            known = registry.default_options(name)
            sizes = [key for key in ("width", "depth") if key not in known]
            if sizes:
                flags = "".join(f" --option {key}=..." for key in sizes)
                raise UserError(
                    f"the file does not state the {' and '.join(sizes)} of this {name};"
                    f" first run `mupax convert --model {name}{flags} --source {source}"
                    " --out DIR`, and then this command with --model DIR"
                )
        given = (place,) if name is None else (name, place)
        model = zoo.load_pretrained(*given)
    except foreign.Misfit as error:
        raise UserError(
            error.as_flags("--option ") + "; `mupax convert` takes options, and "
            "writes a directory that this command reads"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise UserError(str(error)) from None
    model.eval()
    return model
