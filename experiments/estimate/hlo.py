"""The collectives of a compiled program, parsed from its HLO."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

# The TPU compiler writes an overlapped collective at its start, in each fusion that
# overlaps it, and at its end.
_OVERLAPPED, _DONE = "async_collective_fusion", "async-collective-done"
# An all-reduce of which each device keeps only a part counts as a reduce-scatter.
_FUSED_SCATTER = "all-reduce-scatter"

_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLED = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation|condition)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")

# Axes of a mesh: "mesh['a'=4,'b'=2], device_ids=(...) {'a'}", and a part of an axis,
# 'a':(2)4, is its last number.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_LISTED = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      shapes: of the result on each device, e.g. ("f32", (16, 64)).
      group: number of devices that take part.
      times: executions per step.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    group: int
    times: int

    @property
    def bytes(self) -> int:
        """Bytes of the result on each device."""
        return sum(_BYTES[dtype] * math.prod(shape) for dtype, shape in self.shapes)

    @property
    def sent(self) -> float:
        """Bytes that each device sends per step, along a ring."""
        share = (self.group - 1) / self.group
        factor = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": share * self.group,
            "all-to-all": share,
            "collective-permute": 1.0,
        }[self.kind]
        return self.times * factor * self.bytes


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives of a compiled program, one entry per operation.

    Args:
      text: `compiled.as_text()`.
      devices: number of devices of the program.
    """
    bodies, entry = _computations(text)
    times = _times(bodies, entry)
    listed = []
    for name, lines in bodies.items():
        if not times[name]:
            continue
        for line in lines:
            operation = _OPERATION.match(line)
            if operation is None:
                continue
            kind = operation[2].removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            shapes = list(_shapes(operation[1]))
            if operation[2].endswith("-start") and kind != "all-reduce":
                # An asynchronous operation also returns its operands.
                shapes = shapes[len(shapes) // 2 :][: max(1, len(shapes) // 2)]
            group = _group(line, devices)
            if name.startswith(_FUSED_SCATTER):
                kind = "reduce-scatter"
                shapes = [(d, (math.prod(shape) // group,)) for d, shape in shapes]
            if group > 1:
                listed.append(Collective(kind, tuple(shapes), group, times[name]))
    return listed


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    name, entry = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _times(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """Executions of each computation per step."""
    times: dict[str, int] = collections.defaultdict(int)

    def visit(name: str, count: int) -> None:
        if name.startswith(_OVERLAPPED):
            return
        times[name] += count
        for line in bodies.get(name, ()):
            if _DONE in line.split("=")[0]:
                continue
            for called in _CALLED.findall(line):
                visit(called, count)
            for group in _BRANCHES.findall(line):
                for called in group.replace("%", "").split(", "):
                    visit(called, count)
            if body := _BODY.search(line):
                visit(body[1], count * _trips(line, bodies))

    visit(entry, 1)
    return times


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Iterations of a loop, from the compiler's note or the loop's condition."""
    if noted := _TRIPS.search(line):
        return int(noted[1])
    condition = _CONDITION.search(line)
    inside = bodies.get(condition[1], []) if condition else []
    bounds = [int(n) for text in inside for n in _CONSTANT.findall(text)]
    # Loops without a bound, e.g. rejection sampling, count once.
    return max(bounds, default=1)


def _shapes(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for dtype, dims in _SHAPE.findall(text):
        if dtype in _BYTES:
            yield dtype, tuple(int(n) for n in dims.split(",") if n)


def _group(line: str, devices: int) -> int:
    if match := _GROUPS.search(line):
        return len(match[1].split(","))
    if match := _IOTA_GROUPS.search(line):
        return int(match[2])
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(n) for name, n in _AXIS.findall(match[1])}
        listed = _LISTED.findall(match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in listed)
    if "source_target_pairs" in line:
        return 2
    return devices
