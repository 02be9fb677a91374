"""`mupax predict`."""

import sys

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "model",
        "",
        "a run directory, a directory of zoo.save, a file of weights, the id of a "
        "repository on the Hugging Face hub, or a name of zoo.list_pretrained()",
        required="see mupax predict --help",
    ),
    Flag("name", None, "name of the model, for a file of weights"),
    Flag("revision", None, "branch, tag or commit of a repository"),
    Flag(
        "preprocessing",
        None,
        "KEY=VALUE: how the model expects images; may be repeated. Replaces what the "
        "weights state, and is needed where they state nothing: mean and std of each "
        "channel, for pixels from 0 to 1; also size, interpolation, crop and crop_mode "
        "of zoo.DataConfig",
        kind=list,
    ),
    Flag("top", 5, "number of classes to print; default: 5"),
)
EXAMPLES = """\
  mupax predict --model runs/cifar10_vit image.jpg
  mupax predict --model timm/resnet50.a1_in1k --top 3 one.jpg two.png
  mupax predict --model weights.safetensors --name resnet50 \\
      --preprocessing mean=0.485,0.456,0.406 \\
      --preprocessing std=0.229,0.224,0.225 image.jpg"""


def run(given: Parsed) -> None:
    """Print the likeliest classes of image files."""
    from .. import predict

    predict.run(given.flags.pop("model"), given.words, **given.flags)


COMMAND = Command(
    "classify image files with a trained model: labels and probabilities",
    run,
    FLAGS,
    config=False,
    words=sys.maxsize,
    arguments="  IMAGE ...        image files",
    examples=EXAMPLES,
)
