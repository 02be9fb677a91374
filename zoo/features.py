"""Explain why a file of weights does not fit a model, by the features of its keys."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# (pattern of keys that a model lacks, feature of networks with such keys)
_FEATURES = (
    (r"\.ls[12]\.gamma$|\.gamma_[12]$|layer_scale", "LayerScale"),
    (r"reg_token|register_tokens", "register tokens"),
    (r"\.se\.|\.se_module\.|\.eca\.", "squeeze-and-excitation"),
    (r"\.(q|k|query|key)_?norm\.", "QK-norm"),
    (r"dist_token|head_dist\.|^distill", "a distillation token"),
    (r"relative_position|rel_pos", "relative position bias"),
    (r"\.mlp\.(w12|w1|w2|w3|fc1_g|fc1_x|gate_proj)\.", "a gated MLP (SwiGLU)"),
    (r"^conv1\.\d+\.|^stem\.", "a deep stem"),
    (r"\.downsample\.2\.", "average pooling in shortcuts (ResNet-D)"),
    (r"^norm_pre\.|^ln_pre\.|pre_layernorm", "a norm before the blocks"),
    (r"rope|rotary", "rotary position embedding"),
    (r"attn_pool|MAPHead|attentional_pooler", "attention pooling"),
    (r"^decoder", "a decoder, as of masked pretraining"),
    (r"^mask_token", "a mask token"),
    (r"\.attn\.(q|v)_bias$|logit_bias", "separate biases of queries and values"),
    (r"patch_embed\.backbone|patch_embed\.stem|^root/", "a convolutional stem"),
    (r"expert|\.moe\.", "a mixture of experts"),
    (r"\.attn\.norm\.|\.mlp\.norm\.", "a norm inside attention or MLP; see inner_norm"),
    (r"\.attn\.(q|k|v)_proj\.|\.attn\.[qkv]\.", "separate queries, keys and values"),
    (r"^pre_logits|^head\.fc\d|^head\.\d", "a hidden layer in the head"),
    (r"lora_", "LoRA adapters"),
    (r"dwconv|conv_dw|depthwise", "depthwise convolutions"),
    (r"^layers\.\d+\.(blocks|downsample)|^stages\.", "a pyramid of stages"),
    (r"crossattention|cross_attn", "cross-attention"),
    (r"^(vit\.|deit\.)?(embeddings|encoder)\.(layer|patch|cls)", "transformers' names"),
    (r"^(module|model|backbone|state_dict|teacher|student)\.", "a wrapper's names"),
)
# (pattern of keys that depend on the model's options, what to pass instead)
_UNEXPECTED = (
    (r"^fc_norm\.", "pass pool='mean'"),
    (
        r"\.ls[12]\.gamma$|layer_scale[12]\.lambda1$",
        "it has LayerScale: pass layer_scale=1e-5",
    ),
    (r"reg_token|register_tokens", "it has register tokens: pass registers=..."),
    (
        r"^norm_pre\.|\.pre_layrnorm\.",
        "it has a norm before the blocks: pass pre_norm=True",
    ),
    (
        r"^attn_pool\.|\.head\.probe$",
        "it has attention pooling: pass pool='attention'",
    ),
    (r"\.mlp\.weights_(in|out)\.", "it has a gated MLP (SwiGLU): pass gated=True"),
    (r"patch_embed(\.proj|ding)\.bias$", "pass patch_bias=True"),
    (r"^cls_token$|^class_token$|^cls$", "pass class_token=True"),
    (r"^lm_head\.weight$", "pass tied=False"),
    (r"self_attn\.[qk]_norm\.", "pass qk_norm=True"),
    (r"self_attn\.[qkv]_proj\.bias$", "pass qkv_bias=True"),
    (r"experts\.\d+\.|\.gate\.weight$", "pass experts=... and experts_per_token=..."),
    (r"^layer\d+\.\d+\.se\.fc\d\.", "pass squeeze=1/16 for squeeze-and-excitation"),
    (r"^conv1\.\d+\.", "pass stem='deep' for a deep stem"),
    (
        r"^layer.*\.downsample\.2\.",
        "pass shortcut='average' for average pooling in shortcuts (ResNet-D)",
    ),
    (r"^maxpool\.", "pass stem_pooling='conv' for a convolution in its place"),
)
_MISSING = (
    (r"\.attn\.norm\.", "pass inner_norm='mlp', or '' for none"),
    (r"\.mlp\.norm\.", "pass inner_norm=''"),
    (r"^fc_norm\.", "pass pool='token' or pool='norm_mean'"),
    (r"qkv\.bias$|in_proj_bias$", "pass qkv_bias=False"),
    (r"\.ls[12]\.gamma$|layer_scale[12]\.lambda1$", "pass layer_scale=None"),
    (r"reg_token|register_tokens", "pass registers=0"),
    (r"^norm_pre\.|\.pre_layrnorm\.", "pass pre_norm=False"),
    (r"^attn_pool\.|\.head\.probe$", "pass another pool"),
    (r"\.mlp\.weights_(in|out)\.", "pass gated=False"),
    (r"patch_embed(\.proj|ding)\.bias$", "pass patch_bias=False"),
    (r"^visual_projection\.bias$", "pass readout_bias=False"),
    (r"^cls_token$|^class_token$|cls$", "pass pool='mean' or pool='norm_mean'"),
    (r"^lm_head\.weight$", "pass tied=True"),
    (r"self_attn\.[qk]_norm\.", "pass qk_norm=False"),
    (r"self_attn\.[qkv]_proj\.bias$", "pass qkv_bias=False"),
    (r"experts\.\d+\.", "pass experts=0, or the number that the file has"),
)


def features(arrays: Mapping[str, Any], unexpected: Iterable[str]) -> dict[str, str]:
    """Find features that a file's network has and a model of the zoo lacks.

    Args:
      arrays: arrays, or other objects with a shape, by key.
      unexpected: the keys that the model does not have.

    Returns:
      {feature: the first key that shows it}.

    Examples:
      >>> features({}, ["blocks.0.ls1.gamma", "blocks.1.ls1.gamma", "reg_token"])
      {'LayerScale': 'blocks.0.ls1.gamma', 'register tokens': 'reg_token'}
    """
    keys: dict[str, str] = {}
    for key in unexpected:
        for pattern, feature in _FEATURES:
            if re.search(pattern, key):
                keys.setdefault(feature, key)
                break
    for key in arrays:
        # A grouped convolution takes fewer channels than conv1 returns.
        if re.fullmatch(r"layer\d+\.\d+\.conv2\.weight", key):
            before = arrays.get(key.replace("conv2", "conv1"))
            shape = tuple(arrays[key].shape)
            if before is not None and len(shape) == 4 and shape[1] < before.shape[0]:
                keys.setdefault("grouped convolutions (ResNeXt)", key)
    return keys


def explain_mismatch(
    name: str,
    arrays: Mapping[str, Any],
    unexpected: Iterable[str],
    missing: Iterable[str],
    needed: Iterable[str],
) -> str | None:
    """Explain in one sentence why keys do not fit a model; None if they fit.

    Args:
      name: of the model's class.
      arrays: of the file, by key.
      unexpected: keys of the file that the model does not use.
      missing: keys that the model needs and the file lacks.
      needed: all keys that the model needs.
    """
    unexpected, missing = sorted(unexpected), sorted(missing)
    blocks = {_pattern(key): _block(key) for key in sorted(needed, key=_block)}
    more = [key for key in unexpected if _pattern(key) in blocks]
    hint = _hint(unexpected, _UNEXPECTED)
    # Further blocks, and keys that depend on an option, do not show a feature.
    strange = [
        key
        for key in unexpected
        if _block(key) <= blocks.get(_pattern(key), _block(key))
        and not _hint([key], _UNEXPECTED)
    ]
    known = features({}, strange)
    if known:
        shown = " and ".join(f"{key!r} ({feature})" for feature, key in known.items())
        return f"the file's network has features that a {name} lacks: {shown}"
    hint = hint or _hint(missing, _MISSING)
    if hint:
        pass
    elif more:
        unexpected = more
        hint = f"it has more blocks than this {name}; check depth, blocks and width"
    else:
        hint = "check its size and options"
    if missing and unexpected:
        return (
            f"the file lacks {missing[0]!r}, which a {name} of this size has, and "
            f"holds {unexpected[0]!r}, which it does not have; {hint}"
        )
    if missing:
        return f"the file lacks {missing[0]!r}, which a {name} of this size has; {hint}"
    if unexpected:
        return (
            f"the file holds {unexpected[0]!r}, which this {name} does not have; {hint}"
        )
    return None


def _hint(keys: Iterable[str], table: tuple[tuple[str, str], ...]) -> str:
    for pattern, hint in table:
        if any(re.search(pattern, key) for key in keys):
            return hint
    return ""


def _pattern(key: str) -> str:
    return re.sub(r"\d+", "{}", key)


def _block(key: str) -> int:
    """The first number of a key; -1 for none."""
    number = re.search(r"\d+", key)
    return int(number[0]) if number else -1
