"""Every schedule on every layout against one device: run `python pipeline_table.py`.

Unmodified models of Hugging Face with dropout, tied embeddings where the model has them, AdamW and
clipping. A cell trains the model in stages and, beside it, on one device that accumulates over the
same microbatches. It asks for: parameters after `parallelize` bitwise those of one device; the
random generator after each step bitwise where one device leaves it, which every mask that was drawn
moves; losses within 1e-5 of one device's; and parameters at the end. A cell that fails prints why.

    python pipeline_table.py                                 # all cells, 20 steps
    python pipeline_table.py --models Llama --steps 3        # some
    python pipeline_table.py --cells cells.json              # go on where it stopped
    python pipeline_table.py --write ../packages/vescale-parallel/PIPELINE.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

MICROBATCHES, ROWS, TOKENS, VOCABULARY, STEPS = 8, 15, 6, 32, 20
TOLERANCE = 1e-5


def llama() -> nn.Module:
    """Llama-style, tied, dropout in attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=16,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        **sizes,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """GPT-2, tied, dropout everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=8, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16)
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """T5: four blocks of an encoder and four of a decoder, one table for both and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=4,
        num_decoder_layers=4,
        d_model=16,
        d_kv=8,
        num_heads=2,
        d_ff=24,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Llama": (llama, {}),
    "GPT-2": (gpt2, {}),
    "T5": (t5, {"stages": "{encoder,decoder}.block.*"}),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp4": ({"pp": 4}, {}),
    "pp2·tp2": ({"pp": 2, "tp": 2}, {}),
    "pp2·dp2": ({"pp": 2, "dp": 2}, {}),
    "pp2·zero3": ({"pp": 2, "dp": 2}, {"zero": 3}),
    "pp2·dp2·tp2": ({"pp": 2, "dp": 2, "tp": 2}, {}),
}


class Cell(NamedTuple):
    """What a training showed.

    Attributes:
        loss: the largest relative distance of a loss from one device's.
        parameter: the largest distance of a parameter at the end, in units of the largest one.
        why: what went wrong; empty if nothing.
    """

    loss: float
    parameter: float
    why: str = ""


def batch(model: str, step: int) -> dict[str, Tensor]:
    """A batch whose rows make no equal microbatches."""
    draws = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=draws)
    if model == "T5":
        return {"input_ids": tokens, "labels": tokens.flip(1)}
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def made(model: str) -> nn.Module:
    """The model with the values of one seed."""
    torch.manual_seed(0)
    return MODELS[model][0]().train()


def one_device(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Accumulate over the same microbatches."""
    size = -(-ROWS // MICROBATCHES)
    total = torch.zeros(())
    for pieces in zip(*(one.split(size) for one in given.values()), strict=True):
        share = len(pieces[0]) / ROWS
        loss: Any = model(**dict(zip(given, pieces, strict=True))).loss * share
        loss.backward()
        total += loss.detach()
    return total


def whole(one: Any) -> Tensor:
    """The global tensor."""
    return one.full_tensor().detach() if isinstance(one, DTensor) else one.detach()


def on_a_rank(rank: int, world: int, name: str, schedule: str, layout: str, steps: int) -> Cell:
    """Train both, and compare."""
    sizes, fields = LAYOUTS[layout]
    plain, model = made(name), made(name)
    pipeline = {**MODELS[name][1], "schedule": schedule, "microbatches": MICROBATCHES}
    parallelize(
        model,
        make_mesh(device_type="cpu", **sizes),
        Plan.from_hf(model, pipeline=pipeline, **fields),
    )
    pairs = [
        (n, whole(one), other.detach())
        for (n, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
    ]
    wrong = [n for n, one, other in pairs if not torch.equal(one, other)]
    if wrong:
        return Cell(0, 0, f"init of {wrong[0]}")
    torch.manual_seed(7)
    # A large eps: gradients that are zero but for rounding would be steps of the full rate.
    both = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (model, plain)]
    worst = 0.0
    for step in range(steps):
        start = torch.get_rng_state()
        expected = one_device(plain, batch(name, step))
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        found = forward_backward(model, **batch(name, step))
        if not torch.equal(torch.get_rng_state(), end):
            return Cell(worst, 0, f"generator after step {step}")
        worst = max(worst, abs(found.item() - expected.item()) / abs(expected.item()))
        for optimizer, one in zip(both, (model, plain), strict=True):
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    distance = max(
        float((whole(one) - other.detach()).abs().max() / other.detach().abs().max())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return Cell(worst, distance, "" if worst <= TOLERANCE else "losses")


def cell(model: str, schedule: str, layout: str, steps: int) -> Cell:
    """One cell of the table, on simulated ranks."""
    world = torch.Size(LAYOUTS[layout][0].values()).numel()
    try:
        found = simulate(world)(on_a_rank, model, schedule, layout, steps)
    except Exception as error:
        cause = error.__cause__ or error
        return Cell(0, 0, f"{type(cause).__name__}: {cause}".replace("\n", " ")[:300])
    return max(found, key=lambda one: (one.why, one.loss))


class Cells:
    """Cells that ran, kept in a file so that a run goes on where another one stopped."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path, self._steps = path, steps
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._known: dict[str, list[Any]] = known

    def get(self, model: str, layout: str, schedule: str) -> Cell:
        """Run a cell, unless it ran before with as many steps."""
        key = f"{model} {layout} {schedule} {self._steps}"
        if key not in self._known:
            start = time.monotonic()
            self._known[key] = [*cell(model, schedule, layout, self._steps)]
            print(f"{key}: {self._known[key]}, {time.monotonic() - start:.0f} s", flush=True)
            if self._path is not None:
                self._path.write_text(json.dumps(self._known, indent=1))
        return Cell(*self._known[key])


def table(
    models: Sequence[str],
    layouts: Sequence[str],
    schedules: Sequence[str],
    steps: int,
    cells: Path | None = None,
) -> str:
    """Run the cells; returns Markdown."""
    kept = Cells(cells, steps)
    lines = [
        "# Models in stages, beside one device",
        "",
        "Written by `tests-integration/pipeline_table.py`. Unmodified models of Hugging Face with "
        f"dropout, {MICROBATCHES} microbatches of {ROWS} rows, AdamW and clipping, {steps} steps. "
        "In every cell parameters begin bitwise as on one device, and so does the random generator "
        "stand after each step, masks being drawn. Told is the largest relative distance of a loss "
        "from that of one device that accumulates over the same microbatches, and in brackets that "
        "of a parameter at the end.",
        "",
        f"| model | layout | {' | '.join(schedules)} |",
        "|" + "---|" * (2 + len(schedules)),
    ]
    for model in models:
        for layout in layouts:
            found = [kept.get(model, layout, schedule) for schedule in schedules]
            row = [one.why or f"{one.loss:.0e} ({one.parameter:.0e})" for one in found]
            lines.append(f"| {model} | {layout} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cells", type=Path, help="a file that keeps cells which ran")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = table(options.models, options.layouts, options.schedules, options.steps, options.cells)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
