# Agent, launcher and ranks, and the command `gemini-ft`. By default with the CPU build of torch.
FROM python:3.11.17-slim-trixie AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/gemini-ft
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY services services
COPY worker worker
COPY migrations migrations
COPY examples examples
RUN /opt/gemini-ft/bin/pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url "$TORCH_INDEX_URL" ".[worker,client]"

FROM python:3.11.17-slim-trixie
COPY --from=build /opt/gemini-ft /opt/gemini-ft
COPY deploy/healthcheck.py /opt/gemini-ft/healthcheck.py
# Whoever the container runs as, the volume that is mounted here takes over this mode.
RUN install -d -m 1777 /var/lib/gemini-ft
ENV PATH=/opt/gemini-ft/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /var/lib/gemini-ft
USER 10001:10001
