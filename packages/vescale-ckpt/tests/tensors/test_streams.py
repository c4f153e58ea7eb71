"""Threads that copy for a save or a load do it on the streams of their caller.

There is no accelerator here: that threads take the streams first is what a stand-in records.
"""

import threading

import pytest
import torch
import vescale_ckpt._load.fetch as fetch
import vescale_ckpt._save.write as write
from vescale_ckpt import load, save
from vescale_ckpt._tensors import streams


@pytest.fixture
def taken(monkeypatch):
    """Names of threads, by the stream that they took; the caller's is 'training'."""
    found = []

    def of(devices):
        assert {one.type for one in devices} == {"cpu"}
        assert threading.current_thread() is threading.main_thread()
        return ["training"]

    for module in (write, fetch):
        monkeypatch.setattr(module, "streams_of", of)
    monkeypatch.setattr(
        torch.accelerator,
        "set_stream",
        lambda stream: found.append((threading.current_thread().name.rpartition("_")[0], stream)),
    )
    # Files and shares of this test's size.
    monkeypatch.setattr(write, "_FILE_BYTES", 1 << 10)
    monkeypatch.setattr(fetch, "_THREAD_BYTES", 1 << 10)
    monkeypatch.setattr("vescale_ckpt._save.save.cores_per_rank", lambda ranks: 2)
    monkeypatch.setattr("vescale_ckpt._load.load.cores_per_rank", lambda ranks: 2)
    return found


def test_they_take_them_before_they_copy(taken, path):
    state = {"a": torch.arange(10_000.0), "b": torch.ones(10_000)}
    save(path, state)
    assert {*taken} == {("vescale-ckpt-write", "training")}
    taken.clear()
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    load(path, found)
    # A thread that is done with its share may take the other one as well.
    assert {*taken} == {("vescale-ckpt-read", "training")}
    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_streams_are_those_of_the_accelerator_in_use(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    devices = [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert streams.streams_of(devices) == ["of cuda:1"]
    assert streams.streams_of(devices[:1]) == []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert streams.streams_of(devices) == []
