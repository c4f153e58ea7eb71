"""Calls entries of torch's operator database on tensors that lie in memory in other ways.

A tensor of a sample is made from a contiguous one by a view: permuted (channels_last among others),
sliced, expanded. The contiguous one is distributed over a mesh and viewed in the same way, and what
comes out of the entry must have the strides that one device gives it. A trial is determined by its
entry and a seed.
"""

from __future__ import annotations

import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vescale_dtensor
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from vescale_comm import simulate
from vescale_comm.testing import device_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "opinfo"))

from _entries import Sample, dtype_of, entries, samples
from _judge import EXCLUDED
from _places import MESHES, can_be_partial, distributed
from _trial import quiet

RANKS = 4
FORMATS = ("contiguous", "channels_last", "transposed", "permuted", "sliced", "expanded")
NAMED = {4: torch.channels_last, 5: torch.channels_last_3d}

# What is refused by name; where the sweep's singular matrices raise on some ranks only; and where
# a part of torch's workspace comes out, gaps and all, which are none here.
LEFT_OUT = frozenset({*EXCLUDED, "lu", "linalg.lstsq"})


# A view of a sharded dim may be a copy here, which is not written to; and running statistics that
# were expanded are written by some kernels of torch only.
# And a draw into a view with gaps has numbers of its own on one device.
REFUSED = (
    "a view whose layout forced a copy",
    "refers to a single memory location",
    "with gaps in memory, as of every second row",
)


@dataclass(frozen=True)
class Form:
    """A tensor as a view of a contiguous one: `view(base)` has the shape and strides wanted."""

    name: str
    base: Tensor
    view: Callable[[Any], Any]


@dataclass(frozen=True)
class Trial:
    """A sample whose tensors have these forms, distributed over a mesh.

    Attributes:
        words: where each base goes, per mesh axis (see `_places.Scenario`).
    """

    name: str
    sample: Sample
    forms: tuple[Form, ...]
    mesh: str
    words: tuple[tuple[str, ...], ...]
    seed: int

    def __str__(self) -> str:
        pairs = zip(self.forms, self.words, strict=True)
        each = [f"{form.name}{list(form.base.shape)}{''.join(w)}" for form, w in pairs]
        kwargs = {k: v for k, v in self.sample.kwargs.items() if not isinstance(v, Tensor)}
        return f"{self.name} {self.mesh} {' '.join(each)} {kwargs or ''}"


def form_of(x: Tensor, name: str, chosen: random.Random) -> Form | None:
    """`x` in a form; None where its shape has none of this name. Expanded, it has other values."""
    x = x.detach()
    dims = list(range(x.ndim))
    if name == "contiguous":
        return Form(name, x.clone(memory_format=torch.contiguous_format), lambda t: t)
    if name == "channels_last" and x.ndim in (3, 4, 5):
        return _permuted(x, name, [0, *dims[2:], 1])
    if name == "transposed" and x.ndim >= 2:
        return _permuted(x, name, [*dims[:-2], dims[-1], dims[-2]])
    if name == "permuted" and x.ndim >= 2:
        chosen.shuffle(dims)
        return _permuted(x, name, dims)
    if name == "sliced" and x.ndim and x.numel():
        dim = chosen.randrange(x.ndim)
        base = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        extent = x.shape[dim]
        return Form(f"sliced{dim}", base, lambda t: t.narrow(dim, 0, extent))
    wide = [d for d in dims if x.shape[d] > 1]
    if name == "expanded" and wide:
        dim = chosen.choice(wide)
        shape = x.shape
        return Form(f"expanded{dim}", x.narrow(dim, 0, 1).clone(), lambda t: t.expand(shape))
    return None


def _permuted(x: Tensor, name: str, order: list[int]) -> Form:
    back = sorted(range(x.ndim), key=order.__getitem__)
    if name == "permuted":
        name = f"permuted{''.join(map(str, order))}"
    return Form(name, x.permute(order).contiguous(), lambda t: t.permute(back))


def trials(name: str, seed: int, most: int) -> Iterator[Trial]:
    """The trials of an entry: every format of the first tensor, other tensors as it comes."""
    chosen = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    found = samples(name, most, seed)
    more = [image for sample in found[: most - 1] for image in images(sample)]
    for sample in [*found, *larger(name), *more[:1]]:
        tensors = sample.tensors()
        if not tensors or any(t.layout is not torch.strided or t.is_quantized for t in tensors):
            continue
        for wanted in FORMATS:
            first = form_of(tensors[0], wanted, chosen)
            if first is None:
                continue
            forms = [first, *(_any_form(t, wanted, chosen) for t in tensors[1:])]
            mesh = chosen.choice(list(MESHES))
            whole = chosen.random() < 0.2
            words = tuple(_words(f.base, len(MESHES[mesh]), whole, chosen) for f in forms)
            yield Trial(name, sample, tuple(forms), mesh, words, chosen.randrange(1 << 30))


def larger(name: str) -> Iterator[Sample]:
    """Samples of a size from which on torch takes other kernels than those of the database."""
    spatial = _CONVOLUTIONS.get(name)
    for batch, groups in ((2, 1), (17, 1), (2, 4)) if spatial else ():
        weight = (16, 8 // groups) if "transpose" not in name else (8, 16 // groups)
        image, kernel = (9,) * spatial, (3,) * spatial
        tensors = [
            torch.randn(*s, requires_grad=True) for s in ((batch, 8, *image), weight + kernel)
        ]
        yield Sample(tensors[0], (tensors[1],), {"groups": groups}, False)
    if name == "nn.functional.scaled_dot_product_attention":
        heads = [torch.randn(2, 4, 12, 8, requires_grad=True) for _ in range(3)]
        yield Sample(heads[0], tuple(heads[1:]), {}, False)


def images(sample: Sample) -> Iterator[Sample]:
    """The sample with images in place of tensors of one shape: few samples have channels."""
    tensors = sample.tensors()
    if any(t.layout is not torch.strided for t in tensors):
        return
    if len({t.shape for t in tensors}) != 1 or tensors[0].ndim == 4 or not tensors[0].numel():
        return
    shape = torch.Size((2, 6, 4, 5))

    def image(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        many = t.detach().flatten().repeat(-(-shape.numel() // t.numel()))[: shape.numel()]
        return many.reshape(shape).requires_grad_(t.requires_grad)

    made = tree_map(image, (sample.input, sample.args, sample.kwargs))
    yield Sample(*made, sample.broadcasts_input)


_CONVOLUTIONS = {f"nn.functional.conv{way}{n}d": n for way in ("", "_transpose") for n in (1, 2, 3)}


def _any_form(x: Tensor, wanted: str, chosen: random.Random) -> Form:
    name = chosen.choice([wanted, "contiguous", *FORMATS[:5]])
    found = form_of(x, name, chosen) or form_of(x, "contiguous", chosen)
    assert found is not None
    return found


def _words(base: Tensor, axes: int, whole: bool, chosen: random.Random) -> tuple[str, ...]:
    shards = [f"S{d}" for d in range(base.ndim) for _ in range(2)]
    options = ["R"] if whole else ["R", *shards, *(["P"] if can_be_partial(base) else [])]
    return tuple(chosen.choice(options) for _ in range(axes))


def answer(trial: Trial, lay: Callable[[int, Tensor], Tensor]) -> list[Any]:
    """The results of a trial where `lay` puts the bases."""
    sample = trial.sample
    wanted = [t.requires_grad for t in sample.tensors()]
    bases = [
        lay(i, form.base).requires_grad_(wants)
        for i, (form, wants) in enumerate(zip(trial.forms, wanted, strict=True))
    ]
    feed = iter([form.view(base) for form, base in zip(trial.forms, bases, strict=True)])
    first, args, kwargs = tree_map(
        lambda v: next(feed) if isinstance(v, Tensor) else v,
        (sample.input, sample.args, sample.kwargs),
    )
    torch.manual_seed(trial.seed)
    return tree_leaves(entries()[trial.name].op(first, *args, **kwargs))


def differences(mine: list[Any], wanted: list[Any]) -> list[str]:
    """Where strides or contiguity are not one device's, in words."""
    found = []
    for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
        if isinstance(other, Tensor) and isinstance(one, Tensor) and other.numel():
            found += [f"result {index} {words}" for words in lying(one, other)]
    return found


def lying(one: Tensor, other: Tensor) -> list[str]:
    """How the memory of one tensor differs from another's."""
    if other.layout is not torch.strided or one.shape != other.shape:
        return []
    real = [d for d in range(other.ndim) if other.shape[d] > 1]
    shape = list(other.shape)
    if [one.stride(d) for d in real] != [other.stride(d) for d in real]:
        return [f"{shape}: strides {one.stride()}, not {other.stride()}"]
    formats = [torch.contiguous_format, *([NAMED[other.ndim]] if other.ndim in NAMED else [])]
    return [
        f"{shape}: is_contiguous({memory}) is not {other.is_contiguous(memory_format=memory)}"
        for memory in formats
        if one.is_contiguous(memory_format=memory) != other.is_contiguous(memory_format=memory)
    ]


def plain(trial: Trial) -> list[Any] | None:
    """One device's answer; None where it raises."""
    with quiet():
        try:
            return answer(trial, lambda _, base: base.clone())
        except Exception:  # whatever it says: this is no call that torch takes
            return None


def sharded(batch: list[tuple[Trial, list[Any]]]) -> list[tuple[Trial, str]]:
    """What went wrong of these trials on four ranks; the same trial may do so in several ways."""
    found: list[tuple[Trial, str]] = []
    start = 0
    while start < len(batch):
        values = simulate(RANKS).run(_program, batch[start:])
        done = min(len(problems) for problems, _ in values)
        for rank, (problems, _) in enumerate(values):
            for index, words in enumerate(problems[:done]):
                found += [(batch[start + index][0], f"rank {rank}: {w}") for w in words]
        errors = [e for _, e in values if e is not None]
        errors.sort(key=lambda e: e.startswith(("DeadlockError", "CommMismatch")))
        if errors and not any(words in errors[0] for words in REFUSED):
            found.append((batch[start + done][0], f"raised: {errors[0]}"))
        start += done + 1
    return found


def _program(
    rank: int, world_size: int, batch: list[tuple[Trial, list[Any]]]
) -> tuple[list[list[str]], str | None]:
    problems: list[list[str]] = []
    with quiet():
        for trial, wanted in batch:
            mesh = device_mesh(MESHES[trial.mesh])

            try:
                problems.append(
                    differences(answer(trial, partial(_distributed, trial, mesh)), wanted)
                )
            except Exception as error:
                return problems, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return problems, None


def _distributed(trial: Trial, mesh: Any, index: int, base: Tensor) -> Tensor:
    return distributed(vescale_dtensor, base, mesh, trial.words[index], trial.seed % 1000 + index)


def names() -> list[str]:
    """All entries that take tensors on a CPU."""
    return [n for n in entries() if n not in LEFT_OUT and dtype_of(entries()[n]) is not None]


def judge(name: str, seed: int, most: int = 3) -> list[tuple[Trial, str]]:
    """All trials of an entry, and what went wrong."""
    with warnings.catch_warnings(action="ignore"):
        made = [(trial, plain(trial)) for trial in trials(name, seed, most)]
    return sharded([(t, w) for t, w in made if w is not None])
