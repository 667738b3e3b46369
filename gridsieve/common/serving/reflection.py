"""gRPC server reflection, v1 and v1alpha: which services, methods and message types a server has.

grpcio-reflection has v1alpha only. v1 is the same protocol under another package name, so one servicer answers both,
and the description of v1 is made from that of v1alpha.
Source: grpc/proto/grpc/reflection/v1/reflection.proto.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds both versions, which list `services`, by their full names, and themselves."""
    described = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    renamed = text_format.Parse(str(described).replace("v1alpha", "v1"), FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(renamed.SerializeToString())
    servicer = reflection.aio.ReflectionServicer((*services, *_NAMES))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in _NAMES]
    )
