"""Operators to which tests teach rules, and rules that count how often they are asked."""

import torch
from torch import Tensor
from vescale_comm import simulate
from vescale_dtensor import Shard, distribute_tensor, init_device_mesh
from vescale_dtensor.rules import Reads, Rule, Signature

ROWS, COLUMNS = torch.linspace(-2, 2, 20).reshape(5, 4), torch.linspace(1, 2, 4)


@torch.library.custom_op("vescale_dtensor_tests::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * w


@torch.library.custom_op("vescale_dtensor_tests::gate_backward", mutates_args=())
def gate_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return g * w * s * (1 + x * (1 - s)), (g * x * s).sum(0)


@gate.register_fake
def _(x, w):
    return torch.empty_like(x)


@gate_backward.register_fake
def _(g, x, w):
    return torch.empty_like(x), torch.empty_like(w)


gate.register_autograd(
    lambda ctx, g: gate_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("vescale_dtensor_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Each row two times, one below the other."""
    return x.repeat_interleave(2, 0)


@twice.register_fake
def _(x):
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


@torch.library.custom_op("vescale_dtensor_tests::unfaked", mutates_args=())
def unfaked(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("vescale_dtensor_tests::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1)


GATE = {"inputs": (("r", "c"), ("c",)), "outputs": (("r", "c"),)}
GATE_BACKWARD = {"inputs": (("r", "c"), ("r", "c"), ("c",)), "outputs": (("r", "c"), ("c",))}
ELEMENTS = {"inputs": (("r", "c"),), "outputs": (("r", "c"),)}


def letters(name="taught", **options):
    signature = Signature(**options)
    return Rule(name, lambda call: signature.strategy(), reads=Reads.NOTHING)


class Asked:
    """A rule that counts how often it is asked, and says what another one says."""

    def __init__(self, rule):
        self.count = 0
        self.rule = Rule(rule.name, self._strategy, rule.reads, rule.writes)
        self._original = rule

    def _strategy(self, call):
        self.count += 1
        return self._original.strategy(call)


def on_two_ranks(program):
    def run(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        return program(distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None))

    return simulate(2).run(run)
