"""A rule may name arguments by position or name, and results by position or key; others pass."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, PlanError, mesh, parallelize


class Pair(NamedTuple):
    """A named result."""

    first: Tensor
    second: Tensor


class Output(dict[str, Any]):
    """As Hugging Face's outputs: a dict whose items are attributes, with a flag of its own."""

    flag = "kept"


class Inner(nn.Module):
    """Returns what enters it, in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, y: Tensor, scale: Any = None, *, mask: Any = None) -> Any:
        self.seen = {"x": x, "y": y, "scale": scale, "mask": mask}
        forms = {
            "tuple": (x, y),
            "list": [x, [y]],
            "named": Pair(x, y),
            "dict": Output(first=x, second=y, nothing=None),
            "one": x,
        }
        return forms[self.form]


class Outer(nn.Module):
    """Calls the inner module in the usual mixture of ways."""

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inner = Inner(form)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.out = self.inner(x, y=y, mask=[x, {"deep": y}])
        return self.out


def where(value: Any) -> str:
    """The dim that `tp` shards, or nothing."""
    assert isinstance(value, DTensor)
    return repr(value.placements[0])


def called(text: str, form: str = "tuple") -> tuple[dict[str, Any], Any]:
    """What the inner module saw, and what left it, on the first of two ranks."""

    def program(rank: int, world_size: int) -> Any:
        plan = Plan(activations={"inner": text}, batch="tp:0")
        model = parallelize(Outer(form), mesh(tp=2, device_type="cpu"), plan)
        model(torch.arange(8.0).reshape(2, 4), torch.ones(4, 4))
        return model.inner.seen, model.out

    return simulate(2).run(program)[0]


@pytest.mark.parametrize("text", ["x = tp:1 ->", "0 = tp:1 ->"])
def test_an_argument_by_position_or_name(text: str):
    seen, _ = called(text)
    assert where(seen["x"]) == "Shard(1)"
    assert where(seen["y"]) == where(seen["mask"][0]) == "Shard(0)"


def test_keywords_positions_of_keywords_nested_values_and_the_rest():
    seen, _ = called("1 = tp:1; mask = tp:full ->")
    assert where(seen["x"]) == "Shard(0)"
    assert where(seen["y"]) == "Shard(1)"
    assert where(seen["mask"][0]) == where(seen["mask"][1]["deep"]) == "Replicate()"
    seen, _ = called("y = tp:1; * = tp:full ->")
    assert [where(seen[name]) for name in "xy"] == ["Replicate()", "Shard(1)"]


def test_an_argument_that_the_caller_leaves_out_is_not_missed():
    seen, _ = called("scale = tp:0; x = tp:1 ->")
    assert seen["scale"] is None
    assert where(seen["x"]) == "Shard(1)"


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [("tuple", "0", 1), ("list", "0", 1), ("named", "first", "second"), ("named", "0", 1),
     ("dict", "first", "second"), ("dict", "0", "second")],
)  # fmt: skip
def test_a_result_by_position_or_key(form: str, first: str, second: Any):
    _, out = called(f"-> {first} = tp:1", form)
    kept = {"tuple": tuple, "list": list, "named": Pair, "dict": Output}[form]
    assert type(out) is kept
    one, two = (out["first"], out["second"]) if form == "dict" else out
    assert where(one) == "Shard(1)"
    assert where(two[0] if form == "list" else two) == "Shard(0)"
    if form == "dict":
        assert out["nothing"] is None


def test_a_single_tensor_is_the_first_result():
    assert where(called("-> 0 = tp:full", "one")[1]) == "Replicate()"


@pytest.mark.parametrize(
    ("form", "name", "told"),
    [("tuple", "2", "'0', '1'"), ("dict", "secnd", "Did you mean 'second'?"), ("one", "1", "'0'")],
)
def test_a_result_that_is_not_there(form: str, name: str, told: str):
    with pytest.raises(Exception, match="activation rule 'inner'") as caught:
        called(f"-> {name} = tp:1", form)
    assert isinstance(caught.value.__cause__, PlanError)
    assert told in str(caught.value.__cause__)


@pytest.mark.parametrize("name", ["z", "7"])
def test_an_argument_that_forward_does_not_have_is_found_without_processes(name: str):
    with pytest.raises(PlanError, match=f"has no argument '{name}'") as caught:
        Plan(activations={"inner": f"{name} = tp:0 ->"}).check(Outer(), {"tp": 2})
    assert "It has 'x', 'y', 'scale', 'mask'." in str(caught.value)


@pytest.mark.parametrize(
    "text", ["x = ->", "= tp:0 ->", "x = tp:0; x = tp:1 ->", "x y = tp:0 ->", "x = tp:0;; ->"]
)
def test_choices_that_cannot_be_read(text: str):
    with pytest.raises(PlanError, match="layout"):
        Plan(activations={"inner": text})


def test_choices_are_printed_and_stored():
    plan = Plan(activations={"inner": "x=tp:1;y = tp:0->0=tp:full"})
    assert Plan.from_toml(plan.to_toml()) == plan
    row = plan.check(Outer(), {"tp": 2}).boundaries[0]
    assert row.boundary.text == "x = tp:1; y = tp:0 -> 0 = tp:full"
    assert "no axis 'dp'" in "".join(plan.check(Outer(), {"tp": 2}).notes)
