"""`push_to_hub`: publish a model on the Hugging Face hub, with a model card."""

import os
import pathlib
import shutil
import tempfile

from flax import nnx

from . import hub, remote, saving

_CARD = "README.md"


def push_to_hub(
    model: nnx.Module | str | os.PathLike[str],
    repository: str,
    *,
    notes: str = "",
    license: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    message: str = "Upload a model of mupax",
) -> str:
    """Upload a model to the Hugging Face hub; `load_pretrained(repository)` loads it.

    The repository is created if it does not exist. It gets the files that `zoo.save`
    writes, and a model card with tags for the hub, all in one commit.

    Args:
      model: from `zoo.create` or `zoo.load_pretrained`; or a directory that `zoo.save`
        or a run wrote, e.g. "runs/demo/model", also in object storage.
      repository: `owner/name`.
      notes: for the model card, e.g. training data and test accuracy. Not allowed with
        a directory, which has a card.
      license: for the card, e.g. "apache-2.0".
      private: whether a new repository is private.
      revision: the branch; None for the main one.
      token: with write permission; None for the token that `hf auth login` stored or
        HF_TOKEN holds.
      message: of the commit.

    Returns:
      The URL of the commit.

    Raises:
      ValueError: huggingface_hub is not installed, `repository` is not an id, the
        directory holds no model of `zoo.save`, or the upload failed. Nothing is
        uploaded then.
    """
    if not hub.is_name(repository):
        raise ValueError(
            f"{repository!r} is not the id of a repository; write owner/name"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "model"
        if isinstance(model, nnx.Module):
            saving.save(model, folder, notes=notes)
        else:
            if notes:
                raise ValueError(
                    f"{model} has a model card already; edit its {_CARD}, or leave "
                    "notes out"
                )
            directory = remote.local(model)
            saving.read_config(directory)  # checks all files
            shutil.copytree(directory, folder)
        name = saving.read_config(folder).model
        card = folder / _CARD
        text = card.read_text() if card.exists() else f"# {name}\n"
        card.write_text(model_card(text, repository, license=license))
        return hub.upload(
            folder,
            repository,
            private=private,
            revision=revision,
            token=token,
            message=message,
        )


def model_card(text: str, repository: str, *, license: str | None = None) -> str:
    """Adapt the card of a saved model for the hub.

    Args:
      text: the card that `zoo.save` wrote.
      repository: `owner/name`, which replaces the directory in the card's example.
      license: e.g. "apache-2.0"; None for none.

    Examples:
      >>> print(model_card("# resmlp", "me/mine", license="mit"))
      ---
      license: mit
      library_name: mupax
      ---
      # resmlp
    """
    text = text.replace("path/to/this/directory", repository)
    if not text.startswith("---\n"):  # written before cards had a header
        text = f"---\nlibrary_name: mupax\n---\n{text}"
    header, _, _ = text[4:].partition("\n---")
    if license and not any(x.startswith("license:") for x in header.splitlines()):
        text = f"---\nlicense: {license}\n{text[4:]}"
    return text
