"""What is served how, and which tests say so: the page ``sglang_c2t/guides/matrix.md``.

    make test            leaves runs/tests.xml
    make matrix          reads it, and writes the page and what it was made from

A row's answer is one of :data:`ANSWERS`. Each row names the tests that show it; what nobody ran
says so. Rows of what is refused come from ``refusals.py``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "sglang_c2t" / "guides" / "matrix.md"
RESULTS = ROOT / "matrix.json"

PACKED, STATIC = "packed", "static"
ANSWERS = {
    PACKED: "only the rows that a gate or a plan lets through are verified",
    STATIC: "the same output; drafts end early, and every row is verified",
    "refused": "the server says so before a model loads, and what to do instead",
}

CPU, EMULATED, UNSEEN = "CPU server", "emulated device", "read, not run"


class Row(NamedTuple):
    """A combination, and what shows that it is served so."""

    target: str
    draft: str
    attention: str
    feature: str
    answer: str
    where: str
    tests: tuple[str, ...] = ()
    """``file::test``, below ``tests``; all cases of it."""


ALL = "EAGLE, EAGLE3, STANDALONE"
UNUSUAL = "emulated/test_unusual.py"
SERVING = (
    "emulated/test_serving.py::test_tokens_keys_and_values_are_those_of_the_models_in_every_order"
)
ORDEAL = "joins, aborts, retraction, seeds"
ORDERS = "joins, aborts, retraction, opt-out, a switch of policies, grammar, log-probabilities"

ROWS = (
    # Kinds of models and drafts
    Row("Llama", f"{ALL}, chains", "ours for CPUs", "joins, aborts", PACKED, CPU, (
        "e2e/test_chain_serving.py::test_greedy_outputs_equal_those_without_speculation",
        "e2e/test_chain_serving.py::test_the_target_forwards_exactly_the_surviving_rows",
        "e2e/test_chain_serving.py::test_aborted_requests_leave_the_others_untouched",
    )),
    Row("Llama", f"{ALL}, trees", "ours for CPUs", "joins, aborts, KV of a plain prefill", PACKED,
        CPU, (
        "e2e/test_tree_serving.py::test_greedy_outputs_equal_those_without_speculation",
        "e2e/test_tree_serving.py::test_the_target_forwards_the_nodes_of_the_trees_and_nothing_"
        "else",
        "e2e/test_tree_serving.py::test_the_kv_of_every_accepted_token_is_that_of_a_plain_prefill",
    )),
    Row("DeepSeek (MLA, experts)", "NEXTN, chains", "ours for CPUs",
        f"{ORDEAL}, KV of a plain prefill", PACKED, CPU, (
        "e2e/test_latent_servers.py::test_chains_cut_at_random_give_the_same_tokens",
        "e2e/test_latent_servers.py::test_planned_steps_give_the_same_tokens_samples_and_keys",
    )),
    Row("DeepSeek (MLA, experts)", "NEXTN, trees", "ours for CPUs",
        f"{ORDEAL}, KV of a plain prefill", PACKED, CPU, (
        "e2e/test_latent_servers.py::test_planned_steps_give_the_same_tokens_samples_and_keys",
    )),
    Row("Qwen2.5-VL (M-RoPE)", "EAGLE3, chains and trees", "ours for CPUs",
        f"pictures, {ORDEAL}", PACKED, CPU,
        ("e2e/test_vision_servers.py::test_outputs_equal_those_without_speculation_to_the_end_of_"
         "the_context",)),
    Row("Qwen2.5-VL (M-RoPE)", "EAGLE3, chains and trees", "FA3; FlashInfer", "retraction", PACKED,
        EMULATED, (f"{UNUSUAL}::test_packed_rows_are_rotated_as_their_pictures_say",)),
    Row("Gemma 2 (sliding windows)", "STANDALONE, chains and trees", "ours for CPUs",
        f"{ORDEAL}, KV of a plain prefill", PACKED, CPU, (
        "e2e/test_model_breadth.py::test_windows_do_not_change_what_chains_cut_at_random_give",
        "e2e/test_model_breadth.py::test_planned_steps_behind_windows_keep_the_keys_of_a_prompt",
    )),
    Row("gpt-oss (windows, sinks, experts)", "STANDALONE, chains and trees", "ours for CPUs",
        f"{ORDEAL}, KV of a plain prefill; --moe-runner-backend triton", PACKED, CPU, (
        "e2e/test_model_breadth.py::test_windows_do_not_change_what_chains_cut_at_random_give",
        "e2e/test_model_breadth.py::test_planned_steps_behind_windows_keep_the_keys_of_a_prompt",
    )),
    # Attention
    Row("Llama", "EAGLE3, STANDALONE, chains", "FA3, FlashInfer", ORDERS, PACKED, EMULATED,
        (SERVING,)),
    Row("Llama", "EAGLE3, trees", "FlashInfer", ORDERS, PACKED, EMULATED, (SERVING,)),
    Row("Llama", "EAGLE3, chains", "one that reads packed rows wrongly", "", STATIC, EMULATED, (
        f"{UNUSUAL}::test_a_server_that_packs_wrongly_sees_it_at_its_start_and_verifies_whole_"
        "drafts",)),
    Row("any", "chains", "one that says nothing of packed rows (Triton, torch_native, ...)", ORDEAL,
        STATIC, CPU, ("e2e/test_unusual_servers.py::test_static_truncation_gives_the_same_outputs_"
        "at_full_width", "srt/verify/test_backends.py::test_what_cannot_verify_packed_rows_is_"
        "refused_by_name_or_verifies_full_width")),
    Row("any", "chains", "trtllm_mha, FA4", "tried at its start", PACKED, UNSEEN),
    Row("DeepSeek (MLA, experts)", "NEXTN, chains", "FlashInfer-MLA", "bfloat16; retraction; "
        "more requests than graphs hold", PACKED, EMULATED, (
        f"{UNUSUAL}::test_packed_rows_attend_to_latents_as_the_model_does",)),
    Row("MLA", "chains", "trtllm_mla, dsv4", "tried at its start, static where rows differ",
        PACKED, UNSEEN),
    Row("Mamba, linear attention", "chains", "any", "", STATIC, UNSEEN),
    # Features
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", "plans, at every load", PACKED, CPU, (
        "e2e/test_planned_serving.py::test_outputs_are_those_without_speculation_at_every_load",
        "e2e/test_planned_serving.py::test_planned_trees_give_the_same_outputs_at_every_load",
    )),
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", "retraction", PACKED, CPU, (
        "e2e/test_unusual_servers.py::test_requests_retracted_under_a_plan_give_the_same_outputs_"
        "and_leak_nothing",
        "e2e/test_unusual_servers.py::test_retracted_requests_give_the_same_outputs_and_leak_"
        "nothing",
    )),
    Row("Llama", "EAGLE3, STANDALONE, chains and trees", "ours for CPUs",
        "sampling, seeds", PACKED, CPU, (
        "e2e/test_sampling.py::test_samples_follow_the_targets_exact_distribution",
        "e2e/test_sampling.py::test_a_seed_gives_the_same_tokens_with_and_without_speculation",
        "e2e/test_sampling.py::test_a_seed_gives_the_same_tokens_whatever_was_planned",
    )),
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", "grammar, log-probabilities, "
        "penalties", PACKED, CPU, (
        "e2e/test_tree_serving.py::test_constrained_and_free_requests_share_a_batch",
        "e2e/test_tree_serving.py::test_log_probabilities_equal_those_of_plain_decoding",
        "e2e/test_planned_serving.py::test_planned_and_uniform_steps_keep_to_constraints",
    )),
    Row("Llama", "EAGLE3, chains and trees", "FA3; FlashInfer", "seeds", PACKED, EMULATED,
        ("emulated/test_sampled.py::test_seeded_samples_are_those_of_the_target_alone",)),
    Row("Llama", "EAGLE3, chains and trees", "FA3; FlashInfer", "bfloat16, pages of 16",
        PACKED, EMULATED, (f"{UNUSUAL}::test_tokens_keys_and_values_are_the_models_to_rounding",)),
    Row("Llama", "EAGLE3, trees", "FlashInfer", "pages of 16, beside single slots", PACKED,
        EMULATED, (f"{UNUSUAL}::test_trees_in_pages_are_those_of_single_slots",)),
    Row("Llama", "EAGLE3, chains", "ours for CPUs",
        f"--kv-cache-dtype bf16; --page-size 16: {ORDEAL}", PACKED, CPU, (
        "e2e/test_model_breadth.py::test_the_tokens_are_the_same_however_keys_are_kept",)),
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", "LoRA, several adapters in a batch: "
        "joins, aborts, retraction, seeds (torch_native)", PACKED, CPU, (
        "e2e/test_lora_servers.py::test_chains_keep_their_adapters_beside_aborts_and_behind_"
        "retraction",
        "e2e/test_lora_servers.py::test_trees_of_more_adapters_than_fit_into_a_batch_keep_them",
    )),
    Row("Llama", "EAGLE3, chains", "FA3", "LoRA, several adapters in a batch (csgmv)", PACKED,
        EMULATED, (f"{UNUSUAL}::test_packed_rows_have_the_adapters_of_their_requests",)),
    Row("experts with LoRA adapters", "chains", "any", "", STATIC, UNSEEN),
    # Several processes
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", f"--tp-size 2: {ORDEAL}", PACKED, CPU,
        (
        "e2e/test_unusual_servers.py::test_two_tensor_parallel_ranks_give_the_outputs_of_two_ranks_"
        "without_speculation",
        "e2e/test_unusual_servers.py::test_two_tensor_parallel_ranks_follow_one_plan",
    )),
    Row("Llama", "EAGLE3, chains and trees", "FA3; FlashInfer", "--tp-size 2", PACKED, EMULATED,
        (f"{UNUSUAL}::test_two_ranks_keep_what_one_would",)),
    Row("Llama", "EAGLE3, chains", "ours for CPUs", f"--dp-size 2: {ORDEAL}", PACKED, CPU, (
        "e2e/test_data_parallel.py::test_requests_spread_over_replicas_are_answered_as_without_"
        "speculation",
        "e2e/test_data_parallel.py::test_a_change_reaches_every_replica",
    )),
    Row("DeepSeek (MLA, experts)", "NEXTN, chains", "ours for CPUs", "--enable-dp-attention, "
        f"--tp-size 2: {ORDEAL}, a rank without requests", PACKED, CPU, (
        "e2e/test_data_parallel_attention.py::test_both_ranks_answer_as_one_without_speculation_"
        "while_others_come_and_vanish",
        "e2e/test_data_parallel_attention.py::test_a_rank_that_serves_nobody_keeps_step_with_the_"
        "other",
    )),
    Row("GLM-4.5 (dense layers)", "EAGLE3, chains", "FA3; FlashInfer", "--enable-dp-attention, "
        "--tp-size 2: joins, aborts, retraction, opt-out, grammar, log-probabilities, a rank "
        "without requests", PACKED, EMULATED, (
        "emulated/test_data_parallel.py::test_ranks_with_requests_of_their_own_and_with_none_keep_"
        "what_one_would",
        "emulated/test_data_parallel.py::test_requests_that_leave_lose_their_place_or_ask_for_more_"
        "leave_the_others_as_they_were",
    )),
    Row("any", "chains", "any", "--enable-dp-attention with --moe-a2a-backend", STATIC, UNSEEN),
    Row("Llama", "EAGLE3, chains", "ours for CPUs", f"--nnodes 2: {ORDEAL}", PACKED, CPU, (
        "e2e/test_data_parallel.py::test_two_nodes_of_one_model_give_the_outputs_of_one",)),
    Row("Llama", "EAGLE3, chains and trees", "ours for CPUs", "prefill and decode apart: joins, "
        "aborts, retraction, seeds, opt-out", PACKED, CPU, (
        "e2e/test_disaggregation.py::test_chains_planned_and_gated_give_the_outputs_of_a_server_"
        "without_speculation",
        "e2e/test_disaggregation.py::test_requests_that_are_aborted_leave_the_others_untouched",
        "e2e/test_disaggregation.py::test_a_seed_gives_the_tokens_of_a_server_without_speculation",
        "e2e/test_disaggregation.py::test_an_opt_out_has_all_drafts_verified_from_the_first_on",
        "e2e/test_disaggregation.py::test_trees_retracted_on_the_decode_server_give_the_same_"
        "outputs",
    )),
    Row("Llama", "EAGLE3, chains", "ours for CPUs", "two servers behind SGLang's router, one of "
        "them killed", PACKED, CPU, (
        "e2e/test_router.py::test_requests_through_the_router_are_answered_as_without_speculation_"
        "and_counted_where_served",
        "e2e/test_router.py::test_a_worker_killed_under_load_costs_its_streams_and_no_other_answer",
    )),
)  # fmt: skip


def missing_tests(rows: Iterable[Row] = ROWS) -> list[str]:
    """Tests that rows name and nobody wrote."""
    written: dict[str, set[str]] = {}
    found = []
    for name in (test for row in rows for test in row.tests):
        file, _, function = name.partition("::")
        if file not in written:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            written[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        if function not in written[file]:
            found.append(name)
    return found


def outcomes(report: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` of each test in JUnit's XML, of all its cases."""
    found: dict[str, set[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        module = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        found.setdefault(f"{module}.py::{case.attrib['name'].partition('[')[0]}", set()).add(
            outcome
        )
    ranked = ("failed", "skipped", "passed")  # what is said of several cases
    return {test: next(kind for kind in ranked if kind in kinds) for test, kinds in found.items()}


def update(results: dict[str, dict[str, str]], reports: Iterable[Path]) -> None:
    """Put what reports say of the rows' tests into ``results``, with day and SGLang's version; what
    was skipped leaves what was known.
    """
    named = {test for row in ROWS for test in row.tests}
    for report in reports:
        for test, outcome in outcomes(report).items():
            if test in named and (outcome != "skipped" or test not in results):
                results[test] = {
                    "outcome": outcome, "sglang": version("sglang"), "on": str(date.today()),
                }  # fmt: skip


def shown(row: Row, results: Mapping[str, Mapping[str, str]]) -> str:
    """How a row is known."""
    if row.where == UNSEEN:
        return UNSEEN
    known = [results.get(test) for test in row.tests]
    if None in known:
        return f"{row.where}: not run"
    told = {(r["outcome"], r["sglang"], r["on"]) for r in known if r is not None}
    worst = min(told, key=lambda told: ("failed", "skipped", "passed").index(told[0]))
    oldest = min(on for *_, on in told)
    return f"{row.where}, SGLang {worst[1]}: {worst[0]} {oldest}"


def page(results: Mapping[str, Mapping[str, str]]) -> str:
    """All of it, in Markdown."""
    from sglang_c2t.srt.hooks.refusals import REFUSALS

    lines = [
        "# What is served, and how",
        "",
        "Made by `make matrix` from the rows in `tests/matrix.py` and the outcomes of their tests. "
        "No GPU has run any of them.",
        "",
        *(f"- **{answer}**: {meaning}." for answer, meaning in ANSWERS.items()),
        "",
        "| target | draft | attention | with | answer | shown by | tests |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        files = sorted({Path(test.partition("::")[0]).as_posix() for test in row.tests})
        cells = (
            *row[:4], f"**{row.answer}**", shown(row, results),
            ", ".join(f"`{file}`" for file in files),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Refused",
        "",
        "Each with this sentence, before a model loads (`srt/hooks/test_refusals.py`).",
        "",
        "| what | why | instead |",
        "|---|---|---|",
        *(f"| {r.what} | {r.why} | {r.instead} |".replace("|EAGLE", "\\|EAGLE")
          .replace("|NEXTN", "\\|NEXTN").replace("|STAND", "\\|STAND") for r in REFUSALS),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def read_results() -> dict[str, dict[str, str]]:
    """What the page was made from."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text())
    return found


def main(argv: list[str] | None = None) -> int:
    """Write the page and its results."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("reports", nargs="*", type=Path, help="JUnit XML of a run of the tests")
    reports: list[Path] = parser.parse_args(argv).reports
    results = read_results() if RESULTS.exists() else {}
    named = {test for row in ROWS for test in row.tests}
    results = {test: result for test, result in results.items() if test in named}
    update(results, reports)
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
