"""`save` and `load` models as directories: weights, options, a model card."""

import json
import math
import numbers
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import optim
from mupax.optim.rules.parametrizations import Row

from ..layers.attention import logit_scale
from ..plan import Plan, scales
from ..preprocessing import DataConfig, known_data_config, remember
from ..registry import (
    REGULARIZATION,
    ROUNDING,
    abstract,
    complete,
    default_options,
    default_parametrization,
    reads_tokens,
    recipe,
)
from . import positions, remote
from .cards import Training, card
from .files import read_json, read_npz, reason
from .misfits import Misfit

WEIGHTS, _CONFIG, _CARD = "weights.npz", "config.json", "README.md"
_BUILDING = ".saving-"  # start of the names of unfinished directories
_FORMAT = 4


def save(
    model: nnx.Module,
    directory: str | os.PathLike[str],
    *,
    notes: str = "",
    files: Mapping[str, str | os.PathLike[str]] | None = None,
    training: Training | None = None,
) -> pathlib.Path | str:
    """Write a zoo model so that loading it needs only the directory.

    Args:
      model: from `zoo.create` or `zoo.load_pretrained`. Its preprocessing is written
        too, if it is known; see `zoo.data_config`.
      directory: a new one, or a new address in object storage, e.g.
        "gs://bucket/model"; it appears whole or not at all.
      notes: for the model card: what it was trained on, how well it does.
      files: further files to copy, by their name there, e.g. {"tokenizer.json": path}.
      training: for the model card: how the weights were made.

    Returns:
      The directory, as a path; or its address.

    Raises:
      ValueError: a model that the zoo did not create, or with replaced or added parts;
        or an address that cannot be written. Where the upload failed, the message names
        the local copy.
      FileExistsError: the directory is there already.

    Examples:
      >>> import tempfile
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=16, depth=2, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = zoo.save(model, folder + "/mine", notes="not trained")
      ...     sorted(p.name for p in path.iterdir())
      ['README.md', 'config.json', 'weights.npz']
    """
    name, options = recipe(model)
    if remote.is_remote(directory):
        with remote.uploading(directory, last=_CONFIG) as place:
            save(model, place, notes=notes, files=files, training=training)
        return remote.normalized(directory)
    # Written out: another default of a later version must not change the model.
    if options.get("parametrization") is None:
        default = default_parametrization(name, **options)
        options = {**options, "parametrization": default}
    _check_parts(model, name, options)
    directory = pathlib.Path(directory).absolute()
    if directory.exists():
        raise FileExistsError(f"{directory} exists; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    config = {"format": _FORMAT, "model": name, "options": _plain(options)}
    if (data := known_data_config(model)) is not None:
        config["data"] = data.to_json()
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=_BUILDING) as whole:
        building = pathlib.Path(whole, directory.name)
        building.mkdir()
        _write(building / WEIGHTS, arrays_of(model))
        config["crc"] = _checksum(config)
        (building / _CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        for name_there, path in (files or {}).items():
            shutil.copyfile(path, building / name_there)
        text = card(
            name,
            parameters=sum(math.prod(v.shape) for _, v in _variables(model)[1]),
            parametrization=plan_of(model).parametrization,
            task=_task(model, name),
            data=known_data_config(model),
            notes=notes,
            training=training,
        )
        (building / _CARD).write_text(text)
        building.rename(directory)
    return directory


def _check_parts(model: nnx.Module, name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the saved options would not build these parameters."""
    try:
        anew = dict(_variables(abstract(name, **options))[1])
        _check_fit(anew, dict(_variables(model)[1]), None)
    except ValueError as error:
        raise ValueError(
            f"loading could not rebuild this model: {error}. A part of it was replaced "
            "or added; for another "
            "head, load or create it with out_features=...; store other changed models "
            "with Orbax"
        ) from None


def _write(file: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays without compression: trained weights hardly get smaller."""
    whole: dict[str, Any] = {path: np.asarray(array) for path, array in arrays.items()}
    try:
        np.savez(file, **whole)
    except OSError as error:  # names no file
        place = file.parents[2]
        raise OSError(error.errno, error.strerror, str(place)) from None


def load(
    directory: str | os.PathLike[str], *, expected: str | None = None, **overrides: Any
) -> nnx.Module:
    """Read a model that `save` wrote.

    Args:
      directory: of the model.
      expected: the name that the model must have; None for any.
      **overrides: options that replace the saved ones. With another `out_features`
        the readout gets new initial values, and with another `input_shape` a ViT's
        positions are interpolated; other sizes cannot change.

    Raises:
      ValueError: the directory holds no model or cannot be read; the weights do not fit
        the options; or the model would compute another function with these options.
    """
    directory = pathlib.Path(directory).absolute()
    config = read_config(directory)
    name, options = config.model, config.options
    if expected not in (None, name):
        raise ValueError(f"{str(directory)!r} holds a {name!r}, not a {expected!r}")
    rngs = overrides.pop("rngs", None) or nnx.Rngs(0)
    resized = "input_shape" in overrides
    try:
        saved = abstract(name, **options)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{directory} holds a model that this version cannot create: {error}"
        ) from None
    check_sizes(saved, str(directory))
    check_same_function(name, options, overrides, f"the weights in {directory}")
    remedy = _saved_values(name, options, overrides)
    options = {**options, **overrides}
    # Raise before reading arrays and building a large model if they do not fit.
    model = abstract(name, **options)
    new_head = model_classes(model) != model_classes(saved)
    fresh = "readout" if new_head else None
    arrays = positions.between(saved, model, arrays_of(saved))
    try:
        _check_fit(dict(_variables(model)[1]), arrays, fresh)
    except ValueError as error:
        hint = ("; pass ", remedy) if remedy else ()
        raise Misfit(str(error), *hint) from None
    _check_multipliers(saved, model, directory, remedy)
    arrays = _read(directory, saved)
    fill(model, positions.between(saved, model, arrays), fresh=fresh)
    complete(model, rngs)
    remember(model, config.data, resized=resized)
    return model


def _saved_values(
    name: str, options: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, str]:
    """The saved values, as Python code, of the options that overrides change.

    Another number of classes is left out: it gives a new readout.
    """
    known = {**default_options(name), **options}
    for key in ("width", "depth"):
        if known.get(f"base_{key}") is None:
            known[f"base_{key}"] = known[key]
    if isinstance(point := known["parametrization"], optim.Parametrization):
        known["parametrization"] = point.label
    return {
        key: repr(known.get(key))
        for key, value in overrides.items()
        if key != "out_features" and _plain(known.get(key)) != _plain(value)
    }


def _read(directory: pathlib.Path, model: nnx.Module) -> dict[str, np.ndarray]:
    """Read the arrays of a model from `abstract`.

    Raises:
      ValueError: they cannot be read, or do not fit the model.
    """
    variables = dict(_variables(model)[1])
    try:
        arrays = read_npz(directory / WEIGHTS)
        _check_fit(variables, arrays, None)
        # NumPy writes types such as bfloat16 as bytes.
        return {
            path: a.view(variables[path].dtype) if a.dtype.kind == "V" else a
            for path, a in arrays.items()
        }
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"the weights in {directory} cannot be read: {reason(error)}; copy the "
            "model again, or save it again"
        ) from None


# Options that change no function of trained weights, or that are checked otherwise: by
# shapes, or by the multipliers of the forward pass.
_FREE = {
    *ROUNDING,
    *REGULARIZATION,
    *(
        "balance",
        "train_ends",
        "gain",
        "layer_scale",
        "zero_init",
        "zero_queries",
        "zero_readout",
    ),
    *("context", "vocab_size", "eos", "input_shape", "out_features", "width", "depth"),
    *("heads", "head_dim", "queries_per_key", "mlp_ratio", "patch_size", "registers"),
    *("blocks", "block_depth", "rows", "rows_width", "head", "experts"),
    "width_per_group",
    *("base_width", "base_depth", "parametrization", "branch_multiplier"),
}


def check_same_function(
    name: str, options: Mapping[str, Any], overrides: Mapping[str, Any], weights: str
) -> None:
    """Raise a `ValueError` if an option would change the function of weights.

    Args:
      name: of the model.
      options: those of the weights; others have their defaults.
      overrides: the new options.
      weights: the weights in a sentence.
    """
    known = {**default_options(name), **options}
    for key, value in overrides.items():
        if key not in _FREE and key in known and _plain(known[key]) != _plain(value):
            raise ValueError(
                f"{weights} have {key}={known[key]!r}, and {key}={value!r} would "
                f"change the function that they compute; leave {key} out"
            )


def is_config(config: Any) -> bool:
    """Whether the contents of a config.json are from `save`."""
    return isinstance(config, dict) and {"format", "model", "options"} <= config.keys()


class Saved(NamedTuple):
    """A saved model's name, options and preprocessing (if known)."""

    model: str
    options: dict[str, Any]
    data: DataConfig | None


def read_config(directory: pathlib.Path) -> Saved:
    """Read the config of a saved model, and compare it with its checksum.

    Raises:
      ValueError: the config is missing or damaged.
    """
    try:
        config = read_json(directory / _CONFIG)
        if not is_config(config) or config["format"] != _FORMAT:
            raise ValueError(f"it is no config of zoo.save in the format {_FORMAT}")
        if config.pop("crc", None) != _checksum(config):
            raise ValueError("it has changed since it was written")
        options = {key: _rich(value) for key, value in config["options"].items()}
        data = config.get("data")
        data = None if data is None else DataConfig.from_json(data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(
            f"{directory} holds no model of zoo.save: {_CONFIG} cannot be read ({e}); "
            "pass a directory that zoo.save wrote, or copy it again"
        ) from None
    return Saved(config["model"], options, data)


def _checksum(config: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(config, sort_keys=True).encode())


def verify(directory: pathlib.Path) -> None:
    """Compare the config and the weights of a saved model with their checksums.

    Raises:
      ValueError: one of them is missing or damaged.
    """
    config = read_config(directory)
    _read(directory, abstract(config.model, **config.options))


def check_sizes(model: nnx.Module, source: str) -> None:
    """Check that this machine's memory can hold a model.

    Args:
      model: from `abstract`.
      source: of the weights, for messages.

    Raises:
      ValueError: it cannot. Nothing was allocated.
    """
    needed = sum(
        math.prod(array.shape) * array.dtype.itemsize
        for array in arrays_of(model).values()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"the config of {source} describes a model of {needed / 1e9:,.4g} GB, but "
            f"this machine has {memory / 1e9:,.4g} GB of memory; the config may be "
            "damaged"
        )


def arrays_of(model: nnx.Module) -> dict[str, Any]:
    """All arrays of a model except its random state, by path."""
    return {path: variable.get_value() for path, variable in _variables(model)[1]}


def fill(
    model: nnx.Module, arrays: dict[str, Any], *, fresh: str | None = None
) -> None:
    """Fill a model with arrays; every array and every variable is used once.

    Args:
      model: changed only if everything fits.
      arrays: by path. The model may share their memory.
      fresh: variables below this path keep their values.

    Raises:
      ValueError: a path is missing or unknown, or an array has another shape.
    """
    state, pairs = _variables(model)
    variables = dict(pairs)
    for path in _check_fit(variables, arrays, fresh):
        variable = variables[path]
        array = arrays[path]
        if array.dtype != variable.dtype:
            array = array.astype(variable.dtype)
        variable.set_value(jax.device_put(array))
    nnx.update(model, state)


def _check_fit(
    variables: dict[str, nnx.Variable[Any]], arrays: dict[str, Any], fresh: str | None
) -> list[str]:
    """Return the paths to fill; raise a `ValueError` if arrays do not fit (`fill`)."""
    kept = {p for p in variables if fresh and p.split("/")[0] == fresh}
    for path in variables.keys() - arrays.keys() - kept:
        raise ValueError(f"the weights lack {path!r}, which the model has")
    for path in arrays.keys() - variables.keys():
        raise ValueError(f"the weights hold {path!r}, which the model does not have")
    filled = [path for path in variables if path not in kept]
    for path in filled:
        if tuple(arrays[path].shape) != tuple(variables[path].shape):
            raise ValueError(
                f"{path!r} has shape {tuple(arrays[path].shape)} in the weights and "
                f"{tuple(variables[path].shape)} in the model"
            )
    return filled


def _variables(
    model: nnx.Module,
) -> tuple[nnx.State[Any, Any], list[tuple[str, nnx.Variable[Any]]]]:
    state = nnx.state(model, nnx.Not(nnx.RngState))
    pairs = nnx.to_flat_state(state)
    return state, [("/".join(map(str, path)), variable) for path, variable in pairs]


def _check_multipliers(
    saved: nnx.Module,
    model: nnx.Module,
    directory: pathlib.Path,
    remedy: Mapping[str, str],
) -> None:
    """Raise a `Misfit` if the weights compute another function with new options."""
    before, now = _multipliers(saved), _multipliers(model)
    for path in before.keys() & now.keys():
        if not math.isclose(before[path], now[path], rel_tol=1e-9):
            raise Misfit(
                f"the weights in {directory} were saved with a factor of "
                f"{before[path]:g} at {path!r}, which these options change to "
                f"{now[path]:g}, so the model would compute another function; pass ",
                remedy,
            )


def _multipliers(model: nnx.Module) -> dict[str, float]:
    """All factors of the forward pass that depend on the plan."""
    plan = plan_of(model)
    factors = {
        path: optim.multipliers(scale, plan.parametrization).forward
        for path, scale in scales(model).items()
    }
    factors |= {"every branch": plan.branch, "the output": plan.output}
    if "head_dim" in dict(plan.axes):
        factors["the logits of attention"] = logit_scale(plan)
    return factors


def model_classes(model: nnx.Module) -> int | None:
    """Number of classes of a model's readout; None without a readout of classes."""
    axes = dict(plan_of(model).axes)
    return axes["classes"].size if "classes" in axes else None


def _task(model: nnx.Module, name: str) -> str:
    """What a model is for, as the hub names it."""
    if reads_tokens(name):
        return "text-generation"
    data = known_data_config(model)
    embeds = data is not None and data.projection is not None
    if embeds or not model_classes(model):
        return "image-feature-extraction"
    return "image-classification"


def plan_of(model: nnx.Module) -> Plan:
    """The plan of a model of the zoo."""
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{type(model).__name__} is not a model of the zoo; create it by zoo.create"
        )
    return plan


def _plain(value: Any) -> Any:
    """Convert options to JSON; parametrizations and dtypes become tagged objects."""
    if isinstance(value, optim.Parametrization):
        return {"parametrization": _plain(vars(value))}
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    return {"dtype": np.dtype(value).name}


def _rich(value: Any) -> Any:
    """The inverse of `_plain`; lists become tuples, as options are."""
    if isinstance(value, dict):
        if value.keys() == {"parametrization"}:
            return _parametrization(value["parametrization"])
        if value.keys() == {"dtype"}:
            return jnp.dtype(value["dtype"])
        return {key: _rich(v) for key, v in value.items()}
    return tuple(map(_rich, value)) if isinstance(value, list) else value


def _parametrization(data: Mapping[str, Any]) -> optim.Parametrization:
    """Build a parametrization from its fields.

    Raises:
      ValueError: a field has another type, e.g. in a damaged file.
    """
    kinds = {"name": str, "citation": str, "scaled": bool, "branches_only": bool}
    for key, kind in kinds.items():
        if not isinstance(data[key], kind):
            raise ValueError(f"{key} of a parametrization is {data[key]!r}")

    def powers(values: Any) -> optim.Powers:
        for value in values:
            if type(value) not in (int, float) or not abs(value) < 1e3:
                raise ValueError(f"an exponent of a parametrization is {value!r}")
        return optim.Powers(*values)

    def by_role(key: str, made: Callable[[Any], Any]) -> dict[optim.Role, Any]:
        return {optim.Role(role): made(x) for role, x in data[key].items()}

    rows = by_role("rows", lambda row: Row(*map(powers, row)))
    gauge = by_role("gauge", powers)
    return optim.Parametrization(**{**data, "rows": rows, "gauge": gauge})
