"""`visualize_sharding`: prints the picture of a layout once."""

from __future__ import annotations

from vescale_dtensor._inspect.visualize import visualize
from vescale_dtensor._tensor.dtensor import DTensor


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which part of a tensor, on the first rank of its mesh.

    The signature is that of `torch.distributed.tensor.debug.visualize_sharding`. The picture is
    that of `visualize`, of any number of dims. Nothing is printed for a tensor without elements.

    Args:
        dtensor: the tensor. No communication.
        header: a line above the picture.
        use_rich: the picture needs no library, and has no colours: this changes nothing.
    """
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None or any(coordinate) or not dtensor.numel():
        return
    print(f"{header}\n{visualize(dtensor)}" if header else visualize(dtensor))
