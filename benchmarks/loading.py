"""Processor time of the first `zoo.load_pretrained` in a process, beside timm's.

With `--reference PYTHON`, a Python with torch, timm and transformers, the same files
are loaded there too. Weights are random.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy

from mupax.zoo import registry
from mupax.zoo.weights import foreign, saving

# Each prints the seconds of the load, and those of the imports before it.
_OURS = """
import sys, time
import jax
from flax import nnx
from mupax import zoo
jax.device_put(1.0).block_until_ready()
start = time.process_time()
jax.block_until_ready(nnx.state(zoo.load_pretrained(sys.argv[2])))
print(time.process_time() - start, start)
"""
_THEIRS = """
import sys, time, torch
name, folder = sys.argv[1:]
if name == "llama":
    from transformers import LlamaForCausalLM
    load = lambda: LlamaForCausalLM.from_pretrained(folder)
else:
    import timm
    file = folder + "/model.safetensors"
    load = lambda: timm.create_model(name, checkpoint_path=file)
torch.zeros(1) + 1
start = time.process_time()
# transformers only maps the file into memory; a copy reads it.
copies = [parameter.clone() for parameter in load().parameters()]
print(time.process_time() - start, start)
"""
_LLAMA = {"width": 768, "depth": 12, "queries_per_key": 3, "vocab_size": 32000}
_LLAMA |= {"mlp_ratio": 2048 / 768, "context": 2048, "norm_eps": 1e-6}
_LLAMA_CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": True},
}
_NAMES = ("vit_base_patch16_224", "resnet50", "convnext_tiny", "llama")


def _seconds(python: str, code: str, *arguments: object) -> tuple[float, float]:
    command = [python, "-c", code, *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    load, imports = map(float, printed.split())
    return load, imports


def _write(name: str, folder: pathlib.Path) -> None:
    """Write a repository of random weights, in the layout of timm or transformers."""
    is_llama = name == "llama"
    model = registry.abstract(name, **(_LLAMA if is_llama else {}))
    chance = np.random.default_rng(0)
    shapes = {path: array.shape for path, array in saving.arrays_of(model).items()}
    random = {path: chance.random(s, np.float32) for path, s in shapes.items()}
    saving.fill(model, random)
    arrays = foreign.export(model)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config = _LLAMA_CONFIG if is_llama else {"architecture": name, "num_classes": 1000}
    (folder / "config.json").write_text(json.dumps(config))


def main(runs: int = 3) -> None:
    """Print the medians of each model, in seconds: ours, then the reference's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference")
    reference = parser.parse_args().reference
    pythons = {sys.executable: _OURS} | ({reference: _THEIRS} if reference else {})
    print("seconds of the load, and of the imports before it")
    for name in _NAMES:
        with tempfile.TemporaryDirectory() as folder:
            _write(name, pathlib.Path(folder))
            rows = [
                [
                    n
                    for p, code in pythons.items()
                    for n in _seconds(p, code, name, folder)
                ]
                for _ in range(runs)
            ]
        medians = (statistics.median(column) for column in zip(*rows, strict=True))
        print(name, *(f"{n:.2f}" for n in medians))


if __name__ == "__main__":
    main()
