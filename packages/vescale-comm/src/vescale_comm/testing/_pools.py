"""The worker pools of this process: one for each world size, started at first use."""

import atexit
import sys
from threading import RLock

from vescale_comm._outcome import Outcome
from vescale_comm.testing._messages import Case
from vescale_comm.testing._pool import Pool

_lock = RLock()
# A cache: a pool can be dropped at any time, and the next case starts another.
_pools: dict[int, Pool] = {}
_preload: set[str] = set()
# A worker needs pytest where its test process has it: test files, and filters of warnings, do.
# And vescale's packages, which the functions that it runs use; their imports start no threads.
_LOADED = frozenset(
    {"pytest", "vescale_rng", "vescale_dtensor", "vescale_parallel", "vescale_ckpt"}
)


def outcomes_of(case: Case, world_size: int, timeout: float) -> list[Outcome]:
    """Run a case in the pool of its world size."""
    with _lock:
        pool = _pools.get(world_size)
        if pool is not None and not pool.alive():
            _pools.pop(world_size).kill()
            pool = None
        if pool is None:
            pool = _pools[world_size] = Pool(
                world_size, sorted(_preload | _LOADED.intersection(sys.modules))
            )
        try:
            return pool.run(case, timeout)
        except BaseException:
            # The pool has ended its own workers by then: see `Pool.run`.
            _pools.pop(world_size, None)
            raise


def preload(*modules: str) -> None:
    """Name modules that test files import, to be imported once for all workers.

    Call it before the first `run`, as in a `conftest.py`; later it has no effect, and neither has
    it where workers do not fork (it saves time and changes nothing else). The modules must be such
    that importing them starts no threads.
    """
    _preload.update(modules)


def shutdown() -> None:
    """End all workers. They end with the process anyway; the next `run` starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].kill()


atexit.register(shutdown)
