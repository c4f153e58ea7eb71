"""The rows of a report: one parameter, one module boundary."""

from dataclasses import dataclass

from vescale_parallel._layout import Boundary, Layout


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
        zero: what is sharded over the plan's axis `over` besides; 0 is nothing.
    """

    names: tuple[str, ...]
    rule: str
    layout: Layout
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_bytes: int
    uneven: bool
    zero: int = 0

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
