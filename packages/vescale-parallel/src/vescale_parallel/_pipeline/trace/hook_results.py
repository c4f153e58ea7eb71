"""Results of modules within blocks that hooks bring to code outside of these.

Hugging Face's models collect logits of routers so, by hooks on modules inside of the blocks. On a
stage that stands in for a block nothing within it runs, so that its part would be missing. Where a
trial run has found that code outside of the blocks looks for such results, hooks on modules within
are called on every stage, as those on blocks are: with the result, or with what stands for it. What
the code uses of them is passed from stage to stage beside the arguments of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from vescale_comm.nested import named_tensors_within

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs, describe
from vescale_parallel._pipeline.trace.text import add_record, to_text

_BEGINS: Final = "result of "


class MissingInnerResult(PipelineError):
    """Code outside of the blocks looks for what modules within them have computed."""


class FailedInHook(PipelineError):
    """A hook on a module within a block cannot do with what stands for its result."""


def failed_outside(stage: int, error: Exception) -> MissingInnerResult:
    """What to say where a model fails between its blocks, on a stage behind the first."""
    return MissingInnerResult(
        f"the model failed on stage {stage}, outside of its blocks: {type(error).__name__}: "
        f"{error}. Blocks of other stages do not run there, so what they leave beside their "
        "results (logits of routers, hidden states that hooks collect, caches) is missing. Leave "
        "it out (output_router_logits=False, use_cache=False), or let the blocks return it."
    )


@add_record
class Inner(NamedTuple):
    """A call of a module within a block.

    Attributes:
        module: its name within the block.
        given: its (args, kwargs), but for the values.
        output: what it returned, but for the values.
    """

    module: str
    given: NestedSpecs
    output: NestedSpecs


def is_collected(path: str) -> bool:
    """Whether a path names a result of a module within a block, and no argument of one."""
    return path.startswith(_BEGINS)


def named_results(
    unit: tuple[str, int], output: Any, number: int | None = None
) -> dict[str, Tensor]:
    """The tensors of a result, by a path that is the same on all stages.

    Args:
        unit: the unit, and which of its calls it is.
        output: what it returned, or a module within it.
        number: which of the calls within that; None: of the unit itself.
    """
    inner = "" if number is None else f", call {number} within"
    return named_tensors_within(output, f"{_BEGINS}{unit[0]}, call {unit[1]}{inner}: ")


def described_call(name: str, given: Any, output: Any) -> Inner:
    """Describe a call of a module within a block.

    Raises:
        PipelineError: there is more in its result than tensors, numbers and texts.
    """
    try:
        arguments = describe(given)
        to_text(arguments)
    except PipelineError:
        arguments = NestedSpecs(((), {}), ())  # a cache: hooks look at results
    found = Inner(name, arguments, describe(output))
    to_text(found)
    return found


class Watches(Protocol):
    """What is called for calls within blocks."""

    def within(self, unit: str, name: str, given: Any, output: Any) -> None:
        """A module within a block has returned."""


def hooked_within(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules within a block on which somebody has registered forward hooks."""
    for name, module in block.named_modules():
        if name and any(True for _ in own_hooks(module)):
            yield name, module


def own_hooks(module: nn.Module) -> Iterator[tuple[Callable[..., Any], bool]]:
    """The forward hooks of a module that are not of this project, and whether they take kwargs."""
    # Of a copy: a hook may remove itself when it is called.
    for key, hook in list(module._forward_hooks.items()):
        # Ours redistribute, swap parameters and watch: a module that does not run needs none of it.
        if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("vescale_"):
            yield hook, key in module._forward_hooks_with_kwargs


def hides_hooks(model: nn.Module, stages: Iterable[Iterable[str]]) -> bool:
    """Whether a stage has no hooks within its blocks, and one before it has.

    Of what hooks collect a part is seen to be missing where another part comes from the stage's own
    blocks. Here none of it would be there, and code outside of the blocks may go on without.

    Args:
        model: all stages.
        stages: the names of their blocks.
    """
    before = False
    for blocks in stages:
        hooked = any(True for name in blocks for _ in hooked_within(model.get_submodule(name)))
        if before and not hooked:
            return True
        before = before or hooked
    return False


def call_hooks(module: nn.Module, given: Any, output: Any, where: str) -> None:
    """Call the forward hooks of a module that does not run; what they return is not used.

    Args:
        module: it.
        given: its (args, kwargs).
        output: what stands for its result.
        where: names it, and the stage, for the message.

    Raises:
        FailedInHook: one of them has failed.
    """
    args, kwargs = given
    for hook, takes_kwargs in own_hooks(module):
        try:
            if takes_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)
        except Exception as error:
            raise FailedInHook(
                f"a forward hook on {where} failed, where its block does not run: "
                f"{type(error).__name__}: {error}"
            ) from error


class InnerHook:
    """A hook that tells of calls of a module within a block.

    Args:
        watching: gives who hears of it now, if anybody.
        unit: the block.
        name: of the module within it.
    """

    def __init__(self, watching: Callable[[], Watches | None], unit: str, name: str) -> None:
        self._watching, self._unit, self._name = watching, unit, name

    def __call__(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """The module has returned."""
        watching = self._watching()
        if watching is not None:
            watching.within(self._unit, self._name, (args, kwargs), output)
