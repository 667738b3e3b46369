"""The rows of model families: what is made of them, and what another distribution adds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families import FAMILIES, families, family_of
from gridsieve.families.__main__ import table
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.loading.text_family import TextFamily
from gridsieve.services.preprocessing.layouts.family import load_family
from tests.families import FAMILIES as TESTED
from tests.families.qwen_omni import write_published

ROOT = Path(__file__).parents[2]
# A module of another distribution, which serves Qwen2.5-VL as a model type of its own.
OTHER = """
from gridsieve.families import ModelFamily

ROW = ModelFamily(
    model_type="{model_type}",
    models="Other-VL",
    folder="other_vl",
    prompt="parts:Prompt.from_checkpoint",
    tower="parts:load",
    text="parts:TEXT",
    positions="M-RoPE",
)
"""
PARTS = """
from gridsieve.families.qwen.prompt import Qwen25VL as Prompt
from gridsieve.families.qwen.text import QWEN2_5_VL as TEXT
from gridsieve.families.qwen.tower import load_qwen2_5_vl as load
"""


def test_every_family_is_tested_and_its_row_names_what_its_folder_has() -> None:
    tested = {family.model_type or name for name, family in TESTED.items()}
    assert sorted(row.model_type for row in FAMILIES) == sorted(tested)
    for row in FAMILIES:
        assert callable(row.load("prompt"))
        assert callable(row.load("tower"))
        assert isinstance(row.load("text"), TextFamily)
        assert not row.sound or callable(row.load("sound"))


def test_the_table_of_the_docs_is_that_of_the_rows() -> None:
    assert table() in (ROOT / "docs" / "models.md").read_text(), "put it there: python -m gridsieve.families"


def test_rows_load_without_the_families_and_prompts_without_torch() -> None:
    script = """
import sys
from gridsieve.families import families
rows = families().values()
assert not [name for name in sys.modules if name.startswith("gridsieve.families.")]
for row in rows:
    row.load("prompt")
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_another_model_type_is_refused_with_those_that_are_served(tiny_checkpoint: Path, tmp_path: Path) -> None:
    served = ", ".join(sorted(row.model_type for row in FAMILIES))
    with pytest.raises(StartupError, match=f"model_type 'llama'; supported: {served}"):
        family_of(_renamed(tiny_checkpoint, tmp_path / "llama", "llama"))


def test_a_model_that_also_speaks_is_read_as_the_part_of_it_that_reads(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    thinker, cpu = Checkpoint(checkpoints("qwen2_5_omni")), torch.device("cpu")
    whole = Checkpoint(write_published(tmp_path / "whole", thinker.folder))
    assert load_family(whole) == load_family(thinker)
    towers = [load_tower(each, "float32", cpu) for each in (whole, thinker)]
    features, frames = torch.linspace(-1, 1, 16 * 90).view(16, 90), torch.arange(2 * 56 * 84 * 3).view(2, 56, 84, 3)
    for given in (Sound(features), frames.remainder(256).to(torch.uint8)):
        ((own,), (expected,)) = (tower.encode([given]) for tower in towers)
        assert torch.equal(own, expected)
    texts = [load_language_model(each, torch.float32, cpu) for each in (whole, thinker)]
    for name, expected in texts[1].text.state_dict().items():
        assert torch.equal(texts[0].text.state_dict()[name], expected), name
    states = torch.ones(1, texts[0].hidden_size)
    assert torch.equal(*(each.lm_head(states) for each in texts))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, whose one distribution has the package other_vl."""
    folder = tmp_path / "site"
    info = folder / "other_vl-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-vl\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gridsieve.families]\nother_vl = other_vl:ROW\n")
    (folder / "other_vl").mkdir()
    (folder / "other_vl" / "parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(folder))
    families.cache_clear()
    yield folder
    families.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "other_vl"]:
        del sys.modules[name]


def test_another_distribution_adds_a_family(site: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (site / "other_vl" / "__init__.py").write_text(OTHER.format(model_type="other_vl"))
    checkpoint, cpu = _renamed(tiny_checkpoint, tmp_path / "other", "other_vl"), torch.device("cpu")
    assert list(families()) == [*(row.model_type for row in FAMILIES), "other_vl"]
    assert load_family(checkpoint).token_px == load_family(Checkpoint(tiny_checkpoint)).token_px
    assert load_tower(checkpoint, "float32", cpu).pruning_methods == families()["other_vl"].methods
    assert load_language_model(checkpoint, torch.float32, cpu).position_axes == 3


def test_a_family_of_another_distribution_replaces_none(site: Path) -> None:
    (site / "other_vl" / "__init__.py").write_text(OTHER.format(model_type="qwen2_vl"))
    with pytest.raises(StartupError, match=r"entry point other_vl = other_vl:ROW: .* of a taken type"):
        families()


def test_a_family_that_cannot_be_imported_is_named(site: Path) -> None:
    (site / "other_vl" / "__init__.py").write_text("")
    with pytest.raises(StartupError, match=r"entry point other_vl = other_vl:ROW cannot be imported: .*'ROW'"):
        families()


def _renamed(checkpoint: Path, folder: Path, model_type: str) -> Checkpoint:
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return Checkpoint(folder)
