"""The pool returns what ranks return, names the ranks that raise, hang or die, and goes on."""

import gc
import importlib.util
import locale
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from vescale_comm import SimulationError, all_reduce
from vescale_comm.testing import (
    Failed,
    Ok,
    WorkerError,
    _pool,
    device_mesh,
    on_ranks,
    outcomes,
    run,
    shutdown,
)


@dataclass
class Pair:
    left: object
    right: object


def echo(rank, world_size, *args):
    return rank, world_size, dist.get_rank(), dist.get_world_size(), args


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_each_rank_is_called_in_a_world_of_that_size(world_size):
    expected = [(rank, world_size, rank, world_size, ("x", 1)) for rank in range(world_size)]
    assert run(echo, world_size, "x", 1) == expected


@pytest.mark.parametrize("more", ["a", "b"])
@on_ranks(2)
def test_a_test_may_be_what_each_rank_does(rank, world_size, more):
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    assert more in "ab"


@on_ranks(3, simulated=True)
def wrong(more):
    assert more != dist.get_world_size()


def test_what_a_rank_finds_fails_the_test():
    wrong(more=2)
    with pytest.raises(SimulationError, match="assert"):
        wrong(more=3)


def returned(rank, world_size, pair):
    return Pair(pair.right, torch.ones(2, 3, requires_grad=True).t())


def test_values_travel_both_ways():
    sent = Pair(torch.zeros(0, 2), {"x": [torch.tensor(3, dtype=torch.bfloat16)]})
    for pair in run(returned, 2, sent):
        assert type(pair) is Pair
        assert pair.left["x"][0].dtype == torch.bfloat16
        assert pair.left["x"][0].item() == 3
        assert pair.right.tolist() == [[1.0, 1.0]] * 3
        assert pair.right.is_contiguous()
        assert not pair.right.requires_grad
    number = torch.tensor([1 + 2j])
    for found, one in zip(run(views, 1)[0], ([3.0], number.conj(), [-2.0]), strict=True):
        assert torch.equal(found, torch.as_tensor(one))
    parameter = run(parameters, 1)[0]
    assert type(parameter) is torch.nn.Parameter


def views(rank, world_size):
    """One element of a strided column, and what is conjugated or negated lazily."""
    conjugated = torch.tensor([1 + 2j]).conj()
    return torch.arange(6.0).view(1, 6)[:, 3], conjugated, conjugated.imag


def parameters(rank, world_size):
    return torch.nn.Parameter(torch.ones(2))


def disagreeing(rank, world_size):
    all_reduce(torch.ones(2 + rank))


def test_a_checked_case_names_a_disagreement_and_does_not_hang():
    for outcome in outcomes(disagreeing, 2, check=True):
        assert outcome.type_name == "CommMismatchError"
        assert outcome.message.count("in disagreeing") == 2


def process(rank, world_size):
    return os.getpid(), torch.get_num_threads()


def test_workers_are_kept():
    shutdown()  # what another file has left behind may be ending
    first = run(process, 2)
    assert run(process, 2) == first
    assert {threads for _, threads in first} == {1}


def raises_on(rank, world_size, ranks):
    if rank in ranks:
        raise KeyError(f"no key on {rank}")
    return rank


def test_a_rank_that_raises_is_named():
    workers = run(process, 2)
    with pytest.raises(WorkerError, match=r"raises_on raised on rank\(s\) 1 of 2") as caught:
        run(raises_on, 2, [1])
    assert list(caught.value.failures) == [1]
    assert caught.value.failures[1].type_name == "KeyError"
    assert 'raise KeyError(f"no key on {rank}")' in str(caught.value)
    assert run(process, 2) == workers


def test_outcomes_tell_for_each_rank():
    good, bad = outcomes(raises_on, 2, [1])
    assert good == Ok(0)
    assert isinstance(bad, Failed)
    assert bad.kinds[:3] == ("KeyError", "LookupError", "Exception")
    assert all(isinstance(each, Failed) for each in outcomes(raises_on, 2, [0, 1]))
    with pytest.raises(AttributeError, match="this rank raised KeyError"):
        bad.value  # noqa: B018


def reduce_after_failure(rank, world_size):
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def send_and_raise(rank, world_size):
    # The other rank never receives this: it must not be what the next case receives.
    work = dist.isend(torch.full((1,), 99.0), 1 - rank) if rank == 0 else None
    raise RuntimeError(str(work is None))


def test_nothing_of_a_failed_case_reaches_the_next():
    outcomes(send_and_raise, 2)
    assert run(receive_from_zero, 2) == [5.0, 5.0]


def receive_from_zero(rank, world_size):
    x = torch.full((1,), 5.0)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return x.item()


def workers_that_stay():
    """Processes of a pool that is not worn out: after a case that failed the first one may be."""
    return [run(process, 2) for _ in range(2)][-1]


@contextmanager
def impatience():
    """Inside, the time is over when one rank has answered; yields what the others were to have."""
    seconds = []

    def _wait(connections, most):
        if len(connections) > 1:
            return wait(connections)
        seconds.append(most)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pool, "wait", _wait)
        yield seconds


def hang(rank, world_size):
    dist.barrier()  # all are here before one of them answers
    if rank == 1:
        time.sleep(1000)
    return rank


def test_a_rank_that_hangs_is_named_with_its_stack_and_replaced():
    before = workers_that_stay()
    said = r"hang: rank\(s\) 1 did not end within 40 s"
    with impatience() as seconds, pytest.raises(WorkerError, match=said) as caught:
        run(hang, 2, timeout=40)
    assert seconds[0] <= 40
    assert caught.value.hung == (1,)
    assert "in hang" in str(caught.value)
    assert "_worker.py" not in str(caught.value)
    assert set(run(process, 2)).isdisjoint(before)
    assert run(reduce_after_failure, 2) == [2.0, 2.0]


def raise_while_others_wait(rank, world_size):
    dist.barrier()
    if rank == 0:
        raise ValueError("too early")
    dist.barrier()


def test_a_rank_that_raises_while_the_others_wait_for_it():
    workers_that_stay()
    said = r"rank\(s\) 0 raised, while rank\(s\) 1 went"
    with impatience() as seconds, pytest.raises(WorkerError, match=said) as caught:
        outcomes(raise_while_others_wait, 2)
    assert seconds[0] <= _pool._GRACE_SECONDS, "the others were waited for until the timeout"
    assert caught.value.hung == (1,)
    assert caught.value.failures[0].message == "too early"
    assert "in raise_while_others_wait" in str(caught.value)


def die(rank, world_size, how):
    if rank == 1:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "code", "words"), [("exit", 7, "exit code 7"), ("kill", -9, "signal SIGKILL")]
)
def test_a_worker_that_dies_is_named_and_replaced(how, code, words):
    with pytest.raises(WorkerError, match=r"die: the worker of rank\(s\) 1 died") as caught:
        run(die, 2, how)
    assert caught.value.died == {1: code}
    assert f"rank 1 died ({words})" in str(caught.value)
    assert run(reduce_after_failure, 2) == [2.0, 2.0]


def test_a_worker_that_dies_before_it_has_a_log_is_named(tmp_path):
    """As where a script calls `run` outside of `if __name__ == "__main__"`."""
    pool = object.__new__(_pool.Pool)
    pool._folder = tmp_path
    pool._processes = [SimpleNamespace(join=lambda seconds: None, exitcode=1)]
    assert pool._death(0) == (1, "")


def make_a_mess(rank, world_size):
    os.environ["VESCALE_LEFTOVER"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(rank + 5)
    random.seed(rank + 5)
    numpy.random.seed(rank + 5)
    torch.set_default_device("meta")
    locale.setlocale(locale.LC_ALL, "C")  # files are ASCII from here on
    gc.set_threshold(1, 1, 1)
    sys.setswitchinterval(1.0)
    tempfile.tempdir = "/nowhere"
    warnings.simplefilter("ignore")


def look_around(rank, world_size):
    return (
        os.environ.get("VESCALE_LEFTOVER"),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.rand(1).device.type,
        (torch.initial_seed(), random.random(), numpy.random.rand()),
        (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)),
        (gc.get_threshold(), sys.getswitchinterval(), tempfile.tempdir),
    )


def test_a_case_leaves_nothing_behind():
    clean = run(look_around, 2)
    assert clean[0] == clean[1]
    assert clean[0][:4] == (None, torch.float32, True, "cpu")
    run(make_a_mess, 2)
    assert run(look_around, 2) == clean


def warn(rank, world_size):
    warnings.warn("careful", stacklevel=1)


def test_warnings_are_errors_in_workers_where_they_are_here():
    assert [outcome.type_name for outcome in outcomes(warn, 2)] == ["UserWarning"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(warn, 2) == [None, None]


def talk(rank, world_size):
    print("one\ntwo")


def test_what_a_rank_prints_is_shown(capsys):
    run(talk, 2)
    assert capsys.readouterr().out == "[rank 0] one\n[rank 0] two\n[rank 1] one\n[rank 1] two\n"


def mesh_identity(rank, world_size):
    return os.getpid(), id(device_mesh((2,), ("dp",)))


def many_groups(rank, world_size):
    for _ in range(60):
        dist.new_group()


def test_meshes_are_kept_until_there_are_too_many_groups():
    first = run(mesh_identity, 2)
    assert run(mesh_identity, 2) == first
    run(many_groups, 2)
    assert run(group_count, 2) == [1, 1]
    assert run(reduce_after_failure, 2) == [2.0, 2.0]


def group_count(rank, world_size):
    return dist.get_pg_count()


def unsendable(rank, world_size):
    return lambda: None


def test_what_cannot_be_sent_or_called_is_refused():
    assert all(isinstance(outcome, Failed) for outcome in outcomes(unsendable, 2))
    with pytest.raises(ValueError, match="is not a top-level function of a file"):
        run(lambda rank, world_size: None, 2)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        run(echo, 0)


def test_a_file_that_changes_is_loaded_again(tmp_path):
    path = tmp_path / "changing_file.py"
    for value in (1, 2):
        path.write_text(f"def f(rank, world_size):\n    return {value}\n")
        os.utime(path, ns=(value, value))
        module = type(sys)("changing_file")
        module.__file__ = str(path)
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        sys.modules["changing_file"] = module
        try:
            assert run(module.f, 1) == [value]
        finally:
            del sys.modules["changing_file"]


SCRIPT = """
    import os, signal, sys, time
    from vescale_comm.testing import run

    def pid(rank, world_size):
        return os.getpid()

    def wait(rank, world_size):
        time.sleep(1000)

    if __name__ == "__main__":
        # What a shell runs in the background inherits that it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(*run(pid, 2), flush=True)
        if sys.argv[1] != "None":
            run(wait, 2)
"""


def test_no_worker_outlives_its_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ends = (None, signal.SIGINT, signal.SIGKILL)
    # All at the same time: each imports torch.
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parents = [subprocess.Popen([sys.executable, script, str(end)], **how) for end in ends]
    pids = []
    try:
        for parent, end in zip(parents, ends, strict=True):
            pids += map(int, parent.stdout.readline().split())
            if end:
                parent.send_signal(end)
            parent.communicate(timeout=60)
    finally:
        for parent in parents:
            parent.kill()
    assert len(pids) == 6
    deadline = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))


def running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_shutdown_ends_the_workers_and_run_starts_others():
    before = run(process, 1)
    shutdown()
    assert not running(before[0][0])
    assert run(process, 1) != before


def test_classes_of_a_file_without_packages_travel(tmp_path):
    """As pytest names test files of a folder that is no package."""
    file = tmp_path / "inner.py"
    file.write_text(
        "class Own:\n    value = 3\n\ndef give(rank, world, own):\n    return own, type(own)\n"
    )
    spec = importlib.util.spec_from_file_location("no_package.inner", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["no_package.inner"] = module
    try:
        spec.loader.exec_module(module)
        for own, kind in run(module.give, 2, module.Own()):
            assert kind is module.Own
            assert type(own) is kind
    finally:
        del sys.modules["no_package.inner"]


def listening(rank, world_size):
    """The addresses at which this process listens, as the kernel has them."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    found = []
    for table in ("tcp", "tcp6"):
        rows = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        # The local address, the state (0A: it listens), and the socket.
        parts = [row.split() for row in rows]
        found += [p[1].split(":")[0] for p in parts if p[3] == "0A" and f"socket:[{p[9]}]" in own]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who listens where")
def test_workers_listen_to_this_machine_alone():
    found = run(listening, 2)
    assert found[0], "the first rank has the store's server"
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", f"{'0' * 24}01000000"}
    assert {one for each in found for one in each} <= loopback
