"""The one exception that reaches a user as a sentence instead of a traceback."""


class UserError(Exception):
    """Bad input, said in one clear sentence that names what to do.

    The command line prints the sentence and exits with 2; nothing that stood in
    the run directory has been touched.
    """
