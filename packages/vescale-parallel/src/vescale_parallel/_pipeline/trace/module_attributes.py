"""Puts placeholders for what blocks leave in attributes, where the blocks do not run.

Code behind the blocks may look there for auxiliary losses, and be content with those it finds. So
in a trial run each stage tells what its blocks have left, and where another stage stands in for
them their modules have values that are known to be none: whoever uses one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.nested import tensors_within

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs, describe, placeholders
from vescale_parallel._pipeline.trace.text import add_record, to_text

_OF_MODULES: Final = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers and hooks."""

_MISSING: Final = object()


@add_record
class AttributeValue(NamedTuple):
    """A value in an attribute.

    Attributes:
        module: the name of the module within the block.
        attribute: of the module.
        value: what is there, but for the numbers.
    """

    module: str
    attribute: str
    value: NestedSpecs


def left_by(block: nn.Module, is_made: Callable[[Tensor], bool]) -> tuple[AttributeValue, ...]:
    """What the last call of a block has left.

    Args:
        block: on the stage that has it.
        is_made: whether a tensor was computed in that call.
    """
    found = []
    for name, module in block.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _OF_MODULES or not any(map(is_made, tensors_within(value))):
                continue
            described = describe(value)
            try:
                to_text(described)
            except PipelineError:
                continue  # an object that only its own code reads
            found.append(AttributeValue(name, attribute, described))
    return tuple(found)


class StandingIn:
    """Attributes of blocks of other stages, during a trial run."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, str, Any]] = []

    def put(
        self, block: nn.Module, left: Sequence[AttributeValue], mesh: DeviceMesh
    ) -> list[Tensor]:
        """Leave what the block would leave; returns the tensors, whose values mean nothing."""
        every: list[Tensor] = []
        for name, attribute, described in left:
            module = block.get_submodule(name)
            value, made = placeholders(described, mesh)
            self._before.append((module, attribute, vars(module).get(attribute, _MISSING)))
            # Past `__setattr__`, by which modules sort parameters and modules out.
            vars(module)[attribute] = value
            every += made
        return every

    def restore(self) -> None:
        """Let the attributes be what they were."""
        # From behind: of one that was put twice, what was there first is what stays.
        for module, attribute, value in reversed(self._before):
            if value is _MISSING:
                vars(module).pop(attribute, None)
            else:
                vars(module)[attribute] = value
        self._before.clear()
