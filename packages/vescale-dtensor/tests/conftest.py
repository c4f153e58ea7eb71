"""Shared by all tests: one thread, so that the ranks of a test do not fight over the machine."""

import sys
from pathlib import Path

import pytest
import torch
from vescale_comm.testing import preload

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
HERE = Path(__file__).parent
HELPERS = ("support", "redistribute", "ops", "ops/cases", "capture")
sys.path[:0] = [*(str(HERE / folder) for folder in HELPERS), str(HERE.parent / "benchmarks")]
torch.set_num_threads(1)
# Once for all workers, not once in each.
preload("vescale_dtensor")

# Of long tables of like cases, and of single long tests, a run takes one in so many, another part
# each day; `-m slow` takes the rest. A key is a file, for its parametrized tests, or one test.
LONG = {
    "autograd/test_anywhere_gradients": 4,
    "autograd/test_function_results": 3,
    "autograd/test_outliving_gradients": 5,
    "autograd/test_reentrant_checkpoint": 4,
    "capture/test_amp": 3,
    "capture/test_combinations": 3,
    "capture/test_compiled": 2,
    "capture/test_custom_functions": 2,
    "capture/test_functions_of_dtensors::test_replayed_bit_for_bit": 2,
    "capture/test_in_place_sums": 3,
    "capture/test_models": 2,
    "capture/test_optimizers_captured": 3,
    "capture/test_refused_alone": 2,
    "capture/test_training": 4,
    "dispatch/test_dispatch_counts::test_hundreds_of_sequence_lengths_make_a_handful_of_plans": 3,
    "dispatch/test_dispatch_counts::test_reshapes_that_share_a_plan_would_each_have_made_it": 3,
    "dispatch/test_drift": 4,
    "dispatch/test_drift_origins": 3,
    "dispatch/test_untraced": 2,
    "dispatch/test_written_views": 3,
    "ecosystem/test_attention_modules": 3,
    "ecosystem/test_autocast": 3,
    "ecosystem/test_grad_scaler": 4,
    "ecosystem/test_library_calls": 3,
    "ecosystem/test_local_map": 3,
    "ecosystem/test_readme": 2,
    "ecosystem/test_torch_library": 3,
    "ecosystem/test_torch_optimizers": 3,
    "joint/test_joint": 2,
    "joint/test_updates": 2,
    "layout/test_layouts::test_ops_are_right_on_every_layout": 2,
    "ops/test_attention_ring": 3,
    "ops/test_attention_rows": 2,
    "ops/test_flex_rows": 3,
    "ops/test_memory_formats": 3,
    "ops/test_optimizers": 3,
    "ops/test_programs": 3,
    "ops/test_views_fuzz::test_views_equal_one_device": 2,
    "redistribute/test_half_sums": 3,
    "redistribute/test_matrix": 3,
    "redistribute/test_meshes::test_any_layout_becomes_any_other_on_another_mesh": 2,
    "redistribute/test_plans": 4,
    "redistribute/test_processes": 4,
    "redistribute/test_processes::test_gradients_on_two_axes": 2,
    "redistribute/test_processes::test_pairs_on_three_axes": 3,
    "redistribute/test_world_size::test_a_call_does_as_much_on_256_ranks_as_on_16": 2,
    "tensor/test_anywhere_memory": 3,
    "test_imports::test_an_import_has_no_side_effect": 2,
}


def share_of(item):
    """One in how many runs takes a test."""
    file = item.path.relative_to(HERE).with_suffix("").as_posix()
    share = LONG.get(f"{file}::{item.originalname}")
    return share or (LONG.get(file, 1) if hasattr(item, "callspec") else 1)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    from rotation import is_todays

    for item in items:
        if HERE in item.path.parents and not is_todays(item.name, share_of(item)):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
