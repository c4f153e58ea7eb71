"""The training loop: from options to a finished run, the same on one process and on many."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._common.mesh import from_launcher, mesh_sizes, world_size
from vescale_parallel._common.mesh import mesh as make_mesh
from vescale_parallel._common.messages import did_you_mean, listed
from vescale_parallel._errors import TrainError
from vescale_parallel.train.all_or_none import all_or_none
from vescale_parallel.train.checkpoint import (
    checkpoint_package,
    load_run,
    remembered_options,
    save_run,
)
from vescale_parallel.train.data import load_corpus
from vescale_parallel.train.digests import DropoutMasks, digest
from vescale_parallel.train.log import Progress, RunLog
from vescale_parallel.train.memory import held_bytes
from vescale_parallel.train.options import REMEMBERED, Options, make_options, parse_mesh
from vescale_parallel.train.plan import PLAN
from vescale_parallel.train.run import (
    DivergedError,
    Run,
    StepResult,
    build,
    require_finite,
    require_finite_parameters,
    train_step,
    validate,
)


def train(given: Mapping[str, Any]) -> None:
    """Run the trainer with the options that were given; every rank calls it."""
    # Of a run that goes on, sizes may fit the checkpoint's and not the defaults.
    options = make_options(_of_this_run(given) if given.get("resume") else given)
    if options.save_every >= 0:
        checkpoint_package()  # now, and not when hours of training are to be saved
    # Before anything computes: ranks on one machine would each start a thread for every core.
    torch.set_num_threads(_threads())
    device = _device(options)
    mesh = _mesh(options, device)
    # Before anything is built: the checkpoint says how large the model is.
    if options.resume:
        options = make_options(given, remembered_options(options.resume))
    # Together, and before rank 0 opens its log there: a rank that looks later would find
    # an earlier run in it.
    all_or_none(lambda: _make_folder(options))
    # A disk that only one machine lacks must not leave the others waiting for its first batch.
    corpus = all_or_none(lambda: load_corpus(options.data, options.context))
    run = build(options, corpus, mesh, device)
    if options.resume:
        load_run(run, Path(options.resume))
        if run.step >= options.steps:
            raise TrainError(
                f"{options.resume} is at step {run.step} already; give --steps more than that."
            )
    # Every rank computes everything; one of them tells about it.
    main = not dist.is_initialized() or dist.get_rank() == 0
    folder, append = Path(options.out), bool(options.resume) and not options.overwrite
    # Rank 0 alone opens files here, and the others would train on without it if it could not.
    opened = all_or_none(
        lambda: RunLog(folder, active=main, append=append, tensorboard=options.tensorboard)
    )
    with opened as log:
        try:
            _loop(run, mesh, log, main=main)
        except DivergedError as error:
            # Written and then raised on: every rank has the same loss, so all of them leave here.
            log.write("diverged", step=run.step, reason=str(error))
            raise


def _of_this_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a checkpoint says nothing about."""
    return {name: value for name, value in given.items() if name not in REMEMBERED}


def _threads() -> int:
    """Return this process's share of the cores: more threads than cores make every rank slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, from_launcher("LOCAL_WORLD_SIZE", 1)))


def _device(options: Options) -> str:
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if options.device and options.device not in available:
        raise TrainError(f"--device {options.device}: this machine has {listed(available)}.")
    return options.device or available[-1]


def _mesh(options: Options, device: str) -> DeviceMesh | None:
    """Return the mesh that was asked for; none for a single process that asked for none."""
    if not options.mesh and world_size() == 1:
        return None
    sizes = parse_mesh(options.mesh) if options.mesh else {"dp": world_size()}
    for axis in sizes:
        if axis not in PLAN.axes:
            raise TrainError(
                f"--mesh {options.mesh!r}: no axis '{axis}'.{did_you_mean(axis, PLAN.axes)} The "
                f"plan of this program has {listed(PLAN.axes)}."
            )
    return make_mesh(device_type=device, **sizes)


def _make_folder(options: Options) -> None:
    """Make `--out`, and do not throw away the run that is there already."""
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if (Path(options.out) / "log.jsonl").exists() and not (options.overwrite or options.resume):
        raise TrainError(
            f"--out {options.out} holds a run already. Choose another folder, go on with that run "
            "(--resume), or replace it (--overwrite)."
        )


def _loop(run: Run, mesh: DeviceMesh | None, log: RunLog, *, main: bool) -> None:
    options = run.options
    log.write(
        "start",
        step=run.step,
        mesh=None if mesh is None else mesh_sizes(mesh),
        options=dataclasses.asdict(options),
        torch=torch.__version__,
    )
    # Before the first step, and gathered: parameters are compared as one device would hold them.
    if options.digests:
        log.write("digest", what="parameters", sha256=digest(run.model.named_parameters()))
    tokens, first = options.batch * options.context, run.step
    with Progress(run.step, options.steps, tokens, active=main) as progress:
        progress.note(_introduction(run, mesh))
        while run.step < options.steps:
            # Masks are observed once: gathering them takes longer than a step.
            observed = options.digests and run.step == first
            result = _first_step(run, log) if observed else train_step(run)
            rate = round(progress.step(run.step, result.loss), 1)
            facts = dataclasses.asdict(result)
            log.write("step", step=run.step, **facts, tokens_per_second=rate)
            _after_step(run, log, progress)
    # Last: whoever has looked at local tensors may have written to them, so all is gathered anew.
    log.write("memory", step=run.step, ranks=held_bytes(run))
    log.write("end", step=run.step)


def _first_step(run: Run, log: RunLog) -> StepResult:
    """Return the first step, with its dropout masks observed."""
    with DropoutMasks(run.model) as masks:
        result = train_step(run)
    for module, sha256 in masks.digests:
        log.write("digest", what="dropout", module=module, sha256=sha256)
    return result


def _after_step(run: Run, log: RunLog, progress: Progress) -> None:
    """Validate and save where the options say so."""
    options, last = run.options, run.step == run.options.steps
    # By the step and the options alone: a validation is a forward of the whole mesh.
    if options.validate_every and (last or run.step % options.validate_every == 0):
        loss = validate(run)
        progress.note(f"step {run.step:5d}  validation loss {loss:.4f}")
        log.write("validation", step=run.step, loss=loss)
        require_finite(run, f"the validation loss after step {run.step}", loss)
    # Every rank decides from the options and the step, so all of them save or none does.
    due = options.save_every > 0 and run.step % options.save_every == 0
    if due or (last and options.save_every >= 0):
        path = Path(options.out) / f"step-{run.step:08d}"
        require_finite_parameters(run)
        save_run(run, path)
        run.checkpoint = path
        progress.note(f"step {run.step:5d}  saved {path}")
        log.write("checkpoint", step=run.step, path=str(path))


def _introduction(run: Run, mesh: DeviceMesh | None) -> str:
    count, corpus = sum(p.numel() for p in run.model.parameters()), run.corpus
    sizes = {} if mesh is None else mesh_sizes(mesh)
    return (
        f"{count / 1e6:.2f} M parameters on "
        f"{', '.join(f'{axis}={n}' for axis, n in sizes.items()) or 'one device'}; "
        f"{len(corpus.train) / 1e6:.1f} MB of text from {corpus.files} files ({corpus.source}), "
        f"{len(corpus.validation) / 1e6:.2f} MB held out"
    )
