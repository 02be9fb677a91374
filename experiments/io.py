"""Files that survive: durable writes."""

import os
import pathlib
import tempfile

# It can only be read by setting it, which is not safe once threads run.
_UMASK = os.umask(0)
os.umask(_UMASK)


def write_durably(path: pathlib.Path, text: str) -> None:
    """Write a file so that a reader, or a power cut, finds it whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            # mkstemp makes files private; these are as readable as any other.
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
