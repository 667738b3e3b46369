"""uvicorn's WebSocket, whose connections end soon and hold bounded memory whatever a client sends or does not read."""

from __future__ import annotations

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MAX_PARTS = 2**14
"""Of a message. Empty ones would have no end: its size bounds bytes alone."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A transport that is closed waits until its client has read everything, and so does the application in `send`:
    one without a reader is aborted."""

    _pong = b""

    async def send(self, message: ASGISendEvent) -> None:
        """A handshake that is refused with a body is complete, which uvicorn overlooks and logs as an error."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_unread = self.transport.is_closing() and not self.writable.is_set()
        if is_unread or len(self.frames) > MAX_PARTS:
            self.transport.abort()

    def handle_text(self, event: Frame) -> None:
        """The application gets texts as bytes, which say their size, and decodes them beside the event loop."""
        self.handle_bytes(event)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def handle_ping(self) -> None:
        """While the client does not read, only the last pong is kept. Source: RFC 6455 section 5.5.3."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send()) or self._pong

    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.write(self._pong)
        self._pong = b""
