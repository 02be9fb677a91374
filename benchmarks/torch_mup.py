"""The runs of `benchmarks.sweep` in PyTorch with mup, for a Python with these packages.

Prints the seconds of each run, by the clock and of the processor, as JSON. It uses one
thread: torch is fastest here with one process per core. The residual MLP is
x + a M^-½ MS(relu(W x)) with mup's base shapes, readout and Adam; the branch multiplier
and the learning rate's power of depth are set by hand, because mup does not scale with
depth.
"""

import argparse
import json
import time

import mup
import numpy as np
import torch

BASE_WIDTH, BASE_DEPTH = 64, 8


class ResMLP(torch.nn.Module):
    """As `mupax.zoo` builds it."""

    def __init__(self, features: int, width: int, depth: int, classes: int):
        super().__init__()
        self.readin = torch.nn.Linear(features, width, bias=False)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(depth)
        )
        self.output = mup.MuReadout(width, classes, bias=False)
        self.branch = (depth / BASE_DEPTH) ** -0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.readin(x)
        for block in self.blocks:
            z = torch.relu(block(x))
            x = x + self.branch * (z - z.mean(-1, keepdim=True))
        return self.output(x)


def seconds(
    data: tuple[torch.Tensor, torch.Tensor],
    width: int,
    depth: int,
    steps: int,
    rate: float,
) -> tuple[float, float]:
    """How long a run takes, from building the model to its last loss."""
    start = time.perf_counter(), time.process_time()
    features, classes = data[0].shape[1], 10
    model, base, delta = (
        ResMLP(features, n, depth, classes) for n in (width, BASE_WIDTH, 2 * BASE_WIDTH)
    )
    mup.set_base_shapes(model, base, delta=delta)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            mup.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    optimizer = mup.MuAdam(model.parameters(), lr=rate * (depth / BASE_DEPTH) ** -0.5)
    order = torch.randint(len(data[1]), (steps, 64))
    losses = []
    for rows in order:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data[0][rows]), data[1][rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return time.perf_counter() - start[0], time.process_time() - start[1]


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="an .npz of images and labels")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    arrays = np.load(given.data)
    images = torch.tensor(arrays["images"].reshape(len(arrays["images"]), -1))
    data = images, torch.tensor(arrays["labels"], dtype=torch.long)
    seconds(data, given.width, given.depth, 5, 2.0**-9)  # what is done once a process
    sizes = given.width, given.depth, given.steps
    print(json.dumps([seconds(data, *sizes, 2.0**-9) for _ in range(given.runs)]))


if __name__ == "__main__":
    main()
