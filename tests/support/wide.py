# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The tests of seconds each, the like of which run in ``make test`` on less.

They belong to ``make test-long``, as those that are marked ``long``. They are of three
kinds: a path that all commands go, which some of them show to be right; a check that
runs on further dumps, formats or sizes; and a test that takes long for what it finds.
"""

import re

ALIKE = "|".join(("prstat", "zombies", "cpus", "report", "whatis"))
"""Commands that go the path of the others where a test is about that path."""

OF_ALL_COMMANDS = (
    "cli/test_diff.py::test_(damaged|nothing_but_time)",
    "cli/test_recording.py::test_(damaged|intervals|recorded_is_as_direct)",
    "cli/test_recording.py::test_what_is_not_recorded",
    "cli/test_sandbox.py::test_commands_print_the_same",
    "fuzz/test_types.py::test_types",
    "render/test_widths.py::test_golden",
    "report/test_report.py::test_a_part_that_fails_is_a_line",
    "selfcheck/test_checks.py::test_damage_is_noticed",
    "selfcheck/test_report.py::",
    "test_contract.py::test_a_damaged_clock_is_a_loss",
    "test_contract.py::test_(closed_pipe|colours|full_disk|header|names_are_escaped)",
    "test_contract.py::test_json_of_a_rich_dump",
    "test_contract.py::test_(samples|script_prints|signal_ends|strict|truncated)",
    "test_faults.py::",
    "test_numpy_threads.py::test_commands",
    "test_options.py::test_(no_option_is_ignored|selection_that_matches_nothing)",
)
"""Tests that run for each command, and in ``make test`` for two or three of them."""

ON_MORE = (
    r"demo/test_cores.py::test_command_answers_as_the_whole_dump_did\[6.1-",
    r"demo/test_cores.py::test_command_answers_as_the_whole_dump_did\[6.12-\w+ -",
    r"docs/test_pages.py::test_dump_has_the_forms_shown\[docs/commands/cpus-stalls",
    r".*\[.*stalls-stop",
    r"cpus/stalls/test_dumps.py::test_machine_that_does_not_stop",
    r"fuzz/test_types.py::test_types\[(large|overlap)",
    r"locks/names/test_names.py::test_(lockdep_keys|per_cpu_variable_with_dwarf)",
    r"locks/test_contention.py::test_all_locks_are_listed\[(tasks|locks)-",
    r"locks/test_truth.py::test_same_with_debug_info\[lock(module|spin)",
    r"locks/test_truth.py::test_single_selected_task",
    r"locks/test_views.py::test_named_tasks_have_the_same_owners",
    r"locks/test_views.py::test_waits_of_a_control_group_or_namespace",
    r"(cpus|prstat|tasks|zombies)/.*(::test_dwarf_gives_the_same|[-\[]dwarf\])",
    r"memory/test_compiled.py::test_any_memmap",
    r"memory/test_formats.py::test_every_format_gives_the_same_report\[.*-(zstd|raw)",
    r"memory/test_owners_damage.py::test_section_without_struct_pages\[0",
    r"memory/test_unattributed.py::test_types_and_workers.*\[(memory-6.1|barepages)",
    r"memory/test_workers.py::test_any_number_of_workers.*(flattened|by1)",
    r"memory/test_workers.py::test_workers_by_default",
    r"prstat/test_command.py::test_(first_(groups|rows)|order|shares_sum_to_100)\[",
    r"prstat/test_command.py::test_(selection|splits_sum_to_100)\[.*(tasks-on|-u 1000)",
    r"prstat/test_command.py::test_splits_sum_to_100\[threads",
    r"prstat/test_command.py::test_selection\[.*-P 0-1",
    r"query/test_query.py::.*\[(dwarf|tasks-on-)",
    r"query/test_life.py::test_as_by_arrays\[(tasks-|locks-|without[12])",
    r"report/test_expected.py::test_what_a_verdict_names.*\[(memory|crash|lockm|stalls)",
    r"report/test_expected.py::test_what_a_verdict_names.*\[(workq|inflight|fieldio)",
    r"report/test_expected.py::test_what_a_verdict_names.*\[(field|locks)-",
    r"render/test_widths.py::test_no_line_is_wider_than_the_terminal\[report",
    r"report/test_report.py::test_what_is_damaged_or_missing_ends_one_part\[error[13]",
    r"selfcheck/test_checks.py::test_all_hold\[(cpu|crash|tasks|memory|owners|zombies)",
    r"selfcheck/test_checks.py::test_all_hold\[workqueues",
    r"selfcheck/test_checks.py::test_unwound_as_drgn_does",
    r"selfdesc/test_btf.py::test_(flipped_bits|more_members.*little)",
    r"cli/test_recording.py::test_intervals\[locks",
    r"selfdesc/test_objects.py::test_ambiguous_symbol",
    r"selfdesc/test_stacks.py::test_from_within_a_module",
    r"selfdesc/test_types.py::test_constants_equal_dwarf",
    r"selfdesc/test_kallsyms.py::test_(found_by_shape|random_damage|symbols_are)",
    r"selfdesc/test_kallsyms_mend.py::test_no_address_is_said",
    r"program/test_damaged.py::test_(a_lost_page_of_symbols|cut_dump_is_never_whole)",
    r"program/test_damaged.py::test_pages_are_lost_by_themselves.*(zstd|raw|snap|lzo)",
    r"program/test_flatheaders.py::test_what_is_left.*kdump",
    r"program/test_flatheaders.py::test_without_the_mark.*(kdump|-1\])",
    r"program/test_kdumppages.py::test_damage\[kdump-(zstd|raw|snappy|lzo)",
    r"program/test_open.py::test_description_of_a_program.*(kdump)",
    r"program/test_open.py::test_truncated_dump_is_marked_as_such\[(elf|.*0.5)",
    r"program/test_open.py::test_formats.*kdump-(lzo|zstd|snappy|raw)",
    r"program/raw/test_formats.py::test_answers\[(virsh|avml|virtualbox)",
    r"test_faults.py::test_in_a_(rule|section)\[.*(Index|Type|ValueE|error[123])",
    r"test_options.py::test_no_option_is_ignored",
    r"truth/test_facts.py::test_facts\[.*-memory-6.1\]",
    r"truth/test_facts.py::test_facts\[whatis-lockmodule",
    r"truth/test_facts.py::test_each_fact_is_recorded_by_some_dump",
    r"whatis/test_identities.py::.*memory-6.1[]-]",
    r"whatis/test_waiters.py::test_each_lock_of_a_kernel_is_found_by_its_address",
)
"""Tests that run on other dumps, formats or sizes as well."""

OF_LITTLE_YIELD = (
    "fleet/test_command.py::test_(a_run_goes_on|a_signal_stops|workers_that_do_not)",
    "fleet/test_run.py::test_what_has_come_is_kept",
    "fleet/test_single.py::test_report_is_that_of_msa_report",
    "fleet/test_run.py::test_(a_dump_that_ends_its_workers|workers_that_are_killed)",
    "fleet/test_run.py::test_what_is_lost_with_the_last_worker",
    "fleet/test_single.py::test_time_is_bounded",
    "fleet/test_store.py::test_writers_that_are_killed",
    "derived/test_completions.py::test_zsh",
    "docs/test_adding_a_command.py::test_(diff|is_tested_as_all_commands)",
    "docs/test_adding_a_command.py::test_(its_own_test|record|self_check)",
    "cli/test_recording.py::test_arrays_that_do_not_fit",
    "test_numpy_threads.py::test_(fleet|in_drgn|choice_of_the_user_stays_in_drgn)",
    "memory/test_(bulk|slab_free)",
    "render/test_(cpus|locks).py::test_work_is_linear",
    "render/test_map.py::test_size_of_files_is_bounded",
    "report/test_frames",
    "selfcheck/test_checks.py::test_wrong_report_is_noticed",
    "selfdesc/test_tables.py::test_symbols_are_those_of_drgn",
    "program/test_flattened.py::test_pieces_backwards",
    "test_(bounds|paused|records|twice|unavailable)",
    "test_names.py::test_no_class_name_twice",
    "test_package.py::",
    r"whatis/test_identities.py::test_identities\[.*(frames|file_pages|tasks|slab_ob)",
    "report/test_report.py::test_(panic_that_a_program|command_lines_can)",
    "zombies/test_cost",
    "zombies/test_leaks.py::test_nothing_else_leaks",
    "whatis/test_tableowners.py::test_whose_page_tables_they_are",
)
"""Tests of many seconds."""

_WIDE = re.compile(
    rf"tests/(?:(?:{'|'.join(OF_ALL_COMMANDS)}).*\[(?:.*\b)?(?:{ALIKE})\b"
    rf"|{'|'.join((*ON_MORE, *OF_LITTLE_YIELD))})"
)


def is_wide(test: str) -> bool:
    """Return whether a test, by its ID, is one for ``make test-long``."""
    return _WIDE.match(test) is not None
