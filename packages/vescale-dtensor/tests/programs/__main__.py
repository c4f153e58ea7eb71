"""Runs random programs on simulated ranks beside one device, until the minutes are over.

A program is some lines of torch: views, writes into them, operators, redistributions, over tensors
of random dtypes and layouts; then its values, gradients and second derivatives are compared. Its
grammar and a number determine it. A failure is made small and printed as Python that can be pasted.

  nox -s fuzz -- --minutes 10                 ten minutes of every grammar, from number 0 on
  nox -s fuzz -- --minutes 10 --seed 5000     other programs
  nox -s fuzz -- --only views:17              one program again
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / room) for room in ("programs", "redistribute", "ops", "ops/cases")]

import torch  # noqa: E402
from beside import judge  # noqa: E402
from grammars import GRAMMARS  # noqa: E402
from random_programs import generate  # noqa: E402
from shrinking import pasted, shrunk  # noqa: E402

# Ranks that wait for each other are found at once; this is for what turns in a circle.
HUNG = 300


@dataclass
class Tally:
    """What was run so far."""

    began: float = field(default_factory=time.monotonic)
    ran: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def line(self, left):
        """How far it is."""
        each = ", ".join(f"{count} of {name}" for name, count in self.ran.items())
        return f"{each}; {len(self.failures)} failures; {max(0, left) / 60:.1f} minutes left"


def parse(arguments):
    """The options."""
    parser = argparse.ArgumentParser(
        prog="nox -s fuzz --", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to run; default 1")
    parser.add_argument("--seed", type=int, default=0, help="the first number; default 0")
    parser.add_argument("--programs", type=int, metavar="N", help="at most N of each grammar")
    parser.add_argument("--grammar", choices=GRAMMARS, action="append", help="default: all")
    parser.add_argument("--only", metavar="GRAMMAR:SEED", help="run this program alone")
    parser.add_argument("--failures", type=int, default=20, help="stop at so many; default 20")
    options = parser.parse_args(arguments)
    if options.only:
        grammar, _, seed = options.only.partition(":")
        if grammar not in GRAMMARS or not seed.isdigit():
            parser.error(f"--only takes GRAMMAR:SEED, a grammar being one of {', '.join(GRAMMARS)}")
        options.grammar, options.seed, options.programs = [grammar], int(seed), 1
    return options


def run_one(grammar, seed, tally):
    """Run a program; print it, made small, if it fails."""
    program = generate(grammar, seed)
    faulthandler.dump_traceback_later(HUNG, exit=True)
    failure, refused = judge(program)
    tally.ran[grammar] += 1
    tally.refused.update(words.partition(": ")[2][:60] for words in refused)
    if failure is not None:
        faulthandler.cancel_dump_traceback_later()
        small, small_failure = shrunk(program, failure)
        tally.failures.append(f"{grammar}:{seed} {failure.kind}")
        print(f"\n{'-' * 72}\n{pasted(small, small_failure)}\n{'-' * 72}", flush=True)
    faulthandler.cancel_dump_traceback_later()


def main(arguments=None):
    """Run the command line."""
    options, tally = parse(arguments), Tally()
    torch.set_num_threads(1)
    gc.freeze()  # writes to bases of copied views collect garbage: not among what was imported
    ends, shown = tally.began + options.minutes * 60, tally.began
    numbers = itertools.count(options.seed)
    if options.programs:
        numbers = range(options.seed, options.seed + options.programs)
    for seed, grammar in ((n, g) for n in numbers for g in options.grammar or GRAMMARS):
        now = time.monotonic()
        if now > ends or len(tally.failures) >= options.failures:
            break
        if sys.stdout.isatty():
            print(f"\r{tally.line(ends - now)}, at {grammar}:{seed} ", end="", flush=True)
        elif now - shown > 30:
            shown = now
            print(f"{tally.line(ends - now)}, at {grammar}:{seed}", flush=True)
        run_one(grammar, seed, tally)
    print(f"\n{tally.line(ends - time.monotonic())}")
    for words, count in tally.refused.most_common(10):
        print(f"refused {count} times: {words}…")
    print(*tally.failures, sep="\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
