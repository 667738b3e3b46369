"""Embedders and rerankers in the engine: what is read of a prompt is transformers' state of its last token after the
final norm, for any mix of media, pruning, chunks, neighbours, preemption and prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.request.request import Finished, PrefillStarted, Read
from tests.families import text_and_head, write_qwen3_vl_reader
from tests.generation.checkpoints import changed, load, tied
from tests.generation.test_law import LAW, begins_like
from tests.law import Question, answer, question
from tests.oracle import expected_sequence, expected_states
from tests.tiny import PAD_ID, Models, TinyEngine, load_models

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["Pooling", "LogitScore"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("reader")
    return load_models("qwen3_vl", folder, lambda to, seed: write_qwen3_vl_reader(to, seed, request.param))


@LAW
@given(st.data())
def test_what_is_read_is_the_last_state_of_any_mix(models: Models, data: st.DataObject) -> None:
    questions = [data.draw(question(models.family))]
    for _ in range(data.draw(st.integers(1, 3))):
        fresh, other = data.draw(question(models.family)), data.draw(st.sampled_from(questions))
        questions.append(begins_like(data, models, other) if data.draw(st.booleans()) else fresh)
    questions = [Question(each.parts, 1, each.kept_seed) for each in questions]
    engine = TinyEngine(
        models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 1, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((2, 5, 16, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        overlap=data.draw(st.booleans()),
    )
    arrivals = data.draw(st.lists(st.sampled_from((0, 0, 1, 3, 8)), min_size=len(questions), max_size=4))
    asked = answer(engine, questions, arrivals, data.draw(st.lists(st.integers(0, 8), max_size=10)))
    for asking, each in zip(questions, asked, strict=True):
        started, read, finished = each.events
        assert isinstance(started, PrefillStarted)
        assert isinstance(read, Read)
        assert isinstance(finished, Finished)
        assert finished.completion_tokens == 0
        text, head = text_and_head(models.reference)
        state = expected_states(text, expected_sequence(asking.parts, asking.kept, PAD_ID), asking.items)[-1]
        torch.testing.assert_close(torch.from_numpy(read.values), of_state(models, state, head), atol=TOLERANCE, rtol=0)
    assert engine.engine.stats().blocks_used == 0


def of_state(models: Models, state: torch.Tensor, head: Any) -> torch.Tensor:
    """What the published scripts make of a state, before they normalise a vector or take a score's sigmoid."""
    if Checkpoint(models.folder).task == "embed":
        return state
    ids = AutoTokenizer.from_pretrained(models.folder).get_vocab()
    return ((head.weight[ids["yes"]] - head.weight[ids["no"]]) @ state)[None].detach()


def test_a_reranker_whose_output_layer_is_its_embeddings_compares_rows_of_these(tmp_path: Path) -> None:
    folder = tied(write_qwen3_vl_reader(tmp_path / "own", 7, "LogitScore"), tmp_path / "tied")
    model, ids = load(folder), AutoTokenizer.from_pretrained(folder).get_vocab()
    embeddings, states = model.embed_tokens.weight, torch.randn(3, model.hidden_size)
    expected = states @ (embeddings[ids["yes"]] - embeddings[ids["no"]])
    torch.testing.assert_close(model.lm_head(states)[:, 0], expected)


def test_an_embedder_is_known_by_its_modules_or_by_its_name(checkpoints: Any, tmp_path: Path) -> None:
    plain = checkpoints("qwen3_vl")
    named = changed(plain, tmp_path / "Qwen3-VL-Reranker-2B")
    assert [Checkpoint(each).task for each in (plain, named)] == ["generate", "score"]
    assert Checkpoint(plain).fingerprint != Checkpoint(named).fingerprint, "their frames and prompts differ"
    (named / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    assert Checkpoint(named).task == "embed"
    (named / "modules.json").write_text('["Pooling"]')
    with pytest.raises(StartupError, match=r"modules\.json is no list of modules with a type each"):
        _ = Checkpoint(named).task


def test_models_of_families_without_embedders_are_refused_by_name(checkpoints: Any, tmp_path: Path) -> None:
    folder = changed(checkpoints("qwen3_5"), tmp_path / "Qwen3.5-Embedding")
    with pytest.raises(StartupError, match=r"is a model to embed, .*: not supported for the model_type qwen3_5$"):
        load(folder)
