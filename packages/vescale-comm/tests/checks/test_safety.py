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
import vescale_comm as vc
from vescale_comm._torch.compat import set_group_timeout
from vescale_comm.testing import WorkerError, run
from vescale_comm_worlds import waiting_in_vain

x = torch.ones(6)
leaf = torch.ones(6, requires_grad=True)
# What rank 0 and the others call; each would hang, crash, or be silently wrong.
DISAGREE = {
    "op": lambda first: vc.all_reduce(x) if first else vc.all_gather(x),
    "order of calls": lambda first: (
        [vc.all_reduce(x), vc.barrier()] if first else [vc.barrier(), vc.all_reduce(x)]
    ),
    "reduction": lambda first: vc.all_reduce(x, op="sum" if first else "max"),
    "avg": lambda first: vc.all_reduce(x, op="sum" if first else "avg"),
    "fold": lambda first: vc.all_reduce(x, order="rank" if first else "tree"),
    "wire": lambda first: vc.reduce_scatter(x[:6], wire="int8" if first else "fp8"),
    "shape": lambda first: vc.all_reduce(x[: 5 + first]),
    "dtype": lambda first: vc.all_reduce(x.double() if first else x),
    "sizes": lambda first: vc.all_gather(x[: 3 - first], sizes=[2, 2, 2] if first else [2, 3, 3]),
    "source": lambda first: vc.broadcast(x, source=int(first)),
    "pieces": lambda first: vc.all_to_all([x[: 1 + first]] * 3, shapes=[(1 + first,)] * 3),
    "pairs": lambda first: vc.permute(x, pairs=[(0, 1)] if first else [(0, 2)]),
    # Who has no node would not come to the collective of the backward.
    "gradient": lambda first: vc.all_reduce(x if first else leaf),
    "gradient of what is sent": lambda first: vc.broadcast(leaf if first else x),
    "gradient of what comes": lambda first: vc.permute(leaf if first else x, pairs=[(0, 1)]),
    "gradient later": lambda first: vc.all_gather(x if first else leaf, async_op=True).wait(),
    "gradient of pieces": lambda first: vc.all_to_all(
        [x, x if first else leaf, x], shapes=[(6,)] * 3
    ),
}


def disagree(rank, world_size, name):
    with vc.checked(timeout=60), pytest.raises(vc.CommMismatchError) as caught:
        DISAGREE[name](rank == 0)
    # The group is as it was: nothing had been sent.
    assert vc.all_reduce(torch.ones(1)).item() == world_size
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
    return [agreed(rank, world_size, how) for how in (nullcontext(), vc.checked(timeout=60))]


def agreed(rank, world_size, context):
    with vc.trace() as t, context:
        y = x.clone().requires_grad_()
        found = [vc.all_reduce(y), vc.all_gather(x[:rank], sizes=range(world_size))]
        found += vc.all_to_all([x[:rank]] * 3, shapes=[(0,), (1,), (2,)])
        found[0].sum().backward()
        if rank < 2:
            found.append(vc.send(x, target=1) if rank == 0 else vc.recv(x, source=0))
        found.append(vc.all_reduce(x, async_op=True).wait())
    return [v.tolist() if isinstance(v, torch.Tensor) else v for v in found], t.counts()


def test_a_check_changes_nothing_where_all_agree():
    for plain, kept in run(agree, 3):
        assert plain == kept
    for plain, kept in vc.simulate(3)(agree):
        assert plain == kept


def missing(rank, world_size):
    """One after the other they wait in vain, the second for rank 2 alone."""
    group, message = dist.new_group(), None
    with vc.checked(timeout=60):
        vc.barrier(group)
    for turn in (1, 0):
        if rank == turn:
            with vc.checked(timeout=0.2), pytest.raises(vc.CommTimeoutError) as caught:
                vc.all_reduce(x, group)
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
            with pytest.raises(vc.CommTimeoutError) as caught:
                vc.all_reduce(x, group)
        dist.barrier()  # where rank 1 waits meanwhile
    return None if rank == 1 else str(caught.value)


def test_a_timeout_names_who_is_missing_without_a_check():
    messages = run(late, 3)
    for message in (messages[0], messages[2]):  # on a busy machine the other may be late as well
        assert re.search(r"Missing: rank(s [\d,-]*\b1\b| 1)", message)
        assert re.search(r"rank 1: .*test_safety.py:\d+ in late", message)


def mismatched_messages(rank, world_size, numel, later):
    with vc.checked(timeout=60):
        if rank == 0:
            sent = vc.send(torch.ones(numel), target=1, async_op=later)
            if later:
                sent.wait()
            vc.send(torch.full((2,), 7.0), target=1)
            return None

        def receive():
            found = vc.recv(torch.ones(numel, dtype=torch.int32), source=0, async_op=later)
            return found.wait()

        with pytest.raises(vc.CommMismatchError) as caught:
            receive()
        # The message is gone, and the next one is the next one.
        assert vc.recv(torch.ones(2), source=0).tolist() == [7.0, 7.0]
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
    with vc.checked(timeout=60):
        received = vc.recv(x, source=1 - rank, async_op=True)
        vc.send(x, target=1 - rank, async_op=True).wait()
        with (
            pytest.raises(vc.CommTimeoutError, match="in vain for rank 1 to send")
            if rank == 0
            else (nullcontext())
        ):
            if rank == 0:
                with vc.checked(timeout=0.3):
                    vc.recv(x, source=1)
        return received.wait().tolist()


def test_messages_may_cross_and_who_does_not_send_is_named():
    assert run(exchanged_messages, 2) == [[1.0] * 3, [0.0] * 3]


CONTEXTS = {
    "trace": vc.trace,
    "checked": lambda: vc.checked(timeout=60),
    "chaos": lambda: vc.chaos([vc.Fault("delay", seconds=0)]),
}


def raised_inside(rank, world_size, name):
    handles = []

    def body():
        with CONTEXTS[name]():
            vc.all_reduce(x)
            handles.append(vc.all_reduce(x, async_op=True))
            vc.all_reduce_bucketed([x, x[:1]])
            raise KeyError

    with pytest.raises(KeyError):
        body()
    # Not torch's own coalescing: after that every later all-reduce would do nothing.
    return vc.all_reduce(torch.full((2,), rank + 1.0)).tolist(), handles[0].wait().tolist()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_body_that_raises_leaves_no_group_poisoned(name):
    assert run(raised_inside, 2, name) == [([3.0, 3.0], [2.0] * 6)] * 2
    assert vc.simulate(2).run(raised_inside, name) == [([3.0, 3.0], [2.0] * 6)] * 2


# --- chaos


def troubled(rank, world_size, plan, seed=0):
    with vc.chaos(plan, seed=seed) as happened:
        results = [vc.all_reduce(x * (rank + 1)) for _ in range(4)]
        results.append(vc.all_reduce(x, async_op=True).wait())
    return [r.tolist() for r in results], list(happened)


def test_a_plan_without_hits_changes_nothing():
    plain = run(troubled, 2, [])
    assert run(troubled, 2, [vc.Fault("drop", rank=7), vc.Fault("die", call=99)]) == plain
    assert plain[0][0][0] == [3.0] * 6


def test_delays_change_no_bits_and_are_told():
    plan = [vc.Fault("delay", rank=1, call=2, seconds=0.01), vc.Fault("delay", op="barrier")]
    found = run(troubled, 2, plan)
    assert [r for r, _ in found] == [r for r, _ in run(troubled, 2, [])]
    assert [told for _, told in found] == [[], ["delay of all_reduce 2 on rank 1"]]


def test_corruption_flips_one_bit_at_one_rank_and_repeats_with_the_seed():
    plan = [vc.Fault("corrupt", rank=0, call=1), vc.Fault("corrupt", rank=1, call=4)]
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
    plan = [vc.Fault("delay", probability=0.5, seconds=0)]
    told = [[line for _, line in run(troubled, 2, plan, seed)] for seed in range(3)]
    assert told[0] == [line for _, line in run(troubled, 2, plan, 0)]
    assert len({str(each) for each in told}) == 3


def test_a_dead_process_is_named():
    with pytest.raises(WorkerError, match=r"worker of rank\(s\) 1 died") as caught:
        run(troubled, 2, [vc.Fault("die", rank=1, call=1)])
    assert caught.value.died == {1: 77}


@pytest.mark.parametrize("kind", ["die", "drop"])
def test_a_lost_rank_of_a_simulation_is_a_deadlock_at_once(kind):
    with pytest.raises(vc.SimulationError) as caught:
        vc.simulate(3).run(troubled, [vc.Fault(kind, rank=1, call=1)])
    assert isinstance(caught.value.errors.get(1), vc.Died) == (kind == "die")
    assert "nobody can go on" in str(caught.value.errors[0])


def test_faults_that_do_not_exist_are_refused():
    with pytest.raises(vc.CommArgumentError, match="unknown kind 'explode'"):
        vc.Fault("explode")


IN_A_SIMULATION = ["reduction", "fold", "wire", "avg", "shape", "pieces"]


@pytest.mark.parametrize("name", [*IN_A_SIMULATION, *(n for n in DISAGREE if "gradient" in n)])
def test_checks_run_in_a_simulation_too(name):
    assert len(set(vc.simulate(3).run(disagree, name))) == 1
