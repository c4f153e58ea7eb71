"""What differs on one rank is named on every rank, and nothing has been changed; none waits.

Every case is given to rank `BAD` only; the others get what is right. The ranks are simulated, so
that one that waits in vain is found at once; one case is run in processes as well.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate
from vescale_comm.testing import Failed, on_ranks, outcomes, run
from vescale_dtensor import DTensor
from vescale_parallel import DisagreementError, Plan, PlanError, parallelize
from vescale_parallel import mesh as make_mesh

BAD = 2
WORLD = 4


class Net(nn.Module):
    def __init__(self, width: int = 6, p: float = 0.1) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, width), nn.Dropout(p), nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x))) * self.scale


PLAN = Plan(parameters={"up.*": "tp:0", "down.weight": "tp:1", "*": "replicate"})


class Given:
    """What a rank passes to `parallelize`; a case edits it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.plan: Any = PLAN
        self.mesh: Any = None
        self.bucket_bytes: Any = 1024
        self.static: Any = False


def set_plan(**changes: Any) -> Callable[[Given], None]:
    def edit(given: Given) -> None:
        rules = {"parameters": PLAN.parameters, "activations": {}, "batch": "dp:0"} | changes
        given.plan = Plan(**rules)

    return edit


def set_model(edit: Callable[[Net], Any]) -> Callable[[Given], None]:
    def edit_model(given: Given) -> None:
        state = torch.get_rng_state()
        edit(given.model)
        torch.set_rng_state(state)

    return edit_model


def put(name: str, value: Any) -> Callable[[Given], None]:
    return lambda given: setattr(given, name, value)


def wider(model: Net) -> None:
    model.up, model.down = nn.Linear(4, 8), nn.Linear(8, 4)


def transposed(model: Net) -> None:
    """The same values in another memory order."""
    model.up.weight = nn.Parameter(model.up.weight.detach().T.contiguous().T)


def other_order(model: Net) -> None:
    up = model.up
    del model.up
    model.up = up


def no_mesh(given: Given) -> None:
    given.mesh = {"dp": 2, "tp": 2}


OTHERS = "parameter 'up.weight': (6, 4) torch.float32 on cpu on ranks 0, 1, 3; "
CASES: dict[str, tuple[Callable[[Given], Any], str]] = {
    "layout": (
        set_plan(parameters=PLAN.parameters | {"up.*": "tp:1"}),
        "plan 'parameters up.*': 'tp:0' (rule 1) on ranks 0, 1, 3; 'tp:1' (rule 1) on rank 2",
    ),
    "order of rules": (
        set_plan(parameters={"down.weight": "tp:1", "up.*": "tp:0", "*": "replicate"}),
        "plan 'parameters up.*': 'tp:0' (rule 1) on ranks 0, 1, 3; 'tp:0' (rule 2) on rank 2",
    ),
    "batch": (set_plan(batch=None), "plan 'batch': 'dp:0' on ranks 0, 1, 3; None on rank 2"),
    "activations": (
        set_plan(activations={"up": "tp:full ->"}),
        "plan 'activations up': not there on ranks 0, 1, 3; 'tp:full ->' (rule 1) on rank 2",
    ),
    "no plan": (put("plan", "tp"), "plan 'cannot be described'"),
    "plan that does not fit": (
        set_plan(parameters={"upp.*": "tp:0", "*": "replicate"}),
        "plan 'parameters upp.*': not there on ranks 0, 1, 3; 'tp:0' (rule 1) on rank 2",
    ),
    "bucket": (put("bucket_bytes", 4), "option 'bucket_bytes': 1024 on ranks 0, 1, 3; 4 on rank 2"),
    "static": (put("static", True), "option 'static': False on ranks 0, 1, 3; True on rank 2"),
    "bucket of nothing": (put("bucket_bytes", 0), "option 'bucket_bytes'"),
    "shapes": (set_model(wider), OTHERS + "(8, 4)"),
    "dtypes": (set_model(lambda m: m.double()), "parameter 'up.bias': (6,) torch.float32 on cpu"),
    "strides": (set_model(transposed), OTHERS),
    "frozen": (
        set_model(lambda m: m.up.weight.requires_grad_(False)),
        OTHERS + "(6, 4) torch.float32 on cpu, frozen on rank 2",
    ),
    "parameter more": (
        set_model(lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1)))),
        "parameter 'more': not there on ranks 0, 1, 3; (1,) torch.float32 on cpu on rank 2",
    ),
    "order of parameters": (set_model(other_order), "module: another order on rank 2"),
    "buffer": (
        set_model(lambda m: m.register_buffer("scale", torch.ones(5))),
        "buffer 'scale': (4,) torch.float32 on cpu on ranks 0, 1, 3; (5,)",
    ),
    "train mode": (
        set_model(lambda m: m.drop.eval()),
        "module 'drop': Dropout training on ranks 0, 1, 3; Dropout evaluating on rank 2",
    ),
    "dropout": (
        set_model(lambda m: setattr(m.drop, "p", 0.2)),
        "attribute 'p of drop': 0.1 on ranks 0, 1, 3",
    ),
    "a factor": (
        set_model(lambda m: setattr(m.up, "factor", 0.5)),
        "attribute 'factor of up': not there on ranks 0, 1, 3; 0.5 on rank 2",
    ),
    "another class": (
        set_model(lambda m: setattr(m, "drop", nn.Identity())),
        "Identity training on rank 2",
    ),
    "values": (set_model(lambda m: m.up.weight.data.mul_(-1)), "value of 'up.weight': checksum "),
    "values of buffers": (set_model(lambda m: m.scale.mul_(2)), "value of 'scale': checksum "),
    "gradients": (
        set_model(lambda m: m(torch.ones(1, 4)).sum().backward()),
        "problem 'PlanError': not there on ranks 0, 1, 3; parameters hold gradients",
    ),
    "seed": (lambda given: torch.manual_seed(5), "random state of 'cpu': digest "),
    "no mesh": (no_mesh, "dp=2, tp=2 over ranks 0-3 (cpu) on ranks 0, 1, 3; a dict on"),
}


def refusal(given: Given) -> str:
    options = {"bucket_bytes": given.bucket_bytes, "static": given.static}
    with pytest.raises(DisagreementError) as caught:
        parallelize(given.model, given.mesh, given.plan, **options)
    return str(caught.value)


def told_by_every_rank(rank: int, world_size: int) -> dict[str, str]:
    """All cases one after the other: one that left others waiting would end the run."""
    mesh = make_mesh(dp=2, tp=2, device_type="cpu")
    told = {}
    for name, (edit, _) in CASES.items():
        given = Given()
        given.mesh = mesh
        if rank == BAD:
            edit(given)
        names = list(given.model.state_dict())
        before = {key: value.clone() for key, value in given.model.state_dict().items()}
        hooks = len(given.model._forward_pre_hooks)
        told[name] = refusal(given)
        after = given.model.state_dict()
        assert list(after) == names
        assert all(torch.equal(after[key], before[key]) for key in names)
        assert not any(isinstance(p, DTensor) for p in given.model.parameters())
        assert len(given.model._forward_pre_hooks) == hooks
    # After all that nobody has waited for, the ranks still agree and can go on together.
    given = Given()
    parallelize(given.model, mesh, given.plan)
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return simulate(WORLD)(told_by_every_rank)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_who_differs_in_what(case: str, told: list[dict[str, str]]):
    texts = [of_rank[case] for of_rank in told]
    assert len(set(texts)) == 1
    assert texts[0].startswith("parallelize was not given the same on all ranks, and has changed")
    assert CASES[case][1] in texts[0]
    assert f"rank {BAD}" in texts[0]


def one_case(rank: int, world_size: int) -> str:
    given = Given()
    given.mesh = make_mesh(dp=world_size, device_type="cpu")
    if rank == 1:
        wider(given.model)
    return refusal(given)


def test_in_processes():
    one, two = run(one_case, 2, timeout=200)
    assert one == two
    assert "parameter 'up.weight': (6, 4) torch.float32 on cpu on rank 0; (8, 4)" in one


def one_mesh_more(rank: int, world_size: int) -> None:
    """Rank 1 comes to the comparison of a mesh, the others to that of a model: of other sizes."""
    mesh = make_mesh(dp=world_size, device_type="cpu")
    if rank == 1:
        make_mesh(dp=world_size, device_type="cpu")
    parallelize(Net(), mesh, PLAN)


def test_a_call_that_one_rank_makes_alone_is_named_before_anything_is_sent():
    for outcome in outcomes(one_mesh_more, 2, timeout=200):
        assert isinstance(outcome, Failed)
        assert outcome.type_name == "CommMismatchError"
        assert "  rank 1: all_gather of a check torch.int64 3, at " in outcome.message
        assert "in one_mesh_more" in outcome.message


def other_meshes(rank: int, world_size: int) -> list[str]:
    one, two = make_mesh(dp=2, tp=2, device_type="cpu"), make_mesh(dp=4, device_type="cpu")
    reordered = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    told = []
    for mesh in (two if rank == BAD else one, reordered if rank == BAD else one, part):
        given = Given()
        with pytest.raises(DisagreementError) as caught:
            parallelize(given.model, mesh, given.plan)
        told.append(str(caught.value))
    return told


def test_other_meshes_are_named():
    sizes, order, part = simulate(WORLD)(other_meshes)[0]
    assert "dp=2, tp=2 over ranks 0-3 (cpu) on ranks 0, 1, 3; dp=4 over ranks 0-3" in sizes
    assert "dp=2, tp=2 over ranks 0-3, order " in order
    assert "dp=2 over ranks 0, 1 (cpu) is passed by ranks 0-3" in part


def meshes_side_by_side(rank: int, world_size: int) -> list[int]:
    """Two halves of the world, each with a model of its own."""
    mesh = make_mesh(dp=2, tp=2, device_type="cpu")["tp"]
    torch.manual_seed(rank // 2)
    model = Net(width=6 + 2 * (rank // 2))
    parallelize(model, mesh, PLAN)
    return list(model.up.weight.to_local().shape)


def test_the_ranks_of_one_mesh_must_agree_with_each_other_only():
    assert simulate(WORLD)(meshes_side_by_side) == [[3, 4], [3, 4], [4, 4], [4, 4]]


@on_ranks(2, simulated=True)
def test_a_problem_of_all_ranks_is_its_own_error(rank: int, world_size: int):
    mesh = make_mesh(dp=world_size, device_type="cpu")
    with pytest.raises(PlanError, match="matches no parameter"):
        parallelize(Net(), mesh, Plan(parameters={"upp.*": "tp:0", "*": "replicate"}))


def batches(rank: int, world_size: int) -> list[str]:
    mesh = make_mesh(dp=2, tp=2, device_type="cpu")
    told = []
    for edit in (lambda x: x[:3], lambda x: x * 2, lambda x: x.double()):
        given = Given()
        parallelize(given.model, mesh, given.plan)
        x = torch.ones(4, 4)
        with pytest.raises(DisagreementError) as caught:
            given.model(edit(x) if rank == BAD else x)
        told.append(str(caught.value))
    return told


def test_another_batch_on_one_rank_is_named():
    for shapes, values, dtypes in simulate(WORLD)(batches):
        assert "tensor 'args[0]': (4, 4) torch.float32 on ranks 0, 1, 3; (3, 4)" in shapes
        assert "value of 'args[0]': checksum " in values
        assert "on ranks 0, 1, 3; checksum " in values
        assert "(4, 4) torch.float64 on rank 2" in dtypes
        assert "Pass the whole batch on every rank" in shapes
