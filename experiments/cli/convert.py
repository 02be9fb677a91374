"""`mupax convert`."""

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "source",
        "",
        "a run directory, a directory of zoo.save, a .safetensors or .npz file, a name "
        "of zoo.list_pretrained(), or the id of a repository on the Hugging Face hub "
        "(HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE=1 work as in the hub's own tools)",
        required="see mupax convert --help",
    ),
    Flag("revision", None, "branch, tag or commit of that repository"),
    Flag(
        "out",
        "",
        "output path, which must not exist: a .safetensors or .npz file for other "
        "libraries, or a directory for zoo.load_pretrained; also in gs:// or s3://",
        required="see mupax convert --help",
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
)
EXAMPLES = """\
  mupax convert --source weights.safetensors --model resnet50 --out runs/mine
  mupax convert --source timm/resnet50.a1_in1k --out runs/resnet50
  mupax convert --source runs/resnet50 --out resnet50.safetensors --layout timm"""


def run(given: Parsed) -> None:
    """Convert weights, and print a summary."""
    from .. import convert

    convert.run(**given.flags)


COMMAND = Command(
    "convert weights from and to timm, torchvision, big_vision and transformers",
    run,
    FLAGS,
    config=False,
    examples=EXAMPLES,
)
