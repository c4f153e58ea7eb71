"""Lines are counted by what they hold, and the programs that are counted train as one device."""

import copy
import importlib.util
from itertools import product
from typing import Any

import pytest
import torch
from vescale_comm import simulate
from vescale_parallel import forward_backward

from tools.code_lines import ROWS, TORCHTITAN, code_lines, programs, table, with_words

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


# What a run takes, each program once; `-m slow` takes the rest.
USUAL = {("by_rules", "TP + SP + ZeRO-3 + PP"), ("by_preset", "TP + SP + ZeRO-3")}
CASES = [
    pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow])
    for case in product(programs(), ROWS)
]


def test_what_is_a_line_of_code():
    assert code_lines(PROGRAM) == 6
    assert code_lines("") == 0
    assert code_lines("x = 1\n") == 1


def test_the_programs_are_short():
    counted = {name: code_lines(text) for name, text in programs().items()}
    assert counted["by_rules"] <= 25
    assert counted["by_preset"] <= 6
    for text in programs().values():
        assert with_words(text, ROWS["TP + SP + ZeRO-3"]) == text
        assert len({with_words(text, words) for words in ROWS.values()}) == len(ROWS)


def test_the_table_has_all_rows_and_figures():
    text = table()
    assert all(what in text for what in ROWS)
    assert all(str(figure) in text for pair in TORCHTITAN.values() for figure in pair)


@pytest.mark.models
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_counted_program_trains_as_one_device(name: str, what: str):
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
    program: dict[str, Any] = {}
    exec(with_words(programs()[name], ROWS[what]), program)

    def run(rank: int, world_size: int) -> list[float]:
        return losses(program["distributed"](copy.deepcopy(plain), 2))

    def losses(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            # Of a plain model it is a forward and a backward.
            loss = forward_backward(model, input_ids=ids, labels=ids, use_cache=False)
            optimizer.step()
            found.append(loss.item())
        return found

    assert simulate(4).run(run)[0] == pytest.approx(losses(copy.deepcopy(plain)), rel=1e-5)
