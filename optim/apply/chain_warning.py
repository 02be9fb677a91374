"""The warning about set-ups that train, and may not transfer."""


class ChainWarning(UserWarning):
    """Warning: this chain trains, but its optimal learning rate may move with size.

    Examples:
      >>> import warnings
      >>> warnings.simplefilter("error", ChainWarning)  # to make it an error
      >>> warnings.simplefilter("default", ChainWarning)
    """
