"""Every schedule on every layout against one device: run `python pipeline_table.py`.

Unmodified models of Hugging Face with dropout, tied embeddings, AdamW and clipping. A cell trains
the model in stages, beside one device that accumulates over the same microbatches. It asks for:
parameters after `parallelize` bitwise those of one device; the random generator after each step
bitwise where one device leaves it, which every mask that was drawn moves; the masks of two steps
bitwise; losses within 1e-5 of one device's; parameters at the end; and that a checkpoint of the end
is loaded bitwise by the next layout, which then trains a step as one device does. A cell that fails
prints why.

    python pipeline_table.py                                 # all cells, 20 steps
    python pipeline_table.py --models Llama --steps 3        # some
    python pipeline_table.py --cells cells.json              # go on where it stopped
    python pipeline_table.py --write ../packages/vescale-parallel/PIPELINE.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vescale_ckpt
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

MICROBATCHES, ROWS, TOKENS, VOCABULARY, STEPS = 8, 15, 6, 32, 20
TOLERANCE = 1e-5


def llama() -> nn.Module:
    """Llama-style, tied, dropout in attention, whose masks the eager implementation shows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_implementation": "eager",
    }
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


class Masks(TorchFunctionMode):
    """Keeps where dropouts have left zeros, in whatever order they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is nn.functional.dropout:
            self.kept.append((found == 0).detach())
        return found

    def counted(self) -> Counter[bytes]:
        """The global masks; communicates with the ranks of the same stage, which drew the same.

        Later stages pass the dropout of the embeddings with stand-ins, or compute it once more.
        """
        masks = [whole(one) for one in self.kept]
        return Counter(one.numpy().tobytes() for one in masks if one.any())


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


class Training(NamedTuple):
    """What a training left.

    Attributes:
        initial: the parameters before the first step.
        losses: of each step.
        generators: states of the random generator after each step.
        masks: of the dropouts of the steps that were observed, by step.
        states: parameters and states of the optimizer after those, by name.
    """

    initial: list[Tensor]
    losses: list[float]
    generators: list[Tensor]
    masks: dict[int, Counter[bytes]]
    states: dict[int, dict[str, Tensor]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a large eps: gradients that are zero but for rounding would be full steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the global parameters and of the optimizer's tensors."""
    found = {name: whole(one).clone() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        for key, value in optimizer.state[one].items():
            found[f"{name} {key}"] = whole(value).clone()
    return found


def observed(steps: int) -> Sequence[int]:
    """The steps whose masks are compared. Others run without anything that looks at calls."""
    return sorted({steps // 2, steps - 1})


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[int], Tensor],
    steps: int,
    observed: Sequence[int],
) -> Training:
    """Train a model from where the generator stands; masks and states are of observed steps."""
    found = Training([whole(one).clone() for one in model.parameters()], [], [], {}, {})
    for at in range(steps):
        masks = Masks()
        if at in observed:
            with masks:
                loss = step(at)
            found.masks[at] = masks.counted()
        else:
            loss = step(at)
        found.losses.append(loss.item())
        found.generators.append(torch.get_rng_state())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if at in observed:
            found.states[at] = state_of(model, optimizer)
    return found


@cache
def reference(name: str, steps: int) -> Training:
    """One device, for all cells of a model; a step more than those, for what is loaded."""
    model = made(name)
    torch.manual_seed(7)
    return trained(
        model,
        adamw(model),
        lambda at: one_device(model, batch(name, at)),
        steps + 1,
        observed(steps),
    )


def in_stages(name: str, schedule: str, layout: str) -> nn.Module:
    """The model on the mesh of a layout."""
    sizes, fields = LAYOUTS[layout]
    model = made(name)
    words = {**MODELS[name][1], **fields, "microbatches": MICROBATCHES}
    plan = Plan.from_hf(model, pipeline=schedule, **words)
    parallelize(model, make_mesh(device_type="cpu", **sizes), plan)
    return model


def save(rank: int, world: int, asked: tuple[str, str, str, int], path: str) -> Training:
    """Train on a rank, and save."""
    name, schedule, layout, steps = asked
    model = in_stages(name, schedule, layout)
    optimizer = adamw(model)
    torch.manual_seed(7)
    found = trained(
        model,
        optimizer,
        lambda at: forward_backward(model, **batch(name, at)),
        steps,
        observed(steps),
    )
    vescale_ckpt.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return found


def load(
    rank: int, world: int, asked: tuple[str, str, str, int], path: str, start: Tensor
) -> tuple[dict[str, Tensor], float]:
    """Load on a rank; returns what was loaded and the loss of the step after it."""
    name, schedule, layout, steps = asked
    model = in_stages(name, schedule, layout)
    optimizer = adamw(model)
    for one in model.parameters():  # a step of nothing makes the states that are loaded into
        one.grad = torch.zeros_like(one)
    optimizer.step()
    optimizer.zero_grad()
    vescale_ckpt.load(path, into={"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    found = state_of(model, optimizer)
    torch.set_rng_state(start)
    return found, forward_backward(model, **batch(name, steps)).item()


def world_of(layout: str) -> int:
    """The number of ranks of a layout."""
    return torch.Size(LAYOUTS[layout][0].values()).numel()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a parameter, in units of its largest value."""
    return max(
        float((found[name] - one).abs().max() / one.abs().max())
        for name, one in expected.items()
        if " " not in name
    )


def compared(found: Training, expected: Training, steps: int) -> Cell:
    """Compare what every rank knows; masks are compared by `cell`, for all ranks."""
    pairs = zip(found.losses, expected.losses, strict=False)
    loss = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
    last = steps - 1
    parameter = distance(found.states[last], expected.states[last])
    if not all(map(torch.equal, found.initial, expected.initial)):
        return Cell(loss, parameter, "init")
    if not all(map(torch.equal, found.generators, expected.generators)):
        return Cell(loss, parameter, "generator")
    return Cell(loss, parameter, "" if loss <= TOLERANCE else "losses")


def masks_differ(ranks: Sequence[Training], layout: str, expected: Training) -> str:
    """The first step whose masks, of all stages together, are not those of one device."""
    stages = LAYOUTS[layout][0]["pp"]  # the first axis of each layout
    each = len(ranks) // stages
    for step, masks in ranks[0].masks.items():
        total: Counter[bytes] = Counter()
        for stage in range(stages):
            of_stage = [one.masks[step] for one in ranks[stage * each : (stage + 1) * each]]
            if any(one != of_stage[0] for one in of_stage):
                return f"masks of step {step} on ranks of stage {stage}"
            total += of_stage[0]
        known = expected.masks[step]
        if not masks or known - total or total.keys() - known.keys():
            return f"masks of step {step}"
    return ""


def moved(asked: tuple[str, str, str, int], path: str, saved: Training) -> str:
    """What is wrong with a checkpoint on the next layout; empty if nothing."""
    name, schedule, layout, steps = asked
    others = list(LAYOUTS)
    other = others[(others.index(layout) + 1) % len(others)]
    expected = reference(name, steps)
    start = expected.generators[steps - 1]
    asked = (name, schedule, other, steps)
    for found, loss in simulate(world_of(other))(load, asked, path, start):
        for key, one in saved.states[steps - 1].items():
            if not torch.equal(found[key], one):
                return f"{key} loaded on {other}"
        if abs(loss / expected.losses[steps] - 1) > TOLERANCE:
            return f"loss after loading on {other}"
    return ""


def cell(model: str, schedule: str, layout: str, steps: int) -> Cell:
    """One cell of the table, on simulated ranks."""
    asked, expected = (model, schedule, layout, steps), reference(model, steps)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "saved")
            ranks = simulate(world_of(layout))(save, asked, path)
            cells = [compared(one, expected, steps) for one in ranks]
            found = max(cells, key=lambda one: (one.why, one.loss))
            why = found.why or masks_differ(ranks, layout, expected)
            return found._replace(why=why or moved(asked, path, ranks[0]))
    except Exception as error:
        cause = error.__cause__ or error
        return Cell(0, 0, f"{type(cause).__name__}: {cause}".replace("\n", " ")[:300])


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
        "In every cell parameters begin bitwise as on one device, the random generator stands "
        "bitwise where it stands there after each step, the masks of two steps are bitwise the "
        "same, and a checkpoint of the last step is loaded bitwise by the layout of the next row, "
        "which trains on as one device does. The figure is the largest relative distance of a loss "
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
