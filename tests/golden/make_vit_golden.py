"""Make the golden files of the ViT family: small networks of timm and transformers.

    pip install torch==2.13.0 transformers==5.23.0 safetensors pillow
    pip install --no-deps timm==1.0.31 torchvision==0.28.0
    python tests/golden/make_vit_golden.py

writes one .npz for each of `TIMM` and `TRANSFORMERS` beside this file. Each holds the
weights under the library's names, "golden/config" (what the repository's config.json
says), "golden/images", "golden/outputs" (logits, or features of a network without a
head), "golden/cotangent", of timm "golden/tokens" (those of the last norm), and
"golden/gradient/..." (of the sum of outputs times cotangent, for each weight).
vit_family_versions.json says what made them.

Weights are far from their initialization, all biases, norms, LayerScales and tokens
included, so that no mistake in one of them goes unseen; embeddings are small, so that
the first norm shows its eps.
"""

import json
import pathlib
import platform
import tempfile

import numpy as np
import safetensors.numpy
import torch

# timm imports torchvision, whose compiled part does not load beside a CPU build of
# torch. Its Python part asks for two operators, which no ViT calls.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor a, Tensor b, float c) -> Tensor")

import timm  # noqa: E402
import transformers  # noqa: E402
from timm.layers import SwiGLUPacked  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

HERE = pathlib.Path(__file__).parent
SIDE, PATCH = 12, 4
SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
EPS = {"norm_layer": lambda *a, **k: torch.nn.LayerNorm(*a, **{**k, "eps": 1e-5})}
# Arguments of timm's VisionTransformer.
TIMM = {
    "vit_deit3": {"no_embed_class": True, "init_values": 1e-6, "num_classes": 5},
    "vit_dinov2": {"init_values": 1e-5, "num_classes": 0},
    "vit_dinov2_reg": {
        "init_values": 1e-5,
        "reg_tokens": 2,
        "no_embed_class": True,
        "num_classes": 0,
    },
    "vit_dinov2_giant": {
        "init_values": 1e-5,
        "mlp_layer": SwiGLUPacked,
        "act_layer": torch.nn.SiLU,
        "num_classes": 0,
    },
    "vit_reg_gap": {
        "class_token": False,
        "no_embed_class": True,
        "reg_tokens": 2,
        "global_pool": "avg",
        "num_classes": 5,
    },
    "vit_clip": {
        "pre_norm": True,
        **EPS,
        "act_layer": "quick_gelu",
        "num_classes": 5,
    },
    "vit_siglip": {"class_token": False, "global_pool": "map", "num_classes": 0},
}
# Arguments of timm's Eva, of which its DINOv3 are.
_DINOV3 = {
    "qkv_bias": False,
    "init_values": 1e-5,
    "rope_type": "dinov3",
    "rope_temperature": 100,
    "rope_rotate_half": True,
    "use_rot_pos_emb": True,
    "use_abs_pos_emb": False,
    "num_reg_tokens": 2,
    "use_fc_norm": False,
    "global_pool": "avg",
    "dynamic_img_size": True,
    "num_classes": 0,
    **EPS,
}
_EVA02 = {"swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
_SPLIT = {"qkv_fused": False, "scale_mlp": True}
EVA = {
    "vit_dinov3": _DINOV3,
    "vit_dinov3_plus": {**_DINOV3, "swiglu_mlp": True, "swiglu_align_to": 8},
    # Four patches of a side: the positions go in steps of 4/3.
    "vit_eva02_small": {**_EVA02, "num_classes": 5},
    "vit_eva02_base": {**_EVA02, **_SPLIT, "num_classes": 5},
    "vit_eva02_clip": {
        **_EVA02,
        **_SPLIT,
        "scale_attn_inner": True,
        "global_pool": "token",
        "num_classes": 5,
    },
    "vit_eva": {"num_classes": 5},
}
IMAGES = {"image_size": SIDE, "patch_size": PATCH}
BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **IMAGES}
TEXT = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 4,
    "vocab_size": 6,
    "max_position_embeddings": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOWERS = {"vision_config": {**BODY, "intermediate_size": 32}, "text_config": TEXT}
# (config, model, options).
TRANSFORMERS = {
    "hf_vit": (
        transformers.ViTConfig,
        transformers.ViTForImageClassification,
        {**BODY, "intermediate_size": 32, "num_labels": 5},
    ),
    "hf_dinov2": (
        transformers.Dinov2Config,
        transformers.Dinov2Model,
        {**BODY, "mlp_ratio": 2},
    ),
    "hf_dinov2_swiglu": (
        transformers.Dinov2Config,
        transformers.Dinov2Model,
        {**BODY, "mlp_ratio": 2, "use_swiglu_ffn": True},
    ),
    "hf_dinov2_reg": (
        transformers.Dinov2WithRegistersConfig,
        transformers.Dinov2WithRegistersModel,
        {**BODY, "mlp_ratio": 2, "num_register_tokens": 2},
    ),
    "hf_clip": (
        transformers.CLIPConfig,
        transformers.CLIPModel,
        {**TOWERS, "projection_dim": 5},
    ),
    "hf_siglip": (transformers.SiglipConfig, transformers.SiglipModel, TOWERS),
    "hf_dinov3": (
        transformers.DINOv3ViTConfig,
        transformers.DINOv3ViTModel,
        {
            **BODY,
            "intermediate_size": 32,
            "num_register_tokens": 2,
            "use_gated_mlp": True,
            "hidden_act": "silu",
        },
    ),
}


def shake(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every weight random: kernels of size 1.5/√fan_in, norms about one."""
    embeddings = ("patch_embed", "pos_embed", "position_emb", "token", "class_emb")
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            if any(part in name for part in embeddings):
                values *= 0.03 / np.sqrt(values[0].size if weight.ndim == 4 else 1)
            elif "latent" in name or "probe" in name:
                pass
            elif weight.ndim >= 2:
                values *= 1.5 / np.sqrt(values[0].size)
            elif "gamma" in name or "lambda" in name:
                values = 0.5 + 0.3 * values
            else:
                norm = ("norm" in name or "layrnorm" in name) and "weight" in name
                values = 0.3 * values + norm
            weight.copy_(torch.tensor(values, dtype=torch.float32))
    return model.eval()


def file_of(model: torch.nn.Module) -> tuple[dict[str, np.ndarray], dict]:
    """(weights, config.json) that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = pathlib.Path(folder)
        weights = safetensors.numpy.load_file(path / "model.safetensors")
        return weights, json.loads((path / "config.json").read_text())


def gradients_in_place(model: torch.nn.Module) -> None:
    """Put each parameter's gradient in its place; zero for those without one."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                torch.zeros_like(weight) if weight.grad is None else weight.grad
            )


def outputs_of(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    if isinstance(model, VisionTransformer | Eva):
        return model(images)
    if isinstance(model, transformers.CLIPModel | transformers.SiglipModel):
        found = model.get_image_features(pixel_values=images)
        return found if isinstance(found, torch.Tensor) else found.pooler_output
    found = model(pixel_values=images)
    return found.logits if hasattr(found, "logits") else found.pooler_output


def save(name: str, model: torch.nn.Module, config: dict) -> None:
    random = np.random.default_rng(9)
    images = random.normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    outputs = outputs_of(model, torch.tensor(images.transpose(0, 3, 1, 2)))
    cotangent = random.normal(size=tuple(outputs.shape)).astype(np.float32)
    (outputs * torch.tensor(cotangent)).sum().backward()

    def read() -> dict[str, np.ndarray]:
        if isinstance(model, VisionTransformer | Eva):
            return {k: v.numpy().copy() for k, v in model.state_dict().items()}
        return file_of(model)[0]

    weights = read()
    tokens = {}
    if isinstance(model, VisionTransformer | Eva):
        with torch.no_grad():
            found = model.forward_features(torch.tensor(images.transpose(0, 3, 1, 2)))
        tokens["golden/tokens"] = found.numpy()
    gradients_in_place(model)
    gradients = {
        f"golden/gradient/{k}": v
        for k, v in read().items()
        if not k.startswith(("text_", "logit_"))
    }
    path = HERE / f"{name}.npz"
    np.savez_compressed(
        path,
        **weights,
        **gradients,
        **tokens,
        **{
            "golden/config": np.array(json.dumps(config)),
            "golden/images": images,
            "golden/outputs": outputs.detach().numpy(),
            "golden/cotangent": cotangent,
        },
    )
    assert path.stat().st_size < 100_000, path.stat().st_size
    print(name, path.stat().st_size, "bytes", tuple(outputs.shape))


def main() -> None:
    for seed, (name, options) in enumerate(TIMM.items()):
        made = VisionTransformer(
            img_size=SIDE, patch_size=PATCH, **{**SIZES, "qkv_bias": True, **options}
        )
        save(name, shake(made, seed), {})
    for seed, (name, options) in enumerate(EVA.items(), 50):
        made = Eva(img_size=SIDE, patch_size=PATCH, **SIZES, **options)
        save(name, shake(made, seed), {})
    for seed, (name, (config, kind, options)) in enumerate(TRANSFORMERS.items(), 100):
        made = kind(config(**options))
        made.set_attn_implementation("eager")
        made = shake(made, seed)
        save(name, made, file_of(made)[1])
    versions = {p.__name__: p.__version__ for p in (np, timm, torch, transformers)}
    versions["python"] = platform.python_version()
    text = json.dumps(versions, indent=1) + "\n"
    (HERE / "vit_family_versions.json").write_text(text)


if __name__ == "__main__":
    main()
