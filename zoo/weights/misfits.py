"""Explain why a file of weights does not fit a model, by its keys."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from ..family import Family
from ..layers.attention import Transformer


class Misfit(ValueError):
    """Weights do not fit a model; other options of the model may help.

    Args:
      *parts: of the message. A dict is {option: value as Python code}.

    Examples:
      >>> error = Misfit("it has register tokens: pass ", {"registers": "4"})
      >>> print(error)
      it has register tokens: pass registers=4
      >>> error.as_flags("--option ")
      'it has register tokens: pass --option registers=4'
    """

    def __init__(self, *parts: str | Mapping[str, str]):
        super().__init__(*parts)
        self.parts = parts

    def __str__(self) -> str:
        return self._with("{}={}", ", ")

    def as_flags(self, start: str) -> str:
        """The message with each option as a flag of a shell that starts like this."""
        return self._with(start + "{}={}", " ", _in_shell)

    def _with(self, form: str, between: str, quoted: Callable[[str], str] = str) -> str:
        words = [
            part
            if isinstance(part, str)
            else between.join(form.format(k, quoted(v)) for k, v in part.items())
            for part in self.parts
        ]
        return "".join(words)


def _in_shell(value: str) -> str:
    """A value as a word of a shell: strings bare, others in quotes if need be."""
    if value[:1] == "'":
        return value.strip("'") or '""'
    return f'"{value}"' if re.search(r"[^\w.+-]", value) else value


Value = str | Callable[[Mapping[str, Any]], str] | None


class _Remedy(NamedTuple):
    """An option that keys of a file, or keys that it lacks, ask for.

    Attributes:
      pattern: of the keys.
      option: its name.
      present: the value for keys that the model does not have, as Python code, or a
        function of the arrays by key that returns it.
      absent: the value for keys that the file lacks; None if the keys do not tell.
    """

    pattern: str
    option: str
    present: Value
    absent: Value = None


def _registers(arrays: Mapping[str, Any]) -> str:
    table = next(k for k in arrays if re.search(r"reg_token|register_tokens", k))
    return str(arrays[table].shape[-2])


def _experts(arrays: Mapping[str, Any]) -> str:
    numbers = [re.search(r"experts\.(\d+)\.", key) for key in arrays]
    return str(max((int(n[1]) + 1 for n in numbers if n), default=0))


def _squeeze(arrays: Mapping[str, Any]) -> str:
    # The first blocks may have more, because the number of channels is rounded.
    shapes = [arrays[key].shape for key in arrays if key.endswith(".se.fc1.weight")]
    return f"{min(shape[0] / shape[1] for shape in shapes):g}"


def _pool(arrays: Mapping[str, Any]) -> str:
    """The pooling for which a ViT has the keys of a file."""
    if any(re.search(r"^attn_pool\.|(^|\.)head\.probe$", key) for key in arrays):
        return "'attention'"
    if any(key.startswith("fc_norm.") for key in arrays):
        return "'mean'"
    if any(re.search(_CLASS_TOKEN, key) for key in arrays):
        return "'token'"
    return "'norm_mean'"


_CLASS_TOKEN = r"(^|[./])(cls_token|class_token|class_embedding|cls)$"
_REMEDIES = (
    _Remedy(r"^fc_norm\.", "pool", "'mean'", _pool),
    _Remedy(
        r"\.ls[12]\.gamma$|layer_scale[12]\.lambda1$", "layer_scale", "1e-5", "None"
    ),
    _Remedy(r"reg_token|register_tokens", "registers", _registers, "0"),
    _Remedy(r"^norm_pre\.|(^|\.)pre_layrnorm\.", "pre_norm", "True", "False"),
    _Remedy(r"^attn_pool\.|(^|\.)head\.probe$", "pool", "'attention'", _pool),
    _Remedy(r"\.mlp\.weights_(in|out)\.", "gated", "True", "False"),
    _Remedy(
        r"patch_embed(\.proj|ding|dings(\.projection)?)\.bias$",
        "patch_bias",
        "True",
        "False",
    ),
    _Remedy(
        r"^(head|heads\.head|classifier|visual_projection)\.bias$|(^|/)head/bias$",
        "readout_bias",
        "True",
        "False",
    ),
    _Remedy(_CLASS_TOKEN, "class_token", "True"),
    _Remedy(r"^lm_head\.weight$", "tied", "False"),
    _Remedy(r"^(score|classifier|qa_outputs)\.", "head", "False"),
    _Remedy(r"self_attn\.[qk]_norm\.", "qk_norm", "True", "False"),
    _Remedy(
        r"qkv\.bias$|in_proj_bias$|self_attn\.[qkv]_proj\.bias$",
        "qkv_bias",
        "True",
        "False",
    ),
    _Remedy(r"experts\.\d+\.|\.gate\.weight$", "experts", _experts, _experts),
    _Remedy(r"^layer\d+\.\d+\.se\.fc\d\.", "squeeze", _squeeze),
    _Remedy(r"^conv1\.\d+\.", "stem", "'deep'"),
    _Remedy(r"^layer.*\.downsample\.2\.", "shortcut", "'average'"),
)
# Options that the keys of a file decide: with another value the file does not fit.
OPTIONS = {remedy.option for remedy in _REMEDIES}
# (pattern of keys, what a file with such keys is and what to do)
_FORMATS = (
    (
        r"(^|/)Transformer/encoderblock/",
        "the blocks of big_vision's file are stacked (scan=True); unstack them by "
        "scan_to_pyloop of big_vision.models.vit, then save the file again",
    ),
    (
        r"(^|/)MAPHead_\d+/",
        "it has a MAP head, which is not read from files of big_vision; use timm's "
        "weights of the network, e.g. timm/ViT-B-16-SigLIP",
    ),
    (
        r"^features\.\d+\.",
        "it has the names of a network of torchvision, of which ResNets and vision "
        "transformers are read; use timm's weights of the network",
    ),
    (
        r"(^|\.)lora_[AB]\.",
        "the file holds LoRA adapters of peft; merge them into their network by "
        "merge_and_unload() of peft, then save the network",
    ),
)


def check_format(keys: Iterable[str]) -> None:
    """Raise a `Misfit` for keys of a format that no model of the zoo reads."""
    keys = sorted(keys)
    for pattern, said in _FORMATS:
        if key := next((key for key in keys if re.search(pattern, key)), None):
            raise Misfit(f"the file holds {key!r}: {said}")


def explain_mismatch(
    model: nnx.Module,
    arrays: Mapping[str, Any],
    unexpected: Iterable[str],
    missing: Iterable[str],
    needed: Iterable[str],
) -> Misfit | None:
    """Explain in one sentence why keys do not fit a model; None if they fit.

    Args:
      model: the model, possibly abstract.
      arrays: of the file, by key.
      unexpected: keys of the file that the model does not use.
      missing: keys that the model needs and the file lacks.
      needed: all keys that the model needs.
    """
    name = type(model).__name__
    unexpected, missing = sorted(unexpected), sorted(missing)
    if missing and not any(key in arrays for key in needed):
        return Misfit(
            f"the file holds another network than {name}, or names of a library that "
            f"are not read: e.g. {min(arrays)!r}, in place of {missing[0]!r}"
        )
    assert isinstance(model, Family)
    options = {field.name for field in dataclasses.fields(model.options_type)}
    if not isinstance(getattr(model, "head", None), bool):
        options -= {"head"}  # of an EfficientNet, a number of channels
    remedies = [remedy for remedy in _REMEDIES if remedy.option in options]
    blocks = {_pattern(key): _block(key) for key in sorted(needed, key=_block)}
    more = [key for key in unexpected if _pattern(key) in blocks]
    values = _options(model, arrays, unexpected, missing, remedies, blocks)
    hint: list[str | Mapping[str, str]] = ["check its size and options"]
    if values:
        hint = ["pass ", values]
    elif more:
        unexpected = more
        hint = [f"it has more blocks than this {name}; check depth, blocks and width"]
    lacks = holds = ""
    if missing:
        lacks = f"lacks {missing[0]!r}, which a {name} of this size has"
    if unexpected:
        holds = f"holds {unexpected[0]!r}, which this {name} does not have"
    if not missing and not unexpected:
        return None
    return Misfit(f"the file {' and '.join(filter(None, (lacks, holds)))}; ", *hint)


def _options(
    model: nnx.Module,
    arrays: Mapping[str, Any],
    unexpected: list[str],
    missing: list[str],
    remedies: Iterable[_Remedy],
    blocks: Mapping[str, int],
) -> dict[str, str]:
    """The options to pass, as {option: value in Python}.

    Args:
      model: the model.
      arrays: of the file.
      unexpected: keys of the file that the model does not use.
      missing: keys that the model needs and the file lacks.
      remedies: for options of the model.
      blocks: {pattern of a key: number of its last block in the model}.
    """
    values: dict[str, str] = {}
    for keys, where in ((unexpected, 2), (missing, 3)):
        for remedy in remedies:
            value = remedy[where]
            if value is None or remedy.option in values:
                continue
            if any(re.search(remedy.pattern, key) for key in keys):
                values[remedy.option] = (
                    value if isinstance(value, str) else value(arrays)
                )
    if any(re.search(_CLASS_TOKEN, key) for key in missing) and "pool" not in values:
        if getattr(model, "pool", None) in ("token", "token_and_mean"):
            values["pool"] = _pool(arrays)
        else:
            values["class_token"] = "False"
    depth = 1 + max((_block(k) for k in arrays if _pattern(k) in blocks), default=-1)
    if isinstance(model, Transformer) and depth not in (0, model.depth):
        values["depth"] = str(depth)
    return values


# Numbers that follow no letter: those of blocks, not that of "dinov2".
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+")


def _pattern(key: str) -> str:
    return _NUMBER.sub("{}", key)


def _block(key: str) -> int:
    """The first number of a key; -1 for none."""
    number = _NUMBER.search(key)
    return int(number[0]) if number else -1
