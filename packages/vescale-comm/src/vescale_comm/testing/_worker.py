"""A worker: one rank of a pool, which runs the cases that it is sent."""

import faulthandler
import gc
import io
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from vescale_comm._checks.agreement import checked
from vescale_comm._outcome import Failed, Ok, Outcome, failed
from vescale_comm._torch.compat import forget_shardings, process_group_count
from vescale_comm._watchdog.current_watcher import forget_executed
from vescale_comm.testing._clean import cleaner
from vescale_comm.testing._load import function_of
from vescale_comm.testing._mesh import forget_meshes
from vescale_comm.testing._messages import (
    Case,
    Done,
    pack,
    receive,
    send,
    unpack,
)

# Longer than any case: the pool ends a case that hangs, and can say where each rank was.
_GROUP_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "127.0.0.1"


def main(rank: int, world_size: int, log: str, connection: "Connection[Any, Any]") -> None:
    """Run a worker until the other side of `connection` is gone.

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
    # Whatever the shell says: all ranks are on this machine, and nobody else is to be heard.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    # torch looks up the name of every address that it connects to: a name server that does not
    # answer would cost five seconds for each.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    worker = _Worker(rank, world_size, _rendezvous(rank, world_size, connection))
    worker.join_world()
    # What exists by now stays; a later collection has only the objects of the cases to look at.
    gc.collect()
    gc.freeze()
    send(connection, "ready")
    while True:
        try:
            case = receive(connection)
        except EOFError:
            os._exit(0)  # without a farewell to gloo's peers, which may be gone
        send(connection, worker.run(case))


@dataclass(slots=True)
class _Worker:
    rank: int
    world_size: int
    store: Store
    worlds: int = 0
    clean: Callable[[], None] = field(default_factory=cleaner)

    def join_world(self) -> None:
        """Make the default process group; it replaces an earlier one and all its subgroups."""
        forget_meshes()
        if dist.is_initialized():
            forget_executed()  # the ranks of a case that failed do not end alike
            dist.destroy_process_group()
            forget_shardings()
            gc.collect()
        self.worlds += 1
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"world{self.worlds}", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_GROUP_TIMEOUT,
        )

    def run(self, case: Case) -> Done:
        """Run one case from a clean state and report what became of it."""
        if case.fresh:
            self.join_world()
        self.clean()
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            outcome = self._outcome(case)
        try:
            packed = pack(outcome)
        except Exception as error:  # the function returned what cannot be sent
            outcome = failed(error, __file__)
            packed = pack(outcome)
        groups = (process_group_count() or dist.get_pg_count()) if dist.is_initialized() else 0
        return Done(packed, isinstance(outcome, Failed), output.getvalue(), groups)

    def _outcome(self, case: Case) -> Outcome:
        try:
            with warnings.catch_warnings():
                warnings.filters[:] = case.filters  # type: ignore[index]
                function = function_of(case)
                with nullcontext() if case.patience is None else checked(timeout=case.patience):
                    return Ok(function(self.rank, self.world_size, *unpack(case.args)))
        except BaseException as error:  # also SystemExit and pytest's own: the worker lives on
            return failed(error, __file__)


def _rendezvous(rank: int, world_size: int, connection: "Connection[Any, Any]") -> Store:
    """Make the store at rank 0, on a free port, and connect the other ranks to it."""
    if rank:
        return TCPStore(_LOOPBACK, receive(connection), world_size, wait_for_workers=False)
    # torch's server listens to every network, whatever address it is given, and asks nobody who
    # they are. So it gets a socket that is there already.
    listener = socket.create_server((_LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    store: Store = TCPStore(
        _LOOPBACK,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    send(connection, port)
    return store


def _report_to(log: str) -> None:
    """Send what C++ code prints, a crash's stack, and the stacks on SIGUSR1 to a file."""
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

    def _watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=_watch_parent, daemon=True).start()
