# One file, three images: `--target preprocessing`, `encoder` or `generation`.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# gRPC's core writes past our logs; below errors it says what nobody needs.
ENV GRPC_VERBOSITY=ERROR
WORKDIR /app
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
# Dependencies alone (README.md because pyproject.toml names it), so that a change of code does not install them again.
COPY pyproject.toml README.md ./

FROM base AS protos
RUN pip install 'grpcio-tools>=1.76,<2'
COPY protos protos
RUN python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/framesieve/v1/*.proto

FROM base AS preprocessing-dependencies
RUN pip install '.[preprocessing,otel]'

# torch first and pinned. PyPI's build may carry gigabytes of CUDA: --build-arg TORCH=… takes any wheel's address.
FROM base AS torch-dependencies
ARG TORCH=torch==2.13.0
RUN pip install "$TORCH" && pip install '.[encoder,generation,otel]'

FROM preprocessing-dependencies AS preprocessing
COPY common common
COPY services/__init__.py services/
COPY services/preprocessing services/preprocessing
COPY --from=protos /app/framesieve framesieve
COPY demo/model demo/model
RUN useradd --system --uid 10001 framesieve
USER framesieve
EXPOSE 50051 9101
ENTRYPOINT ["python", "-m", "services.preprocessing"]
CMD ["--listen", "0.0.0.0:50051"]

FROM torch-dependencies AS encoder
COPY common common
COPY services/__init__.py services/
COPY services/encoder services/encoder
COPY --from=protos /app/framesieve framesieve
COPY demo/model demo/model
RUN useradd --system --uid 10001 framesieve
USER framesieve
EXPOSE 50052 9102
ENTRYPOINT ["python", "-m", "services.encoder"]
CMD ["--listen", "0.0.0.0:50052"]

FROM torch-dependencies AS generation
RUN pip install '.[lora]'
COPY common common
COPY services/__init__.py services/
COPY services/generation services/generation
COPY --from=protos /app/framesieve framesieve
COPY demo/model demo/model
RUN useradd --system --uid 10001 framesieve
USER framesieve
EXPOSE 50053 9103
ENTRYPOINT ["python", "-m", "services.generation"]
CMD ["--listen", "0.0.0.0:50053"]
