"""One thread per process: the machine's cores are shared by the ranks of a test."""

import sys
from pathlib import Path

import pytest
import torch

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "support"))
torch.set_num_threads(1)

# Of long tables of like cases, and of single long tests, a run takes one in so many, another part
# each day; `-m slow` takes the rest. A key is a file, for its parametrized tests, or one test.
LONG = {
    "apply/test_attention_way": 3,
    "apply/test_bad_input": 2,
    "apply/test_captured": 6,
    "apply/test_collections": 6,
    "apply/test_local_batch": 3,
    "apply/test_preflight": 4,
    "apply/test_replaced": 4,
    "apply/test_replaced::test_what_would_be_left_behind_is_refused": 2,
    "apply/test_replaced::test_wherever_modules_keep_parameters_the_new_ones_are_trained": 2,
    "checkpoint/test_recomputed": 5,
    "checkpoint/test_save_on_cpu": 4,
    "common/test_mesh": 2,
    "deferred/test_pieces": 4,
    "experts/test_bad_input": 4,
    "experts/test_beside_others": 2,
    "experts/test_beside_others::test_recordings_do_not_keep_where_tokens_went": 2,
    "experts/test_beside_others::test_rows_of_each_rank": 2,
    "experts/test_experts": 4,
    "experts/test_move": 5,
    "graph/test_combinations": 8,
    "graph/test_compiled": 4,
    "graph/test_compiled::test_what_ranks_ask_otherwise_is_told_on_all": 2,
    "graph/test_compiled::test_other_levels": 8,
    "graph/test_compiled::test_traced_ahead_of_time": 3,
    "graph/test_offloaded": 8,
    "graph/test_offloaded::test_steps_of_a_mesh": 3,
    "graph/test_offloaded::test_copies_have_a_line_of_their_own": 2,
    "graph/test_offloaded::test_what_is_executed_takes_what_was_planned": 2,
    "graph/test_peaks::test_gathers_ahead_are_bounded": 2,
    "graph/test_recomputed::test_steps_of_a_mesh": 3,
    "graph/test_steps::test_bits_of_eager_mode": 3,
    "graph/test_steps::test_bits_of_eager_mode_in_processes": 2,
    "graph/test_zero_steps": 3,
    "graph/test_zero_steps::test_bits_of_eager_mode_with_tensor_parallelism": 3,
    "graph/test_zero_steps::test_gradients_are_set": 2,
    "graph/test_zero_steps::test_stored_parameters_are_gathered_or_refused": 2,
    "integrations/test_states": 5,
    "invariant/test_invariant": 6,
    "invariant/test_refused": 3,
    "notation/test_arguments": 3,
    "pipeline/test_accumulated": 3,
    "pipeline/test_failed_steps": 4,
    "pipeline/test_given_schedules": 2,
    "pipeline/test_kept": 3,
    "pipeline/test_outputs": 4,
    "pipeline/test_refused_stages": 4,
    "pipeline/test_scaled": 2,
    "pipeline/test_stages": 8,
    "pipeline/test_stages::test_checkpoints_move_between_meshes": 2,
    "pipeline/test_stages_hf": 4,
    "pipeline/test_static_stages": 8,
    "pipeline/test_static_stages::test_a_call_that_keeps_changing_is_bounded": 2,
    "pipeline/test_static_stages_models": 4,
    "pipeline/test_static_stages_models::test_layers_of_experts_run_eagerly_and_say_why": 2,
    "plan/test_data_parallel": 2,
    "plan/test_hf": 3,
    "plan/test_picture::test_segments_are_the_elements_that_ranks_hold": 6,
    "pretrained/test_weights": 4,
    "static/test_static": 4,
    "static/test_static_hf": 3,
    "train/test_diverged": 2,
    "zero/test_behind": 10,
    "zero/test_failures": 3,
    "zero/test_offload::test_the_bits_of_a_model_on_the_device": 5,
    "zero/test_flat_steps": 10,
    "zero/test_precision": 4,
    "zero/test_semantics": 6,
    "zero/test_training": 5,
}


def share_of(item):
    """One in how many runs takes a test."""
    file = item.path.relative_to(HERE).with_suffix("").as_posix()
    share = LONG.get(f"{file}::{item.originalname}")
    return share or (LONG.get(file, 1) if hasattr(item, "callspec") else 1)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    from daily import is_todays

    for item in items:
        if HERE in item.path.parents and not is_todays(item.name, share_of(item)):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
