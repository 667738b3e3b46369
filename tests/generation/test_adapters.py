"""Adapters compute what PEFT computes over transformers' text model, whatever else is in the batch or the cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.generation.settings import AdapterFolder
from tests.generation.adapted_models import CONFIGS, Adapted, engine_of, load_adapted, rewrite, spoiled
from tests.generation.test_decode_graphs import Recorder
from tests.law import Question, answer, assert_law, question
from tests.oracle import Text, expected_logprobs, expected_sequence
from tests.tiny import PAD_ID, TinyEngine, random_item

ASKING = Question((Text(tuple(range(20, 40))),), 6)


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl_moe", marks=pytest.mark.deep)])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def adapted(family: str, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return load_adapted(family, tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_computes_what_peft_computes(adapted: Adapted, name: str) -> None:
    video = random_item(adapted.models.family, (3, 2, 3), Fraction(1), rate=0.5)
    asking = Question((Text((20, 21, 22)), video, Text((30, 31))), 6, adapter=name)
    engine = TinyEngine(adapted.models.engine)
    asked = answer(engine, [asking])
    assert_law(adapted.models, engine, [asking], asked, adapted=adapted.text)
    expected = expected_sequence(asking.parts, asking.kept, PAD_ID)
    reference = adapted.models.reference
    plain = expected_logprobs(
        reference.model.language_model, reference.lm_head, expected, asking.items, asked[0].answer
    )
    own = torch.stack(engine.runner.logits["0"]).log_softmax(dim=-1)
    assert float((own - plain).abs().max()) > 0.01, "the adapter changes nothing, so the test would prove nothing"


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_neighbours_with_other_adapters_or_none_change_nothing(adapted: Adapted, data: st.DataObject) -> None:
    named = st.sampled_from((None, *CONFIGS))
    asking = data.draw(question(adapted.models.family))
    others = data.draw(st.lists(question(adapted.models.family), min_size=1, max_size=3))
    questions = [replace(each, adapter=data.draw(named)) for each in (asking, *others, asking)]
    questions.append(replace(asking, adapter=data.draw(named), answers=data.draw(st.integers(1, 2))))
    engine = TinyEngine(
        adapted.models.engine,
        blocks=max(each.most_blocks for each in questions) + data.draw(st.sampled_from((0, 4, 64))),
        max_num_batched_tokens=data.draw(st.sampled_from((3, 8, 64, 512))),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_draft_tokens=data.draw(st.sampled_from((0, 3))),
    )
    asked = answer(engine, questions, data.draw(st.lists(st.integers(0, 8), max_size=5)))
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_a_prefix_is_reused_only_by_an_adapter_of_the_same_content(adapted: Adapted, tmp_path: Path) -> None:
    """The same files under another name share a prefix; files that differ in one weight or in alpha do not."""
    models = adapted.models
    twin, changed = tmp_path / "twin", tmp_path / "changed"
    shutil.copytree(adapted.folder / "plain", twin)
    shutil.copytree(adapted.folder / "plain", changed)
    rewrite(changed, lambda weights: next(iter(weights.values())).view(-1)[:1].add_(1e-6))
    folders = [AdapterFolder(path.name, path) for path in (adapted.folder / "plain", twin, changed)]
    folders.append(replace(spoiled(adapted, tmp_path / "louder", lora_alpha=8), name="louder"))
    engine = TinyEngine(engine_of(models.folder, *folders))
    cached = []
    for name in (None, "plain", "changed", "louder", "plain", "twin", "louder", None):
        asked = answer(engine, [replace(ASKING, adapter=name)])
        cached.append(asked[0].request.cached_tokens)
    assert cached == [0, 0, 0, 0, 16, 16, 16, 16]


def test_encoded_media_are_not_reused_across_adapters(adapted: Adapted) -> None:
    video = random_item(adapted.models.family, (3, 2, 3), Fraction(1), rate=0.5)
    asking = Question((Text((20, 21, 22)), video, Text((30, 31))), 4)
    engine = TinyEngine(adapted.models.engine)
    questions = [replace(asking, adapter=name) for name in ("plain", "patterns", None, "plain")]
    asked = [answer(engine, [each])[0] for each in questions]
    assert [each.spared for each in asked] == [(), (), (), (0,)]
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)


def test_only_steps_without_adapters_are_replayed_as_graphs(adapted: Adapted) -> None:
    capture, engine = Recorder(), TinyEngine(adapted.models.engine)
    engine.runner.capture_decoding(4, 256, capture)
    questions = [replace(ASKING, adapter="plain", new_tokens=5), replace(ASKING, new_tokens=9)]
    asked = answer(engine, questions)
    # Both begin in one step, so the last four tokens of the longer answer are decoded alone.
    assert capture.replayed == [1] * 4
    assert_law(adapted.models, engine, questions, asked, adapted=adapted.text)
