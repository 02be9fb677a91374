"""What is asked for: a scale, and where data, tables and pictures are."""

import dataclasses
import pathlib

# "wide" tests whether the size is the reason for a verdict at "long".
SCALES = ("laptop", "medium", "long", "wide", "paper")
DRAWN = tuple(scale for scale in SCALES if scale != "wide")


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `python -m papers figure`.

    Attributes:
      scale: one of `SCALES`.
      folder: folder of the pictures. It holds a folder of sweeps for each scale.
      data_dir: directory of TFDS; None for TFDS's default.
      dataset: the dataset to use instead of the paper's.
      tables: folder of the tables.
      from_data: draw from the tables alone, and train nothing.
    """

    scale: str
    folder: pathlib.Path = pathlib.Path()
    data_dir: str | None = None
    dataset: str | None = None
    tables: pathlib.Path = pathlib.Path("data")
    from_data: bool = False

    @property
    def paper(self) -> bool:
        """Whether the scale is the paper's."""
        return self.scale == "paper"
