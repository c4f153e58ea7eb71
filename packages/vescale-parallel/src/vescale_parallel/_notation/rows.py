"""The rows of a report: one parameter, one module boundary."""

from dataclasses import dataclass

import torch

from vescale_parallel._notation.layout import Boundary, RuleLayout


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of the model and the rule that places it.

    Attributes:
        names: the name of the parameter; several where modules share it.
        rule: the glob that matched first.
        layout: what the rule says.
        global_shape: shape on one device.
        local_shape: shape of the largest shard, that of the ranks at coordinate 0.
        local_bytes: bytes of that shard.
        uneven: whether some ranks hold less.
        dtype: in which it is stored, as are its gradient and the states of optimizers.
        compute: dtype of what modules compute with.
        reduce: dtype in which its gradient is summed over the plan's axis `over`.
        zero: what is sharded over the plan's axis `over` besides; 0 is nothing.
        unit: name of the module with which it is gathered, or cast; "" is the model itself.
        owned: whether one rank of the axis `over` stores all of it, for its optimizer.
        offload: the word for what of it lies on the host, see `_zero.offload`; "" is nothing.
    """

    names: tuple[str, ...]
    rule: str
    layout: RuleLayout
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_bytes: int
    uneven: bool
    dtype: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    zero: int = 0
    unit: str = ""
    owned: bool = False
    offload: str = ""

    @property
    def name(self) -> str:
        """The first name of the parameter."""
        return self.names[0]


@dataclass(frozen=True)
class BoundaryRow:
    """One module whose inputs or outputs the plan redistributes, and the rule that says so."""

    module: str
    rule: str
    boundary: Boundary
