"""Hooks of autograd that stages cannot call with what they are promised."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import has_backward_hooks
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.plan.model_walk import ModelWalk
from vescale_parallel._pipeline.run.rank_stages import RankStages


class AutogradHooks(NamedTuple):
    """What has such hooks; empty where nothing has.

    Attributes:
        parameters: names of parameters with hooks.
        blocks: names of first blocks of stages with backward hooks.
    """

    parameters: list[str]
    blocks: list[str]

    @classmethod
    def of(cls, walked: ModelWalk, scene: RankStages) -> AutogradHooks:
        """Look for them: for blocks of all stages, so that all ranks find the same.

        In an evaluation nothing goes backward, and hooks of blocks have nothing to miss.
        """
        firsts = [stage[0] for stage in scene.split.stages[1:]] if torch.is_grad_enabled() else []
        found = [one for one in firsts if has_backward_hooks(scene.model.get_submodule(one))]
        return cls(walked.hooked(), found)

    def refuse(self) -> None:
        """Say that they are refused, where there are any.

        Raises:
            PipelineError: there are.
        """
        if self.parameters:
            raise PipelineError(
                f"parameters have hooks: {listed(self.parameters)}. Gradients of stages are put "
                "together at the end of a step, where no hook of autograd would be called with "
                "them. Look at .grad after forward_backward."
            )
        if self.blocks:
            # torch puts its node around what the caller passes, and that is on another rank.
            raise PipelineError(
                f"stages begin with blocks that have backward hooks: {listed(self.blocks)}. What "
                "they are called with comes from another rank, so that no hook would have its "
                "gradient. Register such hooks on the modules within the block, or on tensors in "
                "its forward."
            )
