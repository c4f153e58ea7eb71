"""State dicts as other programs want them: of plain tensors, of torch's DTensors, as pickles.

- `full_state_dict`: a model's state as one device has it, for `torch.save` and `safetensors`.
- `get_model_state_dict`, `get_optimizer_state_dict`, `get_state_dict` and their `set_…`: the names
  and signatures of `torch.distributed.checkpoint.state_dict`; `full_state_dict=True` gathers.
- `as_torch`: torch's DTensors on the same memory, for what takes only those.
- `pickled`, `unpickled_on`: what `torch.save` and `pickle` do with DTensors themselves.

vescale_ckpt and `save` and `load` of `torch.distributed.checkpoint` need none of this: they take
DTensors as they are.
"""

from vescale_dtensor._ops.tensor.pickling import pickled, unpickled_on
from vescale_dtensor.state_dict._conversion import as_torch, full_state_dict
from vescale_dtensor.state_dict._torch_names import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "as_torch",
    "full_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "pickled",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "unpickled_on",
]
