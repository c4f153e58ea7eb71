"""`torch.distributed.tensor.experimental` for these DTensors: the same names, the same signatures.

`context_parallel` is not among them yet.
"""

from vescale_dtensor._api.local_map import local_map
from vescale_dtensor.experimental._implicit_replication import implicit_replication
from vescale_dtensor.rules._torch_sharding import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
