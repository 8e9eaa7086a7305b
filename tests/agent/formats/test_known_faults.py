"""Faults that other tools had (facts/peers.md, section 6), each with the tests that hold its whole kind away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
FAULTS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("a negative count wraps around", ("agent/formats/test_readers.py::test_lucebox_counts_that_are_none",)),
    2: ("experts from 256 on are overlooked", ("agent/formats/test_readers.py::test_lucebox_placement",)),
    3: ("ids out of range, or twice", ("agent/formats/test_readers.py::test_lucebox_placements_that_are_none",)),
    4: (
        "another model's profile",
        (
            "agent/test_imported_start.py::test_another_models_profile_is_refused_however_alike",
            "agent/formats/test_exports.py::test_another_models_profile_is_refused",
        ),
    ),
    5: (
        "one session under two names",
        (
            "agent/server/test_sessions.py::test_continued_forked_and_resumed_conversations_are_one_session",
            "service/test_db_store.py::test_no_session_is_ever_on_both_sides",
        ),
    ),
    6: (
        "one bad line ends the scan",
        ("agent/transcripts/test_hostile.py::test_bad_line_is_counted_and_the_rest_is_read",),
    ),
    8: ("a slot that was never filled", ("runtime/test_slots.py::test_capacity_is_a_promise",)),
    9: ("the first block is dense", ("agent/formats/test_exports.py::test_layers_find_their_blocks",)),
    10: (
        "selections differ by layer; nothing in it; id -1",
        (
            "runtime/test_model_shape.py::test_experts_and_top_k_differ_between_blocks",
            "agent/formats/test_readers.py::test_mbolt_permutations_that_are_none",
        ),
    ),
    11: (
        "fused tensors and shards",
        (
            "runtime/test_model_shape.py::test_fused_gate_up",
            "runtime/test_gguf_file.py::test_missing_shard",
            "agent/formats/test_readers.py::test_imatrix",
        ),
    ),
    12: ("a fixed top-k", ("agent/formats/test_exports.py::test_another_models_profile_is_refused",)),
    14: ("experts that were never seen are left out", ("agent/formats/test_engine_readers.py::test_plumb",)),
    15: ("NaN is the largest", ("agent/formats/test_engine_readers.py::test_sglang_recordings_that_are_none",)),
    18: (
        "a recording of another mode",
        ("agent/formats/test_engine_readers.py::test_sglang_recordings_that_are_none",),
    ),
    21: ("experts of other nodes are not counted", ("agent/formats/test_engine_readers.py::test_vllm_routed_experts",)),
    22: ("id -1 is the last expert", ("agent/formats/test_engine_readers.py::test_vllm_load_stats",)),
    23: (
        "an id that is no expert",
        (
            "runtime/test_expert_graph.py::test_ids_out_of_range_fail_the_step_with_a_reason",
            "runtime/test_slots.py::test_ids_that_are_no_experts_are_refused_and_change_nothing",
        ),
    ),
    24: ("many misses, one slot", ("runtime/test_slots.py::test_capacity_is_a_promise",)),
    25: (
        "a draft model's blocks",
        (
            "agent/formats/test_exports.py::test_layers_find_their_blocks",
            "runtime/test_model_shape.py::test_blocks_that_predict_further_tokens_do_not_count",
        ),
    ),
    26: ("other slots, other text", ("runtime/test_tier.py::test_other_hot_sets_between_tokens_change_no_bit",)),
    27: (
        "fewer slots than a token needs",
        (
            "runtime/test_recency.py::test_a_cache_below_top_k_is_refused",
            "runtime/test_placement.py::test_budget_below_the_floor_names_what_is_needed",
        ),
    ),
    28: ("identical for eight tokens", ("runtime/test_tier_exactness.py::test_long_texts",)),
    29: (
        "slots outlive their memory",
        ("runtime/test_tier_lifetime.py::test_loading_again_and_again_takes_no_more_memory",),
    ),
    30: (
        "fused tensors are not matched",
        ("agent/formats/test_llama_cpp.py::test_the_expression_matches_as_llama_cpp_matches",),
    ),
    31: ("a count of 0 becomes 1", ("agent/formats/test_readers.py::test_imatrix",)),
    33: (
        "counts divided by calls",
        (
            "agent/formats/test_readers.py::test_imatrix",
            "agent/formats/test_readers.py::test_imatrix_files_that_are_none",
        ),
    ),
    36: ("a slice that is not the tensor's", ("runtime/test_model_shape.py::test_expert_bytes_are_the_files_own",)),
    37: (
        "types differ by layer",
        (
            "runtime/test_model_shape.py::test_expert_bytes_are_the_files_own",
            "agent/formats/test_llama_cpp.py::test_no_other_layers_would_be_read_more",
        ),
    ),
    38: ("a dense model", ("runtime/test_model_shape.py::test_dense_model_is_refused",)),
    39: (
        "a fingerprint that is text",
        (
            "agent/formats/test_exl3moe.py::test_packed_profiles_that_are_none",
            "agent/test_imported_start.py::test_another_models_profile_is_refused_however_alike",
        ),
    ),
    41: ("a prompt larger than the cache", ("runtime/test_slots.py::test_large_calls_go_around_the_slots",)),
    43: (
        "histograms that do not fit each other",
        ("agent/formats/test_exports.py::test_profiles_are_kept_and_read_strictly",),
    ),
    44: ("a session of twenty tokens", ("agent/test_privacy.py::test_merging_neither_loses_nor_mixes_anything",)),
    45: ("killed in the middle of writing", ("agent/test_files.py::test_a_failed_write_leaves_the_old_file",)),
    46: (
        "ids read without their strides",
        (
            "runtime/test_engine.py::test_selections_are_the_routers",
            "agent/formats/test_torch_archive.py::test_storages_that_lie",
        ),
    ),
    47: ("the callback is collected", ("runtime/test_engine.py::test_callback_outlives_garbage_collection",)),
    101: (
        "code in a pickle",
        (
            "agent/formats/test_torch_archive.py::test_code_is_refused_before_it_runs",
            "agent/formats/test_torch_archive.py::test_a_pickled_call_is_refused",
        ),
    ),
    102: (
        "an archive that lies",
        (
            "agent/formats/test_zip_file.py::test_lies_of_zip64",
            "agent/formats/test_zip_file.py::test_entries_that_share_bytes",
            "agent/formats/test_exl3moe.py::test_a_bomb_is_not_unpacked",
        ),
    ),
    103: ("a table of 10 GB", ("agent/formats/test_readers.py::test_a_long_csv_takes_no_more_memory",)),
}
"""By their numbers there; from 101 on those that issue and design name besides."""


@pytest.mark.parametrize("number", FAULTS)
def test_each_fault_has_its_tests(number: int) -> None:
    for named in FAULTS[number][1]:
        file, _, test = named.partition("::")
        text = (TESTS / file).read_text()
        assert re.search(rf"^\s*(?:async )?def {test}\(", text, re.MULTILINE), f"{FAULTS[number][0]}: {named} is gone"
