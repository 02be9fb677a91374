"""What the scripts share that make golden files of decoders."""

import json
import pathlib
import platform
from types import ModuleType

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TOKENS = torch.tensor(np.random.default_rng(9).integers(0, 11, (3, 20)))


def shake(model: torch.nn.Module, seed: int) -> None:
    """Every weight random: kernels of size 1.5/√fan_in, norms about one.

    Weights are then far from their initialization, all norms and biases included, so
    that no mistake in one of them goes unseen; embeddings are small, so that the first
    norm shows its eps.
    """
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            if "embed_tokens" in name:
                values *= 0.03
            elif weight.ndim >= 2:
                values *= 1.5 / np.sqrt(weight.shape[-1])
            else:
                values = 0.3 * values + ("norm" in name)
            weight.copy_(torch.tensor(values, dtype=torch.float32))


def backward(logits: torch.Tensor) -> None:
    """Gradients of the mean cross-entropy of the next of `TOKENS`."""
    vocabulary = logits.shape[-1]
    torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocabulary), TOKENS[:, 1:].reshape(-1)
    ).backward()


def write_versions(name: str, packages: tuple[ModuleType, ...] = ()) -> None:
    """Write the versions of torch, transformers and other packages as JSON."""
    versions = {p.__name__: p.__version__ for p in (np, torch, transformers, *packages)}
    versions["python"] = platform.python_version()
    (HERE / name).write_text(json.dumps(versions, indent=1) + "\n")
