"""What stands in the slots of a line: texts, drawn for tensors of which one device knows the shape.

What cannot be filled raises, and the line is drawn again; what torch then refuses is kept now and
then, as the ranks have to refuse it, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from redistribution_oracle import legal
from rule_cases import CASES
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor.placement_types import StridedShard

DTYPES = ("torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.bool",
          "torch.uint8", "torch.bfloat16", "torch.float16")  # fmt: skip
# Cases that say what torch refuses, or whose result is no number of this program's.
# Torch's second derivative of `_weight_norm` takes the norm for a constant; whether a matrix is
# singular, rounding decides.
_OTHERS = "composed25 composed26 composed27 composed28 composed36 solved_least5"
NAMES = sorted(
    name for name, op in CASES.items()
    if not (op.refuses or op.data or name in _OTHERS.split())
)  # fmt: skip


class Unfilled(Exception):
    """There is nothing that could stand in a slot."""


@dataclass
class Line:
    """A line that is being drawn.

    Attributes:
        chosen: draws.
        pool: the tensors that are there, by name, as one device has them.
        sizes: of the mesh.
        got: what stands in the slots so far.
    """

    chosen: random.Random
    pool: dict[str, torch.Tensor]
    sizes: tuple[int, ...]
    got: dict[str, str] = field(default_factory=dict)

    def fill(self, slot: str) -> str:
        """What stands in a slot, the same wherever it stands in the line."""
        if slot not in self.got:
            self.got[slot] = str(SLOTS[slot](self))
        return self.got[slot]

    @property
    def x(self):
        return self.pool[self.got["x"]]

    @property
    def dim(self):
        if "d" not in self.got:
            self.got["d"] = str(a_dim(self))
        return int(self.got["d"])

    @property
    def extent(self):
        return self.x.shape[self.dim] if self.x.ndim else 1


def any_tensor(line):
    """Late tensors are read more often than early ones."""
    names = list(line.pool)
    return names[min(len(names) - 1, int(line.chosen.random() ** 0.6 * len(names)))]


def fitting(line, fits):
    names = [name for name, x in line.pool.items() if fits(x)]
    return line.chosen.choice(names) if names else line.got["x"]


def broadcasting(line):
    def fits(y):
        pairs = zip(reversed(line.x.shape), reversed(y.shape), strict=False)
        return all(a == b or 1 in (a, b) for a, b in pairs)

    return fitting(line, fits)


def same_shape(line):
    return fitting(line, lambda y: y.shape == line.x.shape and y.dtype == line.x.dtype)


def written(line):
    """What is written: a tensor that fits into the target, or, rarely, one that does not."""

    def fits(y):
        pairs = zip(reversed(line.x.shape), reversed(y.shape), strict=False)
        return y.ndim <= line.x.ndim and all(b in (a, 1) for a, b in pairs)

    return broadcasting(line) if line.chosen.random() < 0.05 else fitting(line, fits)


def multiplied(line):
    def fits(y):
        return y.ndim in (1, 2) and line.x.ndim and y.shape[0] == line.x.shape[-1]

    found = fitting(line, fits)
    return found if fits(line.pool[found]) else f"{found}.mT"


def number(line):
    plain = line.x.is_floating_point()
    return line.chosen.choice([0.5, -1.5, 2.0, 3, -1, 0.25] if plain else [2, 3, 1, -1, True])


def a_dim(line):
    n = line.x.ndim
    return line.chosen.randrange(-n, n) if n else line.chosen.choice([0, -1])


def item(line):
    items = [basic_item(line.chosen, n) for n in line.x.shape]
    items = items[: line.chosen.randint(1, max(1, len(items)))] or ["..."]
    if line.chosen.random() < 0.25:
        items.insert(line.chosen.randrange(len(items) + 1), "None")
    if line.chosen.random() < 0.15 and "..." not in items:
        items.append("...")
    return ", ".join(map(str, items))


def basic_item(chosen, extent):
    if chosen.random() < 0.25 and extent:
        return str(chosen.randrange(-extent, extent))
    if chosen.random() < 0.3:
        return ":"
    low, high = sorted((chosen.randint(0, extent), chosen.randint(0, extent)))
    low, high = chosen.choice([(low, high), ("", high), (low, ""), (low, high - extent)])
    step = chosen.choice(["", "", ":2", ":3"])
    return f"{low}:{high}{step}"


def factors(chosen, numel, count):
    found = []
    for _ in range(count - 1):
        found.append(chosen.choice([n for n in range(1, numel + 1) if numel % n == 0]))
        numel //= found[-1]
    return [*found, numel]


def new_shape(line):
    numel = line.x.numel()
    if not numel:
        return (*line.x.shape, 1)[::-1]
    target = factors(line.chosen, numel, line.chosen.randint(1, 4))
    if line.chosen.random() < 0.3:
        target[line.chosen.randrange(len(target))] = -1
    return tuple(target)


def higher(line):
    # Of one dim, `flatten` is the tensor itself on one device only; see docs/limits.md.
    if int(line.got["low"]) >= line.x.ndim - 1:
        raise Unfilled
    return line.chosen.randint(int(line.got["low"]) + 1, line.x.ndim - 1)


def split_sizes(line):
    cuts = sorted(line.chosen.randint(0, line.extent) for _ in range(2))
    return [b - a for a, b in pairwise([0, *cuts, line.extent])]


def wider(line):
    shape = [3 if n == 1 and line.chosen.random() < 0.7 else -1 for n in line.x.shape]
    return tuple([2] * (line.chosen.random() < 0.5) + shape) or (2,)


def index_of(line, extent, count=None):
    if not extent:
        raise Unfilled
    count = line.chosen.randint(0, 4) if count is None else count
    return f"torch.tensor({[line.chosen.randrange(extent) for _ in range(count)]}).long()"


def columns(line):
    line.got["d"] = str(line.dim % max(1, line.x.ndim))
    return ":, " * line.dim


def places(line):
    if not line.extent or not line.x.numel():
        raise Unfilled
    rows = [line.chosen.randrange(line.extent) for _ in range(4)]
    count = line.x.numel()
    return f"torch.tensor({rows * -(-count // 4)})[:{count}].reshape({tuple(line.x.shape)})"


def mask(line):
    names = [n for n, y in line.pool.items() if y.shape == line.x.shape and y.dtype == torch.bool]
    if names and line.chosen.random() < 0.5:
        return line.chosen.choice(names)
    return f"({line.got['x']} > 0)"


def order(line):
    return tuple(line.chosen.sample(range(line.x.ndim), line.x.ndim)) or ()


def placements(line):
    return placements_of(line.chosen, line.sizes, tuple(line.x.shape), line.x.dtype)


def placements_of(chosen, sizes, shape, dtype):
    found = []
    for count in sizes:
        pick = Replicate()
        if chosen.random() < 0.8:
            pick = cut_of(chosen, count, len(shape), dtype)
        fits = legal((*found, pick), sizes[: len(found) + 1], shape)
        found.append(pick if fits else Replicate())
    return text_of(found)


def cut_of(chosen, count, ndim, dtype):
    if dtype is not torch.bool and chosen.random() < 0.2:
        return Partial("avg") if dtype.is_floating_point and chosen.random() < 0.2 else Partial()
    if not ndim:
        return Replicate()
    dim = chosen.randrange(ndim)
    kind = chosen.randrange(9)
    if kind < 5:
        return Shard(dim)
    if kind == 5:
        return InterleavedShard(dim, chosen.randint(2, 4))
    if kind == 6:
        return StridedShard(dim, split_factor=chosen.randint(2, 3))
    last = dim if kind == 7 else chosen.randint(dim, ndim - 1)
    return RaggedShard(range(dim, last + 1), [chosen.randint(0, 2) for _ in range(count)])


def text_of(found):
    return str(found).replace("Partial(sum)", "Partial()").replace("Partial(avg)", 'Partial("avg")')


def case(line):
    """A case of the rules' own table, on tensors brought to the shapes and kinds that it wants."""
    name = line.chosen.choice(NAMES)
    operands = [any_tensor(line) for _ in CASES[name].operands]
    return f"case({', '.join([repr(name), *operands])})"


SLOTS = {
    "x": any_tensor,
    "y": broadcasting,
    "s": same_shape,
    "w": written,
    "v": multiplied,
    "k": number,
    "q": lambda line: f"torch.tensor({number(line)})",
    "d": a_dim,
    "e": a_dim,
    "n": lambda line: line.chosen.choice([1, 2, 2, 3, 4]),
    "o": lambda line: line.chosen.choice([0, 0, 1, -1, 2]),
    "z": lambda line: line.chosen.choice([0, 0, 1, -1]),
    "z2": lambda line: line.chosen.choice([0, 0, 1]),
    "at": lambda line: line.chosen.randrange(max(1, line.extent)),
    "start": lambda line: line.chosen.randint(0, line.extent),
    "rest": lambda line: line.chosen.randint(0, line.extent - int(line.got["start"])),
    "low": lambda line: line.chosen.randrange(max(1, line.x.ndim)),
    "high": higher,
    "item": item,
    "shape": new_shape,
    "factors": lambda line: factors(line.chosen, line.extent, 2) if line.extent else [0, 3],
    "sizes": split_sizes,
    "wider": wider,
    "index": lambda line: index_of(line, line.extent),
    "index0": lambda line: index_of(line, line.x.shape[0] if line.x.ndim else 0),
    "five": lambda line: index_of(line, 5, min(3, line.x.numel())),
    "columns": columns,
    "places": places,
    "mask": mask,
    "order": order,
    "placements": placements,
    "dtype": lambda line: line.chosen.choice(DTYPES),
    "case": case,
}
