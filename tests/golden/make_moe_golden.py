"""Make the golden files of mixtures of experts: small networks of transformers.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_moe_golden.py

writes, beside this file, mixtral.npz (grouped queries, untied) and qwen3_moe.npz
(QK-norm, tied, gates that do not add up to one). Each holds the weights under the names
that save_pretrained writes, "golden/config" (the config.json), "golden/tokens",
"golden/logits", and "golden/gradient/..." (of the mean cross-entropy of the next token,
for each weight), and "golden/balance" (the load-balancing loss). moe_versions.json says
what made them.
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import transformers
from kit import HERE, TOKENS, backward, shake, write_versions
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"intermediate_size": 12, "num_local_experts": 4, "rms_norm_eps": 1e-5},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "head_dim": 8,
        },
    ),
}
# Keys of one expert's three matrices.
NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def saved_names(kind: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a network's parameters under the names of its files."""
    folder, (gate, up, down) = NAMES[kind]
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


for seed, (kind, (config_type, model_type, options)) in enumerate(KINDS.items()):
    config = config_type(**SIZES, **options)
    model = model_type(config).eval()
    model.set_attn_implementation("eager")
    shake(model, seed)
    out = model(TOKENS, output_router_logits=True)
    balance = load_balancing_loss_func(out.router_logits, 4, 2)
    backward(out.logits)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        text = pathlib.Path(folder, "config.json").read_text()
    parameters = dict(model.named_parameters())
    ours = saved_names(kind, {k: v.detach().numpy() for k, v in parameters.items()})
    assert ours.keys() == weights.keys(), ours.keys() ^ weights.keys()
    assert all(np.array_equal(ours[k], weights[k]) for k in ours)
    gradients = saved_names(kind, {k: v.grad.numpy() for k, v in parameters.items()})
    np.savez_compressed(
        HERE / f"{kind}.npz",
        **weights,
        **{f"golden/gradient/{k}": v for k, v in gradients.items()},
        **{
            "golden/config": np.array(json.dumps(json.loads(text))),
            "golden/tokens": TOKENS.numpy().astype(np.int32),
            "golden/logits": out.logits.detach().numpy(),
            "golden/balance": balance.detach().numpy(),
        },
    )
write_versions("moe_versions.json")
