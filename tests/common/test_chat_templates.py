"""Chat templates are found in the files in which transformers finds them, in its order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from demo.checkpoint import TINY, make_tokenizer
from gridsieve.common.chat_templates import chat_templates
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and one without templates to fill it from."""
    folder = tmp_path_factory.mktemp("places") / "empty"
    tokenizer = make_tokenizer(TINY)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return Path(shutil.copytree(folder, folder.with_name("filled"))), folder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # transformers leaves files open
@pytest.mark.parametrize(
    "places", [each if each.bit_count() < 3 else pytest.param(each, marks=pytest.mark.deep) for each in range(2**5)]
)
def test_templates_are_found_where_transformers_finds_them(places: int, sources: tuple[Path, Path]) -> None:
    """Every choice of the places, each with a template of its own, by transformers' own reading of the files."""
    folder, empty = sources
    shutil.rmtree(folder)
    shutil.copytree(empty, folder)
    named = [{"name": name, "template": f"{{{{ tools }}}}list {name}"} for name in ("default", "tool_use")]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "additional_chat_templates").mkdir()
    files = {
        "tokenizer_config.json": json.dumps(config | {"chat_template": named}),
        "additional_chat_templates/tool_use.jinja": "{{ tools }}additional",
        "chat_template.jinja": "jinja",
        "chat_template.json": json.dumps({"chat_template": "json"}),
        "processor_config.json": json.dumps({"chat_template": "processor"}),
    }
    for place, (name, text) in enumerate(files.items()):
        if places & 1 << place:
            (folder / name).write_text(text)
    try:
        processor, _ = ProcessorMixin.get_processor_dict(folder)
        theirs = SimpleNamespace(chat_template=processor.get("chat_template"))
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        if theirs.chat_template is None:
            expected = tokenizer.get_chat_template()
        else:
            expected = ProcessorMixin._resolve_chat_template(theirs, None)  # type: ignore[arg-type]
    except ValueError:
        with pytest.raises(StartupError, match=str(folder)):
            chat_templates(Checkpoint(folder))
        return
    found = chat_templates(Checkpoint(folder))
    assert found.conversation.text == expected
    shown = [each.text for each in found.for_tools if "tools" in each.text]
    with_tools = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
    assert shown[:1] == ([with_tools] if "tools" in with_tools else [])
