"""What a test teaches is forgotten after it."""

import pytest
from vescale_dtensor._dispatch import registry


@pytest.fixture(autouse=True)
def _forget_what_was_taught():
    tables = (registry._rules, registry.handlers)
    sets = (registry.constants, registry.scalar_agnostic)
    before = [dict(table) for table in tables], [set(each) for each in sets]
    yield
    for table, was in zip((*tables, *sets), (*before[0], *before[1]), strict=True):
        table.clear()
        table.update(was)
    registry.on_change.notify()
