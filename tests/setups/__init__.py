"""Set-ups of real code bases, each with its right multipliers."""

import importlib

MODULES = (
    "transformers",
    "attention",
    "convolutions",
    "ssm",
    "rnn",
    "moe",
    "lora",
    "unet_vae_vq",
    "hypernetworks",
    "torch_layouts",
    "frameworks",
    "stacks",
    "tables",
    "siblings",
)

SETUPS = [
    setup
    for name in MODULES
    for setup in importlib.import_module(f".{name}", __name__).SETUPS
]
