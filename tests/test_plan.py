"""`mupax plan`: operations, bytes and collectives, counted right."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mupax import zoo
from mupax.experiments import cli
from mupax.experiments.errors import UserError
from mupax.experiments.estimate.flops import count_flops
from mupax.experiments.estimate.hardware import find_chip
from mupax.experiments.estimate.hlo import collectives
from mupax.experiments.estimate.plan import topologies

TOY = f"--config={pathlib.Path(__file__).with_name('toy_train.py')}"


def forward(name: str, shape: tuple[int, ...], **options) -> float:
    """Operations of one forward pass."""
    model = nnx.eval_shape(lambda: zoo.create(name, rngs=nnx.Rngs(0), **options))
    model.eval()
    graph, state = nnx.split(model)
    return count_flops(
        lambda s, x: nnx.merge(graph, s, copy=True)(x),
        state,
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )


# Multiplications and additions as torchvision's and timm's tables give them, in 1e9.
@pytest.mark.parametrize(
    ("name", "billions"),
    [("resnet18", 1.814), ("resnet50", 4.089), ("vit_base_patch16_224", 17.56)],
)
def test_operations_are_those_that_the_literature_counts(name, billions):
    counted = forward(name, (1, 224, 224, 3)) / 2e9
    assert counted == pytest.approx(billions, rel=0.01)


def test_a_scanned_loop_counts_as_often_as_it_runs():
    shape = (4, 8, 8, 1)
    shallow = forward("resmlp", shape, width=32, depth=2)
    deep = forward("resmlp", shape, width=32, depth=12)
    assert deep - shallow == 10 * 2 * 4 * 32 * 32


def test_the_gradient_of_each_argument_costs_as_much_as_the_product():
    x, w = jnp.ones((4, 6)), jnp.ones((3, 6, 6))

    def loss(w):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()

    # But for the first layer, of whose input nobody asks the gradient.
    assert count_flops(jax.grad(loss), w) >= 3 * count_flops(loss, w) - 2 * 4 * 36
    strided = {"window_strides": (2, 2), "padding": "SAME"}

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, **strided, dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).sum()

    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    once = count_flops(convolve, image, kernel)
    assert once == 2 * (2 * 4 * 4 * 5) * 27
    for argument in (0, 1):
        grad = jax.grad(convolve, argument)
        # The convolution itself, and one as large.
        assert count_flops(grad, image, kernel) == 2 * once


def test_bytes_sent_along_a_ring():
    text = """
HloModule step

%body (p: (f32[8])) -> (f32[8]) {
  %a = f32[64]{0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%condition (p: (f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
}

%all-reduce-scatter.1 (p: f32[16]) -> f32[4] {
  %r = f32[16]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (f32[8]) while(%t), condition=%condition, body=%body
  %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %s = bf16[10]{0} all-reduce(%p), replica_groups={}, to_apply=%add
  %m = f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], \
device_ids=([8]) {'a','b':(2)2}, to_apply=%add
}
""".replace("\\\n", "")
    gather, scatter, reduce, mesh = collectives(text, 8)
    assert mesh.group == 2 * 2
    assert (gather.kind, gather.times, gather.group) == ("all-gather", 5, 4)
    assert gather.sent == 5 * 64 * 4 * 3 / 4
    assert (scatter.kind, scatter.bytes) == ("reduce-scatter", 4 * 4)
    assert scatter.sent == 16 * 4 * 3 / 4
    assert (reduce.kind, reduce.group) == ("all-reduce", 8)
    assert reduce.sent == 2 * 10 * 2 * 7 / 8


def test_chips_are_known_by_what_jax_calls_them():
    names = ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite"]
    chips = [find_chip(name).name for name in names]
    assert chips == ["v4", "v5e", "v5p", "v5p", "v6e"]
    assert find_chip("NVIDIA H100 80GB HBM3").name == "h100"
    assert find_chip("cpu") is None


def plan(*args: str) -> subprocess.CompletedProcess:
    # A process of its own: the number of devices is fixed when JAX starts.
    return subprocess.run(
        [sys.executable, "-m", "mupax", "plan", *args],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=1000,
    )


def rows(out: str) -> dict[str, list[str]]:
    """The cells of a printed table."""
    lines = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    return {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in lines}


def test_gpus_are_planned_without_a_gpu(tmp_path):
    done = plan(
        TOY,
        f"--config.data_dir={tmp_path}",
        "--config.mesh.fsdp=2",
        "--topology=gpu:2,h200:8",
    )
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["chip"] == ["h100", "h200"]
    assert table["devices"] == ["2", "8"]
    assert table["mesh"] == ["fsdp 2", "data 4, fsdp 2"]
    assert table["fits"] == ["yes", "yes"]
    assert table["memory of the chip"][1] == "131 GiB"
    assert "sent by all-gather" in table
    assert "are estimates" in done.stdout


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ("", "--topology is missing"),
        ("v9:2x2", "topology 'v9:2x2' is not known"),
        ("gpu:many", "must be a whole number"),
        ("v6e", "write chip:shape"),
    ],
)
def test_an_unknown_machine_is_one_sentence(capsys, topology, sentence):
    assert cli.main(["mupax", "plan", TOY, f"--topology={topology}"]) == 2
    assert sentence in capsys.readouterr().err


def test_without_the_compiler_of_tpus_gpus_are_planned(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [t.name for t in topologies(["v6e:16x16", "gpu:1"])] == ["gpu:1"]
    with pytest.raises(UserError, match=r"v6e:4x4 needs the compiler .*\[tpu\]"):
        topologies(["v6e:4x4"])


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install '.[tpu]' in a clone of mupax",
)


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "topology", "overrides"),
    [
        ("imagenet_vit", "v6e:16x16", []),
        ("imagenet_vit", "v5p:8x8x16", ["--config.mesh.fsdp=8"]),
        ("imagenet_resnet50", "v5e:4x8", []),
        ("imagenet_resnet50", "v5p:8x8x16", []),
        ("text_gpt_1b", "v5e:16x16", []),
        ("text_gpt_1b", "v6e:16x16", ["--config.mesh.tensor=4"]),
        ("text_gpt_1b", "v5p:8x8x16", []),
    ],
)
def test_the_step_compiles_for_a_slice_that_is_not_here(config, topology, overrides):
    done = plan(f"--config={config}", f"--topology={topology}", *overrides)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["fits"] == ["yes"], done.stdout
