"""`parallelize` keeps `Tensor.grad_dtype`, and whatever else torch lets one set of a tensor."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from stage_runs import accumulate
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from zero_models import whole

ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
PIPELINE: dict[str, Any] = {"pipeline": vp.Pipeline(stages="blocks.*"), "microbatches": 2}


class Model(nn.Module):
    """Layers in bfloat16, of which every third parameter at least keeps its gradient otherwise."""

    def __init__(self, dtype: torch.dtype | None, every: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).bfloat16()
        for at, one in enumerate(self.parameters()):
            if not at % every:
                one.grad_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def make(dtype: torch.dtype | None = torch.float32, every: int = 1) -> Any:
    torch.manual_seed(0)
    return Model(dtype, every)


def trained(
    rank: int, world_size: int, sizes: dict[str, int], fields: Any, dtype: Any, every: int
) -> None:
    fields = dict(fields)
    words = {"static": True} if fields.pop("static", False) else {}
    plain, model = make(dtype, every), make(dtype, every)
    plan = vp.Plan(**fields)
    vp.parallelize(model, vp.mesh(device_type="cpu", **sizes), plan, **words)
    pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
    assert [one.grad_dtype for one, _ in pairs] == [other.grad_dtype for _, other in pairs]
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (plain, model)]
    for step in range(3):
        accumulate(plain, 2 if "microbatches" in str(fields) else 1, ROWS)
        vp.forward_backward(model, ROWS)
        for one, other in pairs:
            assert other.grad.dtype == one.grad.dtype
            torch.testing.assert_close(whole(other.grad), one.grad, rtol=0.05, atol=2e-4)
        for optimizer in optimizers:
            optimizer.step()
            if step != 1:  # gradients are added to as well
                optimizer.zero_grad()
        for one, other in pairs:
            torch.testing.assert_close(whole(other), one, rtol=0.02, atol=2e-3)


RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp zero3": ({"dp": 2}, {"zero": 3}),
    "dp zero0": ({"dp": 2}, {}),
    "dp zero1": ({"dp": 2}, {"zero": 1}),
    "dp zero2 microbatches": ({"dp": 2}, {"zero": 2, "microbatches": 2}),
    "dp zero3 microbatches": ({"dp": 2}, {"zero": 3, "microbatches": 2}),
    "dp zero3 ahead": ({"dp": 2}, {"zero": vp.Zero(3, reduce_ahead=2)}),
    "dp zero3 static": ({"dp": 2}, {"zero": 3, "static": True}),
    "dp zero3 offload": ({"dp": 2}, {"zero": vp.Zero(3, offload="parameters")}),
    "dp zero3 checkpoint": ({"dp": 2}, {"zero": 3, "checkpoint": "full"}),
    "dp zero3 reduce": ({"dp": 2}, {"zero": 3, "precision": {"reduce": "float32"}}),
    "dp static": ({"dp": 2}, {"static": True}),
    "dp invariant": ({"dp": 2}, {"deterministic": "dp-invariant"}),
    "dp invariant zero3": ({"dp": 2}, {"deterministic": "dp-invariant", "zero": 3}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, PIPELINE),
    "pp zb-h1": ({"pp": 2}, PIPELINE | {"pipeline": vp.Pipeline("zb-h1", stages="blocks.*")}),
    "pp dp": ({"pp": 2, "dp": 2}, PIPELINE),
    "pp dp zero3": ({"pp": 2, "dp": 2}, {**PIPELINE, "zero": 3}),
}


@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("run", RUNS)
def test_steps_keep_gradients_as_one_device_does(run: str, every: int, dtype: Any):
    sizes, fields = RUNS[run]
    simulate(torch.Size(sizes.values()).numel()).run(trained, sizes, fields, dtype, every)


@pytest.mark.parametrize("level", [0, 2, 3])
@on_ranks(2, simulated=True)
def test_sums_are_not_rounded_on_their_way(level: int):
    """Contributions of bfloat16 are added in what keeps them, as those of two backwards are."""
    model = make()
    vp.parallelize(model, vp.mesh(device_type="cpu", dp=2), vp.Plan(zero=level))
    model(ROWS).backward()
    plain = make()
    # Half of the batch's loss is the mean over each half: gradients of bfloat16, and exact halves.
    for part in ROWS.chunk(2):
        (plain(part) / 2).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(other.grad), one.grad)


@on_ranks(2, simulated=True)
def test_it_may_be_set_of_what_is_sharded():
    model = make(torch.bfloat16)
    vp.parallelize(model, vp.mesh(device_type="cpu", dp=2), vp.Plan(zero=3))
    weight = model.blocks[0].weight
    model(ROWS).backward()
    with pytest.raises(RuntimeError, match="already a gradient"):
        weight.grad_dtype = torch.float32
    # As of torch's own parameters: a copy has no gradient, and keeps one in its own dtype.
    weight.grad = None
    weight.grad_dtype = torch.float32
    model(ROWS).backward()
    assert weight.grad.dtype == torch.float32
    assert model.blocks[0].bias.grad.dtype == torch.bfloat16
    copied = copy.deepcopy(model).blocks[0].weight
    assert copied.grad is None
    assert copied.grad_dtype == copy.deepcopy(make().blocks[0].weight).grad_dtype
    # Of what is no leaf: an error, or what torch 2.15 says.
    leaf = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    leaf.grad_dtype = torch.float32
    assert value(weight * 2, "grad_dtype") == value(leaf * 2, "grad_dtype")
    model.float()
    assert weight.grad_dtype == torch.float32


@on_ranks(2, simulated=True)
def test_ranks_keep_gradients_alike(rank: int, world_size: int):
    model = make(torch.float32 if rank else torch.bfloat16)
    with pytest.raises(vp.DisagreementError, match=r"gradient torch\.float32 on rank 1"):
        vp.parallelize(model, vp.mesh(device_type="cpu", dp=2), vp.Plan())


def test_deferred_parameters_keep_it():
    with vp.deferred():
        model = make()
    assert {one.grad_dtype for one in vp.materialize(model).parameters()} == {torch.float32}


# What torch lets one set of a leaf, and what becomes of it. A torch that has more fails below.
KNOWN = {
    **dict.fromkeys(["requires_grad", "grad_dtype"], "kept"),
    **dict.fromkeys(["_backward_hooks", "_post_accumulate_grad_hooks"], "hooks: refused"),
    **dict.fromkeys(["grad", "_grad"], "refused"),
    **dict.fromkeys(["data", "real", "imag"], "values"),
    **dict.fromkeys(["_grad_fn", "_python_dispatch", "_cdata"], "torch's own"),
    # Experimental, and gone since torch 2.13; and of no effect.
    **dict.fromkeys(["names", "volatile"], "obsolete"),
}


def properties() -> list[str]:
    kinds = ("getset_descriptor", "property", "member_descriptor")
    names = [name for name in dir(Tensor) if not name.startswith("__")]
    return [n for n in names if type(inspect.getattr_static(Tensor, n)).__name__ in kinds]


@pytest.mark.filterwarnings("ignore")
def test_nothing_else_can_be_set_of_a_tensor():
    found = set()
    for name in properties():
        leaf = torch.zeros(2, 2)
        try:
            setattr(leaf, name, getattr(leaf, name))
        except (AttributeError, RuntimeError, TypeError):
            continue
        found.add(name)
    assert found <= set(KNOWN)


def value(tensor: Any, name: str) -> Any:
    try:
        found = getattr(tensor, name)
    except (RuntimeError, TypeError) as error:
        return type(error)
    return whole(found).detach().tolist() if isinstance(found, Tensor) else found


@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2, simulated=True)
def test_properties_of_parameters_are_those_of_one_device(level: int):
    plain, model = make(), make()
    vp.parallelize(model, vp.mesh(device_type="cpu", dp=2), vp.Plan(zero=level))
    # Of this very object: where it is, how often it was written to, and that it is distributed.
    own = {"_cdata", "_version", "_python_dispatch", "_has_grad_dtype_override"}
    for name in set(properties()) - own:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one, other = (value(m.blocks[0].weight, name) for m in (plain, model))
        assert one == other, name
