"""Worlds in processes of their own, which may die, and otherwise end as a script does."""

import atexit
import multiprocessing
import os
import socket
import sys
import traceback


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ended(target, size, folder, *args):
    """The exit code of each rank and what it printed, of `target(rank, *args)` in its process.

    It is printed to `folder/<rank>.txt` while they run.
    """
    # Its server has no faulthandler, which pytest enables, and which would have crashes elsewhere.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing"])
    files = [folder / f"{rank}.txt" for rank in range(size)]
    ranks = [
        context.Process(target=_as_script, args=(str(file), target, rank, *args))
        for rank, file in enumerate(files)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(120)
        assert not any(each.is_alive() for each in ranks)
        return [(each.exitcode, file.read_text()) for each, file in zip(ranks, files, strict=True)]
    finally:
        for each in ranks:
            each.kill()


def _as_script(output, target, *args):
    """Call it as the interpreter runs a script, in a process that has torch already."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        target(*args)
    except SystemExit:
        pass
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    # multiprocessing's own processes leave without what is registered for an exit.
    atexit._run_exitfuncs()
    print("ended", flush=True)
    os._exit(0)
