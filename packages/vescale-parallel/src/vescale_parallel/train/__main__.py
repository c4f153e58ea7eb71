"""`python -m vescale_parallel.train`: parse, train, and fail on every rank with one line."""

import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from vescale_comm import CommError

from vescale_parallel._errors import ParallelError
from vescale_parallel.train.loop import train
from vescale_parallel.train.options import parse_arguments

_PATIENCE = timedelta(seconds=15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        train(parse_arguments(words))
    except _expected_errors() as error:
        if "--traceback" in words:
            traceback.print_exc()
        _say(str(error))
        _leave_together()
        return 2
    except KeyboardInterrupt:
        return 130  # as shells count it: 128 + SIGINT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message is all a user needs: ours, and those of the packages below."""
    try:
        from vescale_ckpt import CheckpointError
    except ImportError:
        return (ParallelError, CommError)
    return (ParallelError, CommError, CheckpointError)


def _say(message: str) -> None:
    """One line on this rank's stderr, written at once so that lines of ranks do not mix."""
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    sys.stderr.write(f"{rank}error: {' '.join(message.split())}\n")
    sys.stderr.flush()


def _leave_together() -> None:
    """Wait a moment for the other ranks to print their line too.

    torchrun ends every rank as soon as one has failed, which would silence the slower ones. The
    wait is bounded, for errors that only some ranks have.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world = int(os.environ["WORLD_SIZE"])
    if world == 1:
        return
    # In a thread that may be left behind: torch waits for ever for a store that does not answer.
    waits = Thread(target=_wait_for_others, args=(world,), daemon=True)
    waits.start()
    waits.join(2 * _PATIENCE.total_seconds())


def _wait_for_others(world: int) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # By attempt: the launcher's store outlives a restart, with the count of the one before.
    key = f"vescale_parallel/leaving/{attempt}"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # The launcher's own store: it is there whether or not this rank ever joined a group.
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]
        if store.add(key, 1) == world:
            store.set(f"{key}/all", "1")
        store.wait([f"{key}/all"], _PATIENCE)
    except dist.DistError:
        # The others did not come, or the launcher is gone: this rank has printed its line.
        pass


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and closed. Going through the interpreter's own end lets gloo's threads
    # race with the destructors of what they use, which now and then aborts a finished run.
    os._exit(status)
