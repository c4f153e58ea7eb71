"""Plans calls: which layouts the operands need, and which layouts the results have. Pure.

`op_call` parses a call into operands, arguments and a key. A rule (a function from a call to data)
returns a `strategy`: which dims may be sharded together, and what may be partial. `select` picks,
for each mesh axis, the possibility that sends the fewest bytes. `plan` assembles the result: what
to redistribute, what to call on the local tensors, and the layouts of the results. `memory_order`
finds the order of the results' dims in memory.

Nothing communicates here, and no data is computed. Rules are written against these types; they are
public as `vescale_dtensor.rules`.
"""

from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import AxisStrategy, Dims, Signature, Strategy

__all__ = [
    "AxisStrategy",
    "Dims",
    "LocalContext",
    "OpCall",
    "Reads",
    "Rule",
    "Signature",
    "Strategy",
]
