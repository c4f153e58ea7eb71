"""Divide the extent of a dim among the members of a group."""

from collections.abc import Sequence

from vescale_comm._checks.arguments import check_sizes
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group


def chunk_sizes(
    op: str, extent: int, dim: int, sizes: Sequence[int] | None, group: Group
) -> tuple[int, ...]:
    """Return the extents of the members' shards; equal ones if `sizes` is None."""
    if sizes is None:
        # No padding and no shorter last shard: a result of another size would be a surprise on one
        # rank.
        if extent % group.size:
            raise CommArgumentError(
                f"{op} over {group.name}: extent {extent} of dim {dim} is not divisible "
                f"by {group.size} members; say how to cut it with sizes="
            )
        return (extent // group.size,) * group.size
    sizes = check_sizes(op, sizes, group)
    # Checked against this rank's own tensor, so that it is an error here before a backend hangs.
    if sum(sizes) != extent:
        raise CommArgumentError(
            f"{op} over {group.name}: sizes={sizes} sum to {sum(sizes)}, but dim {dim} "
            f"has extent {extent}"
        )
    return sizes
