"""GStreamer's RTSP server, which the tests run by the system's Python: `gi` is no package of pip's.

Argument: JSON with
    mounts     what is played, by path: a pipeline of gst-launch with payloaders pay0, pay1, ...
    port       0: any
    cert, key  for rtsps, in PEM
    users      passwords by name
    digest     whether passwords are asked for by Digest; otherwise by Basic
    udp        whether packets are sent by UDP alone; otherwise in the connection
    tells      whether it prints a line of JSON when it begins to play: the path, and began_s, when time 0 was due
It prints its port once it listens, and then a line for each TEARDOWN.
"""

import json
import sys
import time

import gi

for name in ("Gst", "GstRtsp", "GstRtspServer"):
    gi.require_version(name, "1.0")
from gi.repository import Gio, GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402  (by these versions)


def tell(factory: object, media: GstRtspServer.RTSPMedia, path: str) -> None:
    pipeline = media.get_element().get_parent()

    def begun() -> bool:
        if pipeline.get_state(0)[1] != Gst.State.PLAYING:
            return True  # it is called again
        since_s = (pipeline.get_clock().get_time() - pipeline.get_base_time()) / Gst.SECOND
        print(json.dumps({"path": path, "began_s": time.time() - since_s}), flush=True)
        return False

    GLib.timeout_add(20, begun)


wanted = json.loads(sys.argv[1])
Gst.init(None)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(str(wanted.get("port", 0)))
users, cert = wanted.get("users", {}), wanted.get("cert")
if users or cert:
    auth = GstRtspServer.RTSPAuth()
    if cert:
        auth.set_tls_certificate(Gio.TlsCertificate.new_from_files(cert, wanted["key"]))
    if users:
        methods = GstRtsp.RTSPAuthMethod
        auth.set_supported_methods(methods.DIGEST if wanted.get("digest") else methods.BASIC)
    role = GstRtspServer.RTSPToken()
    role.set_string("media.factory.role", "user")
    for name, password in users.items():
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic(name, password), role)
        auth.add_digest(name, password, role)
    if not users:
        auth.set_default_token(role)
    server.set_auth(auth)
for path, pipeline in wanted["mounts"].items():
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(f"( {pipeline} )")
    factory.set_protocols(GstRtsp.RTSPLowerTrans.UDP if wanted.get("udp") else GstRtsp.RTSPLowerTrans.TCP)
    if wanted.get("tells"):
        factory.connect("media-configure", tell, path)
    if users or cert:
        permissions = GstRtspServer.RTSPPermissions()
        permissions.add_permission_for_role("user", "media.factory.access", True)
        permissions.add_permission_for_role("user", "media.factory.construct", True)
        factory.set_permissions(permissions)
    server.get_mount_points().add_factory(path, factory)
server.connect(
    "client-connected",
    lambda _, client: client.connect("teardown-request", lambda *_: print("TEARDOWN", flush=True)),
)
server.attach(None)
print(server.get_bound_port(), flush=True)
GLib.MainLoop().run()
