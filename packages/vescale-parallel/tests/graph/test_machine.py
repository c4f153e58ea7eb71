"""What `calibrate` measures is alike on all ranks, kept as JSON, and what timelines ask for.

And the seconds that nodes of a graph took are those of its nodes, of one process and of several,
with its results unchanged.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import all_gather, group_of, simulate
from vescale_parallel import graph, mesh
from vescale_parallel._errors import GraphError
from vescale_parallel._graph.machine import _SENT, _fitted


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.softmax(x @ y, -1).sum()


def communicating(rank: int, world_size: int) -> graph.Machine:
    group = group_of(mesh(dp=world_size, device_type="cpu"), "dp")
    machine = graph.calibrate(seconds=0.01)

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return all_gather(x * 2, group) + 1

    x = torch.randn(3)
    made = make_fx(gathered, tracing_mode="fake")(x)
    seconds = graph.measured_seconds(made, x, rounds=2)
    computed = [one.name for one in made.graph.nodes if "call" in one.op]
    assert list(seconds) == computed
    assert all(took > 0 for took in seconds.values())
    found = graph.timeline(made, machine=machine, seconds=seconds)
    assert found.communicating == sum(took for name, took in seconds.items() if "gather" in name)
    assert torch.equal(made(x), gathered(x))
    return machine


def test_ranks_get_the_same_numbers():
    first, *others = simulate(3).run(communicating)
    assert others == [first, first]
    assert first.link.bandwidth < float("inf")


@given(latency=st.floats(0, 1e-2), bandwidth=st.floats(1e6, 1e12), members=st.integers(2, 64))
def test_a_line_is_found_again(latency: float, bandwidth: float, members: int):
    steps = graph.Link(latency=0, bandwidth=1).steps(members)
    took = [steps * latency + size * (members - 1) / bandwidth for size in _SENT]
    found = _fitted(took, members)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-2)
    assert found.latency * steps == pytest.approx(latency * steps, abs=1e-2 * took[0] + 1e-12)


def test_one_process_and_a_file(tmp_path):
    machine = graph.calibrate(seconds=0.01)
    machine.save(tmp_path / "machine.json")
    assert graph.Machine.load(tmp_path / "machine.json") == machine
    x, y = torch.randn(5, 7), torch.randn(7, 3)
    made = make_fx(step, tracing_mode="fake")(x, y)
    expected = graph.timeline(
        made, link=machine.link, flops=machine.flops, memory_bandwidth=machine.memory_bandwidth
    )
    assert graph.timeline(made, machine=machine) == expected
    assert graph.timeline(made, machine=machine, flops=1.0).seconds > expected.seconds


GOOD = {"flops": 1e9, "memory_bandwidth": 1e9, "link": {"latency": 0.0, "bandwidth": 1.0}}
NO_RATES = ["fast", None, True, float("nan"), -1.0, 0]
BAD = [
    *({name: value} for name in ("flops", "memory_bandwidth") for value in NO_RATES),
    *({"link": {"latency": 0.0, "bandwidth": value}} for value in NO_RATES),
    *({"host": {"latency": value, "bandwidth": 1.0}} for value in ("a", float("nan"), -1.0)),
]


@pytest.mark.parametrize(
    "held", ["", "[]", "{}", json.dumps({"flops": 1}), *(json.dumps(GOOD | one) for one in BAD)]
)
def test_another_file_is_refused(tmp_path, held: str):
    (tmp_path / "machine.json").write_text(held)
    with pytest.raises(GraphError, match=r"machine\.json: not what Machine\.save writes"):
        graph.Machine.load(tmp_path / "machine.json")


def test_a_file_written_by_hand(tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps(GOOD))
    assert graph.Machine.load(tmp_path / "machine.json").link == graph.Link(
        latency=0.0, bandwidth=1.0
    )


def test_rates_that_are_missing():
    made = make_fx(step, tracing_mode="fake")(torch.randn(5, 7), torch.randn(7, 3))
    with pytest.raises(GraphError, match=r"machine=graph\.calibrate\(\)"):
        graph.timeline(made, flops=1e9)
