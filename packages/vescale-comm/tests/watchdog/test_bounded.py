"""A call of a store ends, also where the network has cut this rank off from it."""

import gc
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch.distributed as dist
from vescale_comm._watchdog.bounded import BoundedStore, StoreLostError, in_time


class Cable:
    """Between a store and those that connect to `port`, until it is `cut`: then it is silent."""

    def __init__(self, server):
        self.whole = threading.Event()
        self.whole.set()
        self._server, self._ends = server, []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self.whole.clear()

    def close(self):
        for each in (self._listening, *self._ends):
            each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._server))
                self._ends += near, far
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.whole.is_set():
                    target.sendall(data)


@pytest.fixture
def cable():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Cable(server.port)
    yield made
    made.close()


def connected(cable, seconds):
    store = dist.TCPStore("127.0.0.1", cable.port, is_master=False)
    return BoundedStore(store, "a", seconds)


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
    monkeypatch.setattr("vescale_comm._watchdog.bounded._WAY_SECONDS", 0.2)
    store = connected(cable, 0.2)
    store.set("x", "1")
    cable.cut()
    began = time.monotonic()
    with pytest.raises(StoreLostError, match="has not answered for"):
        store.get("x")
    with pytest.raises(StoreLostError, match="did not answer before"):
        store.within("b").add("n", 1)
    assert time.monotonic() - began < 20  # and not for ever


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
