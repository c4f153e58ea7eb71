"""Attributes of modules are told apart where models would compute something else, only there."""

import argparse
import copy
import dataclasses
import enum
import functools
import math
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from vescale_parallel._apply.attributes import attributes


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Config:
    dropout: float = 0.1
    nested: Any = None


class Named:
    """As configurations of Hugging Face: the only thing known of them is that they tell a dict."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scaled(factor: Any) -> Any:
    return lambda x: x * factor


def facts(**values: Any) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    for name, value in values.items():
        setattr(model[1], name, value)
    return dict(attributes(model))


DIFFERENT: list[tuple[Any, Any]] = [
    (0.1, 0.2),
    (1e-5, math.nextafter(1e-5, 1)),
    (1, 1.0),
    (1, True),
    (0.1, None),
    (math.inf, math.nan),
    ("bilinear", "nearest"),
    (torch.float32, torch.bfloat16),
    (Mode.ONE, Mode.TWO),
    (F.gelu, F.relu),
    (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu)),
    (nn.GELU, nn.ReLU),
    (lambda x: x * 2, lambda x: x * 3),
    (lambda x: x.sin(), lambda x: x.cos()),
    (lambda x: [y * 2 for y in x], lambda x: [y * 3 for y in x]),
    (lambda x, k=2: x * k, lambda x, k=3: x * k),
    (scaled(2), scaled(3)),
    (scaled(scaled(2)), scaled(scaled(3))),
    ((1, 2), (2, 1)),
    ([0.1, [0.2]], [0.1, [0.3]]),
    (["a", "b"], ["a", "c"]),
    ({1, 2}, {1, 3}),
    ({"p": 0.1}, {"p": 0.2}),
    (OrderedDict(p=(1, {"q": 0.1})), OrderedDict(p=(1, {"q": 0.2}))),
    (Config(), Config(dropout=0.2)),
    (Config(nested=SimpleNamespace(eps=1)), Config(nested=SimpleNamespace(eps=2))),
    (argparse.Namespace(p=0.1), argparse.Namespace(p=0.2)),
    (Named(p=0.1), Named(p=0.2)),
    (torch.ones(2), torch.zeros(2)),
    ([torch.ones(2)], [torch.zeros(2)]),
    (numpy.ones(2), numpy.zeros(2)),
    (numpy.float32(0.1), numpy.float32(0.2)),
    (seeded(1), seeded(2)),
]


IDS = [f"{type(one).__name__}-{number}" for number, (one, _) in enumerate(DIFFERENT)]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=IDS)
def test_what_is_computed_with_is_told_apart(one: Any, other: Any):
    before, after = facts(value=one), facts(value=other)
    differing = {name for name in before | after if before.get(name) != after.get(name)}
    assert differing == {"value of 1"}


@pytest.mark.parametrize("one", [one for one, _ in DIFFERENT], ids=IDS)
def test_equal_values_are_equal_in_words(one: Any):
    again = seeded(1) if isinstance(one, torch.Generator) else copy.deepcopy(one)
    assert facts(value=one) == facts(value=again)


OWN: list[tuple[str, Any, Any]] = [
    ("rank", 0, 1),
    ("tp_rank", 0, 1),
    ("local_device", torch.device("cuda", 0), torch.device("cuda", 1)),
    ("is_main_process", True, False),
    ("load_time", 0.5, 0.6),
    ("cache_dir", "a", "b"),
    ("weights", "/host/0/weights", "/host/1/weights"),
    ("config", Config(nested={"local_rank": 0}), Config(nested={"local_rank": 1})),
    ("_calls", 1, 2),
    ("log", Path("a"), Path("b")),
    ("lock", threading.Lock(), threading.Lock()),
    ("anything", object(), None),
    ("hook", lambda x: x, lambda x: x),
    ("bound", scaled(object()), scaled(object())),
    ("words", list({"a", "b"}), list({"b", "a"})),
    ("table", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
]


@pytest.mark.parametrize(("name", "one", "other"), OWN, ids=[name for name, _, _ in OWN])
def test_what_belongs_to_one_process_or_cannot_be_compared_is_left_out(
    name: str, one: Any, other: Any
):
    assert facts(**{name: one}) == facts(**{name: other})


def test_what_torch_does_not_print_is_there():
    one, other = (dict(attributes(nn.MultiheadAttention(4, 2, dropout=p))) for p in (0.1, 0.2))
    assert {name for name in one if one[name] != other[name]} == {"dropout of the model"}


def test_a_configuration_of_many_modules_is_told_once_and_refers_to_itself():
    config = Config()
    config.nested = {"config": config}
    model = nn.ModuleList(nn.Identity() for _ in range(3))
    for each in model:
        each.config = config  # type: ignore[assignment]
    assert list(dict(attributes(model))) == ["config of 0"]
