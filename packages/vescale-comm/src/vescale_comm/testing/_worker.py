"""A worker: one rank of a pool, which runs the functions that it is sent."""

import faulthandler
import gc
import importlib.util
import io
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist

from vescale_comm.testing._messages import (
    Case,
    Done,
    Failed,
    Ok,
    Outcome,
    pack,
    receive,
    send,
    unpack,
)

# Longer than any case: the pool ends a case that hangs, and can say where each rank was.
_GROUP_TIMEOUT = timedelta(minutes=30)


def main(rank: int, world_size: int, log: str, connection: "Connection[Any, Any]") -> None:
    """Runs a worker until the other side of `connection` is gone.

    Args:
        rank: this worker's rank.
        world_size: number of workers of the pool.
        log: file that gets what C++ code prints, and the stacks when the pool asks for them.
        connection: to the test process.
    """
    _live_no_longer_than_parent()
    _report_to(log)
    torch.set_num_threads(1)
    # gloo otherwise looks up the machine's name, which not every container can resolve.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    worker = _Worker(rank, world_size, _rendezvous(rank, world_size, connection))
    worker.join_world()
    # What exists by now stays; collecting after a case needs to look at the case's objects only.
    gc.collect()
    gc.freeze()
    send(connection, "ready")
    while True:
        try:
            case = receive(connection)
        except EOFError:
            os._exit(0)  # without the farewells of gloo, whose peers may be gone
        send(connection, worker.run(case))


@dataclass(slots=True)
class _Worker:
    rank: int
    world_size: int
    store: dist.Store
    worlds: int = 0
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    loaded: dict[str, tuple[int, ModuleType]] = field(default_factory=dict)

    def join_world(self) -> None:
        """Makes the default process group; a later one replaces it and all groups of its kind."""
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()
        self.worlds += 1
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"world{self.worlds}", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_GROUP_TIMEOUT,
        )

    def run(self, case: Case) -> Done:
        """Runs one case from a clean state and reports what became of it."""
        if case.fresh:
            self.join_world()
        self._reset()
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            outcome = _outcome(lambda: self._call(case))
        try:
            packed = pack(outcome)
        except Exception:  # the function returned what cannot be sent
            outcome = _failure()
            packed = pack(outcome)
        groups = dist.get_pg_count() if dist.is_initialized() else 0
        return Done(packed, isinstance(outcome, Failed), output.getvalue(), groups)

    def _call(self, case: Case) -> Any:
        sys.path[:] = case.sys_path
        function = reduce(getattr, case.qualname.split("."), self._load(case.path, case.module))
        return function(self.rank, self.world_size, *unpack(case.args))

    def _load(self, path: str, name: str) -> Any:
        """Loads a file under the name it has in the test process, once until it changes."""
        changed = os.stat(path).st_mtime_ns
        known = self.loaded.get(path)
        if known is not None and known[0] == changed:
            return known[1]
        name = "__mp_main__" if name == "__main__" else name
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        self.loaded[path] = changed, module
        return module

    def _reset(self) -> None:
        """Undoes what a case may have left behind."""
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return Ok(call())
    except BaseException:  # also SystemExit and pytest's own: the worker lives on
        return _failure()


def _failure() -> Failed:
    kind, error, _ = sys.exc_info()
    assert kind is not None
    kinds = tuple(base.__name__ for base in kind.__mro__)
    return Failed(kind.__name__, str(error), traceback.format_exc(), kinds)


def _rendezvous(rank: int, world_size: int, connection: "Connection[Any, Any]") -> dist.Store:
    """Makes the store at rank 0, on a port that is free, and brings it to the other ranks."""
    if rank > 0:
        return dist.TCPStore("127.0.0.1", receive(connection), world_size, is_master=False)
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    send(connection, store.port)
    return store


def _report_to(log: str) -> None:
    """Sends what C++ code prints, a crash's stack, and the stacks on SIGUSR1 to a file."""
    # The test process decides what an interrupt of the terminal means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _live_no_longer_than_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
