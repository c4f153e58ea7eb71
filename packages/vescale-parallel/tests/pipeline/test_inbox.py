"""The next message of each sender is received while a rank computes: on CPU, and only one."""

from typing import Any

import pytest
from vescale_parallel._pipeline.messages import Inbox, traffic_of
from vescale_parallel.schedules import SCHEDULES, make_schedule

MICROBATCHES = 4


class Lines:
    """Connections that note what is received, and how much of it is under way."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self.under_way: set[Any] = set()
        self.most = 0
        self.received: list[Any] = []

    def recv(self, specs: Any, source: int) -> list[Any]:
        assert (source, specs[0]) not in self.received
        self.received.append((source, specs[0]))
        return specs

    def start_recv(self, specs: Any, source: int) -> Any:
        assert source not in {sender for sender, _ in self.under_way}
        self.under_way.add((source, specs[0]))
        lines = self

        class Started:
            def wait(self) -> list[Any]:
                lines.under_way.remove((source, specs[0]))
                return lines.recv(specs, source)

        return Started()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_message_of_each_sender_is_under_way(device: str, name: str):
    schedule = make_schedule(name, 2, MICROBATCHES, chunks=2)
    for rank in range(2):
        every = [one for one, _ in traffic_of(schedule, rank).coming[1 - rank]]
        lines: Any = Lines(rank, device)
        inbox = Inbox(lines, schedule, lambda message: [message])
        assert not lines.under_way  # nothing would take it if ranks did not call alike
        inbox.begin()
        for at, message in enumerate(every):
            assert lines.under_way == ({(1 - rank, message)} if device == "cpu" else set())
            if at == len(every) // 2:
                break  # a failure, after which what others send is taken and dropped
            assert inbox.take(message) == [message]
        inbox.drain()
        assert not lines.under_way
        assert lines.received == [(1 - rank, one) for one in every]
