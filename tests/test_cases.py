"""Which test answers which case of `cases.md`, or why none does yet."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from crossdock.testing.scenarios import SCENARIOS as RUN

ROOT = Path(__file__).parents[1]
CASE_IDS = re.findall(r"^- (B\d+): ", (ROOT / "tests" / "cases.md").read_text(), re.MULTILINE)

COUNTS, IDS, SIZES = "contract/test_token_counts.py", "contract/test_expert_ids.py", "contract/test_sizes.py"
GRADIENTS, NUMERICS = "contract/test_gradients.py", "contract/test_numerics.py"
PADDING, COMPILE, RECOMPUTE = (f"contract/test_{name}.py" for name in ("padding", "compile", "recompute"))
AT_OPENING, LIFETIME, GROUPS = (f"contract/test_{name}.py" for name in ("opening", "lifetime", "groups"))
DISAGREEMENT, ABSENCE, OPENING = (f"faults/test_{name}.py" for name in ("disagreement", "absence", "opening"))
OVERFLOW, RETRY = "contract/test_overflow.py", "contract/test_retry.py"
SCENARIOS = "src/crossdock/testing/scenarios"  # run by contract/test_conformance.py on every backend

CAPTURE, LAYOUTS = "contract/test_capture.py", "contract/test_layouts.py"
TAILS, EDGES = "contract/test_capacity_tails.py", "contract/test_memory_edges.py"
FILLING, PHASES, ENDINGS = "contract/test_padding_tokens.py", "contract/test_phases.py", "faults/test_lifetime.py"
AHEAD = f"{SCENARIOS}/ahead.py"  # on GPUs, with busy devices and second streams, backends/test_ahead_gpu.py runs it too
ON_GPUS = "backends/test_ahead_gpu.py::test_nothing_is_read_too_late_or_written_too_early"
SYMMETRIC, PROTOCOL = "backends/test_symmetric.py", "backends/test_symmetric_protocol.py"
FUSED = "backends/test_symmetric_fused.py"
QUANTISED = "needs a quantised transport, which no backend offers yet"
VENDOR = "needs the adapter of a vendor's package, which is not built yet"

CASES: dict[str, list[str] | str] = {
    "B01": [f"{COUNTS}::test_ranks_without_rows_take_part_in_every_step"],
    "B02": [f"{COUNTS}::test_a_rank_without_tokens_still_receives"],
    "B03": [f"{COUNTS}::test_everybody_empty_looks_like_any_other_call"],
    "B04": [f"{COUNTS}::test_a_cold_rank_gets_its_tokens_back"],
    "B06": [f"{COUNTS}::test_uneven_counts_equal_a_run_padded_by_hand"],
    "B07": [
        f"{DISAGREEMENT}::test_counts_declared_equal_are_not",
        f"{DISAGREEMENT}::test_counts_declared_equal_are_not_on_symmetric",
        f"{COUNTS}::test_declaring_equal_counts_costs_nothing",
    ],
    "B08": [
        f"{DISAGREEMENT}::test_bounds_of_two_ranks_differ_then_agree",
        f"{COUNTS}::test_the_bound_of_a_call_changes_nothing",
    ],
    "B09": [f"{COUNTS}::test_one_rank_receives_far_more_than_it_sends"],
    "B10": [f"{COUNTS}::test_chunks_in_which_a_rank_runs_dry"],
    "B11": [
        f"{COUNTS}::test_nothing_but_real_tokens_is_counted",
        f"{FILLING}::test_tokens_that_fill_up_a_batch_take_no_rows",
    ],
    "B12": [f"{IDS}::test_slots_without_an_expert_shift_nothing"],
    "B13": [f"{IDS}::test_the_first_call_may_name_no_expert_at_all"],
    "B15": [f"{IDS}::test_an_expert_named_twice_counts_twice"],
    "B16": [f"{IDS}::test_ids_out_of_range_are_refused_with_the_number"],
    "B17": [f"{IDS}::test_dtypes_of_ids"],
    "B18": [f"{IDS}::test_all_tokens_of_all_ranks_to_one_rank"],
    "B19": [f"{IDS}::test_more_slots_than_local_experts"],
    "B20": [f"{IDS}::test_counts_are_the_histogram_and_rows_lie_with_their_expert"],
    "B21": [f"{IDS}::test_slots_without_an_expert_do_not_travel"],
    "B23": [f"{SIZES}::test_more_tokens_than_16_bits_count"],
    "B24": [
        f"{SIZES}::test_a_maximum_must_be_positive",
        f"{FILLING}::test_sizes_that_no_index_can_hold_are_refused",
        f"{SIZES}::test_a_maximum_that_no_memory_can_hold_is_refused_before_anything_is_allocated",
        f"{SIZES}::test_an_absurd_maximum_is_nothing_where_no_storage_is_made_for_it",
        f"{SIZES}::test_more_rows_than_an_offset_counts_are_refused",
    ],
    "B25": [f"{SIZES}::test_any_maximum_is_a_good_one", f"{SIZES}::test_a_token_above_the_maximum"],
    "B27": [f"{SIZES}::test_rows_of_any_width"],
    "B28": [f"{SIZES}::test_many_slots"],
    "B29": [
        f"{SIZES}::test_experts_must_divide_over_the_group",
        f"{SIZES}::test_impossible_numbers_of_experts",
    ],
    "B30": [f"{SIZES}::test_group_sizes_that_are_no_power_of_two"],
    "B31": [f"{SIZES}::test_padding_of_groups"],
    "B33": [f"{GRADIENTS}::test_the_router_gets_its_gradient"],
    "B35": [f"{GRADIENTS}::test_a_score_of_zero_has_a_gradient_and_a_missing_expert_has_none"],
    "B36": [f"{GRADIENTS}::test_weight_gradients_have_no_factor_of_the_group_size"],
    "B37": [f"{GRADIENTS}::test_unused_experts_get_gradients_of_zero"],
    "B38": [f"{GRADIENTS}::test_errors_do_not_grow_with_the_number_of_slots"],
    "B39": [
        f"{GRADIENTS}::test_score_gradients_are_added_up_in_float32",
        f"{GRADIENTS}::test_scores_are_not_rounded_on_the_way",
    ],
    "B41": [f"{NUMERICS}::test_every_run_has_the_same_bits", f"{SCENARIOS}/numerics.py::same_bits_every_time"],
    "B42": [f"{IDS}::test_the_order_of_rows"],
    "B43": [
        f"{NUMERICS}::test_backends_agree_to_the_bit",
        f"{FUSED}::test_ranks_give_the_bits_of_all_to_all",
        "kernels/test_small.py::test_whole_steps_between_processes_have_the_bits_of_all_to_all",
    ],
    "B44": [f"{SCENARIOS}/numerics.py::token_alone_or_in_a_crowd"],
    "B45": QUANTISED,
    "B46": QUANTISED,
    "B47": [
        f"{SIZES}::test_groups_of_44_at_alignment",
        f"{SIZES}::test_a_mode_that_would_ask_for_an_alignment_is_refused_as_a_whole",
    ],
    "B48": [f"{SIZES}::test_nothing_is_padded_unless_asked_for"],
    "B49": [f"{TAILS}::test_a_single_local_expert_keeps_out_of_the_spare_rows"],
    "B50": [
        f"{RECOMPUTE}::test_what_the_router_chose_in_the_forward_stands",
        f"{RECOMPUTE}::test_without_replay_another_choice_is_an_error_and_no_hang",
        f"{RECOMPUTE}::test_without_replay_the_reentrant_kind_takes_the_last_choice_and_hangs_nobody",
        f"{RECOMPUTE}::test_ids_are_compared_where_that_is_asked_for",
    ],
    "B51": [f"{RECOMPUTE}::test_rows_counts_and_order_are_those_of_the_forward"],
    "B53": [f"{RECOMPUTE}::test_the_extent_of_a_capacity_is_replayed"],
    "B54": [f"{RECOMPUTE}::test_how_many_calls_a_recomputation_makes"],
    "B55": [f"{RECOMPUTE}::test_a_cold_rank_keeps_its_dtypes_under_autocast"],
    "B56": [f"{RECOMPUTE}::test_counters_advance_once_per_forward"],
    "B57": [
        f"{SCENARIOS}/sharing.py::combines_in_any_order",
        f"{SCENARIOS}/calls.py::wrong_combines",
        f"{RECOMPUTE}::test_two_dispatches_in_flight_keep_to_their_own_layouts",
    ],
    "B58": [
        f"{OVERFLOW}::test_an_overflow_is_flagged_where_it_happens_and_told_everywhere",
        f"{SCENARIOS}/capacity.py::overflow_is_raised_everywhere",
        f"{TAILS}::test_the_kernels_of_large_batches_drop_what_all_to_all_drops",
        f"{OVERFLOW}::test_truncated_steps_are_left_out",
        f"{RETRY}::test_a_step_that_runs_again_is_the_step_that_had_room",
    ],
    "B59": [
        f"{TAILS}::test_nothing_lands_behind_the_last_row_of_a_capacity",
        f"{EDGES}::test_every_tensor_may_end_where_memory_ends",
    ],
    "B61": VENDOR,
    "B62": [
        f"{OVERFLOW}::test_a_capacity_is_agreed_on_by_the_group_and_outlives_its_combines",
        "contract/test_row_capacity.py::test_a_wrong_histogram_is_ignored_without_a_host_synchronisation",
    ],
    "B63": ["backends/test_symmetric_gpu.py::test_a_capture_without_a_fixed_capacity_is_refused"],
    "B65": [
        f"{CAPTURE}::test_kernels_that_a_capture_cannot_load_are_told_of_in_words",
        "backends/test_symmetric_gpu.py::test_a_capture_as_the_very_first_call_works_or_is_refused_in_words",
    ],
    "B66": [f"{TAILS}::test_what_is_told_of_a_dispatch_is_there_or_not_offered"],
    "B67": ["backends/test_symmetric_gpu.py::test_graphs_replay_other_routings_with_eager_calls_between"],
    "B68": [f"{SCENARIOS}/sharing.py::dispatchers_side_by_side"],
    "B69": [
        f"{PHASES}::test_a_short_prefill_stays_a_prefill_and_an_idle_rank_decodes_with_the_others",
        f"{PHASES}::test_ranks_of_two_minds_miss_each_other_by_name",
    ],
    "B70": [
        f"{PHASES}::test_prefill_and_decode_in_any_order_leave_nothing_behind",
        "kernels/test_small.py::test_rounds_of_both_kinds_may_follow_each_other_in_any_order",
    ],
    "B71": [f"{AHEAD}::edited_just_before", ON_GPUS],
    "B73": [
        f"{AHEAD}::dropped_right_after",
        ON_GPUS,
        f"{CAPTURE}::test_the_ledger_that_replays_write_to_outlives_the_dispatcher",
    ],
    "B74": [f"{AHEAD}::dropped_right_after", ON_GPUS, "test_row_memory.py::test_a_graph_holds_what_it_needs"],
    "B75": [f"{AHEAD}::chunks_in_flight", ON_GPUS],
    "B76": [
        f"{SCENARIOS}/sharing.py::odd_numbers_of_calls",
        f"{DISAGREEMENT}::test_a_refused_call_leaves_the_numbering_in_step",
    ],
    "B78": [f"{SCENARIOS}/sharing.py::micro_batches"],
    "B79": [f"{PROTOCOL}::test_no_interleaving_of_three_calls_goes_wrong"],
    "B80": [
        f"{AHEAD}::beside_another_stream",
        ON_GPUS,
        "testing/test_suite.py::test_inputs_that_are_written_to_are_found_out",
    ],
    "B81": [f"{LIFETIME}::test_a_second_thread_is_kept_out", f"{LIFETIME}::test_two_threads_with_a_dispatcher_each"],
    "B82": [f"{IDS}::test_a_token_without_routes_is_zero_even_after_large_values"],
    "B83": [f"{SYMMETRIC}::test_ranks_may_close_in_different_orders"],
    "B85": [
        f"{PADDING}::test_padding_rows_stay_out_of_weight_gradients",
        "nn/test_experts.py::test_zero_padding_inside_groups_changes_no_value",
    ],
    "B86": [
        f"{PADDING}::test_idle_experts_after_busy_ones",
        "nn/test_experts.py::test_experts_without_rows_get_zero_gradients",
    ],
    "B87": [f"{TAILS}::test_spare_rows_are_not_booked_on_the_last_expert"],
    "B88": [
        f"{EDGES}::test_every_tensor_may_end_where_memory_ends",
        f"{EDGES}::test_who_goes_beyond_the_edge_is_killed",
    ],
    "B90": [
        f"{OPENING}::test_experts_are_numbered_by_the_rank_in_the_group",
        f"{SCENARIOS}/groups.py::ranks_in_any_order",
    ],
    "B91": [
        f"{OPENING}::test_members_that_have_made_different_numbers_of_groups",
        f"{OPENING}::test_ranks_that_pass_different_groups",
    ],
    "B92": [
        f"{ABSENCE}::test_reductions_of_the_caller_on_the_same_group",
        f"{LIFETIME}::test_collectives_of_the_caller_on_the_same_group",
    ],
    "B93": [f"{ABSENCE}::test_ranks_that_do_not_take_part"],
    "B94": [f"{ABSENCE}::test_the_limit_is_what_was_set"],
    "B95": [f"{OVERFLOW}::test_a_capacity_is_agreed_on_by_the_group_and_outlives_its_combines"],
    "B96": [
        f"{LAYOUTS}::test_a_handle_that_was_written_to",
        f"{LAYOUTS}::test_what_autograd_saved_was_changed",
        f"{LIFETIME}::test_nothing_travels_between_some_ranks",
        f"{LIFETIME}::test_two_ranks_have_nothing_for_each_other_and_much_for_the_rest",
    ],
    "B97": [
        f"{SCENARIOS}/groups.py::overlapping_groups",
        f"{GROUPS}::test_some_of_the_ranks_first_and_all_of_them_later",
        f"{GROUPS}::test_two_groups_that_share_a_rank_by_turns",
    ],
    "B98": [f"{AT_OPENING}::test_the_first_call_on_a_fresh_group"],
    "B99": [
        f"{COMPILE}::test_a_layer_is_compiled_again_once_when_token_counts_change",
        f"{SCENARIOS}/compiled.py::compiled_aot_eager",
        f"{SCENARIOS}/compiled.py::compiled_inductor",
    ],
    "B100": [f"{COMPILE}::test_fake_tensors_have_the_real_shapes", f"{SCENARIOS}/compiled.py::opcheck"],
    "B102": [f"{AT_OPENING}::test_no_gpu_no_triton_and_broken_vendor_packages"],
    "B103": [
        f"{AT_OPENING}::test_a_named_backend_is_never_replaced",
        f"{AT_OPENING}::test_only_auto_chooses_and_says_what",
    ],
    "B104": VENDOR,
    "B105": ["test_imports.py::test_what_the_package_does_without", "cli/test_verify.py::test_a_wrong_environment"],
    "B106": [f"{GRADIENTS}::test_strides_change_nothing"],
    "B107": [
        f"{AT_OPENING}::test_every_dtype_is_served_and_others_are_refused",
        f"{SCENARIOS}/calls.py::wrong_dispatches",
        f"{SCENARIOS}/calls.py::wrong_on_one_rank",
    ],
    "B108": [
        f"{LIFETIME}::test_many_dispatchers_at_once",
        f"{ENDINGS}::test_sixty_four_at_once",
        f"{ENDINGS}::test_one_after_the_other",
        f"{SYMMETRIC}::test_two_hundred_openings_leak_nothing",
    ],
    "B109": [f"{LIFETIME}::test_leaving_without_close", f"{ENDINGS}::test_the_interpreter_ends"],
    "B110": [f"{AT_OPENING}::test_one_rank_is_no_special_case", f"{AT_OPENING}::test_a_default_group_of_one_rank"],
}


Collected = Callable[[Path], set[str]]


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> Collected:
    """Return a function of a test file: the names of its tests that pytest finds, and runs without `--full`."""

    @cache
    def names_of(path: Path) -> set[str]:
        module: pytest.Module = pytest.Module.from_parent(request.session, path=path)
        items = [item for item in module.collect() if isinstance(item, pytest.Function)]
        return {item.originalname for item in items if not any(map(item.get_closest_marker, ("full", "skip")))}

    return names_of


def scenarios_of(path: Path) -> set[str]:
    """Names of the checks of this file that the suite runs."""
    checks = [scenario.check for scenario in RUN]
    functions = [check.func if isinstance(check, partial) else check for check in checks]
    return {function.__name__ for function in functions if Path(inspect.getfile(function)) == path}


def test_every_case_has_its_entry_and_every_entry_its_case():
    assert len(CASE_IDS) == len(set(CASE_IDS)) == 95
    assert sorted(CASES) == sorted(CASE_IDS)


@pytest.mark.parametrize("case", CASES)
def test_the_entry_is_good(collected: Collected, case: str):
    entry = CASES[case]
    if isinstance(entry, str):
        assert len(entry) > 20 and "\n" not in entry, f"{case}: a reason is one line that says what is missing"
        return
    assert entry, f"{case}: neither a test nor a reason"
    for node in entry:
        path, name = node.split("::")
        if path.startswith(SCENARIOS):
            assert name in scenarios_of(ROOT / path), f"{case}: {name} of {path} is not in SCENARIOS"
        else:
            assert name in collected(ROOT / "tests" / path), f"{case}: pytest finds no {name} in {path}"
