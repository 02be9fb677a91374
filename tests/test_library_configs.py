"""What a config.json of timm or transformers says: a model of the zoo, or a refusal."""

import re

import pytest
from goldens import config_of

from mupax.zoo.families.vit import TIMM
from mupax.zoo.registry import abstract, options_of
from mupax.zoo.weights.architectures import identify

# Configs as published, shortened to what is read.
RESNET_50 = {
    **{"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
    **{"depths": [3, 4, 6, 3], "downsample_in_first_stage": False},
    **{"embedding_size": 64, "hidden_act": "relu", "layer_type": "bottleneck"},
    **{"hidden_sizes": [256, 512, 1024, 2048], "num_channels": 3},
    "id2label": {str(i): str(i) for i in range(1000)},
}
VIT = {
    **{"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    **{"hidden_act": "gelu", "hidden_size": 768, "image_size": 224, "qkv_bias": True},
    **{"intermediate_size": 3072, "layer_norm_eps": 1e-12, "patch_size": 16},
    **{"num_attention_heads": 12, "num_hidden_layers": 12},
    "id2label": {str(i): "x" for i in range(1000)},
}
DINOV2 = {
    **{"model_type": "dinov2", "architectures": ["Dinov2Model"], "hidden_size": 384},
    **{"image_size": 518, "layer_norm_eps": 1e-06, "mlp_ratio": 4, "patch_size": 14},
    **{"num_attention_heads": 6, "num_hidden_layers": 12, "use_swiglu_ffn": False},
}
GIANT = {
    **{**DINOV2, "hidden_size": 1536, "num_attention_heads": 24},
    **{"num_hidden_layers": 40, "use_swiglu_ffn": True},
}
CLIP = {
    **{"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512},
    "vision_config": {"hidden_size": 768, "patch_size": 32, "projection_dim": 512},
}
SIGLIP = {
    **{"model_type": "siglip", "architectures": ["SiglipModel"]},
    "text_config": {"model_type": "siglip_text_model"},
    "vision_config": {"model_type": "siglip_vision_model"},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
LLAMA = {
    **{"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    **{"head_dim": 64, "hidden_act": "silu", "hidden_size": 2048},
    **{"intermediate_size": 8192, "max_position_embeddings": 131072},
    **{"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8},
    **{"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "rope_scaling": {
        **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "vocab_size": 128256,
}
SMOLLM = {
    **{"model_type": "llama", "hidden_act": "silu", "hidden_size": 576},
    **{"intermediate_size": 1536, "max_position_embeddings": 8192},
    **{"num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000},
    **{"tie_word_embeddings": True, "vocab_size": 49152},
}
QWEN3 = {
    **{"model_type": "qwen3", "attention_bias": False, "head_dim": 128},
    **{"hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072},
    **{"max_position_embeddings": 40960, "num_attention_heads": 16},
    **{"num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
TINY_VIT = {"architecture": "vit_tiny_patch16_224", "num_classes": 5}


@pytest.mark.parametrize(
    ("config", "name", "options"),
    [
        (RESNET_50, "resnet50", {}),
        (VIT, "vit_base_patch16_224", {"norm_eps": 1e-12}),
        (
            {**VIT, "architectures": ["ViTModel"]},
            *("vit_base_patch16_224", {"norm_eps": 1e-12, "out_features": 0}),
        ),
        (DINOV2, "vit_small_patch14_dinov2", {"layer_scale": 1.0}),
        (GIANT, "vit_giant_patch14_dinov2", {"layer_scale": 1.0}),
        (CLIP, "vit_base_patch32_clip_quickgelu_224", {"readout_bias": False}),
        (SIGLIP, "vit_base_patch16_siglip_224", {"nonlinearity": "gelu_tanh"}),
        ({**GPT2, "vocab_size": 50257, "n_ctx": 1024}, "gpt2", {}),
        (LLAMA, "llama3_2_1b", {}),
        (SMOLLM, "smollm2_135m", {}),
        (QWEN3, "qwen3_0_6b", {}),
    ],
)
def test_a_published_config_is_the_model_of_that_name(config, name, options):
    assert identify(config, "x") == (name, options)


def test_pooling_and_class_tokens_come_from_the_config():
    found = identify({**TINY_VIT, "global_pool": "avg"}, "x").options
    assert (found["pool"], found["class_token"]) == ("mean", True)
    classifier = {"architectures": ["Dinov2ForImageClassification"]}
    found = identify({**DINOV2, **classifier, "id2label": {"0": "a", "1": "b"}}, "x")
    assert found.options["pool"] == "token_and_mean"


REFUSED = [
    (RESNET_50, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (RESNET_50, {"downsample_in_bottleneck": True}, "downsample_in_bottleneck=True"),
    (RESNET_50, {"hidden_sizes": [256, 512, 1024, 1024]}, "of channels doubles"),
    (RESNET_50, {"depths": [3, 0]}, "depths=0, which must be a whole number"),
    (RESNET_50, {"layer_type": "wide"}, "layer_type='wide'"),
    (VIT, {"hidden_act": "relu2"}, "hidden_act='relu2'"),
    (VIT, {"num_attention_heads": 5}, "num_attention_heads=5, which must divide it"),
    (VIT, {"image_size": "x"}, "image_size='x', which must be a whole number"),
    (VIT, {"model_type": "beit"}, "supported types are clip, .*llama, mixtral"),
    (LLAMA, {"attention_bias": True}, "attention_bias=True; this zoo has only"),
    (LLAMA, {"quantization_config": {}}, "quantized weights"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "positions of type 'yarn'"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "lacks 'factor'"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads=5, which must divide it"),
    (LLAMA, {"rope_theta": 0}, "rope_theta=0, which must be a positive number"),
    (config_of("mixtral"), {"sliding_window": 4096}, "sliding_window=4096"),
    (config_of("mixtral"), {"num_local_experts": 0}, "num_experts=0"),
    ({"model_type": "gpt2", "n_embd": 8}, {}, "lacks 'n_layer'"),
    (TINY_VIT, {"model_args": {"qk_norm": True}}, "qk_norm=True"),
    (TINY_VIT, {"global_pool": "map"}, "global_pool='map'"),
    (TINY_VIT, {"num_classes": "ten"}, "num_classes='ten'"),
    (TINY_VIT, {"pretrained_cfg": {"input_size": 224}}, "input_size"),
    # Values of another type.
    ({"architecture": "resnet50", "model_args": 3}, {}, "me/x"),
    ({"architecture": ["resnet50"]}, {}, "me/x"),
    ({"model_type": []}, {}, "me/x"),
    ({"model_type": "dinov2", "mlp_ratio": [4]}, {}, "me/x"),
    (
        {"model_type": "convnext", "hidden_sizes": [96], "layer_norm_eps": None},
        *({}, "me/x"),
    ),
    ({"model_type": "resnet", "hidden_sizes": [256], "architectures": 1}, {}, "me/x"),
]


@pytest.mark.parametrize(("config", "changes", "said"), REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(config, changes, said):
    with pytest.raises(ValueError, match=said):
        identify({**config, **changes}, "me/x")


# Ids of timm, and what their config.json says of classes and pooling.
IDS = {
    "vit_small_patch14_dinov2.lvd142m": (0, "token", "vit_small_patch14_dinov2"),
    "vit_base_patch14_reg4_dinov2.lvd142m": (
        *(0, "token"),
        "vit_base_patch14_reg4_dinov2",
    ),
    "deit3_base_patch16_384.fb_in1k": (1000, "token", "deit3_base_patch16_224"),
    "vit_base_patch16_clip_224.openai": (512, "token", "vit_base_patch16_clip_224"),
    "vit_base_patch16_siglip_224.webli": (0, "map", "vit_base_patch16_siglip_224"),
    "vit_base_patch16_siglip_gap_224.webli": (0, "avg", "vit"),
    "vit_base_patch16_reg4_gap_256.in1k": (1000, "avg", "vit"),
    "vit_small_patch16_dinov3.lvd1689m": (0, "avg", "vit_small_patch16_dinov3"),
    "eva_giant_patch14_336.clip_ft_in1k": (1000, "avg", "vit"),
    "eva_large_patch14_196.in22k_ft_in1k": (1000, "avg", "vit"),
}


@pytest.mark.parametrize("name", IDS)
def test_an_id_of_timm_names_a_model(name):
    classes, pooling, expected = IDS[name]
    config = {"num_classes": classes, "global_pool": pooling}
    found = identify({**config, "architecture": name.split(".")[0]}, name)
    assert found.model == expected
    made = {**options_of(found.model)[1], **found.options}
    assert made["out_features"] == classes
    names = {"token": "token", "map": "attention", "avg": made.get("pool")}
    assert made.get("pool", "token") == names[pooling]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if i % 8 == 0 else pytest.mark.long)
        for i, name in enumerate(TIMM)
    ],
)
def test_every_listed_architecture_makes_a_model_of_its_size(name):
    side = next((int(s) for s in name.split("_")[:0:-1] if s.isdigit()), 224)
    cfg = {"pretrained_cfg": {"input_size": [3, side, side], "num_classes": 7}}
    identified = identify({"architecture": name, **cfg}, name)
    model = abstract(identified.model, **identified.options)
    assert model.plan["classes"].size == 7
    if "_" in name:
        patch = int((re.search(r"patch(\d+)", name) or (0, 16))[1])
        assert model.patch_size == patch
        assert model.grid == (side // patch, side // patch)
