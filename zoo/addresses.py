"""Addresses as everybody may see them: without secrets, and not as local copies."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

# An address ends at a space or quote. Punctuation before that belongs to the sentence.
# Object storage may be written with one slash.
_ADDRESS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*:///?|\b(?:s3a?|gc?s|https?):/)"
    r"(?P<rest>[^\s'\"<>`]+?)(?P<end>[),.;:\]}]*(?=[\s'\"<>`]|$))",
    re.IGNORECASE,
)
# A query, or a fragment of the form of one.
_AFTER_PATH = re.compile(r"\?|#(?=[^/]*=)")
_HOST = re.compile(r"([^/?#@:]*|\[[^]]*\])(:\d+)?(?=[/?#]|$)")
_copies: dict[str, str] = {}  # addresses by the paths of their local copies


def name_copy(address: str, path: str) -> None:
    """Name an address in place of its local copy, in `public` and `named`."""
    _copies[path] = address


@contextlib.contextmanager
def copied(address: str, folder: str) -> Iterator[None]:
    """As `name_copy`, in a context.

    Examples:
      >>> with copied("s3://bucket/run", "/cache/1f/run"):
      ...     public("wrote /cache/1f/run/report.html")
      'wrote s3://bucket/run/report.html'
    """
    name_copy(address, folder)
    try:
        yield
    finally:
        _copies.pop(folder, None)


def named(text: str) -> str:
    """Replace the directories of local copies by their addresses."""
    for folder, address in list(_copies.items()):
        text = text.replace(folder, address)
    return text


def public(value: Any) -> Any:
    """Drop user, password, query and tokens in the fragment of addresses in a text.

    These may be secrets, e.g. the signature of a signed address. Local copies are named
    by their addresses. Dictionaries, lists and tuples are copied with their texts
    replaced; other values are returned as is.

    Examples:
      >>> public("text:https://me:secret@host/a.txt?X-Amz-Signature=1f")
      'text:https://host/a.txt'
      >>> public(["postgresql://u:p@db:5432/runs", "s3://KEY:SEC/RET@bucket", 3])
      ['postgresql://db:5432/runs', 's3://bucket', 3]
      >>> public("https://host/a#access_token=1f, https://host/a#usage")
      'https://host/a, https://host/a#usage'
      >>> public("s3://bucket/resnet@v2, or user@host")
      's3://bucket/resnet@v2, or user@host'
    """
    if isinstance(value, str):
        value = named(value)
        # Quick, as most texts have none.
        return _ADDRESS.sub(_without_secrets, value) if ":/" in value else value
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [public(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _without_secrets(match: re.Match[str]) -> str:
    rest = match["rest"]
    if not _HOST.match(rest) and "@" in rest:
        # Unescaped passwords may contain slashes, and paths may contain "@".
        authority = re.split("[/?#]", rest)[0]
        user = (authority if "@" in authority else rest).rpartition("@")[0]
        rest = rest[len(user) + 1 :]
    return match["scheme"] + _AFTER_PATH.split(rest, 1)[0] + match["end"]
