"""The benchmarks' own arithmetic: goals, tables, medians, process costs and operation counts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLForConditionalGeneration

from benchmarks.gpu.operations import decode_operations, prefill_operations
from benchmarks.processes import cpu_s, resident_bytes, tree
from benchmarks.table import Row, table
from demo.checkpoint import TINY, make_config, make_tokenizer, write_checkpoint
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model.language_model import LanguageModel

# A child process that starts a grandchild, which uses 64 MiB and 0.2 s of processor time, prints a line and waits.
COSTLY = """
import time
held, start = b"1" * 2**26, time.process_time()
while time.process_time() - start < 0.2:
    pass
print(flush=True)
input()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COSTLY!r}])"


def test_the_table_has_units_goals_and_notes_and_a_goal_includes_its_bound() -> None:
    rows = [
        Row("hop", "bare", 3 * 2**20, 4 * 2**20, "bytes/s", at_least=0.9, note="busy"),
        Row("question", "first", 0.015, 0.1, "s", at_most=0.15),
        Row("videos", "turn", 1.5, 1, "1/s"),
    ]
    assert table(rows)[2:] == [
        "| hop | 3 MiB/s | bare | 4 MiB/s | 0.75 | ≥ 0.9 | no |",
        "| question | 15 ms | first | 100 ms | 0.15 | ≤ 0.15 | yes |",
        "| videos | 1.5 1/s | turn | 1 1/s | 1.5 |  |  |",
        "",
        "- hop: busy",
    ]


def test_costs_of_a_process_include_its_descendants() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(list(tree(process.pid))) == 2
        resident = resident_bytes(process.pid)
        assert 2**26 < resident < 2**26 + 2**26
        assert 0.2 <= cpu_s(process.pid) < 1
        process.communicate(b"\n")
    deadline_s = time.monotonic() + 5
    while resident_bytes(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (resident_bytes(process.pid), cpu_s(process.pid)) == (0, 0)


def test_operations_agree_with_torchs_count(tmp_path: Path) -> None:
    """Of a prefill of as many tokens as one sequence has, and of a decode step of three such sequences."""
    sequences, tokens = 3, 48
    config = make_config(TINY, make_tokenizer(TINY))
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    ours, text = tiny_model(tmp_path), model.config.text_config
    ids = torch.ones(sequences, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=ids[:1], logits_to_keep=1)
    unseen = 2 * tokens**2 * text.hidden_size * text.num_hidden_layers  # masked positions, which torch counts
    assert prefill_operations(ours, tokens) == pytest.approx(counter.get_total_flops() - unseen, rel=1e-2)
    with torch.inference_mode():
        before = model(input_ids=ids[:, 1:], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids[:, :1], cache=before)
    assert decode_operations(ours, sequences, tokens) == pytest.approx(counter.get_total_flops(), rel=1e-2)


def tiny_model(folder: Path) -> LanguageModel:
    return load_language_model(Checkpoint(write_checkpoint(folder, TINY)), torch.float32, torch.device("cpu"))
