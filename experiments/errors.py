"""The one exception that reaches a user as a sentence instead of a traceback."""


class UserError(Exception):
    """Bad input, said in one clear sentence that names what to do.

    The command line prints the sentence and exits with 2; nothing that stood in
    the run directory has been touched.
    """


class Stopped(Exception):
    """A run was told to stop, and saved what it had.

    Attributes:
      step: of its checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped and saved at step {step}")
        self.step = step
