"""The first hour of a new user: every finding and defect that was met, and what was to be built, beside the tests that hold it.

What is not held says why. The tests are looked up in the tree: none of them can be renamed or removed without a change here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Entry:
    """What was met, and where it is held: ``path/of/the/module::test``."""

    what: str
    tests: tuple[str, ...] = ()
    why_not: str = ""  # what of it is not mended, or not tested


FINDINGS: dict[int | str, Entry] = {
    1: Entry(
        "two runs in one folder destroyed each other",
        (
            "loop/test_safe_folders::test_of_two_runs_in_one_folder_one_goes_on_and_the_other_says_who_is_there",
            "loop/test_safe_folders::test_a_run_is_refused_before_anything_of_the_other_is_touched",
            "loop/test_python_api::test_a_second_run_in_the_folder_of_one_that_is_training_is_refused",
            "unit/storage/test_folder_lock::test_of_many_that_start_together_one_gets_the_folder",
        ),
    ),
    2: Entry(
        "a changed learning rate was announced and not applied",
        (
            "loop/test_kill_and_resume::test_a_changed_rate_and_schedule_hold_from_the_next_step_on_in_metrics_and_records",
            "unit/learner/test_hyperparameters::test_every_option_of_a_group_is_the_configured_one_and_the_moments_are_kept",
            "unit/learner/test_hyperparameters::"
            "test_a_changed_rate_and_schedule_hold_from_the_next_step_on_as_if_followed_from_the_first",
        ),
    ),
    3: Entry(
        "other settings in a finished folder trained nothing and falsified its record; a sweep needed three overrides a run",
        (
            "unit/runs/resume/test_resume_plan::test_a_finished_run_with_other_settings_is_refused_and_rewrites_nothing",
            "unit/runs/resume/test_resume_plan::test_a_finished_run_says_so_and_rewrites_nothing",
            "unit/config/test_run_name::test_a_sweep_is_one_loop_and_each_of_its_runs_has_folders_of_its_own",
        ),
    ),
    4: Entry(
        "a full disk in a checkpoint ended in a traceback of torch and left the draft",
        (
            "loop/test_safe_folders::test_a_full_disk_costs_a_checkpoint_and_not_the_run",
            "unit/checkpointing/test_folders::test_a_full_disk_removes_the_draft_and_says_folder_needed_and_free",
            "unit/runs/test_run_folders::test_a_disk_that_is_too_small_is_refused_before_the_model_loads",
        ),
    ),
    5: Entry(
        "a read-only folder was found after training, or without its key",
        (
            "unit/storage/test_folder_lock::test_a_read_only_folder_is_named_with_its_key",
            "loop/test_safe_folders::test_what_is_in_the_way_is_found_before_models_load",
        ),
    ),
    6: Entry(
        "an environment of several turns silently played one",
        (
            "loop/test_console_runs::test_an_environment_that_answers_says_that_it_may_not_from_the_start_to_the_end",
            "unit/trainer/health/test_start_checks::test_an_environment_that_answers_needs_more_than_one_turn",
        ),
    ),
    7: Entry(
        "the console showed the tool's answer as the question",
        (
            "unit/trainer/test_evaluation::"
            "test_a_sample_of_several_turns_is_shown_with_the_question_of_the_task_and_the_last_answer",
        ),
    ),
    8: Entry(
        "stored rollouts joined their turns in one text",
        (
            "unit/monitoring/test_rollout_turns::test_the_tools_answer_and_the_models_are_turns_of_their_own",
            "unit/monitoring/test_rollout_turns::test_turns_are_a_column_that_other_tools_read",
            "loop/test_stored_conversations::test_a_run_stores_turns_and_metrics_and_outlives_text_that_no_file_can_hold",
        ),
    ),
    9: Entry(
        "an environment could not log metrics; groups had no rewards of their own; no tool schemas, tool-call parser or sandbox",
        (
            "unit/environments/test_environment_metrics::"
            "test_an_environment_sets_metrics_in_turns_rewards_and_rewards_of_groups_here_and_in_another_process",
            "unit/environments/test_environment_metrics::test_metrics_are_logged_as_means_beside_the_reward_of_their_environment",
            "unit/environments/test_function_environment::test_a_function_of_rollouts_sees_all_completions_of_the_prompt",
            "loop/test_starters::test_the_calculator_of_the_starter_answers_between_the_turns",
        ),
        "tools= for chat templates, a parser of tool calls and a sandbox for code are features of their own; the multi-turn starter shows "
        "the dispatch in 47 lines",
    ),
    10: Entry(
        "README and docs contradicted themselves about many devices",
        ("unit/test_readme::test_a_row_says_what_the_code_does", "unit/test_readme::test_every_part_that_is_refused_has_a_row"),
    ),
    11: Entry(
        "what a GPU cluster would do could not be seen before having one; pages disagreed about num_engines",
        (
            "unit/cli/test_dry_run::test_what_a_gpu_cluster_would_do_is_shown_without_one",
            "unit/cli/test_dry_run::test_one_assumed_gpu_is_one_process_on_it",
        ),
        "that pages agree is not tested: the default stands in the generated page alone now",
    ),
    12: Entry(
        "no guides, no site, no page on Python, nothing for those who come from TRL or verl",
        (
            "loop/test_guides::test_a_guide_runs_as_it_is_written",
            "loop/test_guides::test_every_name_of_trl_is_an_argument_there",
            "loop/test_guides::test_every_key_beside_another_trainers_is_one_of_strop",
            "unit/test_api::test_the_page_documents_every_stable_name",
        ),
    ),
    13: Entry(
        "no example with data of one's own on the first screen, no recipe for it",
        (
            "loop/test_python_api::test_the_ten_lines_train_in_a_script",
            "loop/test_starters::test_a_starter_trains_as_it_is_written",
            "unit/cli/test_init_command::test_the_starters_of_the_examples_are_those_of_the_package_and_are_shipped",
        ),
    ),
    14: Entry(
        "a plain function was no reward",
        (
            "loop/test_function_rewards::test_a_reward_of_one_function_trains_and_is_the_accuracy",
            "unit/environments/test_function_environment::test_a_function_in_place_of_the_type_is_an_error_that_names_reward",
        ),
    ),
    15: Entry(
        "held-out rows were never validated on, and nobody said so",
        (
            "loop/test_console_runs::test_held_out_rows_that_are_never_used_are_mentioned",
            "unit/trainer/health/test_start_checks::test_validation_data_that_is_never_used_is_found",
        ),
    ),
    16: Entry(
        "an epoch limit that ended a run before its steps was not named",
        (
            "unit/trainer/health/test_start_checks::"
            "test_epochs_that_end_a_run_before_its_steps_are_found_and_the_number_that_does_not",
            "loop/test_recorded_runs::test_epochs_end_a_run_without_a_last_step",
        ),
    ),
    17: Entry(
        "runs on recorded data spoke of generation, and showed the loss alone",
        (
            "unit/monitoring/test_consoles::test_each_kind_of_run_has_columns_of_its_own",
            "unit/monitoring/test_consoles::test_recorded_data_is_read_and_not_generated",
        ),
    ),
    18: Entry(
        "a wrong folder of a reward model ended in a message of the hub",
        ("unit/cli/test_dry_run::test_a_folder_without_a_model_is_named_by_its_own_key",),
    ),
    19: Entry(
        "the score of a reward model was called an accuracy",
        (
            "unit/trainer/test_evaluation::test_a_declared_accuracy_is_no_score",
            "unit/monitoring/test_consoles::test_each_kind_of_run_has_columns_of_its_own",
        ),
    ),
    20: Entry(
        "an evaluation had other keys than training, no standard error, and did not know the run of a checkpoint",
        (
            "loop/test_whole_runs::test_a_run_is_evaluated_without_any_key_as_it_validated_itself",
            "unit/cli/test_eval_command::test_keys_of_training_and_of_an_evaluation_mean_the_same",
            "unit/cli/test_eval_command::test_standard_errors_count_a_task_once",
            "unit/cli/test_eval_command::test_a_dry_run_looks_at_the_tasks_of_a_run",
        ),
    ),
    21: Entry(
        "merging and converting were three scripts, one with a traceback",
        (
            "unit/cli/test_export_command::test_the_merge_command_says_what_is_wrong_without_a_traceback",
            "unit/cli/test_export_command::test_every_layout_loads_in_transformers_with_its_tokenizer",
        ),
    ),
    22: Entry(
        "--dry-run did not look at the columns of data",
        (
            "unit/cli/test_dry_run::test_the_columns_of_local_data_are_looked_at",
            "unit/cli/test_dry_run::test_the_columns_of_recorded_data_are_looked_at",
        ),
    ),
    23: Entry(
        "checkpoints of many ranks do not load with transformers",
        ("unit/checkpointing/test_saved_model::test_the_model_of_a_run_of_many_ranks_loads_in_transformers",),
        "the shards themselves stay DCP's: `strop eval`, `export` and `serve` read them",
    ),
    24: Entry(
        "no sign that all rewards are equal",
        ("unit/trainer/health/test_health_rules::test_what_is_wrong_for_some_steps_is_said_once_and_logged_while_it_is_wrong",),
    ),
    25: Entry(
        "numbers in five formats, -0.0000, a first line of 240 characters",
        (
            "unit/monitoring/test_consoles::test_a_column_has_fixed_decimals_and_no_negative_zero",
            "unit/cli/test_dry_run::test_the_summary_has_about_ten_lines_and_the_algorithm_is_what_differs",
        ),
    ),
    26: Entry(
        "a pipe was silent for its first minute",
        (
            "unit/monitoring/test_consoles::"
            "test_a_plain_console_says_at_once_what_a_run_does_before_its_first_step_and_then_every_ten_seconds",
        ),
    ),
    27: Entry(
        "warnings in three styles",
        (
            "unit/monitoring/test_message_style::test_loggers_of_strop_and_of_others_warn_in_one_style",
            "unit/monitoring/test_message_style::test_a_warning_of_python_says_which_package_it_is_from",
        ),
    ),
    28: Entry(
        "a resumed run printed the checkpoint's step before it said that it continues",
        (
            "unit/runs/resume/test_resume_plan::test_a_continued_run_says_so_first_and_then_shows_the_step_it_continues_from",
            "unit/monitoring/test_consoles::test_a_step_that_was_shown_before_the_run_was_resumed_is_not_shown_again",
        ),
    ),
    29: Entry(
        "debris after a resize, no reward on narrow terminals, no lines in the scrollback",
        (
            "unit/monitoring/test_consoles::test_a_resized_terminal_is_drawn_anew",
            "unit/monitoring/test_consoles::test_a_narrow_terminal_shows_the_reward_and_the_bar",
            "unit/monitoring/test_consoles::test_every_step_leaves_a_line_in_the_scrollback_of_a_live_console",
            "unit/monitoring/test_consoles::test_no_color_in_the_environment_leaves_no_colour_in_the_panel",
        ),
    ),
    30: Entry(
        "the README's own algorithm was warned about a key that is off",
        ("unit/runs/test_algorithms::test_an_algorithm_from_outside_is_not_warned_about_a_key_that_is_off",),
    ),
    31: Entry(
        "--dry-run printed 320 lines after 11 s; `strop doctor | head` ended in a traceback",
        (
            "unit/cli/test_dry_run::test_a_dry_run_takes_less_than_three_seconds_and_no_torch",
            "loop/test_console_runs::test_held_out_rows_that_are_never_used_are_mentioned",
            "loop/test_console_runs::test_a_command_whose_output_nobody_reads_ends_without_a_traceback",
        ),
    ),
    32: Entry(
        "the last line named no next step",
        ("unit/monitoring/test_closing::test_the_commands_to_go_on_with_are_those_that_work_for_the_kind_of_run",),
    ),
    33: Entry(
        "1.6 GB a checkpoint, four of them, by default",
        (
            "unit/monitoring/test_closing::test_the_last_lines_say_what_the_run_did_and_what_was_wrong",
            "unit/runs/test_run_folders::test_with_the_models_the_size_of_a_checkpoint_is_known",
        ),
        "the defaults stay: the size is said, and space for all that are kept is looked at before training",
    ),
    "looking at what it says": Entry(
        "rollouts took Python to read; no page for a browser; curves of one run alone, on misleading axes",
        (
            "unit/cli/test_rollouts_command::test_the_newest_step_is_shown_turn_by_turn",
            "unit/cli/test_rollouts_command::test_the_best_and_the_worst_are_chosen_by_reward",
            "unit/cli/test_rollouts_command::test_a_task_without_a_step_is_shown_over_all_steps",
            "unit/cli/test_plot_command::test_runs_of_several_seeds_are_lines_named_by_what_differs",
            "unit/monitoring/test_run_lines::test_noise_does_not_fill_an_axis_and_shares_have_a_whole_one",
        ),
        "no table of rollouts in Weights & Biases or TensorBoard",
    ),
    "logs": Entry(
        "metrics had other names than people search for; no epoch, no number of tokens",
        (
            "unit/monitoring/test_aliases::test_the_page_lists_the_same_names",
            "unit/monitoring/test_tracking_services::test_tensorboard_gets_the_names_of_other_libraries_too_if_they_are_asked_for",
            "loop/test_console_runs::test_an_environment_that_answers_says_that_it_may_not_from_the_start_to_the_end",
        ),
    ),
}

DEFECTS: dict[str, Entry] = {
    "D1": Entry(
        "no lock on the folders of a run",
        (
            "loop/test_safe_folders::test_of_two_runs_in_one_folder_one_goes_on_and_the_other_says_who_is_there",
            "unit/storage/test_folder_lock::test_a_stopped_process_keeps_its_folder",
            "unit/storage/test_folder_lock::test_after_a_kill_the_folder_is_free_at_once",
        ),
    ),
    "D2": Entry(
        "another user's Ray cluster was joined",
        (
            "unit/distributed/test_ray_strangers::test_an_address_of_another_user_is_refused_with_the_key_to_set",
            "unit/distributed/test_ray_strangers::test_an_address_that_others_may_write_is_refused_with_the_key_to_set",
        ),
    ),
    "D3": Entry(
        "SystemExit in a reward ended the run with exit code 0",
        (
            "unit/test_user_code::test_an_exit_in_an_environment_is_recorded_with_its_reason_on_the_rollout",
            "unit/test_user_code::test_an_exit_where_no_rollout_can_record_it_is_an_error_of_the_command",
            "unit/test_user_code::test_a_real_ctrl_c_passes_even_the_second_one_that_interrupts_the_reward_itself",
            "loop/test_watchdog_runs::test_a_reward_that_ends_the_process_leaves_a_run_that_the_doctor_calls_dead",
        ),
        "os._exit cannot be caught: its exit code is the reward's, and status.json says running until `strop doctor` looks at the process",
    ),
    "D4": Entry(
        "answers were read in quadratic time",
        (
            "unit/environments/test_answers::test_no_text_takes_50_milliseconds",
            "unit/environments/test_answers::test_ten_times_the_text_takes_ten_times_as_long",
            "unit/environments/test_answers::test_answers_are_those_of_the_definition",
        ),
    ),
    "D5": Entry(
        "a lone surrogate killed the run when it was stored",
        (
            "loop/test_stored_conversations::test_a_run_stores_turns_and_metrics_and_outlives_text_that_no_file_can_hold",
            "unit/monitoring/test_rollout_turns::test_a_lone_surrogate_costs_nothing_and_is_noted_once",
            "unit/environments/test_environment_metrics::"
            "test_a_lone_surrogate_in_what_an_environment_says_costs_its_rollout_alone",
        ),
    ),
    "D6": Entry(
        "a full disk ended metrics.jsonl for good",
        (
            "loop/test_safe_folders::test_a_full_disk_of_logs_costs_rollouts_and_no_metrics",
            "loop/test_safe_folders::test_a_disk_of_logs_that_stays_full_costs_records_and_not_the_model",
            "unit/monitoring/test_metrics_jsonl::test_steps_that_a_full_disk_refuses_are_written_in_order_when_there_is_room",
        ),
    ),
    "D7": Entry(
        "a crafted checkpoint ran its code",
        (
            "unit/learner/parallel/test_sharded_checkpoint::test_a_crafted_folder_runs_no_code_and_reads_no_file_outside",
            "unit/checkpointing/test_state_file::test_a_file_that_names_anything_else_is_refused_and_nothing_runs",
        ),
    ),
    "D8": Entry(
        "checkpoint_dir was not looked at before the first save",
        (
            "loop/test_safe_folders::test_what_is_in_the_way_is_found_before_models_load",
            "unit/storage/test_folder_lock::test_a_folder_that_cannot_be_is_named_with_its_key",
            "unit/storage/test_storage::test_a_file_with_the_name_of_a_checkpoint_is_found_at_the_start",
        ),
    ),
    "D9": Entry(
        "numbers that are not finite trained nothing, without a word",
        (
            "unit/cli/test_dry_run::test_numbers_that_are_not_finite_are_refused_everywhere",
            "unit/environments/test_environment_metrics::test_rewards_whose_sum_is_not_finite_are_an_error",
            "loop/test_console_runs::test_a_learning_rate_that_spoils_the_weights_stops_the_run",
        ),
    ),
    "D10": Entry(
        "the store of a weight broadcast listened to everyone",
        (
            "unit/weight_sync/test_secret_store::test_a_stranger_neither_ends_a_publish_nor_receives_it",
            "unit/weight_sync/test_secret_store::test_a_sender_listens_on_its_own_address_only",
            "unit/test_security::test_everything_of_strop_that_listens_in_one_process_listens_on_loopback",
        ),
    ),
    "D11": Entry(
        "a full disk was a traceback, or an errno without a folder",
        (
            "unit/storage/test_storage::test_errors_of_a_full_disk_are_recognised_however_they_are_raised",
            "loop/test_safe_folders::test_a_last_checkpoint_without_room_is_an_error_and_the_same_command_continues",
        ),
    ),
    "D12": Entry(
        "a flipped byte in a checkpoint was not noticed",
        (
            "unit/checkpointing/test_folders::test_a_flipped_bit_is_found_and_the_older_checkpoint_that_is_whole_is_offered",
            "unit/runs/resume/test_resume_plan::"
            "test_previous_sets_damaged_checkpoints_aside_and_continues_from_the_newest_whole_one",
        ),
    ),
    "D13": Entry(
        "a reward that forks left processes and a hang",
        (
            "unit/test_user_code::test_a_fork_that_a_reward_makes_never_runs_on_in_the_run",
            "unit/test_user_code::test_a_fork_that_stays_is_killed_with_the_run",
        ),
        "a fork that makes itself a daemon outlives the run: docs/security.md says so",
    ),
    "D14": Entry(
        "a long reference that cannot be read was called slow",
        ("unit/environments/test_math::test_a_long_reference_that_cannot_be_read_is_named_and_not_called_slow",),
    ),
    "D15": Entry(
        "a data file that was cut short during a run was a SIGBUS",
        (
            "unit/data/test_damaged_files::test_a_file_that_is_cut_short_during_the_run_is_an_error_and_no_signal",
            "unit/data/test_damaged_files::test_an_arrow_file_that_is_cut_short_during_the_run_is_an_error",
        ),
    ),
    "D16": Entry(
        "mutated configurations ended in tracebacks, hangs and messages of 20,000 characters",
        (
            "unit/test_mutations::test_a_document_that_is_wrong_as_a_whole_is_refused_in_one_message",
            "unit/test_mutations::test_mutated_configurations_end_in_one_message",
        ),
    ),
    "D17": Entry(
        "mutated data files ended in errors that name no file",
        (
            "unit/test_mutations::test_mutated_data_files_end_in_one_message",
            "unit/data/test_damaged_files::test_a_damaged_file_is_an_error_that_says_where",
        ),
    ),
    "D18": Entry(
        "os.chdir in a reward moved the logs; 10**400 named no reward; exceptions of 1 MB were printed",
        (
            "loop/test_safe_folders::test_a_reward_that_changes_the_working_directory_changes_nothing",
            "unit/environments/test_environment_metrics::test_a_reward_that_is_no_number_is_named_with_its_environment",
            "unit/environments/test_environment_metrics::test_the_text_of_an_exception_is_bounded_wherever_it_comes_from",
        ),
    ),
    "D19": Entry(
        "step_05 was step 5, a copy named step_99 the newest, a deleted metrics.jsonl no news",
        (
            "unit/checkpointing/test_folders::test_step_05_is_not_step_5",
            "unit/checkpointing/test_folders::test_a_checkpoint_under_another_name_or_of_another_run_is_refused",
            "unit/monitoring/test_metrics_jsonl::test_a_metrics_file_that_was_deleted_beside_a_checkpoint_is_said",
        ),
    ),
}


@dataclass(frozen=True)
class Promise:
    """What was to be built, the module or page that has it, and tests that hold it."""

    what: str
    places: tuple[str, ...]  # under src/strop or docs
    tests: tuple[str, ...]
    half: str = ""  # what of it is missing


PROMISES = (
    Promise(
        "a run locks its folders; stale locks across hosts; file systems without locks; a second run is told who holds them",
        ("storage/folder_lock.py", "runs/run_folders.py", "reliability.md"),
        (
            "unit/storage/test_folder_lock::test_a_folder_that_another_process_holds_is_refused_with_who_holds_it",
            "unit/storage/test_folder_lock::test_a_holder_on_another_machine_whose_lock_is_free_is_replaced_with_a_warning",
            "unit/storage/test_folder_lock::test_a_file_system_without_locks_is_said_and_its_files_are_the_lock",
            "unit/monitoring/test_doctor::test_a_run_that_holds_the_folder_is_told_before_the_status_of_an_earlier_one",
        ),
        "machines that share a folder are simulated",
    ),
    Promise(
        "what identifies a run is compared with the folder; resume: auto, must, never, previous",
        ("config/identity.py", "runs/resume/resume_plan.py", "checkpoints.md"),
        (
            "unit/runs/resume/test_resume_plan::test_every_identity_key_is_refused_by_name_with_both_values_and_the_ways_out",
            "unit/runs/resume/test_resume_plan::test_must_without_a_checkpoint_names_the_folder",
        ),
    ),
    Promise(
        "any other difference is applied for real, said so and true in the metrics",
        ("learner/torch/hyperparameters.py", "monitoring/config_history.py", "checkpoints.md"),
        (
            "loop/test_kill_and_resume::test_a_changed_rate_and_schedule_hold_from_the_next_step_on_in_metrics_and_records",
            "unit/runs/resume/test_resume_plan::test_the_history_says_from_which_step_which_settings_held",
        ),
    ),
    Promise(
        "records of a finished run are never rewritten",
        ("runs/resume/restore.py", "checkpoints.md"),
        ("unit/runs/resume/test_resume_plan::test_a_finished_run_says_so_and_rewrites_nothing",),
    ),
    Promise(
        "run_name, and folders that contain overrides",
        ("config/load/run_name.py", "checkpoints.md"),
        ("unit/config/test_run_name::test_a_sweep_is_one_loop_and_each_of_its_runs_has_folders_of_its_own",),
    ),
    Promise(
        "space and write access are probed for every folder, with what a checkpoint needs",
        ("storage/folder_probe.py", "runs/run_folders.py", "reliability.md"),
        ("unit/runs/test_run_folders::test_with_the_models_the_size_of_a_checkpoint_is_known",),
        "over Ray the estimate knows the weights and not the optimizer",
    ),
    Promise(
        "a full disk in mid-save removes the draft, says folder, needed and free, and keeps the run alive",
        ("storage/storage_error.py", "storage/record_files.py", "reliability.md"),
        (
            "loop/test_safe_folders::test_a_full_disk_costs_a_checkpoint_and_not_the_run",
            "unit/monitoring/test_rollout_store::test_rollouts_that_a_full_disk_refuses_are_lost_and_the_run_goes_on",
            "unit/trainer/test_endings::test_ranks_in_other_processes_do_not_go_on_after_a_refused_save",
        ),
        "over Ray the run ends, and the same command continues it",
    ),
    Promise(
        "checkpoints carry checksums; the one before a damaged one is offered",
        ("storage/checksums.py", "checkpointing/folders.py", "checkpoints.md"),
        ("unit/checkpointing/test_folders::test_a_flipped_bit_is_found_and_the_older_checkpoint_that_is_whole_is_offered",),
    ),
    Promise(
        "nothing is silent: each note once, on the console and in the metrics",
        ("trainer/health/health_rules.py", "trainer/health/start_checks.py", "troubleshooting.md"),
        (
            "unit/trainer/health/test_health_rules::test_what_is_wrong_for_some_steps_is_said_once_and_logged_while_it_is_wrong",
            "unit/trainer/health/test_health_rules::test_every_rule_has_a_section_in_the_troubleshooting_page_and_a_test",
            "unit/runs/test_training_run::test_a_run_whose_tracker_sends_nothing_says_how_to_send_it_later",
        ),
        "Weights & Biases tries again by itself when the network is gone, and Strop does not see it",
    ),
    Promise(
        "a console for people: columns, formats, the first minute, one style, last lines, terminals",
        ("monitoring/console/columns.py", "monitoring/console/closing.py", "monitoring/console/message_style.py"),
        (
            "unit/monitoring/test_consoles::test_each_kind_of_run_has_columns_of_its_own",
            "unit/monitoring/test_consoles::test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines",
            "unit/monitoring/test_closing::test_the_last_lines_say_what_the_run_did_and_what_was_wrong",
        ),
    ),
    Promise(
        "--dry-run in ten lines, under 3 seconds, with assumed GPUs, of data, environments and optimizers",
        ("runs/dry_run/examine.py", "runs/dry_run/assumed_cluster.py", "troubleshooting.md"),
        (
            "unit/cli/test_dry_run::test_a_dry_run_takes_less_than_three_seconds_and_no_torch",
            "unit/cli/test_dry_run::test_what_a_configuration_names_is_looked_at",
            "unit/cli/test_eval_command::test_a_dry_run_looks_at_the_tasks_of_a_run",
        ),
        "that of `strop eval RUN` imports torch",
    ),
    Promise(
        "strop eval RUN_OR_CHECKPOINT",
        ("cli/eval_command.py", "runs/jobs/evaluation_job.py", "evaluation.md"),
        ("unit/cli/test_eval_command::test_a_run_is_evaluated_on_what_it_validates_on_without_any_key",),
    ),
    Promise(
        "strop export CHECKPOINT OUT",
        ("cli/export_command.py", "runs/jobs/model_card.py", "checkpoints.md"),
        (
            "unit/cli/test_export_command::test_every_layout_loads_in_transformers_with_its_tokenizer",
            "unit/cli/test_export_command::test_the_data_type_and_the_size_of_the_files_are_chosen",
            "unit/cli/test_export_command::test_the_card_tells_the_facts_of_the_run",
            "unit/cli/test_export_command::test_the_folder_is_uploaded_to_the_hub",
        ),
    ),
    Promise(
        "strop serve CHECKPOINT",
        ("cli/serve_command.py", "runs/jobs/chat_server.py", "guides/evaluate_export_serve.md"),
        (
            "unit/cli/test_serve_command::test_a_served_run_answers_a_client_and_ends_cleanly_at_ctrl_c",
            "unit/cli/test_serve_command::test_vllm_serves_the_folder_of_a_checkpoint_itself",
        ),
        "vLLM's own server is not started: its command is checked",
    ),
    Promise(
        "strop rollouts RUN",
        ("cli/rollouts_command.py", "monitoring/rollout_view/rollout_text.py", "tracking.md"),
        ("unit/cli/test_rollouts_command::test_the_newest_step_is_shown_turn_by_turn",),
    ),
    Promise(
        "strop plot A B, with seeds as bands",
        ("cli/plot_command.py", "monitoring/run_lines.py", "tracking.md"),
        ("unit/monitoring/test_run_lines::test_runs_that_differ_in_seed_and_folders_are_one_line_with_mean_and_range",),
    ),
    Promise(
        "strop init, with starters that are tested",
        ("cli/init_command.py", "cli/starters/grpo.yaml", "guides/own_data.md"),
        (
            "loop/test_starters::test_a_starter_trains_as_it_is_written",
            "loop/test_starters::test_the_evaluation_starter_scores_every_task_and_keeps_the_samples",
        ),
    ),
    Promise(
        "functions as rewards, rewards of a group, metrics of an environment, rollouts stored by turn",
        ("environments/function_environment.py", "monitoring/rollout_store/turn_record.py", "environments.md"),
        (
            "unit/environments/test_function_environment::test_a_function_of_rollouts_sees_all_completions_of_the_prompt",
            "unit/environments/test_environment_metrics::test_a_function_that_is_a_reward_sets_metrics",
            "unit/monitoring/test_rollout_turns::test_turns_and_metrics_come_back_as_they_were",
        ),
    ),
    Promise(
        "guides, each run by a test; names of other trainers side by side, and as aliases",
        ("monitoring/trackers/aliases.py", "guides/coming_from.md", "guides/flat_reward.md", "tracking.md"),
        (
            "loop/test_guides::test_a_guide_runs_as_it_is_written",
            "loop/test_guides::test_every_key_beside_another_trainers_is_one_of_strop",
            "unit/monitoring/test_aliases::test_the_page_lists_the_same_names",
        ),
        "NeMo-RL's keys are Strop's; its small table of what differs is not looked up",
    ),
    Promise(
        "nothing that is loaded runs code, and nothing that listens answers strangers",
        ("checkpointing/state_file.py", "weight_sync/transports/secret_store.py", "models/loading.py", "security.md"),
        (
            "unit/test_security::test_calls_that_run_data_or_listen_are_where_they_are_known",
            "unit/test_security::test_the_page_names_every_place_that_listens",
            "unit/models/test_remote_code::test_code_of_a_model_is_refused_with_the_key_to_set",
            "unit/weight_sync/test_shared_folder::test_others_cannot_read_or_change_the_weights",
        ),
        "torch's TCPStore and gloo, between the ranks of a learner, have no secret",
    ),
    Promise(
        "kills, two runs, full disks, mutated files: campaigns, with a sample in `make test`",
        ("reliability.md", "log.md"),
        (
            "loop/test_kill_and_resume::test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened",
            "loop/test_kill_and_resume::test_an_asynchronous_run_loses_no_group_and_trains_on_none_twice",
            "unit/test_mutations::test_mutated_configurations_end_in_one_message",
        ),
    ),
)


@cache
def names_in(module: str) -> frozenset[str]:
    """The names of the tests of a module."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_finding_and_defect_has_an_entry() -> None:
    assert [*FINDINGS] == [*range(1, 34), "looking at what it says", "logs"]
    assert [*DEFECTS] == [f"D{number}" for number in range(1, 20)]


@pytest.mark.parametrize("name", [*FINDINGS, *DEFECTS])
def test_what_was_met_is_held_by_tests_that_are_there(name: int | str) -> None:
    entry = FINDINGS[name] if name in FINDINGS else DEFECTS[str(name)]
    assert entry.what and (entry.tests or entry.why_not)
    check_tests(entry.tests)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.what[:40])
def test_what_was_to_be_built_is_there_and_held_by_tests(promise: Promise) -> None:
    for place in promise.places:
        assert (ROOT / ("docs" if place.endswith(".md") else "src/strop") / place).is_file(), place
    assert promise.tests
    check_tests(promise.tests)


def check_tests(tests: tuple[str, ...]) -> None:
    for test in tests:
        module, _, function = test.partition("::")
        assert function in names_in(module), f"{module}.py has no {function}"
