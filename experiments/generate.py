"""Continue a text with a trained decoder."""

import pathlib

import jax
import jax.numpy as jnp

from mupax import zoo
from mupax.zoo.families.decoder import Decoder

from .data.text import Tokenizer, open_tokenizer
from .errors import UserError, visible
from .loading import find_model, load_model


def run(
    model: str,
    prompt: str,
    *,
    tokenizer: str | None = None,
    name: str | None = None,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: str | None = None,
    seed: int = 0,
    bos: bool = False,
) -> None:
    """Print a prompt and its continuation; see the flags of `mupax generate`.

    Raises:
      UserError: a model or tokenizer that cannot be read, a model that does not take
        text, or a value out of range.
    """
    if tokens < 1:
        raise UserError(f"--tokens={tokens} must be 1 or more")
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"--seed={seed} must be a whole number of 64 bits")
    loaded = load_model(model, name=name)
    if not isinstance(loaded, Decoder):
        raise UserError(
            f"a {type(loaded).__name__} takes images, not text; use `mupax predict`"
        )
    words = tokenizer_of(loaded, find_model(model), tokenizer)
    encoded = words.encode(prompt, bos)
    if not encoded:
        raise UserError("the prompt has no tokens; give a longer one")
    special = len(encoded) - len(words.encode(prompt, False))
    if bos and not special:
        raise UserError("--bos: the tokenizer has no special tokens; leave it out")
    ends = loaded.eos if eos is None else _ends(eos)
    try:
        out = zoo.generate(
            loaded,
            jnp.asarray([encoded], jnp.int32),
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos=ends,
            key=jax.random.key(seed),
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    ids = out[0].tolist()
    added = ids[len(encoded) :]
    if ended := [place for place, token in enumerate(added) if token in ends]:
        ids = ids[: len(encoded) + ended[0]]
    if max(ids) >= words.vocabulary:
        raise UserError(
            f"the model drew token {max(ids)}, and the tokenizer has only "
            f"{words.vocabulary} tokens; give the model's tokenizer with --tokenizer"
        )
    # Decode all tokens at once: a token may be a part of a character.
    text = words.decode(ids[special:]).replace("\r\n", "\n")
    print(visible(text, keep="\n\t"))


def _ends(eos: str) -> tuple[int, ...]:
    """The tokens of `--eos`: numbers with commas between them, or "none"."""
    if eos == "none":
        return ()
    try:
        return tuple(int(token) for token in eos.split(","))
    except ValueError:
        raise UserError(
            f"--eos={eos} must be the number of a token, or several, e.g. 0,2, or none"
        ) from None


def tokenizer_of(model: Decoder, source: str, given: str | None) -> Tokenizer:
    """The tokenizer of a model.

    Args:
      model: must have at least as many tokens as the tokenizer.
      source: of the model; a directory or repository may hold a tokenizer.json.
      given: name of another tokenizer; see `open_tokenizer`.
    """
    vocabulary = model.embedding.shape[0]
    path = pathlib.Path(source)
    folder = path if path.is_dir() else path.parent
    if given is not None:
        name = given
    elif source in zoo.list_pretrained():
        name = "bytes"  # the models of the package read bytes
    elif not path.exists():  # a repository
        name = source
    elif (folder / "tokenizer.json").is_file():
        name = str(folder)
    elif vocabulary == 256:
        name = "bytes"
    else:
        raise UserError(
            f"there is no tokenizer.json beside {source}; give --tokenizer: a path, "
            "the id of a repository on the hub, or bytes"
        )
    tokenizer = open_tokenizer(name)
    if tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, more than the "
            f"{vocabulary} of the model; give the model's tokenizer with --tokenizer"
        )
    return tokenizer
