"""Styles that lay out what goes into a module and what comes out, and leave the module alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor.parallel._style import ParallelStyle, laid_out, placement_of

# One placement, or one entry for each tensor; None for what is to be left alone.
Layouts = Placement | tuple[Placement | None, ...] | None


def _entries(layouts: object) -> tuple[Placement | None, ...] | None:
    """One entry for each tensor, of what was given for one tensor or for several."""
    if layouts is None:
        return None
    several = layouts if isinstance(layouts, tuple | list) else (layouts,)
    return tuple(None if one is None else placement_of(one) for one in several)


def _refuse_unequal(style: ParallelStyle, what: str, first: Any, second: Any) -> None:
    """Refuse two lists of layouts that do not belong together."""
    if second is None or len(first) != len(second):
        # The type that torch raises: its callers catch that one.
        raise AssertionError(
            f"{type(style).__name__}: {what} and desired_{what} should have the same length, "
            f"found {first} and {second}"
        )


def _prepared(
    what: str,
    value: Any,
    mesh: DeviceMesh,
    found: Placement | None,
    desired: Placement | None,
    as_local: bool,
) -> Any:
    """One value in the desired layout; itself where none is given for it."""
    if found is None:
        return value
    made = laid_out(what, value, mesh, (found,), (found if desired is None else desired,))
    return made.to_local() if as_local else made


def _prepared_each(
    what: str,
    values: Sequence[Any],
    mesh: DeviceMesh,
    layouts: tuple[Placement | None, ...],
    desired: tuple[Placement | None, ...],
    as_local: bool,
) -> tuple[Any, ...]:
    """All values in the desired layouts.

    Raises:
        LayoutError: a number of values other than that of the layouts (a ValueError, as torch's).
    """
    if len(values) != len(layouts):
        raise LayoutError(f"{what}: layouts for {len(layouts)} tensors, found {len(values)}")
    triples = zip(values, layouts, desired, strict=True)
    return tuple(_prepared(what, v, mesh, f, d, as_local) for v, f, d in triples)


class PrepareModuleInput(ParallelStyle):
    """Lay out the inputs of a module.

    The signature is that of `torch.distributed.tensor.parallel.PrepareModuleInput`.

    Args:
        input_layouts: layouts of plain positional inputs, one entry each; None for one that is no
            tensor, or is left alone. Default: positional inputs are left alone.
        desired_input_layouts: layouts in which the module gets them.
        input_kwarg_layouts: layouts of plain inputs by name; others are left alone.
        desired_input_kwarg_layouts: layouts in which the module gets those.
        use_local_output: give the module local tensors, and no DTensors.

    Raises:
        AssertionError: layouts of which the desired ones lack some.

    Examples:
        PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        """See the class."""
        self.input_layouts = _entries(input_layouts)
        self.desired_input_layouts = _entries(desired_input_layouts)
        self.use_local_output = use_local_output
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if self.input_layouts is not None:
            _refuse_unequal(self, "input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.with_kwargs:
            ours, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            _refuse_unequal(self, "input_kwarg_layouts", sorted(ours), sorted(desired))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = f"inputs of {type(module).__name__}"

        def enter(
            called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            layouts, desired = self.input_layouts, self.desired_input_layouts
            if layouts is not None and desired is not None:
                args = _prepared_each(
                    name, args, device_mesh, layouts, desired, self.use_local_output
                )
            return args, {n: self._named(name, n, v, device_mesh) for n, v in kwargs.items()}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module

    def _named(self, what: str, name: str, value: Any, mesh: DeviceMesh) -> Any:
        """One input that is given by name."""
        found = self.input_kwarg_layouts.get(name)
        desired = self.desired_input_kwarg_layouts.get(name)
        if found is None or value is None:
            return value
        found = placement_of(found)
        desired = None if desired is None else placement_of(desired)
        return _prepared(f"{what}, {name}", value, mesh, found, desired, self.use_local_output)


class PrepareModuleOutput(ParallelStyle):
    """Lay out the outputs of a module.

    The signature is that of `torch.distributed.tensor.parallel.PrepareModuleOutput`.

    Args:
        output_layouts: layouts of plain outputs, one entry each; None for one that is left alone.
        desired_output_layouts: layouts in which they are returned.
        use_local_output: return local tensors, and no DTensors.

    Raises:
        AssertionError: layouts of which the desired ones lack some.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        """See the class."""
        self.output_layouts = _entries(output_layouts) or ()
        self.desired_output_layouts = _entries(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _refuse_unequal(self, "output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = f"outputs of {type(module).__name__}"

        def leave(called: nn.Module, inputs: Any, outputs: Any) -> Any:
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            layouts, desired = self.output_layouts, self.desired_output_layouts
            made = _prepared_each(
                name, several, device_mesh, layouts, desired, self.use_local_output
            )
            return made[0] if len(made) == 1 else made

        module.register_forward_hook(leave)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    The signature is that of `torch.distributed.tensor.parallel.PrepareModuleInputOutput`.

    Args:
        input_layouts: see `PrepareModuleInput`, here and for the next three.
        desired_input_layouts: see there.
        input_kwarg_layouts: see there.
        desired_input_kwarg_layouts: see there.
        use_local_input: give the module local tensors, and no DTensors.
        output_layouts: see `PrepareModuleOutput`, here and for the next two.
        desired_output_layouts: see there.
        use_local_output: see there.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        """See the class."""
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)
