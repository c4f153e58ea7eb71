"""Every function that the table has a rule for is called by some case, so that it is fuzzed."""

import contextlib
import logging
import warnings

from rule_cases import CASES
from rule_cases_table import LEFT_OUT, composed
from rule_fuzz import values
from torch import Generator
from torch.overrides import TorchFunctionMode
from vescale_dtensor._dispatch.registry import known_rules
from vescale_dtensor._planning.plan import function_name


class Recorded(TorchFunctionMode):
    """Which functions were called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.add(func)
        return func(*args, **(kwargs or {}))


def test_every_rule_is_fuzzed():
    generator, recorded = Generator().manual_seed(0), Recorded()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            for op in CASES.values():
                operands = [values(operand, generator) for operand in op.operands]
                with recorded, contextlib.suppress(Exception):  # some are what torch refuses
                    op.call(*operands)
    finally:
        logging.disable(logging.NOTSET)
    # Of operators torch names the function behind them (`>` is `Tensor.gt`), never the method.
    filed = {name.split()[1] for name in CASES if name.startswith("table ")}
    ruled = [*known_rules(), *composed()]
    missing = {function_name(f) for f in ruled if f not in recorded.called} - filed
    assert missing <= LEFT_OUT, sorted(missing)
