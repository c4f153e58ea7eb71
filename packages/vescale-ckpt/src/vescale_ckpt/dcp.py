"""This package's format behind `torch.distributed.checkpoint`: switch by one argument.

```python
dcp.save(state, storage_writer=StorageWriter("run/step-3"))
dcp.load(state, storage_reader=StorageReader("run/step-3"))
```
"""

from vescale_ckpt._dcp.reader import StorageReader
from vescale_ckpt._dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
