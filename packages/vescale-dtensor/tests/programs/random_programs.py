"""Draws a random program, which its grammar and its number determine, as lines of Python.

Lines are run on one device as they are drawn, so that shapes are known and most lines mean
something; and once more with noise in what is rounded, to leave out what rounding decides (a jump,
a tie, a power of a difference): another order of sums would show there, and no fault.
"""

from __future__ import annotations

import random
import re
import warnings
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from grammars import GRAMMARS
from rule_cases import CASES
from slots import Line, Unfilled, placements_of
from vescale_dtensor.rules._check_trial import flat

MESHES = ((2,), (3,), (4,), (2, 2))
EXTENTS = (1, 2, 3, 4, 5, 6, 7) * 3 + (0, 1, 1)
LEVELS = ("values", "gradients", "second derivatives")
MOST = 150
HALVES = (torch.float16, torch.bfloat16)
GRID = 64
NAME = re.compile(r"\bx\d+\b")


@dataclass(frozen=True)
class Input:
    """A tensor that a program begins with, as text: `plain` ones are no DTensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: str
    wants: bool
    plain: bool = False


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        seed: of the values of its inputs.
        sizes: of the mesh.
        level: up to which derivative it is compared.
    """

    grammar: str
    seed: int
    sizes: tuple[int, ...]
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    level: str


def numbers(shape, dtype, seed):
    """Small multiples of 1/4, or small integers."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, dtype)
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    quarters = 4 if dtype is torch.float64 else 1
    return (torch.randint(-8, 9, shape, generator=generator) / quarters).clamp(-3, 3).to(dtype)


def values_of(program):
    """What the inputs are, by name."""
    return {
        each.name: numbers(each.shape, each.dtype, 1000 * program.seed + place)
        for place, each in enumerate(program.inputs)
    }


def assigned(line):
    """The name that a line makes; None: it changes what is there."""
    found = re.match(r"(x\d+) = ", line)
    return found and found[1]


def used(line):
    """The names that a line uses."""
    made = assigned(line)
    return set(NAME.findall(line.split("= ", 1)[1] if made else line))


def run_line(line, names):
    """Run a line; the exception that it raised, if any."""
    # The program's draws are those of its line.
    torch.manual_seed(zlib.crc32(line.encode()))
    try:
        exec(compile(line, line, "exec"), names)
    except Exception as error:
        return error
    return None


def overwrites_its_source(line, names):
    """Whether a line copies part of a tensor into the tensor, in another form.

    Torch looks at no such overlap of tensors with gaps or of other shapes: what is read after it
    was written depends on the order in which a kernel goes.
    """
    if not (found := re.match(r"(x\d+)\.copy_\((x\d+)\b", line)):
        return False
    target, source = names[found[1]], names[found[2]]
    if target is source or not (target.numel() and source.numel()):
        return False
    places = [x.untyped_storage().data_ptr() for x in (target, source)]
    return places[0] == places[1] and target.shape != source.shape


def space(relayout, leaves):
    """The names that a program's lines know."""
    return {"torch": torch, "F": F, "to": relayout, "case": case, **leaves}


def tensors_of(names):
    return {name: x for name, x in names.items() if NAME.fullmatch(name)}


def objective(names):
    """One number of all that a program has made, with second derivatives."""
    total = None
    for place, x in enumerate(tensors_of(names).values()):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad:
            wide = x.float() if x.dtype in HALVES else x
            part = (wide * wide).sum() * (0.25 * (place % 4)) + wide.sum() * (place % 3 + 1)
            total = part.double() if total is None else total + part.double()
    return total


def derivatives(names, leaves, level, gradient_of):
    """First or first and second derivatives of `objective` by leaves; None where there is none."""
    total = objective(names)
    if total is None or not leaves:
        return []
    if level == LEVELS[1]:
        total.backward()
        return [gradient_of(leaf) for leaf in leaves]
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    parts = [(g.detach() + g * g).sum() / 16 for g in first if g is not None and g.requires_grad]
    second = [None] * len(leaves)
    if parts:
        second = torch.autograd.grad(sum(parts), leaves, allow_unused=True)
    return [*first, *second]


# --- Cases of the rules' own table, as lines


def case(name, *given):
    """The results of a case on tensors of the program, as moderate numbers on a grid."""
    op = CASES[name]
    pairs = zip(given, op.operands, strict=True)
    found = op.call(*(fed(x, operand) for x, operand in pairs))
    made = [tamed(x) for x in flat(found) if isinstance(x, torch.Tensor)]
    return made[0] if len(made) < 2 else made[0].sum() + made[1]


def fed(x, operand):
    """A tensor of a program, in the shape and kind that an operand of a case has."""
    count = torch.Size(operand.shape).numel()
    line = x.reshape(-1)
    if count and not x.numel():
        line = x.new_ones(1)
    if line.shape[0] < count:
        line = torch.cat([line] * -(-count // max(1, line.shape[0])))
    shaped = line[:count].reshape(operand.shape)
    shaped = shaped if operand.grad else shaped.detach()
    if operand.kind == "b":
        return shaped > 0
    if operand.kind == "i":
        span = operand.high - operand.low
        return (shaped.detach().abs() * GRID).long() % max(1, span) + operand.low
    shaped = shaped.double()
    return shaped.abs() + 0.25 if operand.kind == "p" else shaped * 1


def tamed(x):
    """A result as a tensor of the program: a number of moderate size, on a grid."""
    x = x.abs() if x.is_complex() else x
    # Terms of a sum may overflow where the sum does not, or cancel to what is no number.
    x = torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).clamp(-4, 4)
    result = x + (torch.round(x * GRID) / GRID - x).detach()
    if result.requires_grad:
        result.register_hook(_tame_gradient)
    return result


# --- Drawing


def _tame_gradient(gradient):
    # Torch hands on None where a second backward has nothing for it.
    return None if gradient is None else torch.nan_to_num(gradient, 0.0, 0.0, 0.0).clamp(-8, 8)


def generate(grammar, seed, rules=None):
    """The program of a grammar with a number; `rules` stand in for those of that name."""
    with warnings.catch_warnings(action="ignore"):
        return _Drawing(grammar, seed, rules or GRAMMARS[grammar]).program()


class _Drawing:
    """A program that is being drawn, and its values on one device, without and with noise."""

    def __init__(self, grammar, seed, rules):
        self.grammar, self.seed, self.rules = grammar, seed, rules
        self.chosen = random.Random(f"{grammar} {seed}")
        self.sizes = self.chosen.choice(MESHES)
        self.wants = self.chosen.random() < self.rules.gradients
        self.lines = []
        names = [f"x{i}" for i in range(self.chosen.randint(1, 3))]
        self.inputs = tuple(self._input(name) for name in names)

    def program(self):
        program = Program(self.grammar, self.seed, self.sizes, self.inputs, (), LEVELS[0])
        self.leaves = [leaves_of(program), leaves_of(program)]
        self.sides = [space(lambda x, _: x.clone(), leaves) for leaves in self.leaves]
        count = self.chosen.randint(2, self.rules.length)
        for _ in range(12 * count):
            if len(self.lines) == count:
                break
            self._try_line()
        level = self._level()
        return Program(self.grammar, self.seed, self.sizes, self.inputs, tuple(self.lines), level)

    def _input(self, name):
        chosen = self.chosen
        shape = tuple(chosen.choice(EXTENTS) for _ in range(chosen.choice([0, 1, 2, 2, 3, 3, 4])))
        while torch.Size(shape).numel() > MOST:
            shape = shape[1:]
        dtype = chosen.choice(self.rules.dtypes)
        of = getattr(torch, dtype)
        wants = self.wants and of.is_floating_point and chosen.random() < 0.8
        plain = self.grammar == "cases" and name != "x0" and chosen.random() < 0.15
        return Input(name, shape, dtype, placements_of(chosen, self.sizes, shape, of), wants, plain)

    def _pool(self):
        found = tensors_of(self.sides[0]).items()
        return {name: x for name, x in found if isinstance(x, torch.Tensor)}

    def _try_line(self):
        templates = self.rules.lines + self.rules.rounded
        place = self.chosen.randrange(len(templates))
        template, rounded = templates[place], place >= len(self.rules.lines)
        line = Line(self.chosen, self._pool(), self.sizes)
        try:
            line.fill("x")
            text = re.sub(r"\{(\w+)\}", lambda found: line.fill(found[1]), template)
        except Unfilled:
            return
        made = None
        if text.startswith("= "):
            made = f"x{len(self.inputs) + len(self.lines)}"
            text = f"{made} {text}"
        keeps = self.chosen.random() < 0.15
        if overwrites_its_source(text, self.sides[0]):
            return
        # Of no dims, `mT` is the tensor itself on one device only: docs/limits.md.
        if text.endswith(".mT") and not line.pool[NAME.findall(text)[-1]].ndim:
            return
        errors = [run_line(text, side) for side in self.sides]
        if errors[0] is not None or errors[1] is not None:
            # In half of a line there is nothing that could be taken back.
            if keeps and type(errors[0]) is type(errors[1]):
                self.lines.append(text)
            return
        if made is not None and not self._good(made, rounded):
            for side in self.sides:
                del side[made]
            return
        self.lines.append(text)

    def _good(self, made, rounded):
        """Whether a result is small, and no matter of rounding."""
        clean, noisy = (side[made] for side in self.sides)
        if not isinstance(clean, torch.Tensor):
            return True
        if clean.shape != noisy.shape or clean.numel() > MOST or clean.ndim > 5:
            return False
        if clean.is_floating_point():
            if rounded:
                noise = torch.Generator().manual_seed(len(self.lines))
                noise = torch.rand(noisy.shape, generator=noise, dtype=torch.float64) - 0.5
                self.sides[1][made] = noisy * (1 + 1e-11 * noise).to(noisy.dtype)
            size = clean.detach().double().abs()
            size = size.sum() if clean.dtype in HALVES else size.max() if size.numel() else 0
            if not size <= self.rules.largest:
                return False
        return close(clean, noisy)

    def _level(self):
        """How far the derivatives of a program are numbers that rounding does not decide."""
        wanted = self.chosen.choice(LEVELS[1:]) if self.wants else LEVELS[0]
        # Not after writes to views of which ranks may have nothing: docs/limits.md.
        if any("no_grad" in line or "fill_diagonal_" in line for line in self.lines):
            wanted = min(wanted, LEVELS[1], key=LEVELS.index)
        # Torch's second derivative of `embedding` leaves `scale_grad_by_freq` out.
        if any("case('lookup" in line for line in self.lines):
            wanted = min(wanted, LEVELS[1], key=LEVELS.index)
        found = []
        for side, leaves in zip(self.sides, self.leaves, strict=True):
            named = [leaves[each.name] for each in self.inputs if each.wants]
            try:
                found.append(derivatives(side, named, wanted, lambda leaf: leaf.grad))
            except RuntimeError:
                return LEVELS[0]
        for one, other in zip(*found, strict=True):
            if one is not None and not (one.isfinite().all() and close(one, other)):
                return LEVELS[0]
            if one is not None and one.numel() and float(one.abs().max()) > 1e6:
                return LEVELS[0]
        return wanted


def leaves_of(program):
    """The inputs of a program on one device."""
    return {
        each.name: x.requires_grad_(each.wants)
        for each, x in zip(program.inputs, values_of(program).values(), strict=True)
    }


def close(one, other):
    return torch.allclose(one.detach(), other.detach(), rtol=1e-8, atol=1e-8, equal_nan=True)
