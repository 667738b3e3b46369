# Builds four images: `--target preprocessing`, `--target encoder`, `--target generation` or `--target gateway`.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# gRPC's core bypasses the services' logs. Restrict it to errors; its other lines are noise.
ENV GRPC_VERBOSITY=ERROR
WORKDIR /app
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PACKAGE=/venv/lib/python3.11/site-packages/gridsieve
# Only the files that pip needs: a change of code does not reinstall dependencies. pip generates gridsieve/v1 from
# protos/ and installs it as $PACKAGE/v1; the services' own code is copied beside it below.
COPY pyproject.toml README.md ./
COPY protos protos

FROM base AS preprocessing-dependencies
RUN pip install '.[preprocessing,otel]'

# torch is installed first and pinned. PyPI's build may include gigabytes of CUDA libraries; to use another build, set
# --build-arg TORCH=… to the URL of a wheel.
FROM base AS torch-dependencies
ARG TORCH=torch==2.13.0
RUN pip install "$TORCH" && pip install ".[encoder,generation,otel]"
# Forwards on a CPU allocate a tensor in every operator: tcmalloc does so faster than glibc.
RUN apt-get update && apt-get install --yes --no-install-recommends libtcmalloc-minimal4 && rm -rf /var/lib/apt/lists/*
ENV LD_PRELOAD=libtcmalloc_minimal.so.4
# Models are compiled at startup, unless they are very small.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV XDG_CACHE_HOME=/var/cache FLASHINFER_WORKSPACE_BASE=/var/cache/gridsieve

FROM preprocessing-dependencies AS preprocessing
COPY gridsieve/common $PACKAGE/common
COPY gridsieve/families $PACKAGE/families
COPY gridsieve/services/__init__.py $PACKAGE/services/
COPY gridsieve/services/preprocessing $PACKAGE/services/preprocessing
COPY demo/gridsieve-demo $PACKAGE/gridsieve-demo
RUN useradd --system --uid 10001 gridsieve && install --directory --owner=gridsieve --mode=700 /uploads
USER gridsieve
EXPOSE 50051 9101
ENTRYPOINT ["python", "-m", "gridsieve.services.preprocessing"]
CMD ["--listen", "0.0.0.0:50051"]

FROM torch-dependencies AS encoder
RUN pip install '.[lora]'
COPY gridsieve/common $PACKAGE/common
COPY gridsieve/families $PACKAGE/families
COPY gridsieve/services/__init__.py $PACKAGE/services/
COPY gridsieve/services/compute $PACKAGE/services/compute
COPY gridsieve/services/encoder $PACKAGE/services/encoder
COPY demo/gridsieve-demo $PACKAGE/gridsieve-demo
RUN useradd --system --uid 10001 gridsieve && install --directory --owner=gridsieve /var/cache/gridsieve
USER gridsieve
EXPOSE 50052 9102
ENTRYPOINT ["python", "-m", "gridsieve.services.encoder"]
CMD ["--listen", "0.0.0.0:50052"]

FROM torch-dependencies AS generation
# For GPUs, --build-arg CUDA=,cuda adds FlashInfer and a compiler, which needs headers that come with PyPI's torch. It links
# with libcudart by a name that the package lacks, and with the driver, which only the host has: an empty library of its
# name stands in for it.
ARG CUDA=
RUN pip install ".[lora$CUDA]"
ENV CUDA_HOME=${CUDA:+/venv/lib/python3.11/site-packages/nvidia/cu13}
RUN if [ -n "$CUDA" ]; then \
    pip install 'cuda-toolkit[nvcc,crt,cccl,cudart,curand]==13.0.*' && mkdir --parents $CUDA_HOME/lib64/stubs && \
    ln --symbolic ../lib/libcudart.so.13 $CUDA_HOME/lib64/libcudart.so && \
    echo | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o $CUDA_HOME/lib64/stubs/libcuda.so; fi
# Kernels for bfloat16 and heads of 128 and 256, for Ampere, Ada and Hopper. Others are compiled at a service's first
# start.
ARG FLASHINFER_CUDA_ARCH_LIST="8.0 8.9 9.0a"
ARG MAX_JOBS=2
COPY deploy/flash_infer_kernels.py /tmp/
RUN if [ -n "$CUDA" ]; then \
    FLASHINFER_WORKSPACE_BASE=/tmp/compiled python /tmp/flash_infer_kernels.py && rm -r /tmp/compiled; fi
COPY gridsieve/common $PACKAGE/common
COPY gridsieve/families $PACKAGE/families
COPY gridsieve/services/__init__.py $PACKAGE/services/
COPY gridsieve/services/compute $PACKAGE/services/compute
COPY gridsieve/services/generation $PACKAGE/services/generation
COPY demo/gridsieve-demo $PACKAGE/gridsieve-demo
COPY demo/gridsieve-demo-draft $PACKAGE/gridsieve-demo-draft
RUN useradd --system --uid 10001 gridsieve && install --directory --owner=gridsieve /var/cache/gridsieve
# The compiler's files need more room than a /tmp in memory has.
ENV TMPDIR=${CUDA:+/var/cache/gridsieve}
USER gridsieve
EXPOSE 50053 9103
ENTRYPOINT ["python", "-m", "gridsieve.services.generation"]
CMD ["--listen", "0.0.0.0:50053"]

FROM base AS gateway
RUN pip install '.[gateway,otel,search]'
COPY gridsieve/common $PACKAGE/common
COPY gridsieve/services/__init__.py $PACKAGE/services/
COPY gridsieve/services/gateway $PACKAGE/services/gateway
COPY gridsieve/*.py gridsieve/py.typed $PACKAGE/
COPY gridsieve/client $PACKAGE/client
COPY gridsieve/search $PACKAGE/search
COPY gridsieve/jobs $PACKAGE/jobs
COPY demo/clip.mp4 $PACKAGE/
RUN useradd --system --uid 10001 gridsieve && install --directory --owner=gridsieve --mode=700 /uploads
USER gridsieve
EXPOSE 8000
ENTRYPOINT ["python", "-m", "gridsieve.services.gateway"]
CMD ["--listen", "0.0.0.0:8000"]
