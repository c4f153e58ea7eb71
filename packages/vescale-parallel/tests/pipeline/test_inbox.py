"""The next message of each sender is received while a rank computes, and only that one."""

from typing import Any

import pytest
from vescale_parallel._pipeline.run.messages import Inbox, traffic_of
from vescale_parallel.schedules import SCHEDULES, make_schedule

MICROBATCHES = 4


class Lines:
    """Connections that note what is received, and how much of it is under way."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.under_way: set[Any] = set()
        self.most = 0
        self.received: list[Any] = []

    def start_recv(self, specs: Any, source: int) -> Any:
        assert source not in {sender for sender, _ in self.under_way}
        self.under_way.add((source, specs[0]))
        lines = self

        class Started:
            def wait(self) -> list[Any]:
                lines.under_way.remove((source, specs[0]))
                assert (source, specs[0]) not in lines.received
                lines.received.append((source, specs[0]))
                return specs

            drop = wait

        return Started()


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_message_of_each_sender_is_under_way(name: str):
    schedule = make_schedule(name, 2, MICROBATCHES, chunks=2)
    for rank in range(2):
        every = [one for one, _ in traffic_of(schedule, rank).coming[1 - rank]]
        lines: Any = Lines(rank)
        inbox = Inbox(lines, schedule, lambda message: [message])
        assert not lines.under_way  # nothing would take it if ranks did not call alike
        inbox.begin()
        for at, message in enumerate(every):
            assert lines.under_way == {(1 - rank, message)}
            if at == len(every) // 2:
                break  # a failure, after which what others send is taken and dropped
            assert inbox.take(message) == [message]
        inbox.drain()
        assert not lines.under_way
        assert lines.received == [(1 - rank, one) for one in every]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_failed_action_would_have_taken_is_dropped(name: str):
    schedule = make_schedule(name, 2, MICROBATCHES, chunks=2)
    lines: Any = Lines(1)
    inbox = Inbox(lines, schedule, lambda message: [message])
    inbox.begin()
    every = [one for one, _ in traffic_of(schedule, 1).coming[0]]
    inbox.take(every[0])
    for message in every:  # of which one has been taken
        inbox.skip(message)
    assert lines.received == [(0, one) for one in every]
    assert not lines.under_way
    for action in schedule.ranks[1]:  # nor is there more to come, of this rank or another
        needs, _ = inbox.passes[action]
        if needs is not None:
            inbox.skip(needs)
    assert lines.received == [(0, one) for one in every]
