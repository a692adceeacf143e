# An image that trains: `docker build -t shardwise .`, then `docker run --rm shardwise`, which runs
# `shardwise doctor`. For GPUs take torch from another index; its wheels bring CUDA's libraries, and
# the driver is the host's (`docker run --gpus all --ipc host …`):
#
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 -t shardwise:cu128 .
#
# BASE may be any Debian or Ubuntu, such as nvidia/cuda:12.8.1-runtime-ubuntu24.04.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH=torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=""

# ssh for `shardwise launch` from inside; Python where the base has none.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client \
    && if ! command -v python3 > /dev/null; then \
        apt-get install -y --no-install-recommends python3 python3-venv; \
    fi \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Torch is the large layer, and changes least.
RUN python3 -m venv /opt/venv && pip install --index-url "${TORCH_INDEX}" "${TORCH}"

WORKDIR /opt/shardwise
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install ".${EXTRAS:+[${EXTRAS}]}"

RUN useradd --create-home train
USER train
WORKDIR /home/train
COPY --chown=train examples examples

CMD ["shardwise", "doctor"]
