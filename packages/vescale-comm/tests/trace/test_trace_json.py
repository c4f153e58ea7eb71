"""A trace knows when and where, and becomes one JSON for all ranks on one clock."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from vescale_comm import all_gather, all_reduce, count, group_of, merge, trace
from vescale_comm._trace.clock import _message_device
from vescale_comm.testing import device_mesh, run


def traced(rank, world_size):
    group = group_of(device_mesh((world_size,), ("dp",)), "dp")
    with trace(align=True) as t:
        before = time.time_ns()
        all_reduce(torch.ones(6), group)
        handle = all_gather(torch.ones(2), group, async_op=True)
        pending = t.records[-1].end
        handle.wait()
        after = time.time_ns()
    assert pending == 0
    assert all(before <= r.start <= r.end <= after for r in t.records)
    line = traced.__code__.co_firstlineno + 4
    # Beside each other, behind other lines: the line of a call is its own.
    assert [r.site for r in t.records] == [f"{__file__}:{at} in traced" for at in (line, line + 1)]
    with count() as counted:
        all_reduce(torch.ones(1), group)
    assert counted.counts() == {"all_reduce": 1}
    return t


def test_times_lines_and_one_document_for_all_ranks(tmp_path):
    traces = run(traced, 2)
    # One machine has one clock: what alignment measures is the time of a message.
    assert all(abs(t.clock[0] - t.clock[1]) < 1e9 for t in traces)
    path = tmp_path / "trace.json"
    merge(path, traces)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    assert [(e["pid"], e["name"], e["tid"]) for e in complete] == [
        (rank, op, "dp") for rank in (0, 1) for op in ("all_reduce", "all_gather")
    ]
    for event, record in zip(complete, [r for t in traces for r in t.records], strict=True):
        assert event["dur"] == (record.end - record.start) / 1000
        assert event["args"]["bytes"] == record.bytes
        assert (event["args"]["device"], event["args"]["time"]) == ("cpu", "until it was done")
        assert event["args"]["shape"] == list(record.shape)


def test_clocks_are_compared_on_a_device_that_the_backend_sends_from():
    assert _message_device({"cpu": "gloo"}) == "cpu"
    assert _message_device({"cpu": "gloo", "cuda": "nccl"}) == "cpu"
    assert _message_device({"cuda": "nccl"}) == "cuda"  # init_process_group("nccl")


@pytest.mark.gpu
def test_clocks_are_compared_over_nccl(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and there is none")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        with trace(align=True) as t:
            all_reduce(torch.ones(1, device="cuda"))
    finally:
        dist.destroy_process_group()
    assert t.clock[0] == t.clock[1] > 0


def test_a_skewed_clock_is_put_right(tmp_path):
    first, second = run(traced, 2)
    second.clock = (second.clock[0] + 5_000_000_000, second.clock[1])
    for record in second.records:
        record.start, record.end = record.start + 5_000_000_000, record.end + 5_000_000_000
    starts = [[e["ts"] for e in t.events() if e["ph"] == "X"] for t in (first, second)]
    assert all(abs(a - b) < 2e6 for a, b in zip(*starts, strict=True))


def test_a_time_of_a_launch_says_so():
    told = run(traced, 2)[0]
    told.records[0].device = "cuda"
    spans = [event for event in told.events() if event["ph"] == "X"]
    assert [one["args"]["time"] for one in spans] == ["of the launch", "until it was done"]
    assert "until the collective was launched" in told.table().splitlines()[-1]


def test_the_table_sums_by_op_and_axis():
    lines = run(traced, 2)[0].table().splitlines()
    assert lines[0].split() == ["op", "group", "count", "bytes", "ms"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["all_reduce", "dp", "1", "24"],
        ["all_gather", "dp", "1", "8"],
    ]
