"""Preprocessing runs without torch and transformers, which its image does not hold."""

from __future__ import annotations

import subprocess
import sys


def test_it_plans_and_decodes_without_torch_and_transformers(tiny_checkpoint: object) -> None:
    program = f"""
import sys
for name in ("torch", "transformers", "torchvision"):
    sys.modules[name] = None
import services.preprocessing.__main__
from io import BytesIO
from pathlib import Path
from PIL import Image
from common.checkpoint import Checkpoint
from common.contract.plan import Modality
from services.preprocessing.planner import Conversation, MediaRequest, Planner
from services.preprocessing.video.sampling import FrameSampling
from services.preprocessing.prompt.tokens import Turn
file = BytesIO()
Image.new("RGB", (64, 64), "red").save(file, "PNG")
image = MediaRequest("image", Modality.IMAGE, file.getvalue(), FrameSampling())
planner = Planner(Checkpoint(Path({str(tiny_checkpoint)!r})), None)
planned = planner.plan(Conversation((Turn("user", (Modality.IMAGE, "What is it?")),), (image,)))
(piece,) = planned.media[0].slices()
print(piece.pixels.shape)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "(1, 56, 56, 3)", found.stderr
