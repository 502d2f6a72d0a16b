# The service with the embedded models: no torch, no transformers, a user without rights.
#   docker build -t bertserve .                                        for CPUs
#   docker build -t bertserve-gpu --build-arg ONNXRUNTIME=gpu .        for NVIDIA GPUs
# All that is installed has a hash in locks/ (`make lock`).
FROM python:3.11-slim AS build

WORKDIR /app
COPY locks/build.txt locks/
RUN pip install --no-cache-dir --require-hashes --requirement locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY service service
COPY export export
COPY bench bench
RUN pip wheel --no-deps --no-build-isolation --wheel-dir wheels .

FROM python:3.11-slim

# `cpu` or `gpu`: which onnxruntime wheel the image gets
ARG ONNXRUNTIME=cpu

WORKDIR /app
RUN useradd --system --uid 10001 bertserve
COPY locks/${ONNXRUNTIME}.txt /app/requirements.txt
RUN pip install --no-cache-dir --require-hashes --requirement /app/requirements.txt
COPY --from=build /app/wheels /app/wheels
RUN pip install --no-cache-dir --no-deps /app/wheels/*.whl
COPY models /models

USER 10001
# weights on huge pages, and lanes that keep their heaps (docs/how-to/tune.md)
ENV GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456
ENV BERT_SERVE_HOST=0.0.0.0 BERT_SERVE_PORT=8000 BERT_SERVE_MODELS=/models PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["bert-serve", "health"]
ENTRYPOINT ["bert-serve"]
CMD ["serve"]
