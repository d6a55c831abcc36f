"""What was found from outside, by the name of its page: the test that holds its mend, or the sentence why it stays.

Each page has a key in ``FINDINGS``. A test is named ``module::function``, below ``tests/``; a row without one has a sentence.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ENGINE = "unit/generation/test_engine_requests"
GATEWAY = "unit/gateway/test_hostile_requests"
SERVE = "unit/runs/jobs/test_chat_server"
TINKER = "unit/runs/jobs/tinker/test_tinker_server"
SANDBOX = "unit/sandbox/test_sandbox_pool"
VIEW = "unit/view/test_unreadable_files"
PAIRS = "unit/environments/test_answer_pairs"
TEXTS = "unit/data/test_texts_and_paths"
LOADS = "unit/models/test_load_report"
USER_CODE = "unit/test_user_code_files"
ROTARY = "unit/generation/test_rotary_lengths"
THOUGHTS = "unit/test_thoughts"
SIZES = "unit/runs/contents/test_model_check"
CONTENTS = "unit/runs/contents/test_run_contents"
NETWORK = "unit/models/test_network"
LOSS_CHECK = "unit/trainer/test_loss_check"
DAMAGED = "unit/models/test_damaged_weights"
WAYS = "deploy/test_ways_in"
DRY_MODELS = "unit/cli/test_dry_run_of_models"
ASSUMED = "unit/cli/test_assumed_packages"
HOSTILE = "security/test_hostile_programs::test_a_hostile_program_does_not_get_out_and_the_next_honest_one_is_right"

# Page -> finding -> tests, or one sentence.
FINDINGS: dict[str, dict[str, tuple[str, ...] | str]] = {
    "faults": {
        "F1 one request kills the embedded engine": (
            f"{ENGINE}::test_a_prompt_holds_token_ids_of_the_vocabulary_alone",
            f"{ENGINE}::test_seeds_sessions_options_and_lengths_are_checked_before_they_are_used",
            f"{ENGINE}::test_sampling_options_that_define_no_distribution_are_refused_when_they_are_made",
            f"{ENGINE}::test_a_fuzz_of_requests_beside_good_ones_ends_none_of_them",
            f"{ENGINE}::test_an_exception_while_one_request_is_served_fails_that_request_alone",
            f"{ENGINE}::test_a_prompt_that_makes_the_model_overflow_fails_alone_beside_others",
            f"{GATEWAY}::test_no_request_of_an_agent_ends_the_engine_or_its_episode",
            f"{GATEWAY}::test_a_fuzz_of_an_agents_requests_against_the_engine_ends_no_episode",
            f"{SERVE}::test_no_request_in_valid_json_stops_the_server",
            f"{SERVE}::test_a_fuzz_of_requests_is_answered_or_refused",
            f"{TINKER}::test_no_sampling_call_stops_the_engine_of_all_clients",
            f"{TINKER}::test_weights_whose_engine_stopped_are_loaded_again",
        ),
        "F2 the Tinker server obeys any web page": (
            f"{TINKER}::test_without_a_key_no_web_page_and_no_rebound_name_commands_the_service",
            f"{SERVE}::test_without_a_key_no_web_page_and_no_rebound_name_uses_the_server",
            f"{SERVE}::test_behind_a_key_another_name_may_lead_to_the_server_and_no_other_site",
            "unit/view/test_view_access::test_a_request_to_another_host_is_refused_even_with_the_token",
        ),
        "F3 an interpreter that dies from outside is told as a crash": (
            f"{SANDBOX}::test_an_interpreter_that_is_ended_from_outside_is_an_error_and_no_crash_of_its_program",
            f"{SANDBOX}::test_an_interpreter_whose_idle_worker_had_died_begins_with_another",
            "unit/sandbox/test_remote_sandbox::test_a_dead_service_is_skipped_and_a_session_in_it_begins_anew",
        ),
        "F4 a big prompt stalls the loop": (
            f"{SERVE}::test_a_prompt_that_is_too_long_however_it_is_read_is_refused_before_it_is_tokenized",
            f"{SERVE}::test_a_large_prompt_is_tokenized_beside_the_other_requests",
        ),
        "F5 processor time of programs is not counted": (
            "stays: a child that its parent does not wait for is in no count that a job in its namespace can read; wall time bounds it, "
            "docs/security.md says so, and rewards for fast code should use wall time"
        ),
        "F6 a zip bomb in a viewed run": (
            f"{VIEW}::test_a_small_file_of_long_texts_is_not_read_into_memory",
            f"{VIEW}::test_a_line_that_is_none_hides_neither_the_run_nor_the_others",
            f"{VIEW}::test_a_run_that_cannot_be_described_is_listed_with_the_reason",
        ),
        "F7 secrets in files": (
            "unit/test_security::test_no_file_of_a_run_holds_a_variable_or_the_login_of_a_url",
            "unit/test_security::test_no_variable_and_no_login_of_a_url_is_left_in_settings_texts_and_commands",
            "unit/test_security::test_a_configuration_whose_secrets_were_left_out_is_not_started_with_what_stands_for_them",
        ),
        "F8 a reward that cancels its own task ends the run": (
            "unit/rollouts/test_episode::test_code_that_cancels_its_own_task_fails_its_rollout_and_no_other",
            "unit/rollouts/test_episode::test_a_cancellation_from_outside_ends_an_episode_and_what_it_waits_for",
        ),
        "F9 no total bound on sandbox memory": (
            f"{SANDBOX}::test_open_interpreters_hold_no_more_memory_together_than_is_configured",
        ),
        "S1 socketpair takes any family": (HOSTILE, f"{SANDBOX}::test_a_pair_of_unix_sockets_is_what_a_program_may_have"),
        "S2 old AIO": (HOSTILE,),
        "S3 sync in a loop": (HOSTILE,),
        "S4 flock, inotify, fadvise": (HOSTILE,),
        "S5 kernel memory without a control group": (
            "stays: page tables are in no file that the job reads, and no limit of a process counts them; with a control group the kernel "
            "holds the limit, and docs/security.md says which promise needs one"
        ),
        "S6 mappings slow the measurement": (
            "stays: the kernel sums a process's mappings in one read that cannot be cut short; the wall limit is late by that read"
        ),
        "S7 core_pattern starts a root process": (HOSTILE,),
        "S8 a lone surrogate kills the supervisor": (f"{SANDBOX}::test_a_lone_surrogate_is_for_the_program_to_stumble_over",),
        "L1 500 where 400 is right": (
            f"{SERVE}::test_odd_headers_and_deep_json_are_errors_of_the_request",
            f"{TINKER}::test_what_is_no_request_is_answered_with_the_reason",
            "unit/sandbox/test_remote_sandbox::test_odd_headers_deep_json_and_too_many_interpreters_are_answered_with_a_status_of_their_own",
        ),
        "L2 half-sent requests stay open": (
            "stays in part: a body has 120 s to arrive; headers that never end hold a descriptor, which aiohttp does not limit"
        ),
        "L3 export and rollouts of hostile files end by traceback": (
            f"{DAMAGED}::test_damaged_weights_are_named_by_every_load_and_by_export",
            f"{DAMAGED}::test_adapters_and_draft_heads_are_named_too",
            "unit/monitoring/test_rollout_store::test_no_reader_inflates_a_small_file",
            "unit/cli/test_rollouts_command::test_damaged_files_are_named_with_what_to_do_and_the_other_steps_are_shown",
        ),
        "L4 a tokenizing worker prints a BrokenPipeError": (
            "unit/rollouts/test_tokenizing_ahead::test_a_worker_whose_run_was_killed_ends_without_a_word",
        ),
        "L5 a reward that leaks": (
            "stays: strop doctor names what was killed for its memory; which share of it is too much depends on the machine's other work"
        ),
        "L6 a reward that deletes logs": (
            "unit/monitoring/test_metrics_jsonl::"
            "test_a_metrics_file_that_is_deleted_while_the_run_writes_it_is_said_and_begins_anew",
        ),
        "L7 metrics without bound": (
            "unit/trainer/health/test_health_rules::"
            "test_what_is_wrong_for_some_steps_is_said_once_and_logged_while_it_is_wrong",
        ),
        "L8 decode kernels of another user": (
            "unit/generation/test_decode_kernels::test_a_library_of_another_user_is_not_loaded",
        ),
        "D2 a file in a Ray folder of another user": (
            "stays: Ray reads it, and docs/security.md names RAY_TMPDIR for machines with others on them"
        ),
        "D9 rewards that sum to inf": (
            "unit/rollouts/test_episode::test_a_reward_that_float32_cannot_hold_is_an_error_of_its_rollout",
        ),
        "D18 os._exit(0) in a reward": (
            "unit/test_user_code::test_a_hard_exit_in_a_reward_is_an_error_of_its_rollout_alone",
            "unit/test_user_code::test_a_hard_exit_outside_of_what_is_contained_ends_the_process_as_ever",
        ),
        "D19 steps and rollouts that were changed or deleted": (
            "unit/monitoring/test_rollout_store::test_a_run_that_continues_says_which_rollouts_are_gone",
        ),
    },
    "outside": {
        "1": (
            f"{LOADS}::test_weights_that_are_not_the_models_are_refused_by_name",
        ),
        "1b": (
            f"{LOADS}::test_every_other_load_refuses_them_too",
        ),
        "2": (
            f"{CONTENTS}::test_other_contents_under_the_same_name_are_refused_until_a_key_accepts_them",
        ),
        "3 what the prompt opened is unknown where the reply is read": (
            f"{THOUGHTS}::test_an_answer_is_read_outside_of_thoughts",
            f"{THOUGHTS}::test_a_prompt_that_ends_in_an_open_tag_opens_a_thought",
        ),
        "4 thoughts, two readers": (
            f"{THOUGHTS}::test_calls_stand_outside_of_thoughts_and_their_arguments_open_none",
            f"{THOUGHTS}::test_an_answer_is_read_outside_of_thoughts",
        ),
        "5 tokens that the policy wrote are missing from the text": (
            "golden/test_golden_curve::test_the_same_tokens_are_sampled_as_when_the_curve_was_stored",
            f"{THOUGHTS}::test_an_answer_is_read_outside_of_thoughts",
        ),
        "6 rope whose frequencies depend on the length": (
            f"{ROTARY}::test_sampler_and_learner_agree_on_short_and_long_rollouts",
            f"{ROTARY}::test_an_engine_reads_the_same_frequencies_from_the_configuration",
        ),
        "7": (
            f"{USER_CODE}::test_an_edited_file_is_loaded_again_even_within_the_same_second",
        ),
        "8 small numbers are all equal": (
            f"{PAIRS}::test_each_row_is_decided_as_by_hand_or_the_table_says_why_not",
        ),
        "9 a mixed number is one fraction": (
            f"{PAIRS}::test_each_row_is_decided_as_by_hand_or_the_table_says_why_not",
        ),
        "10 what cannot be parsed is cut to its first number": (
            f"{PAIRS}::test_each_row_is_decided_as_by_hand_or_the_table_says_why_not",
            "unit/runs/data_check/test_planted_faults::test_a_planted_fault_is_found_and_nothing_else",
        ),
        "11 the last box": (
            f"{PAIRS}::test_each_row_is_decided_as_by_hand_or_the_table_says_why_not",
            "unit/environments/test_answers::test_the_last_box_counts_and_is_empty_if_it_was_cut_off",
        ),
        "12 equal, and 0": (
            f"{PAIRS}::test_each_row_is_decided_as_by_hand_or_the_table_says_why_not",
            f"{PAIRS}::test_the_default_method_decides_boxes_as_the_method_that_reads_nothing_else",
        ),
        "13": (
            f"{TEXTS}::test_a_value_of_the_command_line_is_taken_whole",
        ),
        "14": (
            f"{TEXTS}::test_a_key_that_a_file_does_not_have_is_refused",
            f"{TEXTS}::test_a_key_that_this_kind_of_run_or_task_does_not_read_is_refused",
            f"{TEXTS}::test_a_key_that_names_a_column_and_is_not_read_is_said",
        ),
        "15": (
            f"{TEXTS}::test_every_path_of_a_configuration_may_begin_with_the_home_folder",
        ),
        "16": (
            f"{TEXTS}::test_a_byte_order_mark_is_no_part_of_any_text",
        ),
        "17": (
            f"{TEXTS}::test_of_two_columns_or_keys_of_one_name_none_is_chosen",
        ),
        "17 JSON in a text": (
            f"{TEXTS}::test_a_text_that_holds_messages_is_read_as_messages",
        ),
        "18": (
            f"{SIZES}::test_the_end_of_a_turn_that_is_no_stop_token_is_said",
        ),
        "19": (
            "unit/algorithms/test_functional::test_rewards_that_differ_little_vary_as_far_as_their_data_type_tells",
        ),
        "20 an indented fence, 1e400": (
            "unit/environments/code/test_extract_code::test_the_last_block_of_the_language_is_the_program",
            "unit/tools/test_formats::test_a_call_that_cannot_be_read_is_told",
        ),
        "20 positions": (
            f"{SIZES}::test_a_sequence_beyond_learned_positions_is_refused_and_beyond_rotated_ones_said",
        ),
        "section 2, SFT of several turns with templates that rewrite earlier ones": (
            "unit/rollouts/test_rewritten_turns::test_every_taught_turn_is_what_the_policy_would_write_after_what_it_would_read",
            "unit/rollouts/test_rewritten_turns::test_the_gradient_of_sft_is_that_of_every_turn_read_alone_however_it_is_cut",
            "unit/rollouts/test_rewritten_turns::test_the_tokens_in_the_loss_are_those_of_trl",
            "unit/rollouts/test_rewritten_turns::test_a_template_that_always_opens_a_thought_and_writes_none_says_what_can_be_done",
            "loop/test_recorded_runs::test_talks_whose_turns_the_template_rewrites_train_alike_however_they_are_cut",
            "loop/test_recorded_runs::test_pairs_of_several_turns_that_the_template_rewrites_are_all_trained_on",
        ),
        "section 2, \":0 is not CSV\"": (
            f"{TEXTS}::test_a_data_file_in_another_encoding_is_called_that",
        ),
        "section 2, Bloom and Falcon": (
            f"{NETWORK}::test_dropout_that_a_family_keeps_as_a_number_is_turned_off_too",
        ),
        "section 2, DatasetDict and generator": (
            f"{TEXTS}::test_a_dict_of_splits_is_no_settings",
        ),
        "section 2, GPT-2 beyond its positions": (
            f"{SIZES}::test_a_sequence_beyond_learned_positions_is_refused_and_beyond_rotated_ones_said",
        ),
        "section 2, Llama 4 text": (
            f"{NETWORK}::test_a_model_whose_class_names_no_base_of_its_own_has_a_decoder",
        ),
        "section 2, a NaN in the weights": (
            f"{LOADS}::test_weights_that_are_not_the_models_are_refused_by_name",
        ),
        "section 2, a rollout that cannot be scored": (
            "unit/trainer/test_loop::test_a_rollout_that_cannot_be_scored_is_left_out_alone",
            "unit/environments/test_function_environment::test_a_reward_of_none_says_that_the_rollout_cannot_be_scored",
            "unit/learner/test_one_gradient::"
            "test_the_gradient_with_a_rollout_that_cannot_be_scored_is_that_without_it_however_the_batch_is_cut",
            "unit/environments/test_remote_environments::test_a_reward_of_none_there_leaves_out_its_rollout_as_it_would_here",
            "unit/environments/adapters/test_nemo_gym_environment::"
            "test_a_sample_that_the_server_could_not_measure_is_left_out_and_is_not_a_zero",
            "unit/gateway/test_agents::test_an_agent_that_gives_none_as_its_reward_has_a_rollout_that_cannot_be_scored",
            "unit/environments/test_curriculum_of_a_mixture::test_a_rollout_that_cannot_be_scored_is_no_outcome_of_its_task",
            "unit/trainer/test_evaluation::test_a_sample_that_cannot_be_scored_counts_as_wrong_and_is_counted",
            "unit/runs/replay/test_stored_groups::test_rollouts_that_cannot_be_scored_are_left_out_of_rebuilt_groups_too",
            "loop/test_replayed_runs::test_a_step_with_rollouts_that_cannot_be_scored_is_the_same_however_it_is_cut_and_replayed",
        ),
        "section 2, long CSV fields": (
            f"{TEXTS}::test_a_long_field_of_a_csv_is_read_in_full",
        ),
        "section 2, reward.py imports utils.py": (
            f"{USER_CODE}::test_a_file_imports_its_neighbours_from_any_working_directory",
        ),
        "section 2, tokenizer larger than the embedding": (
            f"{SIZES}::test_tokens_that_a_prompt_may_have_and_the_embedding_has_not_are_refused",
        ),
    },
    "numbers": {
        "N1 a run whose newest tokens disagree goes on": (
            "unit/trainer/test_mismatch::test_the_run_ends_after_so_many_steps_in_a_row_and_says_why",
        ),
        "N1 rotary factors by the length of a call": (
            f"{ROTARY}::test_sampler_and_learner_agree_on_short_and_long_rollouts",
        ),
        "N2 the largest ratio of tokens that do not count": (
            "unit/algorithms/test_grpo::test_the_largest_ratio_is_of_tokens_that_count",
        ),
        "N3 a token that the policy itself holds for impossible": (
            "conformance/test_infinities::test_a_token_of_probability_0_under_one_policy_gives_a_finite_loss_and_gradient",
        ),
        "N4 an interval's effective number of tasks": (
            "unit/statistics/test_intervals::test_shares_have_wilsons_interval_of_as_many_outcomes_as_would_vary_as_much",
        ),
        "N5 the slope of step rewards": (
            "unit/environments/test_step_rewards::"
            "test_where_the_source_does_not_begin_at_zero_a_steps_reward_has_the_slope_alone",
        ),
        "N6 an unbounded loss": (
            "stays: importance and decoupled_ppo have no bound by their definition and kl without clamps has none by request; the loss "
            "overflows float32 beyond e^88, the gradient stays finite"
        ),
        "N7 accuracy at the reference": (
            "unit/algorithms/test_preference::test_a_margin_of_rounding_is_no_hit",
        ),
    },
    "first_hours": {
        "S1 no way in on a GPU": (
            f"{WAYS}::test_nothing_asks_an_index_for_strop_which_is_on_none",
            f"{WAYS}::test_the_install_page_has_three_ways_with_pins",
        ),
        "S2 a moving average where the last value is expected": (
            "unit/monitoring/test_plot_run::test_the_number_of_a_panel_is_the_last_steps_and_an_average_is_called_one",
        ),
        "S3 a dry run sees no template without tools": (
            f"{DRY_MODELS}::test_a_chat_template_without_tools_is_refused_where_the_environment_has_some",
            f"{DRY_MODELS}::test_a_chat_template_that_loses_replies_is_refused_where_there_are_turns",
        ),
        "S4 a dry run does not warn of one turn": (
            f"{DRY_MODELS}::test_one_turn_of_an_environment_with_several_is_warned_of",
        ),
        "S5 files of a user cannot import each other": (
            f"{USER_CODE}::test_a_file_imports_its_neighbours_from_any_working_directory",
            f"{USER_CODE}::test_packages_and_their_relative_imports_are_neighbours_too",
            f"{USER_CODE}::test_a_worker_process_imports_neighbours",
        ),
        "S6 the names of a sweep hide the sweep": (
            "unit/config/test_run_name::test_the_names_of_a_sweep_show_what_is_swept_beside_many_shared_settings",
        ),
        "S7 the starter does not learn on a small model": (
            "stays: twenty steps are too few for a model of 135M, whatever the reward; strop report says that no difference can be seen, "
            "and a starter that learns in minutes needs data that were measured, which belongs to the pages"
        ),
        "S8 hints stop one step short for TRL's words": (
            "unit/config/test_nearest_keys::test_a_word_of_trl_is_told_what_it_is_here",
        ),
        "S9 a replay takes minutes to reach its step": (  # a step is replayed from the checkpoint before it, and others are refused
            "unit/runs/replay/test_replay_plan::test_a_step_begins_with_the_checkpoint_of_the_step_before",
            "loop/test_replayed_runs::test_what_cannot_be_replayed_is_refused_with_what_can",
        ),
        "S10 a report's lines do not repeat the run": (
            "unit/cli/test_report_command::test_the_lines_that_repeat_a_run_can_be_installed_and_name_what_the_page_does_not_hold",
        ),
        "S11 a plan assumes the length of prompts and says nothing of the disk": (  # it plans memory by the greatest lengths alone
            "unit/planning/test_plan_command::test_the_disk_that_checkpoints_take_is_a_row",
        ),
        "S12 a page says that there is no forecast of memory": (
            "stays without a test: docs/training.md names strop plan now, and no test reads what a page claims in words"
        ),
        "S13 verifier means two things": (
            "stays: configurations, and checkpoints of runs, hold env.math.verifier, and verifier in rewards is the name of a part; the "
            "error of taking one for the other names the right key"
        ),
        "B1 a ValueError in user code is printed without a place": (
            f"{USER_CODE}::test_an_error_below_a_users_frame_is_printed_with_file_line_class_and_traceback",
            f"{USER_CODE}::test_what_is_stored_of_an_error_has_its_place",
        ),
        "B2 an algorithm whose gradient depends on the cut": (
            f"{LOSS_CHECK}::test_a_loss_that_depends_on_the_cut_is_refused_with_both_norms",
            f"{LOSS_CHECK}::test_an_objective_that_returns_anything_but_a_value_for_each_token_is_refused",
            f"{LOSS_CHECK}::test_so_is_a_correction",
            "loop/test_bad_input::test_a_loss_that_depends_on_how_a_batch_is_cut_is_refused_before_the_first_step",
        ),
        "B3 rollouts of equal groups are skipped in silence": (
            f"{LOSS_CHECK}::test_an_objective_trains_on_rollouts_without_credit_unless_its_class_says_they_have_no_gradient",
            f"{LOSS_CHECK}::test_a_promise_of_no_gradient_that_does_not_hold_is_refused",
        ),
        "B4 a part named as algorithm": (
            "unit/runs/test_algorithms::test_a_part_named_as_algorithm_is_told_the_key_of_its_kind_which_takes_it",
        ),
        "C1 looking at a GPU run needs its packages": (
            f"{ASSUMED}::test_a_recipe_for_two_nodes_is_translated_planned_and_looked_at_without_any_package_of_gpus",
            f"{ASSUMED}::test_the_same_run_here_is_refused_with_every_package_that_it_lacks",
        ),
        "C2 the image has no pins and no Megatron Core": (
            f"{WAYS}::test_the_image_takes_the_pins_of_its_device",
            f"{WAYS}::test_the_image_has_the_cuda_that_torch_was_built_for",
        ),
        "C3 no way to make the image of a cluster": (
            "stays without a test: docs/guides/cluster_run.md goes from the image to the job, with enroot, Apptainer, HF_HOME, NCCL and "
            "/dev/shm; the image itself is built by nobody's test"
        ),
        "C4 the precision of Megatron Core is said wrong": (
            "unit/cli/test_dry_run::test_the_precision_of_weights_is_that_of_the_learner_and_the_engine",
        ),
        "V1 to V10, B5, C5, C6, the docs": (
            "stays with the pages: what the view's pages and the docs show, and in which order, is mended and tested with them"
        ),
    },
}  # fmt: skip
ROWS = [(page, finding) for page, findings in FINDINGS.items() for finding in findings]


@cache
def names_in(module: str) -> frozenset[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(("page", "finding"), ROWS, ids=lambda part: str(part)[:40])
def test_every_finding_is_held_by_tests_that_are_there_or_says_why_it_stays(page: str, finding: str) -> None:
    held = FINDINGS[page][finding]
    if isinstance(held, str):
        assert held.startswith("stays") and len(held) > 40
        return
    assert held
    for test in held:
        module, _, name = test.partition("::")
        assert name in names_in(module), f"{module}.py has no {name}"


def test_every_finding_of_the_page_on_faults_has_its_row() -> None:
    names = [finding.split()[0] for finding in FINDINGS["faults"]]
    wanted = [
        *(f"F{number}" for number in range(1, 10)),
        *(f"S{number}" for number in range(1, 9)),
        *(f"L{number}" for number in range(1, 9)),
    ]
    assert names[: len(wanted)] == wanted and names[len(wanted) :] == ["D2", "D9", "D18", "D19"]
