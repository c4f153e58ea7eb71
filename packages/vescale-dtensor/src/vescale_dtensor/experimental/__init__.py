"""`torch.distributed.tensor.experimental` for these DTensors: same names, same signatures."""

from vescale_dtensor._api.local_map import local_map
from vescale_dtensor.experimental._context_parallel import context_parallel
from vescale_dtensor.experimental._flex_attention import flex_attention
from vescale_dtensor.experimental._implicit_replication import implicit_replication
from vescale_dtensor.rules._torch_sharding import register_sharding

__all__ = [
    "context_parallel",
    "flex_attention",
    "implicit_replication",
    "local_map",
    "register_sharding",
]
