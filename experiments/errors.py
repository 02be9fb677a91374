"""Exceptions that the command line turns into one sentence."""


class UserError(Exception):
    """Bad input. The message is one sentence that names the remedy.

    The command line prints it and exits with status 2. Existing files are unchanged.
    """


class Diverged(UserError):
    """The training loss is not finite."""


class Stopped(Exception):
    """A run was told to stop, and saved a checkpoint.

    Attributes:
      step: of the checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped and saved at step {step}")
        self.step = step
