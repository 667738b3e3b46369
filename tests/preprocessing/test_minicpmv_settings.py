"""What MiniCPM-V's chat template and processor config change in a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import minicpm
from tests.media import picture
from tests.preprocessing.planning import image, plan_of

# As those of Qwen3: without a value, the model decides by itself whether it thinks.
THINKING = (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


def ids_of(folder: Path) -> list[int]:
    """The prompt of a picture without slices and a question."""
    ids: list[int] = plan_of(folder, image(picture(40, 40)), "What?").input_ids.tolist()
    return ids


@pytest.mark.parametrize("version", ["2.6", "4.5"])
def test_the_template_of_4_5_is_told_not_to_think(version: str, tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1, version)
    before = ids_of(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(minicpm.TEMPLATE + THINKING)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    options = {"enable_thinking": False} if version == "4.5" else {}
    turns = [{"role": "user", "content": "<ref>\nWhat?"}]
    *_, rendered = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False, **options
    ).partition("What?")
    assert ("<think>" in rendered) == (version == "4.5")
    ours, end = ids_of(tmp_path), tokenizer(rendered.partition("assistant")[2])["input_ids"]
    assert ours[-len(end) :] == end
    assert (ours == before) == (version != "4.5")


@pytest.mark.parametrize("file", ["preprocessor_config.json", "config.json"])
def test_images_have_no_numbers_where_the_checkpoint_says_so(file: str, tmp_path: Path) -> None:
    """The processor's file counts, and the model's where that says nothing."""
    minicpm.write(tmp_path, 1, changes={"use_image_id": file != "config.json"})
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"use_image_id": False}
    if file == "config.json":
        del settings["use_image_id"]
    path.write_text(json.dumps(settings))
    text = f"<|im_start|>user\n<image>{'<unk>' * 4}</image>\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(tmp_path) == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]


def test_markers_are_those_of_the_processors_file(tmp_path: Path) -> None:
    minicpm.write(tmp_path, 1)
    path = tmp_path / "preprocessor_config.json"
    changed = {"im_start": "<slice>", "im_end": "</slice>", "unk": "<ref>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    text = (
        f"<|im_start|>user\n<image_id>0</image_id><slice>{'<ref>' * 4}</slice>\nWhat?<|im_end|>\n"
        f"<|im_start|>assistant\n"
    )
    assert ids_of(tmp_path) == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
