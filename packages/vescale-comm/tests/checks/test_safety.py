"""What goes wrong is said: who disagrees and where, who is missing, and what a plan broke.

In real processes, where a disagreement would hang, and in a simulation, where ranks that die or
drop out are found at once.
"""

import re
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from vescale_comm import (
    CommArgumentError,
    CommMismatchError,
    CommTimeoutError,
    Died,
    Fault,
    SimulationError,
    all_gather,
    all_reduce,
    all_reduce_bucketed,
    all_to_all,
    barrier,
    broadcast,
    chaos,
    checked,
    permute,
    recv,
    reduce_scatter,
    send,
    simulate,
    trace,
)
from vescale_comm._torch.compat import set_group_timeout
from vescale_comm.testing import WorkerError, run
from vescale_comm_worlds import waiting_in_vain

x = torch.ones(6)
leaf = torch.ones(6, requires_grad=True)
# What rank 0 and the others call; each would hang, crash, or be silently wrong.
DISAGREE = {
    "op": lambda first: all_reduce(x) if first else all_gather(x),
    "order of calls": lambda first: (
        [all_reduce(x), barrier()] if first else [barrier(), all_reduce(x)]
    ),
    "reduction": lambda first: all_reduce(x, op="sum" if first else "max"),
    "avg": lambda first: all_reduce(x, op="sum" if first else "avg"),
    "fold": lambda first: all_reduce(x, order="rank" if first else "tree"),
    "wire": lambda first: reduce_scatter(x[:6], wire="int8" if first else "fp8"),
    "shape": lambda first: all_reduce(x[: 5 + first]),
    "dtype": lambda first: all_reduce(x.double() if first else x),
    "sizes": lambda first: all_gather(x[: 3 - first], sizes=[2, 2, 2] if first else [2, 3, 3]),
    "source": lambda first: broadcast(x, source=int(first)),
    "pieces": lambda first: all_to_all([x[: 1 + first]] * 3, shapes=[(1 + first,)] * 3),
    "pairs": lambda first: permute(x, pairs=[(0, 1)] if first else [(0, 2)]),
    # Who has no node would not come to the collective of the backward.
    "gradient": lambda first: all_reduce(x if first else leaf),
    "gradient of what is sent": lambda first: broadcast(leaf if first else x),
    "gradient of what comes": lambda first: permute(leaf if first else x, pairs=[(0, 1)]),
    "gradient later": lambda first: all_gather(x if first else leaf, async_op=True).wait(),
    "gradient of pieces": lambda first: all_to_all([x, x if first else leaf, x], shapes=[(6,)] * 3),
}


def disagree(rank, world_size, name):
    with checked(timeout=60), pytest.raises(CommMismatchError) as caught:
        DISAGREE[name](rank == 0)
    # The group is as it was: nothing had been sent.
    assert all_reduce(torch.ones(1)).item() == world_size
    return str(caught.value)


@pytest.mark.parametrize("name", DISAGREE)
def test_a_disagreement_names_every_rank_and_line(name):
    messages = run(disagree, 3, name)
    assert len(set(messages)) == 1
    if "gradient" in name:
        who = [0] if name in ("gradient of what is sent", "gradient of what comes") else [1, 2]
        assert f"its input requires a gradient on rank(s) {who} only" in messages[0]
    lines = messages[0].splitlines()
    assert [line.strip().split(":")[0] for line in lines[1:]] == ["rank 0", "rank 1", "rank 2"]
    assert messages[0].count("test_safety.py:") == 3


def agree(rank, world_size):
    return [agreed(rank, world_size, how) for how in (nullcontext(), checked(timeout=60))]


def agreed(rank, world_size, context):
    with trace() as t, context:
        y = x.clone().requires_grad_()
        found = [all_reduce(y), all_gather(x[:rank], sizes=range(world_size))]
        found += all_to_all([x[:rank]] * 3, shapes=[(0,), (1,), (2,)])
        found[0].sum().backward()
        if rank < 2:
            found.append(send(x, target=1) if rank == 0 else recv(x, source=0))
        found.append(all_reduce(x, async_op=True).wait())
    return [v.tolist() if isinstance(v, torch.Tensor) else v for v in found], t.counts()


def test_a_check_changes_nothing_where_all_agree():
    for plain, kept in run(agree, 3):
        assert plain == kept
    for plain, kept in simulate(3)(agree):
        assert plain == kept


def missing(rank, world_size):
    """One after the other they wait in vain, the second for rank 2 alone."""
    group, message = dist.new_group(), None
    with checked(timeout=60):
        barrier(group)
    for turn in (1, 0):
        if rank == turn:
            with checked(timeout=0.2), pytest.raises(CommTimeoutError) as caught:
                all_reduce(x, group)
            message = str(caught.value)
        dist.barrier()
    return message


def test_who_does_not_come_is_named_with_its_last_call():
    second, first, _ = run(missing, 3)
    for message, names in ((first, ("rank 0", "rank 2")), (second, ("rank 2",))):
        said = "; ".join(f"{name}, whose last call was barrier" for name in names)
        pattern = "waited 0.2 s in vain for " + said.replace("barrier;", r"barrier [^;]*;")
        assert re.search(pattern, message), message
        assert message.count("test_safety.py:") == 1 + len(names)


def late(rank, world_size):
    group = dist.new_group()
    dist.barrier(group)
    with waiting_in_vain():
        if rank != 1:
            set_group_timeout(group, timedelta(seconds=0.2))
            with pytest.raises(CommTimeoutError) as caught:
                all_reduce(x, group)
        dist.barrier()  # where rank 1 waits meanwhile
    return None if rank == 1 else str(caught.value)


def test_a_timeout_names_who_is_missing_without_a_check():
    messages = run(late, 3)
    for message in (messages[0], messages[2]):  # on a busy machine the other may be late as well
        assert re.search(r"Missing: rank(s [\d,-]*\b1\b| 1)", message)
        assert re.search(r"rank 1: .*test_safety.py:\d+ in late", message)


def mismatched_messages(rank, world_size, numel, later):
    with checked(timeout=60):
        if rank == 0:
            sent = send(torch.ones(numel), target=1, async_op=later)
            if later:
                sent.wait()
            send(torch.full((2,), 7.0), target=1)
            return None

        def receive():
            found = recv(torch.ones(numel, dtype=torch.int32), source=0, async_op=later)
            return found.wait()

        with pytest.raises(CommMismatchError) as caught:
            receive()
        # The message is gone, and the next one is the next one.
        assert recv(torch.ones(2), source=0).tolist() == [7.0, 7.0]
        return str(caught.value)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("numel", [3, 300_000])
def test_a_message_that_is_not_what_is_expected_names_both_lines(numel, later):
    _, message = run(mismatched_messages, 2, numel, later)
    assert f"rank 0: send of torch.float32 ({numel},) at " in message
    assert f"rank 1: recv of torch.int32 ({numel},) at " in message
    assert message.count("test_safety.py:") == 2


def exchanged_messages(rank, world_size):
    """Receives are begun before anything is sent: nothing may wait for the other too early."""
    x = torch.full((3,), float(rank))
    with checked(timeout=60):
        received = recv(x, source=1 - rank, async_op=True)
        send(x, target=1 - rank, async_op=True).wait()
        with (
            pytest.raises(CommTimeoutError, match="in vain for rank 1 to send")
            if rank == 0
            else (nullcontext())
        ):
            if rank == 0:
                with checked(timeout=0.3):
                    recv(x, source=1)
        return received.wait().tolist()


def test_messages_may_cross_and_who_does_not_send_is_named():
    assert run(exchanged_messages, 2) == [[1.0] * 3, [0.0] * 3]


CONTEXTS = {
    "trace": trace,
    "checked": lambda: checked(timeout=60),
    "chaos": lambda: chaos([Fault("delay", seconds=0)]),
}


def raised_inside(rank, world_size, name):
    handles = []

    def body():
        with CONTEXTS[name]():
            all_reduce(x)
            handles.append(all_reduce(x, async_op=True))
            all_reduce_bucketed([x, x[:1]])
            raise KeyError

    with pytest.raises(KeyError):
        body()
    # Not torch's own coalescing: after that every later all-reduce would do nothing.
    found = all_reduce(torch.full((2,), rank + 1.0)).tolist()
    return found, handles[0].wait().tolist()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_body_that_raises_leaves_no_group_poisoned(name):
    assert run(raised_inside, 2, name) == [([3.0, 3.0], [2.0] * 6)] * 2
    assert simulate(2).run(raised_inside, name) == [([3.0, 3.0], [2.0] * 6)] * 2


# --- chaos


def troubled(rank, world_size, plan, seed=0):
    with chaos(plan, seed=seed) as happened:
        results = [all_reduce(x * (rank + 1)) for _ in range(4)]
        results.append(all_reduce(x, async_op=True).wait())
    return [r.tolist() for r in results], list(happened)


def test_a_plan_without_hits_changes_nothing():
    plain = run(troubled, 2, [])
    assert run(troubled, 2, [Fault("drop", rank=7), Fault("die", call=99)]) == plain
    assert plain[0][0][0] == [3.0] * 6


def test_delays_change_no_bits_and_are_told():
    plan = [Fault("delay", rank=1, call=2, seconds=0.01), Fault("delay", op="barrier")]
    found = run(troubled, 2, plan)
    assert [r for r, _ in found] == [r for r, _ in run(troubled, 2, [])]
    assert [told for _, told in found] == [[], ["delay of all_reduce 2 on rank 1"]]


def test_corruption_flips_one_bit_at_one_rank_and_repeats_with_the_seed():
    plan = [Fault("corrupt", rank=0, call=1), Fault("corrupt", rank=1, call=4)]
    first, again, other = (run(troubled, 2, plan, seed) for seed in (1, 1, 2))
    assert first == again != other
    right = run(troubled, 2, [])
    for rank, call in ((0, 1), (1, 4)):
        wrong = torch.tensor(first[rank][0][call]).view(torch.int32)
        flipped = wrong ^ torch.tensor(right[rank][0][call]).view(torch.int32)
        assert sum(bin(v & 0xFFFFFFFF).count("1") for v in flipped.tolist()) == 1
        first[rank][0][call] = right[rank][0][call]
    assert [results for results, _ in first] == [results for results, _ in right]


def test_probabilities_are_of_rank_and_call_only():
    plan = [Fault("delay", probability=0.5, seconds=0)]
    told = [[line for _, line in run(troubled, 2, plan, seed)] for seed in range(3)]
    assert told[0] == [line for _, line in run(troubled, 2, plan, 0)]
    assert len({str(each) for each in told}) == 3


def test_a_dead_process_is_named():
    with pytest.raises(WorkerError, match=r"worker of rank\(s\) 1 died") as caught:
        run(troubled, 2, [Fault("die", rank=1, call=1)])
    assert caught.value.died == {1: 77}


@pytest.mark.parametrize("kind", ["die", "drop"])
def test_a_lost_rank_of_a_simulation_is_a_deadlock_at_once(kind):
    with pytest.raises(SimulationError) as caught:
        simulate(3).run(troubled, [Fault(kind, rank=1, call=1)])
    assert isinstance(caught.value.errors.get(1), Died) == (kind == "die")
    assert "nobody can go on" in str(caught.value.errors[0])


def test_faults_that_do_not_exist_are_refused():
    with pytest.raises(CommArgumentError, match="unknown kind 'explode'"):
        Fault("explode")


IN_A_SIMULATION = ["reduction", "fold", "wire", "avg", "shape", "pieces"]


@pytest.mark.parametrize("name", [*IN_A_SIMULATION, *(n for n in DISAGREE if "gradient" in n)])
def test_checks_run_in_a_simulation_too(name):
    messages = simulate(3).run(disagree, name)
    assert len(set(messages)) == 1
