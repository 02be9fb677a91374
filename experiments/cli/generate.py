"""`mupax generate`."""

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "model",
        "",
        "a run directory, a directory of zoo.save, a file of weights, the id of a "
        "repository on the Hugging Face hub, or a model that comes with the package, "
        "e.g. gpt_shakespeare",
        required="see mupax generate --help",
    ),
    Flag(
        "prompt",
        "",
        "the beginning of the text",
        required="give the beginning of a text",
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
    Flag("name", None, "name of the model, for a file of weights"),
    Flag("revision", None, "branch, tag or commit of a repository"),
)
EXAMPLES = """\
  mupax generate --model runs/text_gpt --prompt "ROMEO:" --tokens 200
  mupax generate --model HuggingFaceTB/SmolLM2-135M --prompt "Gravity is" \\
      --top_k 40"""


def run(given: Parsed) -> None:
    """Print a prompt and its continuation."""
    from .. import generate

    flags = given.flags
    generate.run(flags.pop("model"), flags.pop("prompt"), **flags)


COMMAND = Command(
    "continue a text with a trained language model",
    run,
    FLAGS,
    config=False,
    examples=EXAMPLES,
)
