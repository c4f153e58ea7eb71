"""All cases that the rules are fuzzed with: the tables of every family, `rule_cases_*` here."""

from importlib import import_module
from pathlib import Path

from rule_table import CASES

__all__ = ["CASES"]

for family in sorted(Path(__file__).parent.glob("rule_cases_*.py")):
    import_module(family.stem)
