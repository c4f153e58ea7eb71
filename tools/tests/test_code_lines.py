"""Lines are counted by what they hold, and the programs that are counted train as one device."""

import copy
import importlib
import importlib.util

import pytest
import torch
from vescale_comm import simulate

from tools.code_lines import ROWS, TORCHTITAN, code_lines, programs, table, without_zero

PROGRAM = '''"""About
it."""
import os  # kept

# not this

def f(
    a,
):
    """Nor this."""
    return """but
this"""
'''


def test_what_is_a_line_of_code():
    assert code_lines(PROGRAM) == 6
    assert code_lines("") == 0
    assert code_lines("x = 1\n") == 1


def test_the_programs_are_short():
    counted = {name: code_lines(text) for name, text in programs().items()}
    assert counted["by_rules"] <= 25
    assert counted["by_preset"] <= 6
    assert without_zero(programs()["by_rules"]) != programs()["by_rules"]


def test_the_table_says_what_is_not_there():
    text = table()
    assert all(what in text for what in ROWS)
    assert all(str(figure) in text for pair in TORCHTITAN.values() for figure in pair)
    assert text.count("not yet") == 2 * sum(not there for there in ROWS.values())


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("name", programs())
def test_a_counted_program_trains_as_one_device(name: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plain = LlamaForCausalLM(config)
    ids = torch.randint(40, (4, 6))
    program = importlib.import_module(f"tools.user_code.{name}")

    def run(rank: int, world_size: int) -> list[float]:
        return losses(program.distributed(copy.deepcopy(plain), 2))

    def losses(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert simulate(4).run(run)[0] == pytest.approx(losses(copy.deepcopy(plain)), rel=1e-5)
