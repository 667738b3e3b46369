"""Stand-ins for the services and the gateway, for tests of what starts them: health servers that misbehave by flags.

Flags come from the command line, and for all of them from the variable MORE. Each stand-in writes to the folder RECORD:
its arguments, a file `<name>.terminating` on SIGTERM, and to `events` that it started, serves, and stopped by SIGTERM.
"""

from __future__ import annotations

from pathlib import Path

STAND_IN = """
import argparse, os, pathlib, signal, sys, time

parser = argparse.ArgumentParser()
for name in ("listen", "metrics-port", "drain-s", "model", "media-root", "preprocessing", "encoder",
             "generation", "upload-root", "extra", "device", "tower-tensor-parallel"):
    parser.add_argument("--" + name)
for name in ("refuse-to-start", "never-ready", "slow-start", "ignore-sigterm", "cut-off", "end-by-itself",
             "deterministic"):
    parser.add_argument("--" + name, action="store_true")
arguments = parser.parse_args([*sys.argv[1:], *os.environ.get("MORE", "").split()])
name = pathlib.Path(sys.argv[0]).stem
record = pathlib.Path(os.environ["RECORD"])

def note(event):
    with (record / "events").open("a") as file:
        file.write(f"{name} {event}\\n")

print(name, "says hello", flush=True)
note("started")
(record / f"{name}.arguments").write_text(repr(vars(arguments)))
if arguments.refuse_to_start:
    print("cannot start: a weight is missing", file=sys.stderr)
    sys.exit(2)
if arguments.never_ready:
    time.sleep(60)
if arguments.slow_start:
    time.sleep(0.5)

from concurrent import futures  # imported here because it is slow
import grpc
from grpc_health.v1 import health, health_pb2_grpc

stopping = False

def on_term(*_):
    global stopping
    stopping = not arguments.ignore_sigterm
    (record / f"{name}.terminating").touch()

signal.signal(signal.SIGTERM, on_term)
if name == "gateway":
    import http.server, threading
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    host, _, port = arguments.listen.partition(":")
    server = http.server.HTTPServer((host, int(port)), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
else:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(arguments.listen)
    server.start()
note("serving")
while not stopping:
    time.sleep(0.02)
    if arguments.end_by_itself and (record / "end").exists():
        sys.exit(1)
note("stopped")
sys.exit(3 if arguments.cut_off else 0)
"""


def write_stand_ins(folder: Path) -> None:
    services = folder / "gridsieve" / "services"
    services.mkdir(parents=True)
    for package in (services.parent, services):
        (package / "__init__.py").touch()
    for name in ("preprocessing", "encoder", "generation", "gateway"):
        (services / f"{name}.py").write_text(STAND_IN)


def stopped(record: Path) -> list[str]:
    """The names of the stand-ins that have ended by SIGTERM, in order."""
    return [name for name, event in events(record) if event == "stopped"]


def events(record: Path) -> list[tuple[str, str]]:
    """Names of stand-ins, each with started, serving or stopped, in order."""
    path = record / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, event) for name, _, event in (line.partition(" ") for line in lines)]
