"""Processor time of `zoo.load_pretrained` in a fresh process, beside a plain read."""

import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy

from mupax import zoo
from mupax.zoo import registry
from mupax.zoo.weights import foreign, saving

_LOAD = """
import sys, time, jax
from flax import nnx
from mupax import zoo
jax.device_put(1.0).block_until_ready()
start = time.process_time()
jax.block_until_ready(nnx.state(zoo.load_pretrained(*sys.argv[1:])))
print(time.process_time() - start)
"""
_READ = """
import sys, time, safetensors.numpy
start = time.process_time()
safetensors.numpy.load_file(sys.argv[1])
print(time.process_time() - start)
"""


def _seconds(code: str, *arguments: object) -> float:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def main(pairs: int = 3) -> None:
    """Print a row for each model: ours, the layout of timm, and the file alone."""
    print(f"medians of {pairs}, seconds: zoo.save, timm's layout, the file alone")
    chance = np.random.default_rng(0)
    for name in ("resnet50", "vit_base_patch16_224"):
        with tempfile.TemporaryDirectory() as folder:
            model = registry.abstract(name)
            arrays = saving.arrays_of(model).items()
            random = {path: chance.random(a.shape, np.float32) for path, a in arrays}
            saving.fill(model, random)
            ours = zoo.save(model, pathlib.Path(folder) / "ours")
            file = pathlib.Path(folder) / "model.safetensors"
            safetensors.numpy.save_file(foreign.export(model, "timm"), file)
            rows = [
                (
                    _seconds(_LOAD, ours),
                    _seconds(_LOAD, name, file),
                    _seconds(_READ, file),
                )
                for _ in range(pairs)
            ]
        print(
            name,
            *(f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)),
        )
    shipped = [_seconds(_LOAD, "resmlp_digits") for _ in range(pairs)]
    print("resmlp_digits", f"{statistics.median(shipped):.2f}")


if __name__ == "__main__":
    main()
