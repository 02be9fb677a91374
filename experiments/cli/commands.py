"""The commands: what each is for, its flags, and what it calls.

A command imports what it calls when it runs, so that `--help` needs little.
"""

import sys

from ..errors import visible
from . import models as zoo_models
from . import processes
from .command import command
from .flags import Flag, Parsed

OF_WEIGHTS = (Flag("name", None, "name of the model, for a file of weights"),)
DRY_RUN = Flag(
    "dry_run", False, "print number, sizes and cost of the runs, and train nothing"
)


@command(
    "transfer",
    "tune small models, train the large one with the same hyperparameters, write a "
    "report",
    DRY_RUN,
)
def transfer(given: Parsed) -> None:
    """Sweep, train the target, write the report."""
    from .. import transfer
    from ..run import bucket

    if given.flags["dry_run"]:
        transfer.dry_run(given.config, given.workdir)
        return
    with bucket.opened(given.workdir) as folder:
        transfer.run(given.config, folder, command=["mupax", *given.argv])


@command(
    "sweep",
    "run a grid of hyperparameters at several model sizes, and report which transfer",
    DRY_RUN,
)
def sweep(given: Parsed) -> None:
    """Train the runs of the grid, and print the verdicts."""
    from ..run import bucket
    from ..sweep import command

    words = ["mupax", *given.argv]
    if given.flags["dry_run"]:
        command.run(given.config, given.workdir, words, dry_run=True)
        return
    with bucket.opened(given.workdir) as folder:
        command.run(given.config, folder, words)


@command(
    "train",
    "train one model, on one device or on many; run it again to resume",
    Flag("dry_run", False, "print a description of the run without training"),
    *processes.FLAGS,
)
def train(given: Parsed) -> None:
    """Train, alone or with other processes."""
    from ..run import bucket, commands

    config, workdir, words = given.config, given.workdir, ["mupax", *given.argv]
    with processes.joined(given):
        if given.flags["dry_run"]:
            commands.run(config, workdir, command=words, dry_run=True)
            return
        with bucket.opened(workdir, shared=given.flags["distributed"]) as folder:
            commands.run(config, folder, command=words)


@command(
    "eval",
    "evaluate a checkpoint of a run on the test split",
    Flag("checkpoint", "latest", "latest (default), best, or a step"),
    *processes.FLAGS,
)
def evaluate(given: Parsed) -> None:
    """Evaluate a checkpoint and print the result."""
    from ..run import bucket, commands

    shared = given.flags["distributed"]
    with (
        processes.joined(given),
        bucket.opened(given.workdir, writes=False, shared=shared) as folder,
    ):
        commands.evaluate(given.config, folder, given.flags["checkpoint"])


@command(
    "plan",
    "estimate memory, communication and time of a training step on TPUs or GPUs",
    Flag(
        "topology",
        "",
        "accelerators, e.g. v6e:16x16,v5p:4x4x4,gpu:8",
        required=True,
    ),
    Flag("batch_sizes", "", "e.g. 1024,4096; default: the config's batch size"),
)
def plan(given: Parsed) -> None:
    """Compile the training step for each topology and print its needs."""
    from ..estimate import plan

    plan.run(given.config, given.flags["topology"], given.flags["batch_sizes"])


@command(
    "explain",
    "print role, initialization and learning rate of each parameter of a config's "
    "model",
)
def explain(given: Parsed) -> None:
    """Print the table of a training config's model, or of a transfer's target."""
    from .. import transfer
    from ..run import commands

    explain = transfer.explain_target if "sweep" in given.config else commands.explain
    print(visible(str(explain(given.config)), keep="\n"))


@command(
    "coord-check",
    "check that activations of a config's model change alike at every width and depth",
    Flag("widths", "", "e.g. 64,128,256; default: 1, 2 and 4 times the base width"),
    Flag("depths", "", "e.g. 4,8,16; default: 1, 2 and 4 times the base depth"),
    Flag("seeds", 4, "number of initializations; default: 4"),
    Flag("rate", None, "learning rate; default: the config's", kind=float),
    Flag(
        "tolerance",
        0.15,
        "a slope up to this passes, within its error and if surely below 0.25; "
        "default: 0.15. The exit status is 1 if a slope is wrong",
    ),
)
def coord_check(given: Parsed) -> int:
    """Run the coordinate check of a training config; returns 1 if it is wrong."""
    from .. import coord_check
    from ..run import bucket

    rate = given.flags.pop("rate")
    with bucket.opened(given.workdir) as folder:
        result = coord_check.run(
            given.config, folder, learning_rate=rate, **given.flags
        )
    return 1 if result.failed else 0


@command(
    "convert",
    "convert weights from and to timm, torchvision, big_vision and transformers",
    Flag(
        "source",
        "",
        "a run directory, a directory of zoo.save, a .safetensors or .npz file, a name "
        "of zoo.list_pretrained(), or the id of a repository on the Hugging Face hub, "
        "owner/name or owner/name@revision (HF_TOKEN, HF_HUB_CACHE and "
        "HF_HUB_OFFLINE=1 work as in the hub's own tools)",
        required=True,
    ),
    Flag(
        "out",
        "",
        "output path, which must not exist: a .safetensors or .npz file for other "
        "libraries, or a directory for zoo.load_pretrained; also in gs:// or s3://",
        required=True,
    ),
    Flag(
        "model",
        None,
        "name of the model, see `mupax models`; needed only for files and for hub "
        "repositories that do not name a known model",
    ),
    Flag(
        "layout",
        None,
        "library whose parameter names an output file uses, e.g. timm or transformers; "
        "default: that of the source, or the first library that has the model",
    ),
    Flag(
        "option",
        None,
        "KEY=VALUE: an option of the model; may be repeated. out_features=N creates a "
        "new readout if the weights have another number of outputs",
        kind=list,
    ),
    Flag("seed", 0, "seed of a new readout; default: 0"),
    config=False,
    examples="""\
  mupax convert --source weights.safetensors --model resnet50 --out runs/mine
  mupax convert --source timm/resnet50.a1_in1k --out runs/resnet50
  mupax convert --source runs/resnet50 --out resnet50.safetensors --layout timm""",
)
def convert(given: Parsed) -> None:
    """Convert weights, and print a summary."""
    from .. import convert

    convert.run(**given.flags)


@command(
    "predict",
    "classify image files with a trained model: labels and probabilities",
    Flag(
        "model",
        "",
        "a run directory, a directory of zoo.save, a file of weights, the id of a "
        "repository on the Hugging Face hub, or a name of zoo.list_pretrained()",
        required=True,
    ),
    *OF_WEIGHTS,
    Flag("top", 5, "number of classes to print; default: 5"),
    config=False,
    words=sys.maxsize,
    arguments="  IMAGE ...        image files",
    examples="""\
  mupax predict --model runs/cifar10_vit image.jpg
  mupax predict --model timm/resnet50.a1_in1k --top 3 one.jpg two.png""",
)
def predict(given: Parsed) -> None:
    """Print the likeliest classes of image files."""
    from .. import predict

    predict.run(given.flags.pop("model"), given.words, **given.flags)


@command(
    "generate",
    "continue a text with a trained language model",
    Flag(
        "model",
        "",
        "a run directory, a directory of zoo.save, a file of weights, the id of a "
        "repository on the Hugging Face hub, or a model that comes with the package, "
        "e.g. gpt_shakespeare",
        required=True,
    ),
    Flag(
        "prompt",
        "",
        "the beginning of the text",
        required=True,
    ),
    Flag("tokens", 100, "number of tokens to add; default: 100"),
    Flag("temperature", 0.8, "0 takes the likeliest token; default: 0.8"),
    Flag("top_k", None, "draw from the k likeliest tokens only", kind=int),
    Flag(
        "top_p",
        None,
        "draw from the likeliest tokens whose probabilities sum to this, at most 1",
        kind=float,
    ),
    Flag(
        "eos",
        None,
        "numbers of the tokens that end the text, e.g. 0,2, or none to go on; default: "
        "the model's own",
    ),
    Flag("seed", 0, "seed of the draws; default: 0"),
    Flag(
        "tokenizer",
        None,
        "bytes, a tokenizer.json, or the id of a repository; default: the model's own",
    ),
    Flag("bos", False, "start with the tokenizer's special tokens, as Llama 3 needs"),
    *OF_WEIGHTS,
    config=False,
    examples="""\
  mupax generate --model runs/text_gpt --prompt "ROMEO:" --tokens 200
  mupax generate --model HuggingFaceTB/SmolLM2-135M --prompt "Gravity is" \\
      --top_k 40""",
)
def generate(given: Parsed) -> None:
    """Print a prompt and its continuation."""
    from .. import generate

    flags = given.flags
    generate.run(flags.pop("model"), flags.pop("prompt"), **flags)


@command(
    "models",
    "list the zoo's models: sizes, parameters, FLOPs and sources of weights",
    Flag("names", False, "print the names only, one per line"),
    config=False,
    words=1,
    arguments="  PATTERN          a pattern of names, e.g. 'res*'; default: all",
)
def models(given: Parsed) -> None:
    """Print the models of the zoo: sizes, parameters, FLOPs and sources of weights."""
    print(zoo_models.listing(given.words, names_only=given.flags["names"]))
