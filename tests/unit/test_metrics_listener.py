"""Metrics over HTTP: read on the event loop, whoever asks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.metrics_listener import serve_metrics


class OneGauge(Collector):
    def __init__(self) -> None:
        self.collected_in: set[int] = set()

    def collect(self) -> Iterator[Metric]:
        self.collected_in.add(threading.get_ident())
        yield GaugeMetricFamily("gemini_ft_test", "A number", value=len(self.collected_in))


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url)


async def test_a_scrape_is_read_on_the_event_loop() -> None:
    collector = OneGauge()
    async with serve_metrics("127.0.0.1:0", collector) as url:
        answers = await asyncio.gather(*(get(url) for _ in range(3)))
    for answer in answers:
        assert answer.status_code == 200
        assert "gemini_ft_test 1.0" in answer.text
        assert "process_resident_memory_bytes" in answer.text
    assert collector.collected_in == {threading.get_ident()}


async def test_nothing_listens_afterwards() -> None:
    async with serve_metrics("[::1]:0", OneGauge()) as url:
        assert (await get(url)).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await get(url)


@pytest.mark.parametrize("listen", ["", "9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999", "203.0.113.1:9464"])
async def test_an_address_of_no_use_is_refused_in_one_sentence(listen: str) -> None:
    with pytest.raises(ConfigurationError, match="--metrics-listen"):
        async with serve_metrics(listen, OneGauge()):
            pass
