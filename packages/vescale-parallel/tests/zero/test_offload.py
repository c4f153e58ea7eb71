"""`offload=`: what zero shards lies on the host, with the bits of a model that stays on the device.

The machine's only device is the host. So a link whose ends are both the host, which copies and
counts, stands for a device here; `test_second_device` has one that is not the host.
"""

from math import prod
from typing import Any

import pytest
import torch
from offload_runs import HALF, RUNS, alike, backward, built
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import (
    GraphError,
    ParallelError,
    Plan,
    PlanError,
    Zero,
    forward_backward,
    graph,
    parallelize,
)
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero import host
from zero_models import (
    PARAMETERS,
    Decoder,
    batch,
    distributed,
    make,
    plan_for,
    schedule_of,
    whole,
)

DP, DP_TP, HSDP, ONE = {"dp": 2}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}, {"dp": 1}


class CountingLink(host.HostLink):
    """Copies within the host, counts bytes each way, and knows which memory is the host's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.down = self.up = 0
        self._held: list[Tensor] = []

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._noted(super().zeros(count, dtype))

    def start_to_device(self, shard: Tensor, target: Tensor) -> Any:
        assert self.is_held(shard)
        self.down += shard.nbytes
        return super().start_to_device(shard, target)

    def to_host(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        self.up += values.numel() * dtype.itemsize
        return self._noted(values.to(dtype).clone())

    def _noted(self, made: Tensor) -> Tensor:
        self._held.append(made)
        return made

    def is_held(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == at for one in self._held)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[CountingLink]:
    """The links of all models that are parallelised."""
    made: list[CountingLink] = []

    def link(device_type: str) -> CountingLink:
        made.append(CountingLink())
        return made[-1]

    monkeypatch.setattr(host, "is_host", lambda device_type: False)
    monkeypatch.setattr(host, "host_link", link)
    return made


def on_mesh(rank: int, world_size: int, sizes: dict[str, int], *args: Any) -> None:
    alike(make_mesh(device_type="cpu", **sizes), *args)


@pytest.mark.parametrize(
    ("run", "sizes", "zero", "words"),
    [
        ("stepped", DP, 3, {"offload": True}),
        ("stepped", ONE, 3, {"offload": True, "precision": HALF}),
        ("stepped", HSDP, {"embed*": 1, "*": 3}, {"offload": True, "owned": "*.down.weight"}),
        ("accumulated", DP, 3, {"offload": "optimizer", "reduce_ahead": 1}),
        ("accumulated", DP_TP, 3, {"offload": True, "precision": HALF, "reduce_ahead": 1}),
        ("accumulated", DP, 1, {"offload": "optimizer", "precision": HALF}),
        ("scaled", DP, 2, {"offload": True}),
        ("scaled", DP_TP, 3, {"offload": True}),
        # Not clipped: words by glob make other buffers, whose norms are added up otherwise.
        (
            "accumulated",
            DP_TP,
            3,
            {"offload": {"embed*": "none", "*.up.*": "optimizer", "*": True}},
        ),
        ("copied", DP, 3, {"offload": "optimizer"}),
        ("copied", DP, 2, {"offload": True, "precision": HALF}),
        ("stepped", DP, 3, {"offload": True, "checkpoint": "full", "static": True}),
    ],
)
def test_the_bits_of_a_model_on_the_device(links: list[CountingLink], run, sizes, zero, words):
    n = prod(sizes.values())
    # One rank as a plan without levels: zero stores nothing as shards there without offload.
    simulate(n)(on_mesh, sizes, zero, run, words)
    assert len(links) == n
    assert all(link.down and link.up for link in links)


@pytest.mark.parametrize(
    ("zero", "offload", "copies"), [(3, True, 2), (3, "optimizer", 1), (2, True, 1), (1, True, 1)]
)
def test_what_lies_where_and_is_copied(links: list[CountingLink], zero, offload, copies):
    def run(rank: int, world_size: int) -> None:
        model: Any = built(make_mesh(device_type="cpu", dp=2), zero, offload=offload)
        link = links[-1]  # ranks switch where they communicate: not between these two lines
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            before = link.down, link.up
            backward(model, step)
            optimizer.step()
        stored = [one for one in model.parameters() if one.ndim]
        for one in stored:
            own = one.to_local()
            assert not own.numel() or link.is_held(own)
            assert not own.numel() or link.is_held(one.grad.to_local())
            assert optimizer.state[one]["exp_avg"].device.type == "cpu"
        units = schedule_of(model).units
        assert all(not link.is_held(b.full) for u in units for b in u.buffers if b.full is not None)
        kept = sum(b.full.nbytes for u in units for b in u.buffers if b.full is not None)
        rows = [b.row for u in units for b in u.buffers]
        assert kept == (sum(row.gathered_bytes for row in rows) if zero < 3 else 0)
        # The root, and the block with which backward begins, are gathered once.
        down = sum(
            row.shard_bytes * (copies if row.unit in ("blocks.0", "blocks.1") else 1)
            for row in rows
        )
        assert link.down - before[0] == down
        assert link.up - before[1] == sum(row.shard_bytes for row in rows)

    simulate(2)(run)


def test_the_table_has_a_column_for_the_host():
    def bytes_of(offload: Any, zero: int) -> tuple[int, int, int]:
        report = plan_for(DP, zero, offload=offload).check(make(), DP)
        rows = report.buffers
        shard = sum(row.shard_bytes for row in rows)
        held = sum(row.stored_bytes for row in rows)
        assert sum(row.host_bytes for row in rows) == (shard if offload else 0)
        return held, sum(row.gradient_bytes for row in rows), shard

    held, _, shard = bytes_of(True, 3)
    assert (held, bytes_of("optimizer", 3)[0]) == (0, shard)
    assert bytes_of(True, 2)[:2] == (bytes_of(None, 2)[0], 0)
    text = str(plan_for(DP, 3, offload=True).check(make(), DP))
    assert "each optimizer state     0 B  1.5 KiB" in text
    assert "to the device and 1.5 KiB of gradients to the host" in text
    assert "stays on the device: 'blocks.0.mlp.gain'" in text


def test_a_step_is_priced_with_its_copies():
    def cost(zero: int, **words: Any) -> Any:
        return plan_for(DP, zero, **words).check(make(), DP).cost(4096)

    plain, moved, kept = cost(3), cost(3, offload=True), cost(3, offload="optimizer")
    before, after = plain.memory, moved.memory
    stored = before.parameters + before.gradients + before.states
    left = after.parameters + after.gradients + after.states
    # The scalars stay.
    assert after.host == pytest.approx(stored - left)
    assert left < stored / 50
    assert after.total == pytest.approx(before.total - after.host)
    assert kept.memory.host == after.host
    assert kept.memory.total > after.total
    sent = {one.kind: size for one, size, _ in moved.transfers if one.axis == "host"}
    assert set(sent) == {"to_device", "to_host"}
    assert moved.seconds > plain.seconds
    # In bf16, but for the scalars.
    assert cost(2, offload=True).memory.parameters < 0.51 * cost(2).memory.parameters


def test_where_the_device_is_the_host_nothing_moves():
    def run(rank: int, world_size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2)
        report = plan_for(DP, 3, offload=True).check(make(), mesh)
        assert "the devices of this mesh are the host, so nothing moves" in str(report)
        assert not any(row.offload for row in report.buffers)
        model = alike(mesh, 3, "stepped", {"offload": True})
        assert all(b.host is None for u in schedule_of(model).units for b in u.buffers)

    simulate(2)(run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"zero": Zero(offload=True)}, "zero=0 stores none"),
        ({"zero": Zero(3, offload="optimiser")}, "no 'optimiser'. Did you mean 'optimizer'"),
        ({"zero": Zero(3, offload=1)}, "there is no 1"),
        ({"zero": Zero(3, offload={"a": "x"})}, "there is no 'x'"),
        ({"zero": Zero(3, offload={"{a": True})}, "never closed"),
        ({"zero": Zero(3, offload={3: True})}, "a glob is a string, got 3"),
    ],
)
def test_words_that_cannot_be_read(words: dict[str, Any], said: str):
    with pytest.raises(PlanError, match=said):
        Plan(**words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"zero": Zero(2, offload="parameters")}, "Say level 3 for them, or offload='optimizer'"),
        ({"zero": Zero(3, offload={"embd*": True})}, "'embd\\*' matches no parameter. Nearest"),
        (
            {"zero": Zero(3, offload={"embed*": True, "head*": "optimizer", "*": "none"})},
            "one parameter, and offload rules give it different words",
        ),
        (
            {"zero": Zero(3, offload=True), "deterministic": "dp-invariant"},
            "sums of logical shards",
        ),
    ],
)
def test_plans_that_do_not_fit(words: dict[str, Any], said: str):
    with pytest.raises(PlanError, match=said):
        Plan(**words).check(make(), DP)


def in_stages(sizes: dict[str, int], schedule: str, zero: int, words: Any) -> Any:
    """Three clipped steps of a decoder in stages."""
    torch.manual_seed(3)
    model = Decoder(tied=words.pop("tied", False), blocks=4)
    static = words.pop("static", False)
    how = Plan(parameters=PARAMETERS, pipeline=schedule, microbatches=4, zero=zero).with_(**words)
    torch.manual_seed(11)
    parallelize(model, make_mesh(device_type="cpu", **sizes), how, static=static)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        forward_backward(model, *batch(step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("sizes", "schedule", "zero", "words"),
    [
        ({"pp": 2, "dp": 2}, "1f1b", 3, {"offload": True}),
        ({"pp": 2, "dp": 1}, "gpipe", 3, {"offload": True, "checkpoint": "full"}),
        ({"pp": 2, "dp": 2}, "zb-h1", 2, {"offload": True, "tied": True}),
        ({"pp": 2, "dp": 2}, "interleaved", 1, {"offload": "optimizer"}),
        ({"pp": 2, "dp": 2}, "1f1b", 3, {"offload": "optimizer", "precision": HALF}),
        ({"pp": 2, "dp": 2}, "1f1b", 3, {"offload": True, "static": True}),
    ],
)
def test_stages_have_the_bits_of_stages_on_the_device(
    links: list[CountingLink], sizes: dict[str, int], schedule: str, zero: int, words: Any
):
    def run(rank: int, world_size: int) -> None:
        # One rank has shards with offload only.
        level = zero if sizes["dp"] > 1 else 0
        plain = in_stages(sizes, schedule, level, {**words, "offload": None})
        model = in_stages(sizes, schedule, zero, dict(words))
        link = next(b.host.link for u in schedule_of(model).units for b in u.buffers)
        assert link.down
        assert link.up
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), whole(other.detach())), name
            assert torch.equal(whole(one.grad), whole(other.grad)), name
        held = {id(p) for u in schedule_of(model).units for b in u.buffers for p in b.parameters}
        for one in model.parameters():
            own = one.to_local()
            if id(one) in held and own.numel():
                assert link.is_held(own)

    simulate(prod(sizes.values()))(run)


def test_what_every_stage_holds_stays_on_the_device():
    sizes = {"pp": 2, "dp": 2}
    torch.manual_seed(0)
    model = Decoder(tied=True, blocks=4)
    report = Plan(zero=Zero(3, offload=True), pipeline="1f1b", microbatches=2).check(model, sizes)
    assert "what zero does not shard stays on the device: 'embed.weight'" in str(report)
    assert {row.name for row in report.parameters if not row.offload} >= {"embed.weight"}


def test_a_mesh_without_the_axis_is_told():
    report = plan_for({"tp": 2}, 3, offload=True).check(make(), {"tp": 2})
    assert "nothing is stored as shards without the axis 'dp'" in str(report)
    assert not report.buffers


def test_no_joint_graph_of_two_devices(links: list[CountingLink]):
    def run(rank: int, world_size: int) -> None:
        model: Any = distributed(make(), DP, 3, offload=True)
        with pytest.raises(GraphError, match="lie on the host by offload="):
            graph.train_step(model, model, *batch(0))

    simulate(2)(run)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("run", ["stepped", "accumulated", "copied"])
@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (3, {"offload": True, "reduce_ahead": 1}),
        (3, {"offload": "optimizer", "precision": HALF}),
        (2, {"offload": True}),
        (1, {"offload": True, "precision": HALF}),
    ],
)
def test_on_a_gpu(run: str, zero: int, words: dict[str, Any]):
    # Of one rank: without offload it has no shards, and its optimizer runs on the device.
    mesh = make_mesh(device_type="cuda", dp=1)
    models: list[nn.Module] = []
    for offload in (words["offload"], None):
        model = built(mesh, zero, **{**words, "offload": offload})
        RUNS[run](model)
        models.append(model)
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if one.ndim:
            assert one.device.type == "cpu", name
            assert one.to_local().is_pinned(), name
        own, other = one.full_tensor().detach().cpu(), two.full_tensor().detach().cpu()
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    models[0].to("cuda")
    with pytest.raises(ParallelError, match="lie on the host by offload=, and were moved to"):
        backward(models[0], 0)
