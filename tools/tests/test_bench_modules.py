"""The benchmarks run, at their smallest size, and their meters count what they say they count."""

import pytest
import torch
import torch.distributed as dist
import vescale_comm
from vescale_comm.testing import run

from tools.bench import ckpt, consistency, dispatch, experts, graph, rng
from tools.bench._code_lines import code_lines
from tools.bench._timing import microseconds
from tools.bench._wire import Wire


@pytest.mark.slow
def test_dispatch_has_a_line_for_each_reference_of_each_case():
    rows = list(dispatch.measure(rounds=1))
    assert not dist.is_initialized()
    against = {(row.name, row.against) for row in rows}
    assert len(against) == len(rows)
    assert {("add", "plain torch"), ("add", "torch DTensor")} <= against
    assert all(row.ours > 0 and row.reference > 0 for row in rows)


@pytest.mark.slow
def test_consistency_finds_our_loss_nearer_to_one_device_than_torchs():
    rows = {(row.name, row.against): row for row in consistency.measure(steps=2, layers=1)}
    loss = rows["largest loss difference, 2 steps", consistency.STOCK]
    assert loss.ours < loss.reference
    assert rows["elements dropped as on one device", consistency.STOCK].ours == 1


def test_experts_send_no_more_than_padded_dispatch_does():
    options = {"width": [16], "tokens": 64, "experts": 4, "layers": 1, "rounds": 1}
    rows = {(row.name.rpartition(": ")[2], row.against): row for row in experts.measure(**options)}
    assert rows["sent", experts.PADDED].ratio < 1
    assert all(row.ours > 0 for row in rows.values())


def test_a_real_models_memory_is_planned_on_paper():
    asked = {"models": (), "hidden": (), "ranks": 1, "seconds": 5}
    rows = {row.against: row for row in graph.measure(**asked, zoo=["AlexNet"], batches=[1])}
    assert rows["torch's allocator"].ratio < 0.65  # gradients go at once: they are most of it
    assert rows["lower bound"].ratio >= 1
    assert rows["list scheduling"].ours > 0


def test_rng_times_every_distribution_against_both_references():
    rows = list(rng.measure(extent=16, rounds=1, memory=False, shapes=[(4, 4)]))
    against = {(row.name, row.against) for row in rows}
    assert len(against) == len(rows)
    assert {
        ("native: uniform, rows", "the whole"),
        ("portable: normal, ragged", "as many"),
        ("consistent: F.dropout, 4 x 4, each draw asks", "stock"),
        ("consistent: F.dropout, 4 x 4, rows declared", "stock"),
    } < against
    assert all(row.ours > 0 for row in rows)


def test_ckpt_reads_what_it_needs_and_the_values_are_right():
    rows = {row.name: row for row in ckpt.measure(count=2, extent=256, rounds=1)}
    # Less than needed would mean that the meter, or the load, misses something.
    assert rows["load: bytes read / needed"].ours >= 1


def test_timing_tells_a_slow_call_from_a_fast_one():
    x = torch.ones(300, 300)
    cost = microseconds({"slow": lambda: x @ x, "fast": lambda: x.ndim}, rounds=3)
    assert cost["slow"] > cost["fast"] > 0


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    assert code_lines('"""Title."""\n\n# why\nx = (\n    1,\n)\ndef f():\n    """Doc."""\n') == 4


def _both_meters(rank, world_size):
    x = torch.ones(8, 2)
    with Wire() as wire, vescale_comm.trace() as trace:
        vescale_comm.all_reduce(x, None)
        vescale_comm.all_gather(x, None)
        vescale_comm.reduce_scatter(x, None)
        vescale_comm.broadcast(x, None)
    return dict(wire.counts), wire.bytes, trace.counts(), trace.bytes()


def test_the_wire_meter_agrees_with_the_trace_of_our_collectives():
    for rank, (counts, sent, traced, traced_bytes) in enumerate(run(_both_meters, 2)):
        # Over gloo a sum of two, and a small gather, travel as an exchange.
        exchanged = traced.pop("all_reduce") + traced.pop("all_gather")
        assert counts == {**traced, "all_to_all": exchanged}
        # The meter counts a broadcast on every member; the trace where it is sent.
        assert sent == traced_bytes + (64 if rank else 0)


def _one_all_reduce(rank, world_size):
    with Wire() as wire:
        dist.all_reduce(torch.ones(10))
    return dict(wire.counts), wire.bytes


def test_the_wire_meter_sees_torchs_own_collectives():
    assert run(_one_all_reduce, 2) == [({"all_reduce": 1}, 40)] * 2
