"""Names and values of hyperparameters, formatted for reports."""

import markupsafe

from ..sweep import grids

_NOUNS = {
    "b1": "β1",
    "b2": "β2",
    "beta": "β",
    "eps": "ε",
    "richness": "richness μ0",
    "adam_b1": "Adam's β1",
    "adam_b2": "Adam's β2",
    "adam_weight_decay": "Adam's weight decay",
}


def noun(name: str) -> str:
    """The name of a hyperparameter in a sentence.

    Examples:
      >>> noun("learning_rate"), noun("b2")
      ('learning rate', 'β2')
    """
    return _NOUNS.get(name, name.replace("_", " "))


def value(name: str, coordinate: float) -> str:
    """The value at a coordinate of the grid, rounded.

    Args:
      name: name of the hyperparameter.
      coordinate: its value in the unit of `grids.coordinate`.

    Examples:
      >>> value("learning_rate", -6.5), value("b1", 3.3), value("warmup", 0.1)
      ('0.011', '0.898', '0.1')
    """
    number = grids.value(name, coordinate)
    if grids.unit(name) == "log2(1-x)":
        # Enough digits to differ from 1.
        digits = max(2, round(0.3 * coordinate) + 2)
        return f"{number:.{digits}f}".rstrip("0").rstrip(".")
    if 100 <= number < 1e5:
        return f"{number:.0f}"
    return f"{number:.2g}"


def factor(name: str, change: float) -> str:
    """The distance of two values: a ratio, or a difference where the grid is linear.

    Examples:
      >>> factor("learning_rate", -3.21), factor("warmup", 0.05)
      ('9.3x', '0.05')
    """
    if grids.unit(name) == "linear":
        return f"{abs(change):.2g}"
    return f"{2 ** abs(change):.2g}x"


def signed(name: str, change: float) -> str:
    """A shift with its sign: in octaves, or in units where the grid is linear.

    Examples:
      >>> signed("learning_rate", -0.983), signed("warmup", 0.0512)
      ('−0.98', '+0.051')
    """
    if grids.unit(name) == "linear":
        text = f"{change:+.2g}"
    else:
        text = f"{change:+.2f}"
        text = "0.00" if float(text) == 0 else text
    return text.replace("-", "−")


def power(name: str, coordinate: float | None) -> markupsafe.Markup:
    """A value as HTML: a power of two, or a number where the grid is linear."""
    if coordinate is None:
        return markupsafe.Markup('<em class="none">nothing trained</em>')
    unit = grids.unit(name)
    if unit == "linear":
        return markupsafe.Markup("{}").format(value(name, coordinate))
    one = "1 − " if unit == "log2(1-x)" else ""
    exponent = -coordinate if one else coordinate
    # Adding zero turns -0.0 into 0.0.
    text = f"{round(exponent, 1) + 0.0:.1f}".replace("-", "−")
    return markupsafe.Markup("{}2<sup>{}</sup>").format(one, text)


def tick(name: str, coordinate: float) -> str:
    """The label of a value on the axis of a picture.

    Examples:
      >>> tick("learning_rate", -5.0), tick("b1", 3.0), tick("warmup", 0.1)
      ('$2^{-5}$', '$1-2^{-3}$', '0.1')
    """
    match grids.unit(name):
        case "log2":
            return f"$2^{{{coordinate:g}}}$"
        case "log2(1-x)":
            return f"$1-2^{{{-coordinate:g}}}$" if coordinate else "0"
    return f"{coordinate:g}"
