"""Make the golden files of the Llama family: small networks of transformers.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_llama_golden.py

writes, beside this file, llama.npz (grouped queries, untied, scaled rotary positions,
as Llama 3), smollm.npz (tied, as SmolLM2), qwen2.npz (biases of queries, keys and
values) and qwen3.npz (QK-norm, heads wider than the model). Each holds the weights
under transformers' names, "golden/config" (the config.json), "golden/tokens",
"golden/logits", and "golden/gradient/..." (of the mean cross-entropy of the next
token, for each weight). llama_versions.json says what made them.
"""

import json

import numpy as np
import transformers
from kit import HERE, TOKENS, backward, shake, write_versions

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
KINDS = {
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": SCALED, "rms_norm_eps": 1e-5},
    ),
    "smollm": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": PLAIN, "rms_norm_eps": 1e-5},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": PLAIN, "rms_norm_eps": 1e-6},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": PLAIN,
            "rms_norm_eps": 1e-6,
            "head_dim": 12,
        },
    ),
}


for seed, (name, (config_type, model_type, options)) in enumerate(KINDS.items()):
    config = config_type(**SIZES, **options)
    model = model_type(config).eval()
    model.set_attn_implementation("eager")
    shake(model, seed)
    logits = model(TOKENS).logits
    backward(logits)
    weights = {k: v.detach().numpy() for k, v in model.named_parameters()}
    gradients = {
        f"golden/gradient/{k}": v.grad.numpy() for k, v in model.named_parameters()
    }
    np.savez_compressed(
        HERE / f"{name}.npz",
        **weights,
        **gradients,
        **{
            "golden/config": np.array(json.dumps(config.to_dict())),
            "golden/tokens": TOKENS.numpy().astype(np.int32),
            "golden/logits": logits.detach().numpy(),
        },
    )
write_versions("llama_versions.json")
