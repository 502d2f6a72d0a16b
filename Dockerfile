# The service with the included models: no torch, no transformers, an unprivileged user.
#   docker build -t bertserve .                                            for CPUs
#   docker build -t bertserve-gpu --build-arg EXTRAS=gpu .                 for NVIDIA GPUs
#   docker build -t bertserve-export --build-arg EXTRAS=cpu,export .       with the exporter, for `serve --model`
# All packages have a hash in locks/ (`make lock`), and the base has a digest (Python 3.11.16). Security fixes of the base come with
# its next digest, which `docker buildx imagetools inspect python:3.11-slim` prints, or with the tag: --build-arg BASE=python:3.11-slim
ARG BASE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE} AS build

WORKDIR /build
COPY locks/build.txt locks/
RUN pip install --no-cache-dir --require-hashes --requirement locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY bertserve/__init__.py bertserve/
COPY service bertserve/service
COPY export bertserve/export
COPY bench bertserve/bench
RUN pip wheel --no-deps --no-build-isolation --wheel-dir wheels .

FROM ${BASE}

# `cpu` or `gpu` selects the onnxruntime wheel; `cpu,export` adds the exporter
ARG EXTRAS=cpu
ARG REVISION=unknown

LABEL org.opencontainers.image.title="bertserve" \
      org.opencontainers.image.description="Serves fine-tuned BERT-family encoders over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"

# rarely changed layers come first: a change of the service only rebuilds the last two
RUN useradd --system --uid 10001 bertserve && install --directory --owner bertserve /cache
COPY locks/${EXTRAS}.txt /app/requirements.txt
RUN pip install --no-cache-dir --require-hashes --requirement /app/requirements.txt
COPY models /models
COPY --from=build /build/wheels /app/wheels
RUN pip install --no-cache-dir --no-deps /app/wheels/*.whl
LABEL org.opencontainers.image.revision="${REVISION}"

USER 10001
# no variable for --models: its default, `models`, must allow --model instead
WORKDIR /
# weights on huge pages; threads keep freed memory (docs/how-to/operations.md)
ENV GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456
# exports of --model and their downloads; mount a volume there to keep them
ENV BERT_SERVE_CACHE_DIR=/cache HF_HOME=/cache/huggingface
ENV BERT_SERVE_HOST=0.0.0.0 BERT_SERVE_PORT=8000 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["bert-serve", "health"]
ENTRYPOINT ["bert-serve"]
CMD ["serve"]
