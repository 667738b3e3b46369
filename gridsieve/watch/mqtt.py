"""Events to an MQTT broker: at least once (QoS 1), over a connection that paho makes again after growing waits.

paho's callbacks run in a thread of its own.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

from paho.mqtt.client import Client, error_string
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from gridsieve.watch.cameras import Mqtt
from gridsieve.watch.outbox import Letter, Undelivered

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1, 60


class MqttSender:
    """failed: takes the reason why there is no connection."""

    def __init__(self, wanted: Mqtt, failed: Callable[[str], None]) -> None:
        self.name = f"mqtt {wanted.host}:{wanted.port}"
        self._topic = wanted.topic
        self._acknowledged: dict[int, asyncio.Future[None]] = {}  # by message id
        loop = asyncio.get_running_loop()
        tell = loop.call_soon_threadsafe
        self._client = client = Client(CallbackAPIVersion.VERSION2)
        client.reconnect_delay_set(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        if wanted.tls:
            client.tls_set_context(ssl.create_default_context())
        if wanted.user is not None:
            client.username_pw_set(wanted.user, wanted.password)

        def connected(_: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
            if reason.is_failure:
                tell(failed, f"the broker says {reason}")

        def no_connection(*_: Any) -> None:
            tell(failed, str(sys.exception() or "no connection"))  # paho calls it where it caught the error

        def disconnected(_: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
            if reason.is_failure:
                tell(failed, f"the connection ended: {reason}")

        def published(_: Any, __: Any, message_id: int, *___: Any) -> None:
            tell(self._acknowledge, message_id)

        client.on_connect, client.on_connect_fail = connected, no_connection
        client.on_disconnect, client.on_publish = disconnected, published
        client.connect_async(wanted.host, wanted.port)
        client.loop_start()

    async def deliver(self, letter: Letter) -> None:
        """Without a connection paho keeps the event, and sends it after the next one is made."""
        sent = self._client.publish(self._topic.replace("{camera}", letter.camera), letter.body, qos=1)
        if sent.rc not in (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_NO_CONN):
            raise Undelivered(error_string(sent.rc))
        acknowledged = self._acknowledged[sent.mid] = asyncio.get_running_loop().create_future()
        await acknowledged

    async def close(self) -> None:
        self._client.disconnect()
        # It waits for paho's thread, which may be connecting for long.
        threading.Thread(target=self._client.loop_stop, daemon=True).start()

    def _acknowledge(self, message_id: int) -> None:
        if (acknowledged := self._acknowledged.pop(message_id, None)) and not acknowledged.done():
            acknowledged.set_result(None)
