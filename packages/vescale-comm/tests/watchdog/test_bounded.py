"""A call of a store ends, also where the network has cut this rank off from it."""

import gc
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch.distributed as dist
from vescale_comm._watchdog import bounded_store
from vescale_comm._watchdog.bounded_store import BoundedStore, StoreLostError, in_time
from vescale_comm._watchdog.channel import Channel
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm._watchdog.watcher import Watcher


class Cable:
    """Between a store and those that connect to `port`; silent from `cut` to `mend`."""

    def __init__(self, server):
        self.whole = threading.Event()
        self.whole.set()
        self.server, self._ends = server, []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self.whole.clear()

    def mend(self):
        self.whole.set()

    def close(self):
        self.mend()
        for each in (self._listening, *self._ends):
            with suppress(OSError):  # it may be closed at the other end
                each.shutdown(socket.SHUT_RDWR)  # who waits for it in another thread is woken
            each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self.server))
                self._ends.append(far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.whole.wait()
                target.sendall(data)


@pytest.fixture
def cable():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Cable(server.port)
    yield made
    made.close()


def client(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def connected(cable, seconds):
    return BoundedStore(client(cable.port), "a", seconds)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(bounded_store, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(bounded_store, "_WAY_SECONDS", 0.4)


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_store_says(cable):
    store = connected(cable, 5.0)
    assert (store.get("x"), store.check("x"), store.add("n", 2)) == (None, False, 2)
    store.within("b").set("x", b"\0word")
    assert store.get("b/x") == b"\0word"
    assert store.compare_set("y", "", "mine") == store.compare_set("y", "", "yours") == b"mine"
    with pytest.raises(TypeError):  # an error of the store's own is raised as it is
        store.add("n", "two")
    assert store.add("n", 1) == 3


def test_a_call_on_a_dead_connection_ends(cable, monkeypatch):
    monkeypatch.setattr("vescale_comm._watchdog.bounded_store._WAY_SECONDS", 0.2)
    store = connected(cable, 0.2)
    store.set("x", "1")
    cable.cut()
    began = time.monotonic()
    with pytest.raises(StoreLostError, match="has not answered for"):
        store.get("x")
    with pytest.raises(StoreLostError, match="did not answer before"):
        store.within("b").add("n", 1)
    assert time.monotonic() - began < 20  # and not for ever
    # What was asked before is answered first.
    assert store.is_silent
    cable.mend()
    until(lambda: not store.is_silent)
    assert (store.get("x"), store.within("b").add("n", 1)) == (b"1", 1)


def test_a_rank_answers_again_after_a_silence(cable, impatient):
    near, far = Channel(client(cable.port), 0, 2), Channel(client(cable.server), 1, 2)
    watcher = Watcher(near, server=None)
    watcher.look(0.0)
    assert far.ask() == 1
    cable.cut()
    with pytest.raises(StoreLostError):
        watcher.look(1.0)
    watcher.look(2.0)
    assert watcher.lost
    assert not watcher.gone
    cable.mend()
    until(lambda: not watcher.lost)
    watcher.look(3.0)
    assert [*far.answers(1)] == [0]


def test_ranks_are_compared_again_after_a_silence(cable, impatient):
    ports = cable.port, cable.server
    ranks = [Comparison(client(port), rank, 2, lambda: True) for rank, port in enumerate(ports)]
    logs = [each.log((0, 1), "") for each in ranks]
    cable.cut()
    until(lambda: ranks[0]._lost)
    for rank, log in enumerate(logs):
        log.record(("step", rank))
    cable.mend()
    until(lambda: all(each.trouble for each in ranks))
    assert "step 1" in ranks[0].trouble
    for each in ranks:
        each.stop()


def test_a_connection_that_is_not_made_is_not_waited_for(cable, impatient):
    store = client(cable.port)
    cable.cut()
    with pytest.raises(StoreLostError, match="has not answered for"):
        Channel(store, 0, 2)


def test_a_server_that_accepts_and_is_silent_is_left():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StoreLostError, match="has not answered for"):
            in_time(lambda: dist.TCPStore("127.0.0.1", port, is_master=False), 0.2)
    assert in_time(lambda: 3, 30.0) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, 30.0)


def test_threads_end_with_their_stores(cable):
    before = {*threading.enumerate()}
    store = connected(cable, 5.0)
    (asks,) = (e for e in {*threading.enumerate()} - before if e.name == "vescale-store")
    within = store.within("b")
    del store
    assert (within.add("n", 1), asks.is_alive()) == (1, True)
    del within
    gc.collect()
    asks.join(30)
    assert not asks.is_alive()
