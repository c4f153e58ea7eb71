"""Makes a model without values, and its plan, of what a user names on the command line."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vescale_parallel._errors import PlanError
from vescale_parallel._plan.declared_layout import model_of
from vescale_parallel._plan.plan import Plan
from vescale_parallel._untrusted import read_small

# Of a plan, which has a line for each rule.
_MOST_BYTES: Final = 1 << 22

PRESETS: Final = ("auto", "hf", "decoder", "encoder", "vit", "data")


def named_model(name: str) -> nn.Module:
    """Build the model of `module:callable`, or of a Hugging Face configuration (file or folder).

    Nothing is loaded or stored: it is built on the meta device.

    Raises:
        PlanError: the name is neither, or what it names makes no model.
    """
    path = Path(name)
    # First what is there: a name of a file may have a colon, too.
    if path.exists():
        return model_of(_configuration(path))
    if ":" not in name:
        raise PlanError(
            f"MODEL {name!r}: there is no such file or folder. Name a Hugging Face configuration "
            "(config.json), or a function that builds the model, as my_models.llama:build."
        )
    return _built(*name.split(":", 1))


def _configuration(path: Path) -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"MODEL '{path}' is read by transformers, which is not installed."
        ) from error
    try:
        # Code that lies beside a configuration is not run, nor asked about.
        return library.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a configuration may hold anything, and its class checks little
        line = " ".join(str(error).split())[:300]
        raise PlanError(
            f"MODEL '{path}' is no Hugging Face configuration that transformers itself knows: "
            f"{type(error).__name__}: {line}"
        ) from error


def _built(module: str, function: str) -> nn.Module:
    # As `python -m` has it: modules in the current folder can be named.
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    # A name that begins with a dot is relative, to nothing: TypeError.
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise PlanError(f"MODEL '{module}:{function}' cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        made = make() if callable(make) and not isinstance(make, nn.Module) else make
    # A configuration will do as well, as that of a file does.
    return made if isinstance(made, nn.Module) else model_of(made)


def chosen_plan(
    model: nn.Module, sizes: Mapping[str, int], preset: str, sequence_parallel: bool
) -> Plan:
    """Return a preset's plan; `auto` takes what the model declares, else its shapes."""
    if preset == "hf" or (preset == "auto" and hasattr(model, "config")):
        return Plan.from_hf(model, mesh=sizes, sequence_parallel=sequence_parallel)
    # All that presets of layers say is how `tp` shards them.
    if preset == "data" or sizes.get("tp", 1) == 1:
        return Plan()
    if preset == "auto":
        return Plan.for_encoder(model, sequence_parallel=sequence_parallel)
    make = getattr(Plan, f"for_{preset}")
    made: Plan = make(model, sequence_parallel=sequence_parallel)
    return made


def read_plan(path: Path) -> Plan:
    """Return the plan in a file, by the end of its name.

    Raises:
        PlanError: there is no such file, or no plan in it.
    """
    try:
        text = read_small(path, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"plan '{path}' cannot be read: {error}") from error
    return Plan.from_json(text) if path.suffix == ".json" else Plan.from_toml(text)
