"""Progress is told in bytes to who asks, shown on a terminal, and silent elsewhere."""

import io

import pytest
import torch
from vescale_ckpt import _progress, inspect, load, save, verify


def test_callbacks_count_up_to_the_total(path):
    state = {"a": torch.zeros(100), "b": torch.zeros(50)}
    for work in (
        lambda tell: save(path, state, progress=tell),
        lambda tell: load(path, state, progress=tell),
        lambda tell: inspect(path, statistics=True, progress=tell),
    ):
        told = []
        work(lambda done, total: told.append((done, total)))  # noqa: B023
        assert told == [(400, 600), (600, 600)]
    told = []
    size = verify(path, progress=lambda done, total: told.append((done, total))).nbytes
    header = size - 600
    assert told == [(header, size), (header + 400, size), (size, size)]


def test_silent_where_stderr_is_no_terminal(path, capsys):
    save(path, {"a": torch.zeros(100)})
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("seconds_each", "shown"), [(0.01, 0), (0.5, 4)])
def test_a_line_on_a_terminal_for_what_takes_long(monkeypatch, seconds_each, shown):
    terminal, clock = Terminal(), [100.0]
    monkeypatch.setattr(_progress.sys, "stderr", terminal)
    monkeypatch.setattr(_progress.time, "monotonic", lambda: clock[0])
    tell = _progress.progress_line("saving x")
    for done in range(1, 6):
        clock[0] += seconds_each
        tell(done * 1_000_000, 5_000_000)
    assert terminal.getvalue().count("\r") == shown
    if shown:
        assert terminal.getvalue().endswith("\rsaving x: 100 %  5 MB  2 MB/s\n")
