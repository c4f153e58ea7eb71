"""Nested arguments keep their structure and types while their tensors are replaced."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from vescale_comm.nested import map_tensors, named_tensors_within, tensors_within

Pair = namedtuple("Pair", ["left", "right"])


def test_every_tensor_and_nothing_else():
    value = (torch.ones(1), [Pair(torch.ones(2), "text")], {"a": torch.ones(3), "b": None}, 5)
    mapped = map_tensors(lambda t: t * 2, value)
    assert mapped[1][0].right == "text"
    assert isinstance(mapped[1][0], Pair)
    assert mapped[2]["b"] is None
    assert mapped[3] == 5
    assert [t.sum().item() for t in named_tensors_within(mapped).values()] == [2.0, 4.0, 6.0]
    assert value[2]["a"].sum().item() == 3.0


def test_dict_subclasses_keep_their_type():
    mapped = map_tensors(torch.neg, OrderedDict(x=torch.ones(1)))
    assert type(mapped) is OrderedDict
    assert mapped["x"].item() == -1.0


def test_what_behaves_like_a_dict_is_one():
    # As Hugging Face's BatchEncoding, which is no dict.
    batch = UserDict(x=torch.ones(1), words=["a"])
    mapped = map_tensors(torch.neg, batch)
    assert type(mapped) is UserDict
    assert mapped["x"].item() == -1.0
    assert mapped["words"] == ["a"]
    assert batch["x"].item() == 1.0
    assert list(named_tensors_within(batch, "batch")) == ["batch['x']"]


def test_paths_are_readable():
    assert list(named_tensors_within(({"x": [torch.ones(1)]},), "args")) == ["args[0]['x'][0]"]


@dataclass(frozen=True)
class Picture:
    pixels: torch.Tensor
    name: str
    more: dict[str, Any] = field(default_factory=dict)


def test_data_classes_are_nestings():
    one = Picture(torch.ones(2), "cat", {"mask": torch.ones(1)})
    mapped = map_tensors(torch.neg, [one])[0]
    assert type(mapped) is Picture
    assert (mapped.pixels.sum(), mapped.name, mapped.more["mask"].item()) == (-2.0, "cat", -1.0)
    assert one.more["mask"].item() == 1.0
    assert list(named_tensors_within(one, "x")) == ["x['pixels']", "x['more']['mask']"]
    assert map_tensors(lambda t: t, one) is one
    assert map_tensors(torch.neg, Picture) is Picture


def test_what_is_found_is_what_is_replaced():
    # One walk for all three, so what one of them sees, all do: slices, too.
    value = (slice(torch.ones(1), None, torch.ones(2)), UserDict(x=torch.ones(3)), {"y": 1})
    assert [len(t) for t in tensors_within(value)] == [1, 2, 3]
    assert [len(t) for t in named_tensors_within(value).values()] == [1, 2, 3]
    mapped = map_tensors(torch.neg, value)
    assert type(mapped[0]) is slice
    assert [t.sum().item() for t in tensors_within(mapped)] == [-1.0, -2.0, -3.0]
    assert map_tensors(lambda t: t, value) is value


@dataclass
class Linked:
    weight: torch.Tensor
    back: Any = None


def test_data_classes_that_refer_back_are_looked_into_once():
    one = Linked(torch.ones(1))
    one.back = [one]
    assert tensors_within({"one": one}) == [one.weight]
