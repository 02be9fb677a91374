"""Write the keys of small networks in the files of transformers and timm.

    pip install torch==2.13.0 transformers==5.24.0 timm==1.0.31 safetensors
    python tests/golden/make_layout_names.py

writes, beside this file, layout_names.json: {case: sorted keys} of the files that
`save_pretrained` writes, without those that only pretraining or training needs; and
under "timm convnext" the rank of the MLP's kernels of each network.
"""

import json
import pathlib
import re
import tempfile

import safetensors.torch
import timm
import torch
import transformers as hf

UNUSED = re.compile(r"mask_token$|(^|\.)pooler\.|num_batches_tracked$")
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
CLASSES = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
LLAMA = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 11,
    "max_position_embeddings": 8,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GPT2 = {"n_embd": 24, "n_layer": 1, "n_head": 4, "vocab_size": 11, "n_positions": 8}
REGISTERS = {"num_register_tokens": 2}
PYRAMID = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}
# case: (class, class of its config, options)
CASES = {
    "vit": (hf.ViTForImageClassification, hf.ViTConfig, {**VIT, **CLASSES}),
    "vit base": (hf.ViTModel, hf.ViTConfig, VIT),
    "dinov2": (hf.Dinov2ForImageClassification, hf.Dinov2Config, {**VIT, **CLASSES}),
    "dinov2 base": (hf.Dinov2Model, hf.Dinov2Config, VIT),
    "dinov2 gated": (
        hf.Dinov2ForImageClassification,
        hf.Dinov2Config,
        {**VIT, **CLASSES, "use_swiglu_ffn": True},
    ),
    "dinov2 registers": (
        hf.Dinov2WithRegistersForImageClassification,
        hf.Dinov2WithRegistersConfig,
        {**VIT, **CLASSES, **REGISTERS},
    ),
    "dinov2 registers base": (
        hf.Dinov2WithRegistersModel,
        hf.Dinov2WithRegistersConfig,
        {**VIT, **REGISTERS},
    ),
    "dinov3": (hf.DINOv3ViTModel, hf.DINOv3ViTConfig, {**VIT, **REGISTERS}),
    "dinov3 gated": (
        hf.DINOv3ViTModel,
        hf.DINOv3ViTConfig,
        {**VIT, **REGISTERS, "use_gated_mlp": True},
    ),
    "clip": (hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig, VIT),
    "clip base": (hf.CLIPVisionModel, hf.CLIPVisionConfig, VIT),
    "siglip": (hf.SiglipVisionModel, hf.SiglipVisionConfig, VIT),
    "resnet": (
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        {**PYRAMID, "embedding_size": 8, "layer_type": "basic"},
    ),
    "convnext": (hf.ConvNextForImageClassification, hf.ConvNextConfig, PYRAMID),
    "convnextv2": (hf.ConvNextV2ForImageClassification, hf.ConvNextV2Config, PYRAMID),
    "gpt": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "gpt untied": (hf.GPT2LMHeadModel, hf.GPT2Config, {**GPT2, **UNTIED}),
    "gpt base": (hf.GPT2Model, hf.GPT2Config, GPT2),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {**LLAMA, **TIED}),
    "llama untied": (hf.LlamaForCausalLM, hf.LlamaConfig, {**LLAMA, **UNTIED}),
    "llama base": (hf.LlamaModel, hf.LlamaConfig, LLAMA),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**LLAMA, **TIED}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**LLAMA, **TIED}),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {**LLAMA, "num_local_experts": 2},
    ),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {**LLAMA, "num_experts": 2},
    ),
}
CONVNEXTS = (
    *("convnext_atto", "convnext_tiny", "convnext_small", "convnext_base"),
    *("convnext_large", "convnextv2_atto", "convnextv2_nano", "convnextv2_tiny"),
    *("convnextv2_base", "convnextv2_large"),
)


def keys(model: torch.nn.Module) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = safetensors.torch.load_file(f"{folder}/model.safetensors")
        return sorted(key for key in weights if not UNUSED.search(key))


def rank(name: str) -> int:
    with torch.device("meta"):
        return timm.create_model(name).stages[0].blocks[0].mlp.fc1.weight.ndim


names = {case: keys(kind(config(**o))) for case, (kind, config, o) in CASES.items()}
names["timm convnext"] = {name: rank(name) for name in CONVNEXTS}
pathlib.Path(__file__).with_name("layout_names.json").write_text(
    json.dumps(names, indent=0) + "\n"
)
