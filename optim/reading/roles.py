"""Fan-in and fan-out axes of each parameter, from its uses in the program."""

import dataclasses
from collections.abc import Mapping

from ..scales.declare import AxesOf, Declarations, parsed
from ..scales.patterns import pattern
from .axes import Axes, Event, Use
from .leaves import whole
from .models import Reading
from .program import Node


@dataclasses.dataclass(frozen=True)
class Found:
    """The axes of a parameter as the program uses them.

    Attributes:
      path: the parameter.
      in_axes: the axes that are summed over.
      out_axes: the axes that index results, or entries of a vector.
      copies: the axes that count layers, experts or groups.
      table: whether `in_axes` counts the entries of a table.
      node: the operation that decides; None if the user declared the axes.
      tied_node: a second use, the other way around, e.g. of a tied table as a readout.
      mixed: the axes of which a part is summed over and a part indexes results.
      uncalled: whether it belongs to a well-known layer that the program does not call.
    """

    path: str
    in_axes: tuple[int, ...] = ()
    out_axes: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    table: bool = False
    node: Node | None = None
    tied_node: Node | None = None
    mixed: tuple[int, ...] = ()
    uncalled: bool = False

    @property
    def line(self) -> str:
        """Line of the user's code that decides."""
        return self.node.line if self.node is not None else ""

    @property
    def at(self) -> int:
        """Place of the deciding operation in the program."""
        return self.node.id if self.node is not None else -1


def find_roles(
    reading: Reading, axes: Axes, given: Declarations
) -> dict[str, Found | None]:
    """Find the axes of every parameter; None for one that the program does not use.

    Raises:
      ValueError: a primitive that cannot be read takes a parameter.
    """
    found: dict[str, Found | None] = {}
    for index, path in enumerate(reading.path_of):
        shape, events = reading.leaves[path].shape, axes.events[index]
        told = given.axes(whole(path), shape)
        if axes.unread[index] and not events and told is None:
            node = axes.unread[index][0]
            raise ValueError(
                f"{path!r} enters {node.op!r} ({node.line or 'unknown line'}), whose "
                "use of it cannot be read from the program; declare its axes: "
                f"{remedy({path: shape})}"
            )
        sliced = {a for p, a in axes.sliced if p == index}
        if whole(path) != path:
            sliced |= {a for a, n in enumerate(shape) if n == 1}
        units, grows = (
            {a for p, a in each if p == index} for each in (axes.units, axes.growing)
        )
        # Axes that it shares with a parameter that it is multiplied by, e.g. heads.
        labels = [axes.labels.get(e.node.id, ()) for e in events if e.axes(Use.LINK)]
        every = [each for of_node in labels for each in of_node]
        both = {a for each in every for p, a in each if p == index if len(each) > 1}
        later = {a for e in events for a in _linked_to_outputs(e, index, axes)}
        read = _found(path, len(shape), events, sliced, units, grows, both, later)
        layer = reading.leaves.layers.get(path)
        if told is not None:
            read = _agreed(from_declaration(path, told), read, told.insists)
        elif read is None and layer is not None:
            own = parsed(path, layer)
            if own.rank == len(shape):  # else it is a stack of layers
                read = dataclasses.replace(from_declaration(path, own), uncalled=True)
        found[path] = read
    return found


def from_declaration(path: str, told: AxesOf) -> Found:
    """The axes of a parameter as the user declared them."""
    return Found(path, told.in_axes, told.out_axes, told.copies, told.table)


def remedy(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """An example of declarations of these parameters."""
    alike: dict[str, list[str]] = {}
    for path, shape in shapes.items():
        first = " ".join("abcdefgh"[: len(shape) - 1])
        text = "in -> out" if len(shape) == 2 else f"{first} -> out"
        if max(shape[:-1], default=1) == 1:  # a bias, a token
            text = f"{first} d".strip() if shape else ""
        alike.setdefault(text, []).append(whole(path))
    told = [f"r'{pattern(*paths)}': '{text}'" for text, paths in alike.items()]
    return (
        f"axes={{{', '.join(told)}}}, with the axes that are summed over left of the "
        "arrow"
    )


def _agreed(told: Found, read: Found | None, insists: bool) -> Found:
    """What was declared, unless the program says something else.

    Raises:
      ValueError: it does.
    """
    if read is None or insists:
        return told
    if (told.in_axes, told.out_axes) == (read.in_axes, read.out_axes):
        return read
    raise ValueError(
        f"{told.path!r} is declared to sum over axes {told.in_axes} and to have the "
        f"outputs {told.out_axes}, but the program ({read.line or 'unknown line'}) "
        f"sums over {read.in_axes} and has the outputs {read.out_axes}; leave the "
        "declaration out, or end it with '!' if you are sure"
    )


def _found(
    path: str,
    rank: int,
    events: list[Event],
    sliced: set[int],
    units: set[int],
    grows: set[int],
    both: set[int],
    later: set[int],
) -> Found | None:
    if not events:
        return None
    copies = {a for e in events for a in e.axes(Use.COPY)} - units
    copies |= sliced - {a for e in events for a in e.uses}
    sums = [e for e in events if e.axes(Use.IN) or e.axes(Use.LINK)]

    def other_way(out: set[int]) -> Node | None:
        """A use that sums over the outputs, as a tied readout or autoencoder."""
        own = [e for e in sums if any(x.weight for x in e.node.operands)]
        into = ((e.node, set(e.axes(Use.IN))) for e in own)
        return next((node for node, axes in into if axes and axes <= out), None)

    tables = [e for e in events if e.axes(Use.TABLE)]
    looked = set(tables[0].axes(Use.TABLE)) - copies if tables else set()
    # Else rows are looked up that are the kernel of each token's expert.
    if looked:
        out = {*range(rank)} - copies - looked
        every = _sorted(looked), _sorted(out), _sorted(copies)
        return Found(path, *every, True, tables[0].node, other_way(out))
    event = next((e for e in sums if e.axes(Use.IN)), (sums or events)[0])
    summed, results = set(event.axes(Use.IN)), set(event.axes(Use.OUT))
    mixed = _sorted(summed & results - copies)
    if len(mixed) == 2 and summed == results:  # a symmetric function of a kernel
        summed, mixed = {mixed[0]}, ()
    # Summed against another parameter: the other end of what meets activations.
    links = {a for e in sums for a in e.axes(Use.LINK)}
    links = links - later or links  # one in the middle of a product
    if summed <= both or summed & links:
        summed |= links
    copies -= summed
    out = {*range(rank)} - copies - summed
    node, other = event.node, other_way(out)
    if other is not None and grows & summed and not grows & out:
        # First a readout, then an input.
        summed, out, node, other = out, summed, other, node
    every = _sorted(summed), _sorted(out), _sorted(copies)
    return Found(path, *every, node=node, tied_node=other, mixed=mixed)


def _linked_to_outputs(event: Event, index: int, axes: Axes) -> tuple[int, ...]:
    """The axes on which others multiply a parameter, if none sums over inputs."""
    others = [axes.depends(x) for x in event.node.operands]
    params = set[int]().union(*(each for each in others if index not in each))
    sums = any(e.axes(Use.IN) for param in params for e in axes.events[param])
    return () if sums else event.axes(Use.LINK)


def _sorted(axes: set[int]) -> tuple[int, ...]:
    return tuple(sorted(axes))
