"""Simulated ranks that compute on streams of their own: who moves data waits for all, all for it.

There is no accelerator here. Stand-ins for streams write down what each is told, in order.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from vescale_comm import all_reduce, simulate
from vescale_comm._simulation import streams


class Stream:
    """What one rank's stream is given."""

    def __init__(self, rank):
        self.rank, self.told = rank, []
        self._numbers = itertools.count()

    def record_event(self):
        event = f"{self.rank}.{next(self._numbers)}"
        self.told.append(f"record {event}")
        return event

    def wait_event(self, event):
        self.told.append(f"wait {event}")


@pytest.fixture
def each(monkeypatch):
    """Streams by rank; tensors of the host stand for those of a device."""
    found = {}
    monkeypatch.setattr(streams, "_HOST", ("meta",))
    monkeypatch.setattr(
        torch.accelerator,
        "current_stream",
        lambda device: found.setdefault(dist.get_rank(), Stream(dist.get_rank())),
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: stream.told.append("uses memory")
    )
    return found


def test_the_last_to_come_waits_for_all_and_all_for_what_it_moved(each):
    def program(rank, world_size):
        return all_reduce(torch.ones(1)).item()

    assert simulate(3)(program) == [3.0] * 3
    told = [each[rank].told for rank in range(3)]
    # Rank 2 comes last: it waits for the others' events, and records one behind the data. Memory
    # of all is not given to others before.
    assert told[2] == ["record 2.0", "wait 0.0", "wait 1.0", *["uses memory"] * 3, "record 2.1"]
    assert told[0] == ["record 0.0", "wait 2.1"]
    assert told[1] == ["record 1.0", "wait 2.1"]


def test_a_message_is_copied_behind_its_sender(each):
    def program(rank, world_size):
        x = torch.full((2,), 5.0)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x.zero_(), 0)
        return x.tolist()

    assert simulate(2)(program) == [[5.0, 5.0]] * 2
    assert each[0].told == ["record 0.0"]
    assert each[1].told == ["wait 0.0", "uses memory"]


def test_of_one_stream_nothing_waits(each, monkeypatch):
    only = Stream(0)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: only)
    assert simulate(3)(lambda rank, size: all_reduce(torch.ones(1)).item()) == [3.0] * 3
    assert all(one.startswith("record") for one in only.told)


def test_the_host_has_no_streams(monkeypatch):
    def none(device):
        raise AssertionError("asked for a stream")

    monkeypatch.setattr(torch.accelerator, "current_stream", none)
    assert simulate(2)(lambda rank, size: all_reduce(torch.ones(1)).item()) == [2.0] * 2
