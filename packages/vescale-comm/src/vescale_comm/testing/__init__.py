"""Multi-rank tests in real processes: a pool of workers that is started once and used again.

`run` calls a top-level function of any test file on every rank of a gloo world, and returns what
the ranks returned. The workers live until the test run ends, so that a case costs milliseconds:

    def check_sum(rank, world_size):
        x = torch.full((2,), float(rank))
        torch.distributed.all_reduce(x)
        return x

    def test_sum():
        assert [x.tolist() for x in run(check_sum, 2)] == [[1.0, 1.0], [1.0, 1.0]]

Every case is bounded in time. A rank that hangs is named with its stack, one that dies with its
exit code, and the workers are replaced. What a case leaves behind is undone before the next: random
seeds (0 on every rank), grad mode, default dtype and device, environment. Process groups that a
case makes live on for a while: make meshes with `device_mesh`, or in the case, and keep none.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from vescale_comm._outcome import Failed, Ok, Outcome
from vescale_comm._simulation.simulate import simulate
from vescale_comm.testing._core import choose_core
from vescale_comm.testing._mesh import device_mesh
from vescale_comm.testing._messages import Case, pack
from vescale_comm.testing._pool import inside_worker
from vescale_comm.testing._pools import outcomes_of, preload, shutdown
from vescale_comm.testing._report import WorkerError, raised

__all__ = [
    "Failed",
    "Ok",
    "Outcome",
    "WorkerError",
    "choose_core",
    "device_mesh",
    "on_ranks",
    "outcomes",
    "preload",
    "run",
    "shutdown",
]


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    check: bool = False,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank of a gloo world and return the values.

    Args:
        fn: a top-level function of a file; the workers load the file by its path, so it need not be
            importable. What it prints is shown here, each line with its rank.
        world_size: number of ranks; the default process group of each worker has exactly these.
        args: anything that pickles; tensors arrive as CPU copies.
        timeout: seconds after which the ranks that have not returned are given up.
        check: whether `vescale_comm.checked` is on: ranks that disagree about a collective are told
            so, with the line of each, and do not hang. In `simulate` it always is.

    Returns:
        What each rank returned, by rank. Tensors come as contiguous, detached CPU copies.

    Raises:
        WorkerError: a rank raised, hung or died; the message has each rank's traceback.
    """
    results = outcomes(fn, world_size, *args, timeout=timeout, check=check)
    failures = {rank: each for rank, each in enumerate(results) if isinstance(each, Failed)}
    if failures:
        raise raised(fn.__qualname__, world_size, failures)
    return [each.value for each in results if isinstance(each, Ok)]


def outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    check: bool = False,
) -> list[Outcome]:
    """Like `run`, but returns for each rank either `Ok(value)` or `Failed(...)`.

    So a test can assert that *every* rank raised, and what.

    Raises:
        WorkerError: a rank hung or died. Once one rank has raised or died, the others have 20
            seconds.
    """
    if inside_worker():
        raise RuntimeError(
            f"run({fn.__qualname__}) was called while a worker loads the file: "
            'put the call under `if __name__ == "__main__":`'
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    # Sooner than the case is given up, so that who is missing is named.
    patience = timeout / 2 if check else None
    return outcomes_of(_case(fn, args, patience), world_size, timeout)


def on_ranks(
    world_size: int, *, simulated: bool = False, timeout: float = 120, check: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of pytest's of what each rank does: a decorator, nearest to the function.

        @pytest.mark.parametrize("dim", [0, 1])
        @on_ranks(2)
        def test_sum(rank, world_size, dim):
            ...

    The function gets its rank and the world size where its first parameters have these names; all
    others are pytest's.

    Args:
        world_size: number of ranks.
        simulated: whether they are those of `simulate`, and not processes as `run` has them.
        timeout: as of `run`.
        check: as of `run`.

    Returns:
        The decorator.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        first = ("rank", "world_size")
        told = 2 if tuple(signature.parameters)[:2] == first else 0
        own = tuple(signature.parameters.values())[told:]

        @wraps(body)
        def test(*on_a_rank: Any, **given: Any) -> None:
            # Workers find the function by its name, which is that of the test.
            if on_a_rank:
                body(*on_a_rank[:told], *on_a_rank[2:])
                return
            values = [given[parameter.name] for parameter in own]
            if simulated:
                simulate(world_size)(test, *values)
            else:
                run(test, world_size, *values, timeout=timeout, check=check)

        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate


def _case(fn: Callable[..., Any], args: tuple[Any, ...], patience: float | None) -> Case:
    # A lambda or a closure exists in this process only; workers load the file and look it up.
    if not inspect.isfunction(fn) or "<" in fn.__qualname__:
        raise ValueError(f"{fn!r} is not a top-level function of a file, which workers could load")
    module = sys.modules.get(fn.__module__)
    path = getattr(module, "__file__", None) or inspect.getsourcefile(fn)
    if path is None or path.startswith("<"):
        raise ValueError(f"{fn.__qualname__} is not in a file, from which workers could load it")
    return Case(path, fn.__module__, fn.__qualname__, pack(args), patience)
