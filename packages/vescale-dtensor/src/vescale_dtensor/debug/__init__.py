"""`torch.distributed.tensor.debug` for these DTensors: the same names, the same signatures.

`vescale_dtensor.explain` tells more, by op; `vescale_comm.trace` by collective; and
`vescale_dtensor.visualize` returns its picture, of any number of dims.
"""

from vescale_dtensor.debug._comm_mode import CommDebugMode
from vescale_dtensor.debug._visualize_sharding import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
