"""Importing `gridsieve`: which packages the client needs, and which names it exports."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

from gridsieve.__main__ import COMMANDS

# Rejects every third-party import except those that the client may need. typing_extensions is grpcio's own dependency.
CLIENT_ALONE = """
import sys
from importlib.abc import MetaPathFinder

ALLOWED = {"gridsieve", "grpc", "google.protobuf", "numpy", "typing_extensions"}

class OnlyClient(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top, two = name.split(".")[0], ".".join(name.split(".")[:2])
        if name != "google" and not {top, two} & ALLOWED and top not in sys.stdlib_module_names:
            # Optional imports of the allowed packages themselves go on without it.
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, OnlyClient())
import asyncio
from gridsieve import GridsieveClient, Video
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import user_turn

async def main():
    async with GridsieveClient("127.0.0.1:1", token="secret-token-0123456789"):
        generate_request([user_turn(Video(data=b"film"), "What moves?")], {"pruning_rate": 0.75})

asyncio.run(main())
"""


def run(code: str) -> None:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_client_needs_grpcio_protobuf_and_numpy_alone() -> None:
    run(CLIENT_ALONE)


def test_commands_do_not_import_torch_and_the_help_imports_no_command() -> None:
    imported = "import sys, importlib, gridsieve.__main__ as main; "
    every = "[importlib.import_module(module) for module, _ in main.COMMANDS.values()]; "
    run(f"{imported}{every}sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    run(f"{imported}sys.exit(any(module in sys.modules for module, _ in main.COMMANDS.values()))")


def test_the_help_has_the_first_line_of_each_command() -> None:
    for name, (module, line) in COMMANDS.items():
        assert getattr(import_module(module), name).__doc__.partition("\n")[0] == line
