"""All cases that the rules are fuzzed with: the tables of every family."""

import rule_cases_along
import rule_cases_classes
import rule_cases_dims
import rule_cases_heads
import rule_cases_making
import rule_cases_models
import rule_cases_nn
import rule_cases_pointwise
import rule_cases_put
import rule_cases_recurrent
import rule_cases_signal
import rule_cases_table
import rule_cases_tables
import rule_cases_tensor
import rule_cases_unique
import rule_cases_views
import rule_cases_written
from rule_table import CASES

__all__ = ["CASES"]

FAMILIES = (
    rule_cases_along,
    rule_cases_classes,
    rule_cases_dims,
    rule_cases_heads,
    rule_cases_making,
    rule_cases_models,
    rule_cases_nn,
    rule_cases_pointwise,
    rule_cases_put,
    rule_cases_recurrent,
    rule_cases_signal,
    rule_cases_table,
    rule_cases_tables,
    rule_cases_tensor,
    rule_cases_unique,
    rule_cases_views,
    rule_cases_written,
)
