"""The unit that a save plans, and that a data file is made of: one rank's region of a tensor."""

from typing import NamedTuple

from vescale_ckpt._tensors.dtypes import STORED_AS
from vescale_ckpt._tensors.regions import Region


class WriteItem(NamedTuple):
    """A region of a tensor that one rank writes."""

    name: str
    dtype: str
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.numel * STORED_AS[self.dtype].bytes_per_element
