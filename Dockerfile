# syntax=docker/dockerfile:1

# Serves the zoo, or bundles mounted into it. Only what serving needs is installed: no PyTorch.
# `inspect` and `calibrate` of bundles work here too.
#
#   docker build --tag stepdial .
#   docker run --rm --publish 127.0.0.1:8000:8000 stepdial
#   docker run --rm --publish 127.0.0.1:8000:8000 --volume "$PWD/my-bundle:/bundle:ro" stepdial /bundle
#
# For another port inside, --env STEPDIAL_PORT=9000: the health check reads that, and no --port.
#
# With the GPU runtimes:
#
#   docker build --build-arg RUNTIME=gpu --tag stepdial:gpu .
#   docker run --rm --gpus all --env STEPDIAL_DEVICE=cuda --publish 127.0.0.1:8000:8000 stepdial:gpu

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG RUNTIME=cpu
RUN python -m venv /venv
WORKDIR /app
# An editable install: a change of the code below does not install everything again, and the zoo is
# found beside the code, as in a checkout.
COPY LICENSE pyproject.toml stepdial.py ./
COPY locks ./locks
COPY deploy/sbom.py ./
# Exactly what locks/ names, found by its hash. TensorRT alone has none: its releases on the index
# fetch another file. What builds the package stays out of the image.
RUN case "$RUNTIME" in \
        cpu) extra=serve ;; \
        gpu) extra=gpu ;; \
        *) echo "RUNTIME is '$RUNTIME'; it may be cpu or gpu" >&2; exit 1 ;; \
    esac \
    && version="$(/venv/bin/python -c 'import sys; print("%d%d" % sys.version_info[:2])')" \
    && lock="locks/$extra-py$version-linux-$(uname -m).txt" \
    && if [ ! -f "$lock" ]; then \
        echo "there is no $lock: add this platform to .ci/lock.py, then make lock" >&2; exit 1; \
    fi \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --require-hashes --no-deps --requirement "$lock" \
    && if [ "$extra" = gpu ]; then \
        /venv/bin/pip install --no-cache-dir --disable-pip-version-check 'tensorrt>=10.14,<11'; \
    fi \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --require-hashes --no-deps --target /build --requirement locks/build.txt \
    && PYTHONPATH=/build /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --no-deps --no-build-isolation --editable . \
    && /venv/bin/pip check \
    && /venv/bin/python sbom.py > sbom.cdx.json
COPY serve ./serve
COPY export ./export
COPY train ./train
COPY zoo ./zoo
RUN /venv/bin/python -m compileall -q serve export train stepdial.py

FROM python:${PYTHON}-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin stepdial
COPY --from=build /venv /venv
COPY --from=build /app /app
# XDG_CACHE_HOME is for engines that onnxruntime builds with STEPDIAL_DEVICE=tensorrt: the user has no
# home. The last two are read by the NVIDIA container runtime, and by nothing where there is none.
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    STEPDIAL_HOST=0.0.0.0 \
    STEPDIAL_PORT=8000 \
    STEPDIAL_ENGINE_NICE=10 \
    XDG_CACHE_HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
USER 10001
EXPOSE 8000
# For display, and for compose to wait for. Where unhealthy containers are replaced, ask /health/live:
# a server that drains is not ready.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD \
    ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(f\"http://127.0.0.1:{os.environ.get('STEPDIAL_HEALTH_PORT') or os.environ['STEPDIAL_PORT']}/health/ready\", timeout=2)"]
ENTRYPOINT ["stepdial", "serve"]
