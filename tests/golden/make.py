"""Make the golden files: small networks of timm, torchvision and transformers.

    pip install torch==2.13.0 transformers==5.23.0 safetensors pillow
    pip install --no-deps timm==1.0.31 torchvision==0.28.0
    python tests/golden/make.py [name ...]

writes, beside this file, one .npz for each of `CASES`, or for those that are named. It
holds the weights under the library's own names, as their libraries write them, and

- "golden/images", of shape (batch, height, width, channels), or "golden/tokens";
- "golden/logits" or "golden/outputs" (features of a network without a head);
- "golden/gradient/..." for each weight: of decoders, of the mean cross-entropy of the
  next token; of ViTs, of the sum of the outputs times "golden/cotangent"; of
  convolutional networks in training, of the mean over the batch of the squared logits;
- "golden/config": what the repository's config.json says.

versions.json says what made each file. Weights are random and far from their
initialization, all biases, norms, statistics and tokens included, so that no mistake in
one of them goes unseen; embeddings are small, so that the first norm shows its eps.
"""

import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import nn

# The compiled part of torchvision does not load beside a CPU build of torch. Its Python
# part asks for two operators, which no network here calls.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor a, Tensor b, float c) -> Tensor")

import timm.layers  # noqa: E402
import timm.models.convnext  # noqa: E402
import timm.models.efficientnet  # noqa: E402
import timm.models.mobilenetv3  # noqa: E402
import timm.models.resnet  # noqa: E402
import torchvision.models  # noqa: E402
import transformers as hf  # noqa: E402
from timm.models import _efficientnet_blocks as mb  # noqa: E402
from timm.models import _efficientnet_builder as builder  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import (  # noqa: E402
    load_balancing_loss_func,
)

HERE = pathlib.Path(__file__).parent
Arrays = dict[str, np.ndarray]
#: {name of a golden file: function that returns its arrays}
CASES: dict[str, Callable[[], Arrays]] = {}


def case(name: str, make: Callable[..., Arrays], *arguments: Any) -> None:
    """Add a golden file to `CASES`."""
    CASES[name] = functools.partial(make, *arguments)


_EMBEDDINGS = (
    *("patch_embed", "conv_proj", "pos_emb", "position_emb", "token", "class_emb"),
    *("wte", "wpe"),
)


def shake(model: nn.Module, seed: int) -> nn.Module:
    """Draw weights of transformers: kernels of size 1.5/√fan_in, norms about one."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            # Of experts, which are stacked, the last axis is the fan-in too.
            fan_in = values[0].size if weight.ndim == 4 else (1, *weight.shape)[-1]
            if any(part in name for part in _EMBEDDINGS):
                values *= 0.03 / np.sqrt(fan_in if weight.ndim == 4 else 1)
            elif "latent" in name or "probe" in name:
                pass
            elif weight.ndim >= 2:
                values *= 1.5 / np.sqrt(fan_in)
            elif "gamma" in name or "lambda" in name:
                values = 0.5 + 0.3 * values
            else:
                norm = any(part in name for part in ("norm", "layrnorm", "ln"))
                values = 0.3 * values + (norm and "weight" in name)
            weight.copy_(torch.tensor(values, dtype=torch.float32))
    return model.eval()


def golden(weights: Arrays, **data: Any) -> Arrays:
    """The arrays of a file: weights, and data under "golden/..."."""
    return {**weights, **{f"golden/{k}": np.asarray(v) for k, v in data.items()}}


def weights_of(model: nn.Module) -> Arrays:
    return {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}


def saved(model: nn.Module) -> tuple[Arrays, str]:
    """The weights and the config.json that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        config = json.loads(pathlib.Path(folder, "config.json").read_text())
    return weights, json.dumps(config)


def channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.tensor(images.transpose(0, 3, 1, 2))


# --- Decoders of transformers ---

TOKENS = torch.tensor(np.random.default_rng(9).integers(0, 11, (3, 20)))
_NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
_LLAMA = {
    **{"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 11},
    **{"max_position_embeddings": 64, **_NO_TOKENS},
}
_EXPERTS = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 11},
    **{"max_position_embeddings": 64, **_NO_TOKENS},
}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
_SCALED = {
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    }
}


def expert_names(folder: str, kernels: tuple[str, str, str], arrays: Arrays) -> Arrays:
    """Arrays of a network's parameters under the names of its files."""
    gate, up, down = kernels
    out = {}
    for key, array in arrays.items():
        start, inside, name = key.partition(".mlp.")
        if not inside:
            out[key] = array
        elif name == "gate.weight":
            out[f"{start}.{folder}.gate.weight"] = array
        else:
            for expert, part in enumerate(array):
                place = f"{start}.{folder}.experts.{expert}"
                if name == "experts.down_proj":
                    out[f"{place}.{down}.weight"] = part
                    continue
                assert name == "experts.gate_up_proj", name
                for kernel, half in zip((gate, up), np.split(part, 2), strict=True):
                    out[f"{place}.{kernel}.weight"] = half
    return out


def decoder(
    config_type: type,
    model_type: type,
    seed: int,
    options: dict[str, Any],
    experts: tuple[str, tuple[str, str, str]] | None = None,
) -> Arrays:
    """Of experts, also "golden/balance", the load-balancing loss."""
    config = config_type(**options)
    model = model_type(config).eval()
    model.set_attn_implementation("eager")
    shake(model, seed)
    more: dict[str, Any] = {}
    if experts is None:
        logits, names = model(TOKENS).logits, dict
    else:
        out = model(TOKENS, output_router_logits=True)
        logits, names = out.logits, functools.partial(expert_names, *experts)
        more["balance"] = load_balancing_loss_func(out.router_logits, 4, 2).detach()
    nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), TOKENS[:, 1:].reshape(-1)
    ).backward()
    parameters = dict(model.named_parameters())
    weights = names({k: v.detach().numpy() for k, v in parameters.items()})
    text = json.dumps(config.to_dict())
    if experts is not None:
        written, text = saved(model)
        assert weights.keys() == written.keys(), weights.keys() ^ written.keys()
        assert all(np.array_equal(weights[k], written[k]) for k in written)
    gradients = names({k: v.grad.numpy() for k, v in parameters.items()})
    return golden(
        weights,
        **{f"gradient/{k}": v for k, v in gradients.items()},
        config=text,
        tokens=TOKENS.numpy().astype(np.int32),
        logits=logits.detach(),
        **more,
    )


# Grouped queries, untied, scaled rotary positions; tied; biases of queries, keys and
# values; QK-norm, and heads wider than the model.
for _name, _kind, _seed, _options in (
    ("llama", "Llama", 0, {**_SCALED, "rms_norm_eps": 1e-5}),
    ("smollm", "Llama", 1, {**_PLAIN, "rms_norm_eps": 1e-5}),
    ("qwen2", "Qwen2", 2, {**_PLAIN, "rms_norm_eps": 1e-6}),
    ("qwen3", "Qwen3", 3, {**_PLAIN, "rms_norm_eps": 1e-6, "head_dim": 12}),
):
    _options = {**_LLAMA, **_options, "tie_word_embeddings": _name != "llama"}
    _types = getattr(hf, f"{_kind}Config"), getattr(hf, f"{_kind}ForCausalLM")
    case(_name, decoder, *_types, _seed, _options)
case(
    "mixtral",
    decoder,
    hf.MixtralConfig,
    hf.MixtralForCausalLM,
    0,
    {
        **{**_EXPERTS, **_PLAIN, "intermediate_size": 12, "num_local_experts": 4},
        "rms_norm_eps": 1e-5,
    },
    ("block_sparse_moe", ("w1", "w3", "w2")),
)
case(
    "qwen3_moe",
    decoder,
    hf.Qwen3MoeConfig,
    hf.Qwen3MoeForCausalLM,
    1,
    {
        **{**_EXPERTS, **_PLAIN, "moe_intermediate_size": 12, "num_experts": 4},
        **{"norm_topk_prob": False, "tie_word_embeddings": True, "head_dim": 8},
    },
    ("mlp", ("gate_proj", "up_proj", "down_proj")),
)


# --- ViTs of timm and transformers ---

SIDE, PATCH = 12, 4
_VIT = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
_EPS = {"norm_layer": lambda *a, **k: nn.LayerNorm(*a, **{**k, "eps": 1e-5})}


def vit(make: Callable[[], nn.Module], seed: int) -> Arrays:
    """Of timm, also "golden/tokens": those of the last norm."""
    model = shake(make(), seed)
    is_timm = isinstance(model, VisionTransformer | Eva)
    config = "{}" if is_timm else saved(model)[1]
    random = np.random.default_rng(9)
    images = random.normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    outputs = _outputs(model, channels_first(images))
    cotangent = random.normal(size=tuple(outputs.shape)).astype(np.float32)
    (outputs * torch.tensor(cotangent)).sum().backward()
    weights = weights_of(model) if is_timm else saved(model)[0]
    tokens = {}
    if is_timm:
        with torch.no_grad():
            tokens["tokens"] = model.forward_features(channels_first(images))
    with torch.no_grad():  # to write gradients as weights are written
        for weight in model.parameters():
            nothing = torch.zeros_like(weight)
            weight.copy_(nothing if weight.grad is None else weight.grad)
    gradients = weights_of(model) if is_timm else saved(model)[0]
    return golden(
        weights,
        **{
            f"gradient/{k}": v
            for k, v in gradients.items()
            if not k.startswith(("text_", "logit_"))
        },
        **tokens,
        config=config,
        images=images,
        outputs=outputs.detach(),
        cotangent=cotangent,
    )


def _outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    if isinstance(model, VisionTransformer | Eva):
        return model(images)
    if isinstance(model, hf.CLIPModel | hf.SiglipModel):
        found = model.get_image_features(pixel_values=images)
        return found if isinstance(found, torch.Tensor) else found.pooler_output
    found = model(pixel_values=images)
    return found.logits if hasattr(found, "logits") else found.pooler_output


def _timm_vit(kind: type, **options: Any) -> nn.Module:
    return kind(img_size=SIDE, patch_size=PATCH, **_VIT, **options)


_DINOV2 = {"init_values": 1e-5, "num_classes": 0}
_DINOV3 = {
    **{"qkv_bias": False, "rope_type": "dinov3", "rope_temperature": 100},
    **{"rope_rotate_half": True, "use_rot_pos_emb": True, "use_abs_pos_emb": False},
    **{"num_reg_tokens": 2, "use_fc_norm": False, "global_pool": "avg"},
    **{"dynamic_img_size": True, **_DINOV2, **_EPS},
}
# (name, class, seed, arguments of timm's class)
for _name, _kind, _seed, _options in (
    (
        *("vit_deit3", VisionTransformer, 0),
        {"no_embed_class": True, "init_values": 1e-6, "num_classes": 5},
    ),
    ("vit_dinov2", VisionTransformer, 1, _DINOV2),
    (
        *("vit_dinov2_reg", VisionTransformer, 2),
        {**_DINOV2, "reg_tokens": 2, "no_embed_class": True},
    ),
    (
        *("vit_dinov2_giant", VisionTransformer, 3),
        {**_DINOV2, "mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU},
    ),
    (
        *("vit_reg_gap", VisionTransformer, 4),
        {
            **{"class_token": False, "no_embed_class": True, "reg_tokens": 2},
            **{"global_pool": "avg", "num_classes": 5},
        },
    ),
    (
        *("vit_clip", VisionTransformer, 5),
        {"pre_norm": True, **_EPS, "act_layer": "quick_gelu", "num_classes": 5},
    ),
    (
        *("vit_siglip", VisionTransformer, 6),
        {"class_token": False, "global_pool": "map", "num_classes": 0},
    ),
    ("vit_dinov3", Eva, 50, _DINOV3),
    (
        *("vit_dinov3_plus", Eva, 51),
        {**_DINOV3, "swiglu_mlp": True, "swiglu_align_to": 8},
    ),
    ("vit_eva", Eva, 55, {"num_classes": 5}),
):
    _more = {"qkv_bias": True} if _kind is VisionTransformer else {}
    _make = functools.partial(_timm_vit, _kind, **_more, **_options)
    case(_name, vit, _make, _seed)


def _hf_vit(config_type: type, model_type: type, options: dict[str, Any]) -> nn.Module:
    model = model_type(config_type(**options))
    model.set_attn_implementation("eager")
    return model


_BODY = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": SIDE, "patch_size": PATCH},
}
_TEXT = {
    **{"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"intermediate_size": 4, "vocab_size": 6, "max_position_embeddings": 5},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
_TOWERS = {"vision_config": {**_BODY, "intermediate_size": 32}, "text_config": _TEXT}
for _seed, (_name, _config, _model, _options) in enumerate(
    (
        (
            *("hf_vit", "ViTConfig", "ViTForImageClassification"),
            {**_BODY, "intermediate_size": 32, "num_labels": 5},
        ),
        ("hf_dinov2", "Dinov2Config", "Dinov2Model", {**_BODY, "mlp_ratio": 2}),
        (
            *("hf_dinov2_swiglu", "Dinov2Config", "Dinov2Model"),
            {**_BODY, "mlp_ratio": 2, "use_swiglu_ffn": True},
        ),
        (
            *("hf_dinov2_reg", "Dinov2WithRegistersConfig"),
            *("Dinov2WithRegistersModel",),
            {**_BODY, "mlp_ratio": 2, "num_register_tokens": 2},
        ),
        ("hf_clip", "CLIPConfig", "CLIPModel", {**_TOWERS, "projection_dim": 5}),
        ("hf_siglip", "SiglipConfig", "SiglipModel", _TOWERS),
        (
            *("hf_dinov3", "DINOv3ViTConfig", "DINOv3ViTModel"),
            {
                **{**_BODY, "intermediate_size": 32, "num_register_tokens": 2},
                **{"use_gated_mlp": True, "hidden_act": "silu"},
            },
        ),
    ),
    100,
):
    _types = getattr(hf, _config), getattr(hf, _model)
    case(_name, vit, functools.partial(_hf_vit, *_types, _options), _seed)


# --- A ViT under the names of four libraries, and GPT-2: weights and logits alone ---

_SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def _drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images, larger ones, smaller ones, and tokens."""
    random = np.random.default_rng(0)
    sizes = (2, 32, 32, 3), (1, 48, 40, 3), (1, 24, 16, 3)
    images = (random.normal(size=size).astype(np.float32) for size in sizes)
    return *images, random.integers(50, size=(2, 12))


def _small(**options: Any) -> nn.Module:
    return VisionTransformer(img_size=32, patch_size=8, **_SMALL, **options)


@torch.no_grad()
def vit_token() -> Arrays:
    """A class token; also for images of other sizes."""
    images, larger, smaller, _ = _drawn()
    model = shake(_small(dynamic_img_size=True), 1)
    logits = (model(channels_first(x)) for x in (images, larger, smaller))
    inputs = {"images": images, "larger": larger, "smaller": smaller}
    names = ("logits", "logits_larger", "logits_smaller")
    outputs = dict(zip(names, logits, strict=True))
    return golden(weights_of(model), **inputs, **outputs)


@torch.no_grad()
def plain_vit(make: Callable[[], nn.Module], seed: int) -> Arrays:
    images, model = _drawn()[0], shake(make(), seed)
    logits = model(channels_first(images))
    return golden(weights_of(model), images=images, logits=logits)


@torch.no_grad()
def renamed_vit(rename: Callable[[Arrays], Arrays], **options: Any) -> Arrays:
    """The weights of vit_token, which timm's own loader reads back to its logits."""
    whole = vit_token()
    weights = {k: v for k, v in whole.items() if not k.startswith("golden/")}
    renamed, again = rename(weights), _small(**options)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/weights.npz", **renamed)
        again.load_pretrained(f"{folder}/weights.npz")
    images, logits = whole["golden/images"], whole["golden/logits"]
    read = again.eval()(channels_first(images)).numpy()
    np.testing.assert_allclose(read, logits, rtol=1e-5, atol=1e-6)
    return golden(renamed, images=images, logits=logits)


def big_vision_names(weights: Arrays) -> Arrays:
    """timm's weights under big_vision's names (models/vit.py there)."""
    d, heads = weights["cls_token"].shape[-1], _SMALL["num_heads"]
    new = {
        "embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        # big_vision gives the class token no position of its own.
        "cls": weights["cls_token"] + weights["pos_embed"][:, :1],
        "pos_embedding": weights["pos_embed"][:, 1:],
        "Transformer/encoder_norm/scale": weights["norm.weight"],
        "Transformer/encoder_norm/bias": weights["norm.bias"],
        "head/kernel": weights["head.weight"].T,
        "head/bias": weights["head.bias"],
    }
    for i in range(_SMALL["depth"]):
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


def augreg_names(weights: Arrays) -> Arrays:
    """The same under the names of the original vision_transformer."""
    new = {}
    for key, value in big_vision_names(weights).items():
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


@torch.no_grad()
def gpt2() -> Arrays:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, **sizes))
    tokens, weights = _drawn()[3], weights_of(shake(model, 4))
    del weights["lm_head.weight"]  # the token embedding once more
    logits = model(torch.tensor(tokens)).logits
    return golden(weights, tokens=tokens.astype(np.int32), logits=logits)


_TORCHVISION = {
    **{"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3},
    **{"hidden_dim": 24, "mlp_dim": 96, "num_classes": 5},
}
case("vit_token", vit_token)
case(
    "vit_mean",
    plain_vit,
    functools.partial(_small, global_pool="avg", class_token=False),
    2,
)
case(
    "vit_torchvision",
    plain_vit,
    functools.partial(torchvision.models.VisionTransformer, **_TORCHVISION),
    3,
)
CASES["vit_big_vision"] = functools.partial(
    renamed_vit, big_vision_names, no_embed_class=True
)
case("vit_augreg", renamed_vit, augreg_names)
case("gpt2", gpt2)


# --- Convolutional networks of timm and transformers ---

CLASSES, BATCH = 5, 3


def randomize(net: nn.Module, seed: int) -> None:
    """Kernels of size √(2/fan_in), norms about one, everything else of order one."""
    random = np.random.default_rng(seed)
    kinds = {
        f"{prefix}.{name}".removeprefix("."): module
        for prefix, module in net.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }

    def put(tensor: torch.Tensor, values: np.ndarray) -> None:
        tensor.copy_(torch.tensor(values.astype(np.float16).astype(np.float32)))

    with torch.no_grad():
        for name, weight in net.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            if weight.ndim > 1 and isinstance(kinds[name], nn.Conv2d | nn.Linear):
                values *= (2 / weight[0].numel()) ** 0.5
            else:
                norm = "norm" in type(kinds[name]).__name__.lower()
                values = 0.3 * values + (norm and name.endswith("weight"))
            put(weight, values)
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                put(buffer, 0.3 * random.normal(size=tuple(buffer.shape)))
            elif name.endswith("running_var"):
                put(buffer, np.exp(random.normal(size=tuple(buffer.shape)) - 1))


def convnet(
    make: Callable[[], nn.Module],
    seed: int,
    pixels: tuple[int, int],
    gradients: bool = True,
    config: dict[str, Any] | None = None,
    statistics: bool = False,
) -> Arrays:
    """Logits in evaluation, and of a step of training the gradients and statistics.

    Weights are rounded to float16, which halves the files and changes no comparison.
    All is computed in float64 and kept in float32: what differs is the rounding of the
    zoo's float32, and not torch's too. Without `gradients`, another file has those of
    a network that differs in names or padding alone. With `statistics`, the file also
    has the logits of the step, "golden/train", and the running statistics after it,
    "golden/after/...".
    """

    def run(x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        return getattr(out, "logits", out)

    net = make()
    randomize(net, seed)
    net.double()
    weights = {
        key: value.numpy().astype(np.float16)
        for key, value in net.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    random = np.random.default_rng(99)
    images = random.normal(size=(BATCH, 3, *pixels)).astype(np.float16)
    x = torch.tensor(images.astype(np.float64))
    net.eval()
    with torch.no_grad():
        logits = run(x).numpy().astype(np.float32)
    more: Arrays = {}
    net.train()
    train = run(x)
    if gradients:
        train.square().mean(0).sum().backward()
        for key, weight in net.named_parameters():
            more[f"gradient/{key}"] = weight.grad.numpy().astype(np.float32)
    if statistics:
        more["train"] = train.detach().numpy().astype(np.float32)
        for key, buffer in net.named_buffers():
            if "running" in key:
                more[f"after/{key}"] = buffer.numpy().astype(np.float32)
    text = json.dumps(config or {})
    return golden(weights, logits=logits, **more, images=images, config=text)


def _timm_resnet(**options: Any) -> nn.Module:
    """timm's ResNet with fewer channels; a stem of 7x7 has 64 in timm."""
    models, width = timm.models.resnet, 4
    net = models.ResNet(
        models.Bottleneck,
        num_classes=CLASSES,
        stem_width=width // 2,
        channels=(width, 2 * width),
        layers=(1, 2),
        **options,
    )
    net.layer3 = net.layer4 = nn.Identity()
    if "deep" in options.get("stem_type", ""):
        return net
    net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    stages, _ = models.make_blocks(
        (models.Bottleneck, models.Bottleneck),
        (width, 2 * width),
        (1, 2),
        width,
        norm_layer=nn.BatchNorm2d,
        **options,
    )
    for name, stage in stages:
        setattr(net, name, stage)
    return net


def _timm_convnext(**options: Any) -> nn.Module:
    return timm.models.convnext.ConvNeXt(
        num_classes=CLASSES, depths=(1, 2, 1, 1), dims=(4, 8, 16, 32), **options
    )


# Numbers of channels are multiples of 8, as timm rounds them.
_B0 = [
    ["ds_r1_k3_s1_e1_c8_se0.25"],
    ["ir_r2_k5_s2_e2_c16_se0.25"],
    ["er_r2_k3_s1_e2_c16"],
    ["cn_r2_k3_s1_e1_c16_skip"],
]
_V3 = [
    ["ds_r1_k3_s2_e1_c8_se0.25_nre"],
    ["ir_r1_k3_s1_e2_c16", "ir_r2_k5_s1_e3_c16_se0.25"],
    ["cn_r1_k1_s1_c24"],
]
_V2 = [["ds_r1_k3_s1_e1_c8"], ["ir_r2_k3_s2_e2_c16"], ["ir_r2_k5_s1_e2_c16"]]


def _timm_efficientnet(kind: type, rows: list[list[str]], **options: Any) -> nn.Module:
    return kind(
        builder.decode_arch_def(rows),
        **{"num_classes": CLASSES, "num_features": 24, "stem_size": 8, **options},
    )


_EFFICIENTNET = functools.partial(
    _timm_efficientnet, timm.models.efficientnet.EfficientNet
)
_HF_RESNET = {
    **{"embedding_size": 4, "hidden_sizes": [16, 32], "depths": [1, 2]},
    **{"layer_type": "bottleneck", "num_labels": CLASSES},
    "architectures": ["ResNetForImageClassification"],
}
_HF_CONVNEXT = {
    **{"hidden_sizes": [4, 8], "depths": [1, 2], "num_stages": 2},
    **{"num_labels": CLASSES, "layer_norm_eps": 1e-3},
}
# Two groups of the width of the stage each, as 32x4d is 32 groups of 1/16.
case(
    "resnext",
    convnet,
    functools.partial(_timm_resnet, cardinality=2, base_width=64),
    *(0, (20, 21)),
)
case(
    "resnet_d_se",
    convnet,
    functools.partial(
        _timm_resnet,
        stem_type="deep",
        avg_down=True,
        block_args={
            "attn_layer": functools.partial(timm.layers.SEModule, rd_divisor=1)
        },
    ),
    *(1, (33, 30)),
)
case("convnext", convnet, _timm_convnext, 6, (64, 67), False)
case(
    "convnextv2",
    convnet,
    functools.partial(_timm_convnext, use_grn=True, ls_init_value=None, conv_mlp=True),
    *(7, (64, 67), False),
)
for _name, _kind, _model, _seed, _pixels, _options in (
    ("hf_resnet", "ResNet", "resnet", 5, (33, 30), _HF_RESNET),
    ("hf_convnext", "ConvNext", "convnext", 8, (17, 24), _HF_CONVNEXT),
    ("hf_convnextv2", "ConvNextV2", "convnextv2", 9, (17, 24), _HF_CONVNEXT),
):
    _classes = getattr(hf, f"{_kind}ForImageClassification")
    _options = {**_options, "architectures": [_classes.__name__]}
    _config = functools.partial(getattr(hf, f"{_kind}Config"), **_options)
    _make = functools.partial(lambda kind, config: kind(config()), _classes, _config)
    case(
        _name, convnet, _make, _seed, _pixels, True, {"model_type": _model, **_options}
    )
_SILU = functools.partial(_EFFICIENTNET, _B0, act_layer=nn.SiLU)
_SAME = {"pad_type": "same", "norm_layer": functools.partial(nn.BatchNorm2d, eps=1e-3)}
_SQUEEZE = functools.partial(
    mb.SqueezeExcite,
    gate_layer="hard_sigmoid",
    force_act_layer=nn.ReLU,
    rd_round_fn=builder.round_channels,
)
_MOBILENETV3 = functools.partial(
    *(_timm_efficientnet, timm.models.mobilenetv3.MobileNetV3, _V3),
    act_layer=nn.Hardswish,
    se_layer=_SQUEEZE,
)
for _name, _make, _seed, _gradients in (
    ("efficientnet", _SILU, 10, True),
    ("tf_efficientnet", functools.partial(_SILU, **_SAME), 11, False),
    ("mobilenetv3", _MOBILENETV3, 12, True),
    (
        *("mobilenetv2", functools.partial(_EFFICIENTNET, _V2, act_layer=nn.ReLU6)),
        *(14, True),
    ),
):
    case(_name, convnet, _make, _seed, (21, 22), _gradients)


# --- ResNets of torchvision, whose names and numbers are timm's too ---

_WIDTH = 4


def _torchvision_resnet(block: str, blocks: tuple[int, ...], stem: str) -> nn.Module:
    """A network with fewer channels than the constructor allows."""
    models = torchvision.models.resnet
    kind = {"basic": models.BasicBlock, "bottleneck": models.Bottleneck}[block]
    net = models.ResNet(kind, [1, 1, 1, 1], num_classes=CLASSES)
    net.inplanes = _WIDTH
    options = {"kernel_size": 7, "stride": 2, "padding": 3}
    if stem == "cifar":
        options = {"kernel_size": 3, "stride": 1, "padding": 1}
        net.maxpool = nn.Identity()
    net.conv1 = nn.Conv2d(3, _WIDTH, **options, bias=False)
    net.bn1 = nn.BatchNorm2d(_WIDTH)
    for i, count in enumerate(blocks):
        stage = net._make_layer(kind, _WIDTH * 2**i, count, stride=1 if i == 0 else 2)
        setattr(net, f"layer{i + 1}", stage)
    net.fc = nn.Linear(8 * _WIDTH * kind.expansion, CLASSES)
    return net


# 44 pixels are even behind the stem too, so that its pooling shows its padding.
for _seed, (_name, _pixels, *_network) in enumerate(
    (
        ("resnet_basic", (45, 44), "basic", (2, 1, 1, 2), "imagenet"),
        ("resnet_bottleneck", (45, 44), "bottleneck", (2, 1, 1, 1), "imagenet"),
        ("resnet_cifar", (15, 18), "basic", (1, 2, 1, 1), "cifar"),
    ),
    20,
):
    _make = functools.partial(_torchvision_resnet, *_network)
    case(_name, convnet, _make, _seed, _pixels, False, None, True)


def main() -> None:
    """Write all cases, or those that are named."""
    packages = (np, timm, torch, torchvision, hf)
    made = {p.__name__: p.__version__ for p in packages}
    made["python"] = sys.version.split()[0]
    path = HERE / "versions.json"
    versions = json.loads(path.read_text())
    for name in sys.argv[1:] or CASES:
        np.savez_compressed(HERE / f"{name}.npz", **CASES[name]())
        versions[name] = made
    path.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
