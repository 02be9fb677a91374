"""Measure mupax on an accelerator in one go: no data, no network, one to eight minutes.

    python -m benchmarks.accelerator [--minutes 8] [--only PART ...] [--out FILE]
    python -m benchmarks.accelerator --smoke    # tiny sizes, for CPUs too

Each line is printed as soon as it is measured, the most important ones first; what does
not fit into the time is named at the end. Parts:

- roof: rate of a large product of matrices, of which all MFU are shares;
- steps: training steps (forward, backward, AdamW) of ViT-B/16, ResNet-50, GPT-2 small
  and Llama 3.2 1B by `mupax train`'s program, and in plain Flax NNX and Optax;
- sweeps: 64 runs at once against one run after another, in the programs of `mupax
  sweep`;
- optimizers: updates of a ViT-B by `mupax.optim`, and by Optax;
- tests: tests/test_accelerator.py, if pytest is installed; not with --smoke;
- torch: the same steps in torch with `compile`, if torch is installed.

MFU counts three times the products of the forward pass, attention in full.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

# Memory is taken as needed, so that what is measured later has some. Before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from mupax import optim, zoo
from mupax.experiments import memory
from mupax.experiments.estimate.flops import count_flops
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.prepare import prepare
from mupax.experiments.sweep import program
from mupax.experiments.sweep.tasks import ZooTask

from . import optimizer, plain

PARTS = ("roof", "steps", "sweeps", "optimizers", "tests", "torch")
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
      name: in the zoo.
      kind: a class of benchmarks/plain.py: "vit", "decoder" or "resnet".
      sizes: its arguments.
      batch: examples of a step; halved until they fit into memory.
      options: of the zoo's model.
      pixels: of a side of the images; 0 for text.
    """

    name: str
    kind: str
    sizes: dict[str, int]
    batch: int
    options: dict[str, Any]
    pixels: int = 0

    @property
    def data(self) -> str:
        """The dataset of `mupax train`: noise."""
        if self.kind == "decoder":
            return f"fake:{self.sizes['context']}:{self.sizes['vocab']}"
        return f"fake:{self.pixels}x{self.pixels}x3:{self.sizes['classes']}"

    def plain(self, dtype: str) -> nnx.Module:
        """The network in plain Flax NNX."""
        kinds = {"vit": plain.ViT, "decoder": plain.Decoder, "resnet": plain.ResNet}
        kind: Any = kinds[self.kind]
        return kind(**self.sizes, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))


def networks(smoke: bool) -> list[Network]:
    """The networks, or tiny ones of the same kinds; the most important first."""
    gpt = {"vocab": 50257, "context": 1024, "width": 768, "depth": 12, "heads": 12}
    vit = {"pixels": 224, "patch": 16, "width": 768, "depth": 12, "heads": 12}
    llama = {"vocab": 128256, "context": 2048, "width": 2048, "depth": 16}
    llama |= {"heads": 32, "kv": 8, "hidden": 8192}
    options, grouped, stem, depth = {}, {}, {}, 50
    pixels, classes, batches = 224, 1000, (32, 128, 8, 256)
    if smoke:
        tiny = {"width": 64, "depth": 2, "heads": 2}
        pixels, classes, batches = 32, 10, (4, 8, 4, 8)
        gpt |= tiny | {"vocab": 512, "context": 64}
        vit |= tiny | {"pixels": pixels}
        llama |= tiny | {"vocab": 512, "context": 64, "kv": 1, "hidden": 256}
        options = {"width": 64, "depth": 2, "head_dim": 32}
        grouped, stem, depth = {"queries_per_key": 2}, {"stem": "cifar"}, 18
    labels = {"classes": classes}
    vit |= labels
    resnet = {"depth": depth} | labels
    return [
        Network("gpt2", "decoder", gpt, batches[0], options),
        Network("vit_base_patch16_224", "vit", vit, batches[1], options, pixels),
        Network("llama3_2_1b", "decoder", llama, batches[2], options | grouped),
        Network(f"resnet{depth}", "resnet", resnet, batches[3], stem, pixels),
    ]


# {name: (data, batch, options of the model)}: a sweep's runs.
LANES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resmlp": ("fake:8x8x1:10", 64, {"width": 64, "depth": 8}),
    "cnn": ("fake:16x16x3:10", 32, {"width": 64, "depth": 6}),
    "gpt": ("fake:64:256", 8, {"width": 64, "depth": 4, "head_dim": 16}),
    "resnet18": (
        "fake:16x16x3:10",
        32,
        {"width": 16, "depth": 2, "blocks": (1, 1), "stem": "cifar"},
    ),
    "vit": (
        "fake:32x32x3:10",
        32,
        {"width": 64, "depth": 4, "patch_size": 8, "head_dim": 16},
    ),
}


class Report:
    """Prints lines as they are measured, and keeps them."""

    def __init__(self, minutes: float, smoke: bool):
        self.smoke = smoke
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.roof = 0.0  # operations per second
        self.failed = False
        self._end = math.inf if smoke else time.monotonic() + 60 * minutes

    def add(self, text: str, **row: Any) -> None:
        """Print a line, and keep its numbers."""
        print(text, flush=True)
        self.rows.append(row)

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[bool]:
        """Whether there is time; what does not run is a line of the report."""
        if time.monotonic() > self._end:
            self.left_out.append(what)
            yield False
            return
        try:
            yield True
        except Exception as error:  # what follows is measured all the same
            self.failed = True
            lines = str(error).splitlines() or [""]
            self.add(f"{what}: {type(error).__name__}, {lines[0][:200]}", what=what)
        gc.collect()
        jax.clear_caches()


def seconds(call: Callable[[], Any], least: float) -> float:
    """Seconds of a call, in the median of three rounds of at least so many seconds.

    Calls of a round are dispatched one after another, without waiting for each.
    """
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, round(least / (time.perf_counter() - start)))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / count)
    return statistics.median(rounds)


def roof(report: Report) -> None:
    """The rate of products of square matrices."""
    side = 512 if report.smoke else 8192
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.full((side, side), 1 / side, dtype)
        products = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
        call = functools.partial(products, x)
        took = seconds(call, 0.02 if report.smoke else 0.5)
        rate = 8 * 2 * side**3 / took
        report.roof = max(report.roof, rate if dtype == jnp.bfloat16 else 0.0)
        name = jnp.dtype(dtype).name
        report.add(
            f"product of {side} x {side} in {name}: {rate / 1e12:.3g} TFLOP/s",
            **{"part": "roof", "dtype": name, "tflops": rate / 1e12},
        )


class Step:
    """A compiled training step, its state and its batch.

    Attributes:
      compiling: seconds to trace and compile.
      bytes: memory that the step needs.
      parameters: their number.
    """

    def __init__(self, step: Any, *arguments: Any):
        start = time.perf_counter()
        self._compiled = step.lower(*arguments).compile()
        self.compiling = time.perf_counter() - start
        self.bytes = memory.needed(self._compiled)
        self._state, self._rest = arguments[0], arguments[1:]

    def __call__(self) -> Any:
        self._state, out = self._compiled(self._state, *self._rest)
        return out


def batch_of(spec: Any, classes: int) -> dict[str, jax.Array]:
    """Random examples: pixels or tokens, and labels."""
    random = np.random.default_rng(0)

    def draw(x: Any) -> jax.Array:
        top = 256 if x.dtype == np.uint8 else classes
        return jnp.asarray(random.integers(0, top, x.shape).astype(x.dtype))

    return {name: draw(x) for name, x in spec.items()}


def trained(network: Network, dtype: str, batch: int) -> tuple[Step, float, int]:
    """The step of `mupax train`; its operations, and the number of parameters."""
    c = defaults()
    c.dataset, c.batch_size = network.data, batch
    c.model = ConfigDict({"name": network.name, "dtype": dtype, **network.options})
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.learning_rate, c.steps, c.log_every = 1e-4, 10**6, 10**6
    prepared = prepare(parse(c))
    program = prepared.program
    spec = prepared.dataset.spec(batch)
    examples = batch_of(spec, prepared.dataset.out_features)
    state = program.init_on_mesh(prepared.built.create)
    step = Step(program.jit_step(), state, examples, program.hyper)

    # Without flash attention, whose products `count_flops` does not see.
    shapes = prepared.built.shapes
    attention = {} if network.kind == "resnet" else {"attention": "xla"}
    made = {**network.options, **shapes, **attention}
    model = nnx.eval_shape(lambda: zoo.create(network.name, **made, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    x = spec.get("image", spec.get("tokens"))
    if "tokens" in spec:
        inputs = jax.ShapeDtypeStruct((batch, x.shape[1] - 1), x.dtype)
    else:
        inputs = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    forward = count_flops(
        lambda params, x: nnx.merge(graph, params, copy=True)(x), params, inputs
    )
    return step, 3 * forward, program.parameters


def plainly(network: Network, dtype: str, batch: int) -> tuple[Step, int]:
    """The same step in plain Flax NNX and Optax."""
    graph, params, rest = nnx.split(network.plain(dtype), nnx.Param, ...)
    tx = optax.adamw(1e-4, weight_decay=0.1)
    random = np.random.default_rng(0)
    if network.kind == "decoder":
        shape = batch, network.sizes["context"] + 1
        tokens = random.integers(0, network.sizes["vocab"], shape)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        side = network.pixels
        inputs = random.normal(size=(batch, side, side, 3)).astype(np.float32)
        labels = random.integers(0, network.sizes["classes"], batch)
    data = jax.tree.map(jnp.asarray, (inputs, labels))

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(batch[0]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    def step(state: Any, batch: Any) -> Any:
        params, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(
            params, rest, batch
        )
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), rest, opt), value

    count = sum(x.size for x in jax.tree.leaves(params))
    return Step(
        jax.jit(step, donate_argnums=0), (params, rest, tx.init(params)), data
    ), count


def steps(report: Report) -> None:
    """Training steps of large networks."""
    print(
        f"\n{'step':22} {'dtype':9} {'by':10} {'batch':>5} {'ms':>8} {'MFU':>6} "
        f"{'GB':>6} {'compile s':>9}"
    )
    everything = networks(report.smoke)
    for dtype in ("bfloat16",) if report.smoke else ("bfloat16", "float32"):
        for network in everything:
            what = f"steps of {network.name} in {dtype}"
            with report.measuring(what) as there_is_time:
                if there_is_time:
                    _compare_steps(report, network, dtype)


def _compare_steps(report: Report, network: Network, dtype: str) -> None:
    """Ours and plain, at the largest batch that fits for both."""
    batch = network.batch
    while True:
        try:
            ours, flops, count = trained(network, dtype, batch)
            _print_step(report, network, dtype, "mupax", batch, ours, flops)
            del ours
            gc.collect()
            theirs, plain_count = plainly(network, dtype, batch)
            if count != plain_count:
                raise AssertionError((network.name, count, plain_count))
            _print_step(report, network, dtype, "plain NNX", batch, theirs, flops)
            return
        except jax.errors.JaxRuntimeError as error:
            if not memory.ran_out(error) or batch == 1:
                raise
        gc.collect()
        batch //= 2


def _print_step(
    report: Report,
    network: Network,
    dtype: str,
    by: str,
    batch: int,
    step: Step,
    flops: float,
) -> None:
    took = seconds(step, 0.1 if report.smoke else 1.0)
    share = flops / took / report.roof if report.roof else float("nan")
    report.add(
        f"{network.name:22} {dtype:9} {by:10} {batch:5} {1e3 * took:8.2f} {share:6.1%} "
        f"{step.bytes / 1e9:6.2f} {step.compiling:9.1f}",
        **{"part": "steps", "model": network.name, "dtype": dtype, "by": by},
        **{"batch": batch, "ms": 1e3 * took, "mfu": share, "flops": flops},
        **{"gb": step.bytes / 1e9, "compile_s": step.compiling},
    )


def sweeps(report: Report) -> None:
    """Runs at once against one run after another."""
    lanes, count = (4, 5) if report.smoke else (64, 200)
    print(
        f"\n{'sweep':10} {'dtype':9} {'runs a minute':>13} {'in turn':>8} {'ratio':>6} "
        f"{'ms a step':>9} {'GB':>6} {'compile s':>9}"
    )
    for dtype in ("float32",) if report.smoke else ("float32", "bfloat16"):
        for name in LANES:
            with report.measuring(f"sweep of {name} in {dtype}") as there_is_time:
                if there_is_time:
                    _sweep(report, name, dtype, lanes, count)


def _sweep(report: Report, name: str, dtype: str, lanes: int, count: int) -> None:
    data, batch, options = LANES[name]
    if report.smoke:
        options = {**options, "width": 16, "depth": 1 if name == "resnet18" else 2}
    c = defaults()
    c.dataset, c.batch_size, c.steps = data, batch, count
    c.model = ConfigDict({"name": name, "dtype": dtype, **options})
    c.optimizer, c.learning_rate = ConfigDict({"name": "adam"}), 1e-3
    c.schedule.name = "constant"
    rates = tuple(np.geomspace(1e-4, 1e-2, lanes).tolist())
    task = ZooTask("sweep", parse(c), {"learning_rate": rates}, 1, 1)
    training = task.training()
    keys, orders, examples = training.feed([0])
    examples = jax.tree.map(jnp.asarray, examples)
    took: dict[bool, float] = {}
    for together, points in ((True, lanes), (False, 2)):
        # Grid points are sharded over the local devices.
        points = -(-points // jax.local_device_count()) * jax.local_device_count()
        limits = np.full(points, count, np.int32)
        hyper = {"learning_rate": np.resize(np.float32(rates), points)}
        arguments = keys, hyper, orders, limits, examples
        start = time.perf_counter()
        compiled = program.program(training, arguments, together=together)
        compiling = time.perf_counter() - start
        losses = np.asarray(compiled(*arguments))
        if not np.isfinite(losses[0, 0]).all():
            raise AssertionError((name, losses[0, 0]))
        rounds = []
        for _ in range(2):
            start = time.perf_counter()
            np.asarray(compiled(*arguments))
            rounds.append(time.perf_counter() - start)
        took[together] = min(rounds) / points
        if together:
            size, compile_s = memory.needed(compiled) / 1e9, compiling
    at_once, in_turn = 60 / took[True], 60 / took[False]
    step = 1e3 * took[True] * lanes / count
    report.add(
        f"{name:10} {dtype:9} {at_once:13,.0f} {in_turn:8,.0f} "
        f"{took[False] / took[True]:6.1f} {step:9.2f} {size:6.2f} {compile_s:9.1f}",
        **{"part": "sweeps", "model": name, "dtype": dtype, "lanes": lanes},
        **{"a_minute": at_once, "in_turn": in_turn},
        **{"ms_a_step": step, "gb": size, "compile_s": compile_s},
    )


# {name: (ours, Optax's)}, as functions of the scales where they take some.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda scales: optim.adamw(1e-3, scales, weight_decay=0.05),
        lambda: optax.adamw(1e-3, weight_decay=0.05),
    ),
    "lion": (
        lambda scales: optim.lion(1e-3, scales),
        lambda: optax.lion(1e-3, weight_decay=0.0),
    ),
    "sgd": (
        lambda scales: optim.sgd(1e-3, scales, momentum=0.9),
        lambda: optax.sgd(1e-3, momentum=0.9),
    ),
}


def optimizers(report: Report) -> None:
    """Updates of a ViT-B, in pairs."""
    print(f"\n{'update':8} {'ms':>8} {'Optax ms':>8} {'ratio':>6}")
    width, depth, pairs = (64, 4, 3) if report.smoke else (768, 12, 50)
    scales, shapes = optimizer.make_scales(width, depth), optimizer.vit(width, depth)
    for name, (ours, theirs) in OPTIMIZERS.items():
        with report.measuring(f"updates of {name}") as there_is_time:
            if not there_is_time:
                continue
            params = optimizer.filled(shapes)
            updates = (optimizer.Step(tx, params) for tx in (ours(scales), theirs()))
            columns = optimizer.times(*updates, params, pairs)
            ratio = statistics.median(a / b for a, b in zip(*columns, strict=True))
            ms = [1e3 * statistics.median(column) for column in columns]
            report.add(
                f"{name:8} {ms[0]:8.2f} {ms[1]:8.2f} {ratio:6.3f}",
                **{"part": "optimizers", "name": name, "ms": ms[0]},
                **{"optax_ms": ms[1], "ratio": ratio},
            )


def tests() -> None:
    """The tests of accelerators, in a process of their own."""
    print("\ntests/test_accelerator.py", flush=True)
    if importlib.util.find_spec("pytest") is None:
        print("left out: pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    precision = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    subprocess.run(
        [*command, "tests/test_accelerator.py"], cwd=ROOT, env=os.environ | precision
    )


def torch(rows: list[dict[str, Any]], smoke: bool, seconds: float) -> None:
    """The steps that were measured, in torch, at the same batch sizes."""
    print("\ntorch", flush=True)
    if importlib.util.find_spec("torch") is None:
        print("left out: torch is not installed")
        return
    ours = {(r["model"], r["dtype"]): r for r in rows if r.get("by") == "mupax"}
    for network in networks(smoke):
        row = ours.get((network.name, "bfloat16"))
        if row is None or seconds < 10:
            print(f"left out: {network.name}")
            continue
        case = {"kind": network.kind, "sizes": network.sizes, "pixels": network.pixels}
        case |= {"batch": row["batch"], "dtype": "bfloat16"}
        command = [sys.executable, "-m", "benchmarks.torch_step", json.dumps([case])]
        command += ["--steps=2"] if smoke else ["--steps=20", "--compile"]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=seconds, stdout=subprocess.PIPE, text=True
            )
            took = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            took = {"error": type(error).__name__, "torch": ""}
        seconds -= time.monotonic() - start
        if "error" in took:
            print(f"{network.name:22} torch {took['torch']}: {took['error']}")
            continue
        share = row["mfu"] * row["ms"] / took["ms"]
        print(
            f"{network.name:22} bfloat16  {'torch':10} {row['batch']:5} "
            f"{took['ms']:8.2f} {share:6.1%} {took['gb']:6.2f}; mupax takes "
            f"{row['ms'] / took['ms']:.2f} of its time",
            flush=True,
        )


def measure(parts: list[str], minutes: float, smoke: bool, out: str) -> None:
    """The parts that use JAX, in this process; their numbers go to a file."""
    report = Report(minutes, smoke)
    device = jax.devices()[0]
    print(
        f"{device.device_kind} ({device.platform}); jax {jax.__version__}, flax "
        f"{flax.__version__}, optax {optax.__version__}, Python "
        f"{sys.version.split()[0]}{'; tiny sizes' if smoke else ''}",
        flush=True,
    )
    measured = {
        "roof": roof,
        "steps": steps,
        "sweeps": sweeps,
        "optimizers": optimizers,
    }
    for part, function in measured.items():
        if part in parts:
            function(report)
            pathlib.Path(out).write_text(json.dumps(report.rows))
    for what in report.left_out:
        print(f"left out for lack of time: {what}")
    if report.failed:
        sys.exit("some measurements failed")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="time to use")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on CPUs")
    parser.add_argument("--out", help="a file for the numbers, as JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.only, given.minutes, given.smoke, given.out)
        return
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(given.out or f"{folder}/rows.json").absolute()
        # A process of its own, whose memory is free for what follows.
        words = ["--here", f"--out={out}", f"--minutes={0.8 * given.minutes}"]
        words += ["--only", *given.only, *(["--smoke"] if given.smoke else [])]
        command = [sys.executable, "-m", "benchmarks.accelerator", *words]
        done = subprocess.run(command)
        rows = json.loads(out.read_text()) if out.exists() else []
        if "tests" in given.only and not given.smoke:
            tests()
        if "torch" in given.only:
            torch(rows, given.smoke, end - time.monotonic())
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
