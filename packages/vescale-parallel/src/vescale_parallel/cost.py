"""Estimates a training step for 8 to 16,384 devices on paper: memory, flops, seconds.

`Plan.check(model, sizes).cost(tokens, ...)` answers for any model (on the meta device, too) and
mesh. As a program, it prints a table for the shapes of Llama 3 with ZeRO and tensor parallelism:

    python -m vescale_parallel.cost                              # 8B, 70B and 405B on H100
    python -m vescale_parallel.cost --model 70B --tp 1 2 4 8     # how wide tensor parallelism?
    python -m vescale_parallel.cost --model 8B --zero 0 1 2 3    # what each level saves and sends
    python -m vescale_parallel.cost --model 8B --ranks 64 --tp 8 --explain

Every rank of `dp` trains `--sequences` sequences a step, so the global batch grows with the ranks.
Memory and bytes follow from shapes; seconds from alpha-beta links and a fixed efficiency of matrix
products, both assumptions of the cluster that `--cluster` names. Change them to what you measure.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from vescale_parallel._check.report import Report
from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._common.numbers import real, whole
from vescale_parallel._cost import (
    CLUSTERS,
    Cluster,
    Cost,
    Link,
    Memory,
    Precision,
    Transfer,
    Workload,
    collective_seconds,
)
from vescale_parallel.train.model import Decoder, ModelConfig
from vescale_parallel.train.plan import PLAN

__all__ = [
    "CLUSTERS",
    "LLAMA3",
    "Cluster",
    "Cost",
    "Link",
    "Memory",
    "Precision",
    "Transfer",
    "Workload",
    "collective_seconds",
    "llama3",
    "main",
]

# Table 3 of the Llama 3 report (arXiv 2407.21783); the trainer's decoder has the same parts.
_VOCAB: Final = 128_256
LLAMA3: Final = {
    "8B": ModelConfig(
        vocab=_VOCAB, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, context=8192
    ),
    "70B": ModelConfig(
        vocab=_VOCAB, dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, context=8192
    ),
    "405B": ModelConfig(
        vocab=_VOCAB, dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248, context=8192
    ),
}

_HEADER: Final = [
    *("model", "ranks", "dp", "tp", "zero", "GiB/rank", "of it activations", "fits"),
    *("PFLOP", "dp ms", "tp ms", "waits ms", "step ms", "tokens/s/rank", "of peak"),
]


def llama3(name: str, *, dp: int, tp: int) -> Report:
    """Return the trainer's plan for a decoder of that size, on a mesh that nobody has to start.

    Raises:
        KeyError: no such size; see `LLAMA3`.
    """
    return PLAN.check(_on_meta(name), {"dp": dp, "tp": tp})


@functools.cache
def _on_meta(name: str) -> Decoder:
    """Return the model without values; made once, as a table asks for it again and again."""
    with torch.device("meta"):
        return Decoder(LLAMA3[name])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    cluster = CLUSTERS[options.cluster]
    for field in ("efficiency", "overlap"):
        value = getattr(options, field)
        cluster = cluster if value is None else replace(cluster, **{field: value})
    # All of them before the first line: columns are as wide as their widest cell.
    costs = list(_costs(options, cluster))
    if not costs:
        print(
            "no mesh of these sizes: --tp has to divide --ranks, and the heads of keys and values",
            file=sys.stderr,
        )
        return 2
    print(table(_HEADER, [row for row, _ in costs], right=_HEADER[1:]))
    print(f"\n{_footer(options, cluster)}")
    if options.explain:
        for row, cost in costs:
            print(f"\n{row[0]} on dp={row[2]}, tp={row[3]}, zero={row[4]}\n\n{cost}")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m vescale_parallel.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--model", nargs="+", choices=LLAMA3, default=list(LLAMA3), help="default: all")
    add("--ranks", nargs="+", type=whole(), default=[8, 64, 512, 2048, 16384], help="devices")
    add("--tp", nargs="+", type=whole(), default=[8], help="tensor parallel ranks (default: 8)")
    add("--zero", nargs="+", type=int, choices=range(4), default=[3], help="default: 3")
    add("--sequences", type=whole(), default=1, help="of each dp rank and step (default: 1)")
    add("--sequence", type=whole(), default=8192, help="tokens of a sequence (default: 8192)")
    add("--no-recompute", action="store_true", help="keep all activations instead of block inputs")
    add("--cluster", choices=CLUSTERS, default="h100", help="default: h100")
    add("--efficiency", type=real(1e-6, 1.0), help="part of the peak that matrix products reach")
    add(
        "--overlap", type=real(0.0, 1.0), help="part of the computation that hides dp's collectives"
    )
    add("--explain", action="store_true", help="and each row's memory and collectives")
    return made


def _costs(options: argparse.Namespace, cluster: Cluster) -> Iterator[tuple[list[object], Cost]]:
    """A row for each model, number of ranks, tp and level."""
    for name in options.model:
        for ranks in options.ranks:
            for tp in options.tp:
                # A table goes on: what cannot be is left out. Ranks have whole heads, of which
                # there are fewest for keys and values.
                if min(ranks, tp) < 1 or ranks % tp or LLAMA3[name].kv_heads % tp:
                    continue
                report = llama3(name, dp=ranks // tp, tp=tp)
                for zero in options.zero:
                    cost = report.cost(
                        options.sequences * options.sequence * (ranks // tp),
                        sequence=options.sequence,
                        zero=zero,
                        cluster=cluster,
                        recompute=not options.no_recompute,
                        # As the activations of the trainer's plan say.
                        sequence_parallel=True,
                    )
                    yield _row(name, ranks // tp, tp, zero, cost), cost


def _row(name: str, dp: int, tp: int, zero: int, cost: Cost) -> list[object]:
    return [
        *(name, cost.ranks, dp, tp, zero),
        f"{cost.memory.total / 2**30:.1f}",
        f"{cost.memory.activations / 2**30:.1f}",
        "yes" if cost.fits else "no",
        # Of all ranks together: the same for one global batch on any mesh.
        f"{cost.flops * cost.ranks / 1e15:.3g}",
        *(f"{1e3 * cost.seconds_over(axis):.1f}" for axis in ("dp", "tp")),
        f"{1e3 * cost.exposed:.1f}",
        f"{1e3 * cost.seconds:.1f}",
        f"{cost.tokens_per_second:.0f}",
        f"{cost.utilization:.1%}",
    ]


def _footer(options: argparse.Namespace, cluster: Cluster) -> str:
    """Return the assumptions, in one sentence each."""
    inside, between = cluster.inside, cluster.between
    return (
        f"{options.sequences} x {options.sequence} tokens for each dp rank; bf16, float32 masters, "
        f"Adam; blocks {'not ' * options.no_recompute}recomputed; sequence parallel.\n"
        f"{cluster.name}: {cluster.per_node} devices a node of {human_bytes(int(cluster.memory))}, "
        f"{cluster.flops / 1e12:.0f} TFLOP/s at {cluster.efficiency:.0%}; links "
        f"{inside.bandwidth / 1e9:.0f} and {between.bandwidth / 1e9:.0f} GB/s, "
        f"{1e6 * inside.latency:.0f} and {1e6 * between.latency:.0f} us; "
        f"{cluster.overlap:.0%} of the computation hides dp's collectives."
    )


if __name__ == "__main__":
    sys.exit(main())
