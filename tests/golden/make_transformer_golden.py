"""Make the golden files of ViT and GPT: small networks of other libraries.

    pip install torch==2.15.0 torchvision==0.29.2 timm==1.0.31 transformers==5.23.0
    python tests/golden/make_transformer_golden.py

writes, beside this file,

* vit_token.npz, vit_mean.npz: timm's VisionTransformer with a class token, and with
  average pooling: weights under timm's names, images, logits;
* vit_big_vision.npz, vit_augreg.npz: the weights of vit_token under the names of
  big_vision and of the original vision_transformer, which timm's own loader reads
  back here to the same logits;
* vit_torchvision.npz: torchvision's VisionTransformer;
* gpt2.npz: transformers' GPT2LMHeadModel;
* vit_gpt_versions.json: what made them.

Arrays named "golden/..." are inputs and logits, all others are weights. Weights are
far from their initialization, all biases and norms included, so that no mistake in
one of them goes unseen; embeddings are small, so that the first norm shows its eps.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import timm
import torch
import torchvision
import transformers
from timm.models.vision_transformer import VisionTransformer

HERE = pathlib.Path(__file__).parent
SIZES = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def shake(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every weight random: kernels of size 1.5/√fan_in, norms about one."""
    first = ("patch_embed", "conv_proj", "pos_emb", "token", "wte", "wpe")
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            if any(part in name for part in first):
                values *= 0.03 / np.sqrt(values[0].size if weight.ndim == 4 else 1)
            elif weight.ndim >= 2:
                # torch keeps (out, in); the square kernels of GPT-2 differ little.
                values *= 1.5 / np.sqrt(values[0].size)
            elif weight.ndim == 1:
                values = 0.3 * values + ("norm" in name or "ln" in name) * (
                    "weight" in name
                )
            weight.copy_(torch.tensor(values, dtype=torch.float32))
    return model.eval()


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {k: v.numpy().copy() for k, v in model.state_dict().items()}


def big_vision_names(
    weights: dict[str, np.ndarray], heads: int
) -> dict[str, np.ndarray]:
    """timm's weights under big_vision's names (models/vit.py there)."""
    d = weights["cls_token"].shape[-1]
    first = weights["pos_embed"][:, :1]
    new = {
        "embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        # big_vision gives the class token no position of its own.
        "cls": weights["cls_token"] + first,
        "pos_embedding": weights["pos_embed"][:, 1:],
        "Transformer/encoder_norm/scale": weights["norm.weight"],
        "Transformer/encoder_norm/bias": weights["norm.bias"],
        "head/kernel": weights["head.weight"].T,
        "head/bias": weights["head.bias"],
    }
    for i in range(SIZES["depth"]):
        old, block = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        for j, norm in enumerate(("norm1", "norm2")):
            new[f"{block}LayerNorm_{j}/scale"] = weights[f"{old}{norm}.weight"]
            new[f"{block}LayerNorm_{j}/bias"] = weights[f"{old}{norm}.bias"]
        attention = f"{block}MultiHeadDotProductAttention_0/"
        kernels = np.split(weights[f"{old}attn.qkv.weight"], 3)
        biases = np.split(weights[f"{old}attn.qkv.bias"], 3)
        for name, kernel, bias in zip(
            ("query", "key", "value"), kernels, biases, strict=True
        ):
            new[f"{attention}{name}/kernel"] = kernel.T.reshape(d, heads, d // heads)
            new[f"{attention}{name}/bias"] = bias.reshape(heads, d // heads)
        out = weights[f"{old}attn.proj.weight"].T
        new[f"{attention}out/kernel"] = out.reshape(heads, d // heads, d)
        new[f"{attention}out/bias"] = weights[f"{old}attn.proj.bias"]
        for j in (0, 1):
            dense = f"{block}MlpBlock_0/Dense_{j}/"
            new[f"{dense}kernel"] = weights[f"{old}mlp.fc{j + 1}.weight"].T
            new[f"{dense}bias"] = weights[f"{old}mlp.fc{j + 1}.bias"]
    return new


def augreg_names(
    big_vision: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The same under the names of the original vision_transformer."""
    new = {}
    for key, value in big_vision.items():
        for old, name in (
            ("LayerNorm_1", "LayerNorm_2"),
            ("MlpBlock_0", "MlpBlock_3"),
            ("Attention_0", "Attention_1"),
        ):
            key = key.replace(old, name)
        new[key] = value
    del new["pos_embedding"]
    new["cls"] = weights["cls_token"]
    new["Transformer/posembed_input/pos_embedding"] = weights["pos_embed"]
    return new


def read_by_timm(weights: dict[str, np.ndarray], **options) -> VisionTransformer:
    """A network that timm's own loader has filled from an .npz file."""
    model = VisionTransformer(img_size=32, patch_size=8, **SIZES, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/weights.npz"
        np.savez(path, **weights)
        model.load_pretrained(path)
    return model.eval()


def save(name: str, weights: dict, inputs: dict, logits: dict) -> None:
    golden = {f"golden/{k}": np.asarray(v) for k, v in {**inputs, **logits}.items()}
    path = HERE / name
    np.savez_compressed(path, **weights, **golden)
    assert path.stat().st_size < 200_000, path.stat().st_size
    print(name, path.stat().st_size, "bytes")


@torch.no_grad()
def main() -> None:
    random = np.random.default_rng(0)
    images = random.normal(size=(2, 32, 32, 3)).astype(np.float32)
    others = {
        "larger": random.normal(size=(1, 48, 40, 3)).astype(np.float32),
        "smaller": random.normal(size=(1, 24, 16, 3)).astype(np.float32),
    }

    def torch_of(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x.transpose(0, 3, 1, 2))

    options = {"img_size": 32, "patch_size": 8, **SIZES}
    token = shake(VisionTransformer(**options, dynamic_img_size=True), 1)
    logits = token(torch_of(images)).numpy()
    weights = weights_of(token)
    save(
        "vit_token.npz",
        weights,
        {"images": images, **others},
        {"logits": logits}
        | {f"logits_{k}": token(torch_of(x)).numpy() for k, x in others.items()},
    )

    mean = shake(VisionTransformer(**options, global_pool="avg", class_token=False), 2)
    save(
        "vit_mean.npz",
        weights_of(mean),
        {"images": images},
        {"logits": mean(torch_of(images)).numpy()},
    )

    renamed = big_vision_names(weights, SIZES["num_heads"])
    again = read_by_timm(renamed, no_embed_class=True)(torch_of(images)).numpy()
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-6)
    save("vit_big_vision.npz", renamed, {"images": images}, {"logits": logits})

    renamed = augreg_names(renamed, weights)
    again = read_by_timm(renamed)(torch_of(images)).numpy()
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-6)
    save("vit_augreg.npz", renamed, {"images": images}, {"logits": logits})

    vision = shake(
        torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24,
            mlp_dim=96, num_classes=5,
        ),
        3,
    )  # fmt: skip
    save(
        "vit_torchvision.npz",
        weights_of(vision),
        {"images": images},
        {"logits": vision(torch_of(images)).numpy()},
    )

    gpt = shake(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3
            )
        ),
        4,
    )
    tokens = random.integers(50, size=(2, 12))
    weights = weights_of(gpt)
    del weights["lm_head.weight"]  # the token embedding once more
    save(
        "gpt2.npz",
        weights,
        {"tokens": tokens.astype(np.int32)},
        {"logits": gpt(torch.tensor(tokens)).logits.numpy()},
    )

    packages = (np, timm, torch, torchvision, transformers)
    versions = {p.__name__: p.__version__ for p in packages}
    versions["python"] = sys.version.split()[0]
    with open(HERE / "vit_gpt_versions.json", "w") as file:
        json.dump(versions, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
