"""Names of a ViT's parameters in the files of other libraries."""

import re
from collections.abc import Iterable

from ..weights.features import Misfit
from ..weights.sources import FLAX_LEAVES, TORCH_LEAVES, Layout, Leaf, Source, sources
from .vit import ViT

_FLAX_BLOCK = "Transformer/encoderblock_{}/"


def _flax_layout(norm: str, mlp: str, attention: str, position: str) -> Layout:
    modules = {
        "readin": "embedding/",
        "position": position,
        "token": "cls",
        "blocks/attention_norm": f"{_FLAX_BLOCK}LayerNorm_0/",
        "blocks/mlp_norm": f"{_FLAX_BLOCK}{norm}/",
        "blocks/mlp/up": f"{_FLAX_BLOCK}{mlp}/Dense_0/",
        "blocks/mlp/down": f"{_FLAX_BLOCK}{mlp}/Dense_1/",
        "norm": "Transformer/encoder_norm/",
        "readout": "head/",
    }
    for name in ("query", "key", "value", "out"):
        modules[f"blocks/attention/{name}"] = f"{_FLAX_BLOCK}{attention}/{name}/"
    return Layout(modules, FLAX_LEAVES, "ours")


def _torch_layout(block: str, ends: dict[str, str], inside: dict[str, str]) -> Layout:
    """Build the layout of a PyTorch library.

    Args:
      block: start of the keys of a block.
      ends: names of modules outside of the blocks.
      inside: names of a block's modules, which follow `block`.
    """
    blocks = {f"blocks/{ours}": block + theirs for ours, theirs in inside.items()}
    return Layout({**ends, **blocks}, TORCH_LEAVES, "out_in")


# ViT and DINOv2 of transformers, as their files name them.
_EMBEDDINGS = {
    "readin": "embeddings.patch_embeddings.projection.",
    "position": "embeddings.position_embeddings",
    "token": "embeddings.cls_token",
    "norm": "layernorm.",
    "readout": "classifier.",
}
_SELF_ATTENTION = {
    "attention/query": "attention.attention.query.",
    "attention/key": "attention.attention.key.",
    "attention/value": "attention.attention.value.",
    "attention/out": "attention.output.dense.",
}
# CLIP and SigLIP of transformers.
_TOWER = {
    "position": "embeddings.position_embedding.weight",
    "readin": "embeddings.patch_embedding.",
    "norm": "post_layernorm.",
}
_TOWER_BLOCK = {
    "attention_norm": "layer_norm1.",
    "attention/query": "self_attn.q_proj.",
    "attention/key": "self_attn.k_proj.",
    "attention/value": "self_attn.v_proj.",
    "attention/out": "self_attn.out_proj.",
    "mlp_norm": "layer_norm2.",
    "mlp/up": "mlp.fc1.",
    "mlp/down": "mlp.fc2.",
}

LAYOUTS = {
    "timm": _torch_layout(
        "blocks.{}.",
        {
            "readin": "patch_embed.proj.",
            "position": "pos_embed",
            "token": "cls_token",
            "registers": "reg_token",
            "pre_norm": "norm_pre.",
            "norm": "norm.",
            "attention_pool/token": "attn_pool.latent",
            "attention_pool/attention/query": "attn_pool.q.",
            "attention_pool/attention/kv": "attn_pool.kv.",
            "attention_pool/attention/out": "attn_pool.proj.",
            "attention_pool/norm": "attn_pool.norm.",
            "attention_pool/mlp/up": "attn_pool.mlp.fc1.",
            "attention_pool/mlp/down": "attn_pool.mlp.fc2.",
            "readout": "head.",
        },
        {
            "attention_norm": "norm1.",
            "attention/qkv": "attn.qkv.",
            "attention/norm": "attn.norm.",
            "attention/out": "attn.proj.",
            "attention_scale/scale": "ls1.gamma",
            "mlp_norm": "norm2.",
            "mlp/up": "mlp.fc1.",
            "mlp/gate_up": "mlp.fc1.",
            "mlp/norm": "mlp.norm.",
            "mlp/down": "mlp.fc2.",
            "mlp_scale/scale": "ls2.gamma",
        },
    ),
    "torchvision": _torch_layout(
        "encoder.layers.encoder_layer_{}.",
        {
            "readin": "conv_proj.",
            "position": "encoder.pos_embedding",
            "token": "class_token",
            "norm": "encoder.ln.",
            "readout": "heads.head.",
        },
        {
            "attention_norm": "ln_1.",
            "attention/qkv": "self_attention.in_proj_",
            "attention/out": "self_attention.out_proj.",
            "mlp_norm": "ln_2.",
            "mlp/up": "mlp.0.",
            "mlp/down": "mlp.3.",
        },
    ),
    "big_vision": _flax_layout(
        "LayerNorm_1", "MlpBlock_0", "MultiHeadDotProductAttention_0", "pos_embedding"
    ),
    "augreg": _flax_layout(
        "LayerNorm_2",
        "MlpBlock_3",
        "MultiHeadDotProductAttention_1",
        "Transformer/posembed_input/pos_embedding",
    ),
    "transformers_vit": _torch_layout(
        "encoder.layer.{}.",
        _EMBEDDINGS,
        {
            **_SELF_ATTENTION,
            "attention_norm": "layernorm_before.",
            "mlp_norm": "layernorm_after.",
            "mlp/up": "intermediate.dense.",
            "mlp/down": "output.dense.",
        },
    ),
    "transformers_dinov2": _torch_layout(
        "encoder.layer.{}.",
        {**_EMBEDDINGS, "registers": "embeddings.register_tokens"},
        {
            **_SELF_ATTENTION,
            "attention_norm": "norm1.",
            "attention_scale/scale": "layer_scale1.lambda1",
            "mlp_norm": "norm2.",
            "mlp/up": "mlp.fc1.",
            "mlp/gate_up": "mlp.weights_in.",
            "mlp/down": "mlp.fc2.",
            "mlp_scale/scale": "layer_scale2.lambda1",
        },
    ),
    "transformers_clip": _torch_layout(
        "encoder.layers.{}.",
        {
            **_TOWER,
            "token": "embeddings.class_embedding",
            # Misspelled in transformers.
            "pre_norm": "pre_layrnorm.",
            "readout": "visual_projection.",
        },
        _TOWER_BLOCK,
    ),
    "transformers_siglip": _torch_layout(
        "encoder.layers.{}.",
        {
            **_TOWER,
            "attention_pool/token": "head.probe",
            "attention_pool/attention/qkv": "head.attention.in_proj_",
            "attention_pool/attention/out": "head.attention.out_proj.",
            "attention_pool/norm": "head.layernorm.",
            "attention_pool/mlp/up": "head.mlp.fc1.",
            "attention_pool/mlp/down": "head.mlp.fc2.",
        },
        _TOWER_BLOCK,
    ),
}
LAYOUTS["transformers_dinov3"] = _torch_layout(
    "layer.{}.",
    {
        "readin": "embeddings.patch_embeddings.",
        "token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        "norm": "norm.",
    },
    {
        "attention_norm": "norm1.",
        "attention/query": "attention.q_proj.",
        "attention/key": "attention.k_proj.",
        "attention/value": "attention.v_proj.",
        "attention/out": "attention.o_proj.",
        "attention_scale/scale": "layer_scale1.lambda1",
        "mlp_norm": "norm2.",
        "mlp/gate": "mlp.gate_proj.",
        "mlp/up": "mlp.up_proj.",
        "mlp/down": "mlp.down_proj.",
        "mlp_scale/scale": "layer_scale2.lambda1",
    },
)
# Prefixes of all keys except those of the readout.
_PREFIXES = {
    "transformers_vit": "vit.",
    "transformers_dinov2": "dinov2.",
    "transformers_clip": "vision_model.",
    "transformers_siglip": "vision_model.",
}
# Keys outside of the image tower, or used in pretraining only.
_UNUSED = {
    "transformers_vit": r"(^|\.)pooler\.|mask_token$",
    "transformers_dinov2": r"mask_token$",
    "transformers_dinov3": r"mask_token$",
    "transformers_clip": r"^text_model\.|^text_projection\.|^logit_|position_ids$",
    "transformers_siglip": r"^text_model\.|^logit_|position_ids$",
}
# Whether the class token has a position; layouts that are missing allow both.
_CLASS_POSITION = {
    "torchvision": True,
    "big_vision": False,
    "augreg": True,
    "transformers_vit": True,
    "transformers_dinov2": True,
    "transformers_clip": True,
}


def vit_layout(keys: Iterable[str]) -> tuple[str, str]:
    """Detect the layout and the prefix of the keys of a ViT's file.

    Args:
      keys: of the file.

    Returns:
      (one of `LAYOUTS`, the prefix of every key but those of the readout).

    Examples:
      >>> vit_layout(["vit.embeddings.patch_embeddings.projection.weight"])
      ('transformers_vit', 'vit.')
    """
    keys = set(keys)
    flax = "params/" if any(key.startswith("params/") for key in keys) else ""
    if any(key.startswith(f"{flax}Transformer/") for key in keys):
        augreg = any("posembed_input" in key for key in keys)
        return ("augreg" if augreg else "big_vision"), flax

    def before(end: str) -> str | None:
        """The prefix of the key with this ending; None if there is no such key."""
        prefixes = [k.removesuffix(end) for k in keys if k.endswith(end)]
        return min(prefixes, key=len) if prefixes else None

    if (prefix := before("embeddings.class_embedding")) is not None:
        return "transformers_clip", prefix
    if (prefix := before("embeddings.patch_embedding.weight")) is not None:
        return "transformers_siglip", prefix
    if (prefix := before("embeddings.patch_embeddings.projection.weight")) is not None:
        scaled = any("layer_scale1." in key for key in keys)
        return ("transformers_dinov2" if scaled else "transformers_vit"), prefix
    if (prefix := before("embeddings.patch_embeddings.weight")) is not None:
        return "transformers_dinov3", prefix
    if any(key.startswith("encoder.") for key in keys):
        return "torchvision", ""
    return "timm", ""


def vit_unused(model: ViT, layout: str) -> re.Pattern[str]:
    """Pattern of the keys of a file that a ViT deliberately does not use.

    These are the text tower of CLIP and SigLIP, parameters of pretraining, the head if
    the model has no readout, and attention pooling with `pool="none"`.
    """
    patterns = [_UNUSED[layout]] if layout in _UNUSED else []
    modules = LAYOUTS[layout].modules
    if model.readout is None and "readout" in modules:
        patterns.append("^" + re.escape(modules["readout"]) + "(weight|bias|kernel)$")
    if model.pool == "none":
        pool = [name for ours, name in modules.items() if ours.startswith("attention_")]
        patterns += [r"(^|\.)" + re.escape(name) for name in pool]
    return re.compile("|".join(patterns) or r"(?!)")


def vit_names(
    model: ViT, layout: str = "timm", *, prefix: str | None = None
) -> dict[Leaf, Source]:
    """Map each parameter of a ViT to its array in the files of another library.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      layout: "timm", "torchvision", "transformers_vit", "transformers_dinov2",
        "transformers_dinov3", "transformers_clip", "transformers_siglip" (state
        dicts), "big_vision", or "augreg" (.npz files of big_vision and of the original
        vision_transformer).
      prefix: of every key (in transformers, except the readout's), e.g. "params/" in
        some .npz files, "vit." in transformers. None for the library's default.

    Returns:
      {(path, layer): `Source`}; the layer is None for parameters that are not stacked.

    Raises:
      ValueError: the layout is unknown, or does not fit the model, e.g. big_vision and
        a class token with a position.

    big_vision's networks were trained with "gelu_tanh" and pool="norm_mean"; timm reads
    those of augreg with "gelu".

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("vit", width=24, depth=2, heads=3, rngs=nnx.Rngs(0))
      >>> source = vit_names(model)["blocks/attention/key/kernel", 1]
      >>> source.key, source.shape, source.part, source.leaf
      ('blocks.1.attn.qkv.weight', (72, 24), (0, 1, 3), (24, 3, 8))
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    chosen = LAYOUTS[layout]
    _check_positions(model, layout)
    modules = dict(chosen.modules)
    if layout == "timm" and _is_eva(model):
        modules |= _eva_modules(model)
        if model.options.gated and "blocks/mlp/gate" not in modules:
            modules.pop("blocks/mlp/up")
    elif layout == "transformers_dinov3":
        pass
    elif model.options.gated:
        modules.pop("blocks/mlp/up", None)
        if layout == "transformers_dinov2":
            modules["blocks/mlp/down"] = "encoder.layer.{}.mlp.weights_out."
    else:
        modules.pop("blocks/mlp/gate_up", None)
    if layout == "timm" and model.pool == "mean":
        modules["norm"] = "fc_norm."
    bare = model.readout is None and layout in (
        "transformers_vit",
        "transformers_dinov2",
    )
    if prefix is None:
        prefix = "" if bare else _PREFIXES.get(layout, "")
        if prefix == "dinov2." and model.registers is not None:
            prefix = "dinov2_with_registers."
    special = _special(model, chosen, layout)
    table = sources(model, chosen._replace(modules=modules), special, prefix)
    if layout not in _PREFIXES:
        return table
    return {
        (path, layer): source._replace(key=source.key.removeprefix(prefix))
        if path.startswith("readout/")
        else source
        for (path, layer), source in table.items()
    }


def _is_eva(model: ViT) -> bool:
    """Whether the model is in timm's class Eva: DINOv3, EVA and EVA-02."""
    return model.rope_theta is not None or not model.options.key_bias


def _eva_modules(model: ViT) -> dict[str, str]:
    """Names in timm's class Eva that differ from those of other ViTs."""
    block = "blocks.{}."
    modules = {
        "blocks/attention_scale/scale": f"{block}gamma_1",
        "blocks/mlp_scale/scale": f"{block}gamma_2",
        "blocks/attention/query/bias": f"{block}attn.q_bias",
        "blocks/attention/value/bias": f"{block}attn.v_bias",
    }
    is_dinov3 = model.rope_theta is not None and model.rope_grid is None
    inner_norm = bool(model.options.inner_norm)
    if inner_norm:
        modules = {
            **{k: v for k, v in modules.items() if not k.endswith("bias")},
            "blocks/attention/query": f"{block}attn.q_proj.",
            "blocks/attention/key": f"{block}attn.k_proj.",
            "blocks/attention/value": f"{block}attn.v_proj.",
        }
    if model.options.gated and (is_dinov3 or inner_norm):
        modules |= {
            "blocks/mlp/gate": f"{block}mlp.fc1_g.",
            "blocks/mlp/up": f"{block}mlp.fc1_x.",
        }
    return modules


def _check_positions(model: ViT, layout: str) -> None:
    if layout != "timm" and model.rope_grid is not None:
        raise ValueError(
            f"the layout {layout!r} has no network with rotary='index'; use 'timm'"
        )
    if layout not in ("timm", "transformers_dinov3") and model.rope_theta is not None:
        raise ValueError(
            f"the layout {layout!r} is for networks without rotary positions; use "
            "'timm' or 'transformers_dinov3'"
        )
    if layout == "transformers_dinov3" and model.rope_theta is None:
        raise Misfit(
            f"the layout {layout!r} is for networks with rotary positions; pass ",
            {"rotary": "True", "position": "False"},
        )
    if model.token is None or model.position is None:
        return
    has, needed = model.class_position, _CLASS_POSITION.get(layout)
    if layout == "timm" and model.registers is not None:
        needed = False
    if needed not in (None, has):
        raise Misfit(
            f"in the layout {layout!r} the class token has "
            f"{'a' if needed else 'no'} position; pass ",
            {"class_position": str(needed)},
        )


def _special(
    model: ViT, layout: Layout, name: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{path: (shape in the file, order of axes)} of what is not a matrix or vector."""
    p, c, n = model.patch_size, model.channels, model.plan["embed"].size
    flax = layout.kernel == "ours"
    tower = name in ("transformers_clip", "transformers_siglip")
    positions = (0, n) if model.position is None else model.position.shape
    registers = 0 if model.registers is None else model.registers.shape[0]
    return {
        "readin/kernel": (
            ((p, p, c, n), (0, 1, 2, 3)) if flax else ((n, c, p, p), (2, 3, 1, 0))
        ),
        "position": ((positions, (0, 1)) if tower else ((1, *positions), (0, 1, 2))),
        "token": ((n,), (0,)) if tower else ((1, 1, n), (0, 1, 2)),
        "registers": ((1, registers, n), (0, 1, 2)),
        "attention_pool/token": ((1, 1, n), (0, 1, 2)),
    }
