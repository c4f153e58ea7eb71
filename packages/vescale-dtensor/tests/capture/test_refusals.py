"""What a replay could not do again is refused when it is recorded, with the line of user code.

A case is a function that capture must refuse; its last line is the one that the error must name.
Other functions, close to these, are recorded and right: refusals are no wider than they have to be.
"""

import gc
import inspect

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import vescale_comm
import vescale_dtensor as vd
from function_cases import Returned
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import CaptureError, Shard

CASES, FINE = {}, {}


def refused(reason):
    def case(function):
        CASES[function.__name__] = function, reason
        return function

    return case


def fine(function):
    FINE[function.__name__] = function
    return function


def line():
    return device_mesh((2,), ("dp",))


def rows():
    whole = torch.arange(20.0).reshape(5, 4)
    return vd.distribute_tensor(whole, line(), [Shard(0)], src_data_rank=None)


# --- values of DTensors: a line each

CASES |= {
    "item": (lambda x: x.sum().item(), "item reads the value"),
    "truth": (lambda x: x if (x > 0).all() else -x, "__bool__ reads the value"),
    "as_float": (lambda x: x * float(x.sum()), "__float__ reads the value"),
    "as_int": (lambda x: x[int(x.sum())], "__int__ reads the value"),
    "as_index": (lambda x: range(x.long().sum()), "__index__ reads the value"),
    "listed": (lambda x: x.tolist(), "tolist reads the value"),
    "as_numpy": (lambda x: x.detach().numpy(), "numpy reads the value"),
    "as_array": (lambda x: numpy.asarray(x.detach()), "__array__ reads the value"),
    "contained": (lambda x: 3.0 in x, "__contains__ reads the value"),
    "equal": (lambda x: torch.equal(x, x), "equal reads the value"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose reads the value"),
    "formatted": (lambda x: f"{x.sum():.2f}", "item reads the value"),
    "shape_of_nonzero": (lambda x: x.nonzero().shape[0], "depends on values"),
    "masked_rows": (lambda x: x[x > 3], "depends on values"),
    "selected": (lambda x: torch.masked_select(x, x > 3), "depends on values"),
    "distinct": (lambda x: x.unique(), "depends on values"),
    "where_alone": (lambda x: torch.where(x > 3), "depends on values"),
}


@refused("reads the value")
def clipped_with_an_error(x):
    weight = nn.Parameter(x.detach())
    weight.grad = x.detach()
    return torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


# --- values of plain tensors: a line each, and more

CASES |= {
    "item_of_plain": (lambda x: x * x.to_local().sum().item(), "item reads the value"),
    "truth_of_plain": (lambda x: x if torch.rand(()) > 2 else -x, "__bool__ reads the value"),
    "size": (lambda x: x.sum() + torch.arange(x.to_local().long().sum()).sum(), "on values"),
    "sliced": (lambda x: x + torch.ones(9, 4)[: x.to_local().long().sum()], "on values"),
    "classes": (lambda x: F.one_hot(x.to_local().long()), "depends on values"),
    "unfilled": (lambda x: x if torch.empty(4).sum() > 0 else -x, "__bool__ reads the value"),
    "of_a_sum": (lambda x: x * vescale_comm.all_reduce(torch.ones(())).item(), "item reads"),
    "made_of_numpy": (lambda x: x + torch.from_numpy(numpy.ones(4, "f")), "torch.from_numpy"),
    "raw_collective": (lambda x: dist.all_reduce(x.to_local().clone()), "raw collectives"),
    "pointer": (lambda x: torch.ones(3).data_ptr(), "data_ptr reads the value"),
}


@refused("__bool__ reads the value")
def a_view_that_was_written_from_outside(x):
    table = torch.zeros(4)
    table[:2].copy_(x.to_local()[0, :2])
    return x if table.sum() > 0 else -x


# --- what happens behind the overrides' back


@refused("custom autograd.Function")
def custom_function_that_returns_its_argument(x):
    return Returned.apply(x * torch.ones(4, requires_grad=True)) * 2


@refused("full backward hook of a module")
def a_module_with_a_full_backward_hook(x):
    model = nn.Identity()
    model.register_full_backward_hook(lambda module, inward, outward: None)
    return model(x * torch.ones(4, requires_grad=True)) * 2


@refused("a random generator was moved")
def seeded_inside(x):
    torch.manual_seed(0)
    return F.dropout(x)


@refused("saved-tensor hooks")
def checkpointed(x):
    return checkpoint(torch.sin, x * torch.ones(4, requires_grad=True), use_reentrant=False)


@refused("inference mode")
def inference_inside(x):
    with torch.inference_mode():
        return x + 1


@refused("what chooses between kernels")
def kernels_chosen_inside(x):
    with sdpa_kernel(SDPBackend.MATH):
        return x + 1


@refused("retain_grad")
def retained_inside(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.retain_grad()


@refused("grad_fn gives Python")
def node_hooked(x):
    return (x.to_local() * torch.ones(4, requires_grad=True)).grad_fn


# --- what is close to these, and fine


@fine
def choice_by_where(x):
    return torch.where(x > 3, x, -x)


@fine
def masked_fill(x):
    return x.masked_fill(x > 3, 0.0)


@fine
def written_by_mask(x):
    y = torch.ones(4)
    y[y > 0] = 3.0
    return x * y


@fine
def shape_decides(x):
    return x * 2 if x.shape[0] > 3 and x.dim() == 2 and x.dtype.is_floating_point else x


@fine
def integer_index_by_a_tensor(x):
    return x + torch.arange(4.0)[torch.tensor([3, 1, 2, 0])]


@fine
def repeats_of_known_size(x):
    return x + torch.repeat_interleave(torch.ones(2), torch.tensor([1, 3]), output_size=4)


@fine
def fixed_classes(x):
    return x + F.one_hot(torch.tensor([0, 2, 1]), 4).sum(0)


@fine
def control_flow_on_constants(x):
    positions = torch.arange(4)
    consecutive = bool((positions.diff() == 1).all()) and positions.max().item() == 3
    chosen = positions[positions > 1].tolist()
    return x * 2 if consecutive and chosen == [2, 3] else x


@fine
def clipped(x):
    weight = nn.Parameter(x.detach())
    weight.grad = x.detach() * 2
    return torch.nn.utils.clip_grad_norm_([weight], 1.0) * x


@pytest.mark.parametrize("name", sorted(CASES))
@on_ranks(2)
def test_refused_with_the_line(name):
    function, reason = CASES[name]
    lines, first = inspect.getsourcelines(function)
    torch.manual_seed(5)  # a seed that is set inside to what it was changes nothing
    with pytest.raises(CaptureError) as raised:
        vd.capture(function)(rows())
    message = str(raised.value)
    del raised
    if name == "checkpointed":  # up to torch 2.12 one that raises is active while its error lives
        gc.collect()
    assert reason in message
    inside = [f"{__file__}:{first + i}: {text.strip()}" for i, text in enumerate(lines)]
    assert message.splitlines()[-1].removeprefix("  at ") in inside, message
    # Nothing of the refused recording is left: others are recorded as ever.
    captured = vd.capture(torch.sin)
    captured(rows()), captured(rows())
    assert len(captured.programs) == 1


@pytest.mark.parametrize("name", sorted(FINE))
@on_ranks(2)
def test_recorded_though_close_to_it(name):
    captured = vd.capture(FINE[name])
    for _ in range(3):
        expected = FINE[name](rows())
        assert torch.equal(captured(rows()).full_tensor(), expected.full_tensor())
    assert len(captured.programs) == 1


def kept_outside(rank, world_size):
    seen = []

    def hoarding(x):
        seen.append(x * 2)
        return x

    captured = vd.capture(hoarding)
    captured(rows())  # made once, perhaps: this call was an eager one
    assert not captured.programs
    with pytest.raises(CaptureError, match="kept outside"):
        captured(rows())


def made_once(rank, world_size):
    cache = {}

    def cached(x):
        if "table" not in cache:
            cache["table"] = x.new_ones(4) * 2
        return x * cache["table"]

    captured = vd.capture(cached)
    for _ in range(3):
        assert torch.equal(captured(rows()).full_tensor(), rows().full_tensor() * 2)
    assert len(captured.programs) == 1


def caught_refusals(rank, world_size):
    def swallowing(x):
        try:
            return x * x.sum().item()
        except Exception:
            return x

    with pytest.raises(CaptureError, match="item reads"):
        vd.capture(swallowing)(rows())


@pytest.mark.parametrize(
    "check", [kept_outside, made_once, caught_refusals], ids=lambda check: check.__name__
)
def test_what_outlives_a_recording(check):
    run(check, 2)


def test_every_op_that_torch_marks_is_known():
    """torch tags the operators whose shapes or results depend on values: none is left out."""
    from vescale_dtensor._capture.record.unsupported import READERS, SHAPED_BY_VALUES

    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    # Refused by their arguments; the last one only makes a buffer of another size.
    elsewhere = {"index", "repeat_interleave", "where"}
    elsewhere |= {"_local_scalar_dense", "one_hot", "_ctc_loss"}
    names = {name.partition(".")[0].removeprefix("aten::") for name in _aten_names()}
    missing = []
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name, None)
        public = hasattr(torch, name) or hasattr(torch.Tensor, name)
        if packet is None or not public:
            continue
        marked = any(tags & set(getattr(packet, o).tags) for o in packet.overloads())
        if marked and name not in READERS | SHAPED_BY_VALUES | elsewhere:
            missing.append(name)
    assert not missing


def _aten_names():
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
