"""The variants of this project: eager, static, captured steps. All that a user writes for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from vescale_dtensor import capture
from vescale_parallel import Plan, parallelize

from tools.bench._train.model import Sizes, seeded
from tools.bench._train.training import adamw

Step = Callable[[Tensor, Tensor], Tensor]

PLAN = Plan(
    parameters={
        "*.{q,k,v,gate,up}.weight": "tp:0",
        "*.{out,down}.weight": "tp:1",
        "*": "replicate",
    },
)

PLAN_ZERO3 = Plan(parameters={"*": "replicate"}, zero=3)

PLAN_CONTEXT = Plan(batch="cp:1", parameters={"*": "replicate"})


class Ours:
    """The model under a plan; `static`: captured forwards; `captured`: all but the update."""

    def __init__(
        self,
        sizes: Sizes,
        mesh: DeviceMesh,
        *,
        plan: Plan = PLAN,
        static: bool = False,
        captured: bool = False,
    ) -> None:
        # Uncompared, as nearly all steps of a long run are: these are among the first.
        self.model = parallelize(seeded(sizes), mesh, plan, static=static, check=None)
        self.optimizer: Optimizer = adamw(self.model.parameters())
        gradients = self._gradients
        self._computed: Step = capture(gradients, check=None) if captured else gradients

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step of training; returns the loss."""
        loss = self._computed(tokens, targets)
        self.optimizer.step()
        return loss

    def _gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The global loss: `item` of a distributed tensor is that."""
        return loss.item()
