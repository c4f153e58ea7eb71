"""Property: a simulated rank has generators, a current device and a stream of its own.

Beside a module that answers as `torch.cuda` does and notes what it is asked; on a GPU, beside it.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from vescale_comm import simulate
from vescale_comm._simulation import device_state
from vescale_comm._simulation.device_state import DeviceState


class FakeModule:
    """Two devices: generators of the process; the current device and streams of each thread."""

    def __init__(self):
        self.initialized, self.capturing = True, False
        self.states = [torch.tensor([7]), torch.tensor([7])]
        self._own = threading.local()

    def is_initialized(self):
        return self.initialized

    def is_current_stream_capturing(self):
        return self.capturing

    def get_rng_state_all(self):
        assert self.initialized, "asking would initialise it"
        assert not self.capturing, "refused within a capture"
        return [one.clone() for one in self.states]

    def set_rng_state_all(self, states):
        assert not self.capturing, "refused within a capture"
        self.states = [one.clone() for one in states]

    def manual_seed_all(self, seed):
        self.states = [torch.tensor([seed]) for _ in self.states]

    def current_device(self):
        assert self.initialized, "asking would initialise it"
        return getattr(self._own, "device", 0)

    def set_device(self, device):
        self._own.device = device

    def current_stream(self):
        return getattr(self._own, "streams", {}).get(self.current_device(), "default")

    def set_stream(self, stream):
        self._own.streams = {**getattr(self._own, "streams", {}), self.current_device(): stream}

    def draw(self):
        """The next number of the current device's generator."""
        self.states[self.current_device()] += 1
        return self.states[self.current_device()].item()


@pytest.fixture
def module(monkeypatch):
    made = FakeModule()
    monkeypatch.setattr(device_state, "accelerator", lambda: made)
    return made


def test_each_rank_draws_from_generators_of_its_own(module):
    def program(rank, world_size):
        module.set_device(rank % 2)
        found = []
        for _ in range(3):
            dist.barrier()
            found.append(module.draw())
        return found

    assert simulate(4)(program) == [[8, 9, 10]] * 4
    assert [one.item() for one in module.states] == [7, 7]


def test_ranks_begin_on_the_caller_s_device_and_stream(module):
    module.set_device(1)
    module.set_stream("of the caller")

    def program(rank, world_size):
        begun = module.current_device(), module.current_stream()
        dist.barrier()
        module.set_device(0)
        module.set_stream(f"of rank {rank}")
        dist.barrier()
        return begun, (module.current_device(), module.current_stream())

    for rank, (begun, later) in enumerate(simulate(3)(program)):
        assert begun == (1, "of the caller")
        assert later == (0, f"of rank {rank}")
    assert (module.current_device(), module.current_stream()) == (1, "of the caller")


def test_the_first_rank_that_uses_a_device_leaves_the_others_their_seeds(module):
    module.initialized = False
    torch.manual_seed(30)

    def program(rank, world_size):
        if rank == 0:
            module.initialized = True
            module.manual_seed_all(30)
            module.draw()
        dist.barrier()
        return module.draw()

    assert simulate(3)(program) == [32, 31, 31]


def test_what_is_never_used_is_never_initialised(module):
    module.initialized = False
    simulate(2)(lambda rank, world_size: dist.barrier())
    assert not module.initialized


def test_generators_are_not_asked_for_while_a_graph_is_captured(module):
    module.capturing = True
    state = DeviceState.captured()
    assert (state.generators, state.unmade, state.device) == (None, False, 0)
    state.restore()
    assert [one.item() for one in module.states] == [7, 7]


def test_autocast_and_grad_mode_are_the_rank_s():
    def program(rank, world_size):
        found = []
        with torch.autocast("cpu", enabled=rank == 1), torch.set_grad_enabled(rank != 2):
            for _ in range(3):
                dist.barrier()
                dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
                found.append((dtype == torch.bfloat16, torch.is_grad_enabled()))
        return found

    expected = [(False, True), (True, True), (False, False)]
    assert simulate(3)(program) == [[one] * 3 for one in expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_a_gpu():
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda").tolist()
    torch.cuda.manual_seed(3)
    side = torch.cuda.Stream()

    def program(rank, world_size):
        own = torch.cuda.Stream()
        begun = torch.cuda.current_stream() == side
        torch.cuda.set_stream(own)
        found = []
        for _ in range(3):
            dist.barrier()
            found.append(torch.rand(1, device="cuda").item())
        return begun, found, torch.cuda.current_stream() == own

    with torch.cuda.stream(side):
        found = simulate(3)(program)
    assert all(begun and kept for begun, _, kept in found)
    drawn = [numbers for _, numbers, _ in found]
    assert drawn[0] == drawn[1] == drawn[2]
    # One call for each number draws otherwise than one for all; the first is the same.
    assert drawn[0][0] == expected[0]
