"""Meshes: the same training wherever the arrays lie, and no byte moved in vain."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from patience import ended

from mupax import zoo
from mupax.experiments.errors import UserError
from mupax.experiments.run.mesh import check_batch, make_mesh

CHILD = pathlib.Path(__file__).with_name("mesh_child.py")
SMALL = 4096  # bytes; norms, losses and biases are below, weights and batches above


def on_meshes(model: str) -> dict:
    command, pipe = [sys.executable, str(CHILD), model], subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    out, err = ended(child)
    assert child.returncode == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def vit():
    return on_meshes("vit")


def large(found: dict, mesh: str) -> list[tuple[str, int, int]]:
    """(kind, times, group) of the collectives that move more than a bias."""
    return sorted(
        (kind, times, group)
        for kind, times, group, size in found[mesh]["collectives"]
        if size > SMALL
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data", "fsdp", "tensor", "all"])
def test_a_vit_trains_the_same_on_every_mesh(vit, mesh):
    np.testing.assert_allclose(vit[mesh]["losses"], vit["one"]["losses"], rtol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("model", ["resmlp", "gpt", "resnet18"])
def test_every_model_trains_the_same_on_every_mesh(model):
    found = on_meshes(model)
    # Adam divides by gradients that rounding alone tells from zero, in a ResNet.
    rtol = 1e-3 if model == "resnet18" else 2e-5
    for mesh in ("data", "fsdp", "tensor", "all"):
        np.testing.assert_allclose(
            found[mesh]["losses"], found["one"]["losses"], rtol=rtol
        )


@pytest.mark.long
def test_one_device_talks_to_nobody(vit):
    assert vit["one"]["collectives"] == []


@pytest.mark.long
def test_data_parallel_sums_each_gradient_once(vit):
    # In every block, and at both ends with the loss.
    assert large(vit, "data") == [("all-reduce", 1, 8), ("all-reduce", 3, 8)]
    assert {kind for kind, *_ in vit["data"]["collectives"]} == {"all-reduce"}


@pytest.mark.long
def test_fsdp_gathers_each_weight_twice_and_sums_its_gradient_once(vit):
    found = large(vit, "fsdp")
    # Query, key, value, out, up and down: for the forward and the backward pass.
    assert found.count(("all-gather", 3, 8)) == 2 * 6
    assert found.count(("all-reduce", 3, 8)) == 1
    assert {kind for kind, *_ in vit["fsdp"]["collectives"]} <= {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
    }


@pytest.mark.long
def test_tensor_parallel_sums_activations_after_each_branch(vit):
    # Two branches, forward and backward; no weight moves.
    found = large(vit, "tensor")
    assert {kind for kind, *_ in found} == {"all-reduce"}
    assert [times for _, times, _ in found] == [3, 3, 3, 3]


def test_every_device_keeps_its_part_only():
    model = zoo.create("vit", width=64, depth=2, heads=8, rngs=nnx.Rngs(0))
    mesh = AbstractMesh((1, 4, 2), ("data", "fsdp", "tensor"))
    specs = zoo.partition_specs(model, mesh)
    assert specs["blocks/mlp/up/kernel"] == PartitionSpec(None, "fsdp", "tensor")
    assert specs["blocks/mlp/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs["blocks/attention/out/kernel"][1] == "tensor"
    assert specs["readout/kernel"] == PartitionSpec("fsdp", None)
    assert specs["position"] == PartitionSpec(None, "fsdp")


@pytest.mark.parametrize("name", zoo.list_models())
def test_fsdp_covers_every_parameter_and_splits_nearly_all(name):
    complete = "_" in name or name.startswith(("resnet", "gpt2"))
    sizes = {} if complete else {"width": 64, "depth": 4}
    model = nnx.eval_shape(lambda: zoo.create(name, **sizes, rngs=nnx.Rngs(0)))
    mesh = AbstractMesh((2, 2, 1), ("data", "fsdp", "tensor"))
    specs = zoo.partition_specs(model, mesh)
    split, total = 0, 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        count = math.prod(variable.shape)
        total += count
        split += count if "fsdp" in specs["/".join(map(str, path))] else 0
    assert split > 0.98 * total


@pytest.mark.parametrize(
    ("mesh", "rules", "sentence"),
    [
        (
            (1, 5, 1),
            None,
            r"axis 'embed' of parameter .* has size 64, which the 5 devices",
        ),
        ((1, 1, 2), {"mlp": None, "heads": None}, "no parameter of a ViT is split"),
        ((1, 2, 1), {"embed": "model"}, "rule of 'embed' names 'model'"),
    ],
)
def test_what_a_mesh_cannot_split_is_said(mesh, rules, sentence):
    model = zoo.create("vit", width=64, depth=2, heads=8, rngs=nnx.Rngs(0))
    mesh = AbstractMesh(mesh, ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=sentence):
        zoo.partition_specs(model, mesh, rules)


def test_an_axis_without_a_rule_is_an_error_that_names_it():
    model = zoo.create("resmlp", width=8, depth=2, rngs=nnx.Rngs(0))
    model.readin.kernel.set_metadata(axes=("pixels", "flavour"))
    mesh = AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"'flavour' of parameter 'readin/kernel'"):
        zoo.partition_specs(model, mesh)


def test_a_model_that_names_no_axes_is_data_parallel_only():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    zoo.partition_specs(model, AbstractMesh((8, 1, 1), ("data", "fsdp", "tensor")))
    with pytest.raises(ValueError, match=r"'kernel'|'bias'"):
        zoo.partition_specs(model, AbstractMesh((4, 2, 1), ("data", "fsdp", "tensor")))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"data": 3}, "data=3 does not fit 1 devices"),
        ({"model": 1}, "mesh.model is not known"),
        ({"data": 0}, "mesh.data=0"),
        ({"data": -1, "fsdp": -1}, "only one axis"),
    ],
)
def test_a_mesh_that_does_not_suit_the_devices_is_refused(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        make_mesh(sizes, jax.devices()[:1])


def test_a_batch_that_does_not_divide_names_one_that_does():
    mesh = AbstractMesh((2, 4, 3), ("data", "fsdp", "tensor"))
    check_batch(32, mesh, accumulate=4)
    with pytest.raises(UserError, match=r"multiple of 32, such as 64"):
        check_batch(40, mesh, accumulate=4)
