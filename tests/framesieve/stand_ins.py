"""Services for tests of what starts them: small gRPC health servers that misbehave when a flag tells them to.

Flags come by the command line, and by the variable MORE for all of them.
"""

from __future__ import annotations

from pathlib import Path

STAND_IN = """
import argparse, os, pathlib, signal, sys, time

parser = argparse.ArgumentParser()
for name in ("listen", "metrics-port", "drain-s", "model", "media-root", "preprocessing", "encoder", "extra"):
    parser.add_argument("--" + name)
for name in ("refuse-to-start", "never-ready", "ignore-sigterm", "cut-off", "end-by-itself"):
    parser.add_argument("--" + name, action="store_true")
arguments = parser.parse_args([*sys.argv[1:], *os.environ.get("MORE", "").split()])
name = pathlib.Path(sys.argv[0]).stem
record = pathlib.Path(os.environ["RECORD"])
print(name, "says hello", flush=True)
(record / f"{name}.arguments").write_text(repr(vars(arguments)))
if arguments.refuse_to_start:
    print("cannot start: a weight is missing", file=sys.stderr)
    sys.exit(2)
if arguments.never_ready:
    time.sleep(60)

from concurrent import futures  # from here on, for they take their time
import grpc
from grpc_health.v1 import health, health_pb2_grpc

stopping = False

def on_term(*_):  # sets a variable: whoever waits for an Event holds its lock, and so would this
    global stopping
    stopping = not arguments.ignore_sigterm

signal.signal(signal.SIGTERM, on_term)
server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(arguments.listen)
server.start()
while not stopping:
    time.sleep(0.02)
    if arguments.end_by_itself and (record / "end").exists():
        sys.exit(1)
with (record / "stopped").open("a") as file:
    file.write(name + "\\n")
sys.exit(3 if arguments.cut_off else 0)
"""


def stopped(record: Path) -> list[str]:
    path = record / "stopped"
    return path.read_text().split() if path.exists() else []
