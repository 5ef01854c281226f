# Coordinator, failure detector and dashboard; without torch.
FROM python:3.11.17-slim-trixie AS build
WORKDIR /src
RUN python -m venv /opt/gemini-ft
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY services services
COPY worker worker
COPY migrations migrations
COPY examples examples
RUN /opt/gemini-ft/bin/pip install --no-cache-dir --constraint constraints.txt ".[services,dashboard,planning]"

FROM python:3.11.17-slim-trixie
COPY --from=build /opt/gemini-ft /opt/gemini-ft
COPY deploy/healthcheck.py /opt/gemini-ft/healthcheck.py
ENV PATH=/opt/gemini-ft/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /tmp
USER 10001:10001
