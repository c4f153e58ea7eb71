"""`torch.distributed.tensor.debug` for these DTensors: the same names, the same signatures.

`vescale_dtensor.explain` tells more, by op; `vescale_comm.trace` by collective; and
`vescale_dtensor.visualize` returns its picture, of any number of dims. `layout_differences` is for
programs that move here: it tells where local tensors are other parts than torch's. And
`watch_operands` is for layers above: it tells of operands that ops redistribute unasked.
"""

from vescale_dtensor._inspect.torch_layouts import layout_differences
from vescale_dtensor._tensor.observers import watch_operands
from vescale_dtensor.debug._comm_mode import CommDebugMode
from vescale_dtensor.debug._visualize_sharding import visualize_sharding

__all__ = ["CommDebugMode", "layout_differences", "visualize_sharding", "watch_operands"]
