"""docker-compose.yml and its Dockerfiles: valid, complete, and closed to strangers."""

from __future__ import annotations

import argparse
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_file import ROOT, Dockerfile, compose_config, run_compose

from gemini_ft.agent.settings import AgentSettings
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.security.compose_secrets import write_secrets
from gemini_ft.security.exposure import is_loopback, require_encryption
from gemini_ft.security.nats_access import NatsAccess, add_nats_options

_DOCKERFILES = sorted(path.name for path in (ROOT / "deploy").glob("*.Dockerfile"))
_SERVICES = sorted(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])
_CONTROL_PLANE = {"postgres", "nats", "coordinator", "failure-detector", "dashboard"}
_NODES = {f"node-{number}" for number in range(5)}
_PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w.-]+)?|postgres:\d+\.\d+-\w+")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose_config()


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ("", set()),
        ("demo", _NODES | {"demo"}),
        ("observability", {"prometheus", "grafana"}),
        ("*", _NODES | {"demo", "prometheus", "grafana"}),
    ],
)
def test_each_profile_is_valid_and_starts_its_services(profile: str, more: set[str]) -> None:
    options = ("--profile", profile) if profile else ()
    done = run_compose(*options, "config", "--services", variables={"GEMINI_FT_USER": "1000:1000"})
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == _CONTROL_PLANE | more


def test_nothing_starts_before_the_secrets_are_made() -> None:
    done = run_compose("config", variables={})
    assert done.returncode != 0
    assert "deploy/README.md says how to make the secrets and .env" in done.stderr


@pytest.mark.parametrize("name", _SERVICES)
def test_a_service_is_confined(name: str, config: dict[str, Any]) -> None:
    service = config["services"][name]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cpus"] <= 1, "a machine with one core could not run it"
    assert int(service["mem_limit"]) > int(service.get("shm_size", 0))
    assert service["pids_limit"]
    assert _PINNED.fullmatch(service["image"])
    assert service["restart"] == ("no" if name == "demo" else "unless-stopped")
    assert ("healthcheck" in service) != (name == "demo")
    assert {needed["condition"] for needed in service.get("depends_on", {}).values()} <= {"service_healthy"}
    for port in service.get("ports", []):
        assert is_loopback(port["host_ip"])
        assert "front" in service["networks"], "ports are published from networks that are not internal only"


def test_who_reaches_whom(config: dict[str, Any]) -> None:
    internal = {name for name, network in config["networks"].items() if network.get("internal")}
    on = {
        network: {name for name, service in config["services"].items() if network in service["networks"]}
        for network in config["networks"]
    }
    assert internal == {"database", "cluster"}
    assert on["database"] == {"postgres", "coordinator"}
    assert on["front"] == {"coordinator", "dashboard", "prometheus", "grafana"}
    assert on["cluster"] == _NODES | {"nats", "coordinator", "failure-detector", "demo", "prometheus"}


def test_every_secret_is_made_and_each_service_gets_only_its_own(config: dict[str, Any], tmp_path: Path) -> None:
    write_secrets(tmp_path)
    files = {name: Path(secret["file"]) for name, secret in config["secrets"].items()}
    assert {path.parent for path in files.values()} == {ROOT / "deploy" / "secrets"}
    assert {path.name for path in files.values()} == {path.name for path in tmp_path.iterdir()}
    given = {
        name: {secret["source"] for secret in service.get("secrets", [])}
        for name, service in config["services"].items()
        if service.get("secrets")
    }
    assert given == {
        "postgres": {"postgres-password"},
        "nats": {"nats.conf"},
        "coordinator": {"database-url", "nats-coordinator", "api-token"},
        "failure-detector": {"nats-failure-detector"},
        "dashboard": {"cookie-secret"},
        "demo": {"api-token"},
        "grafana": {"grafana-password"},
        **{name: {"nats-agent"} for name in _NODES},
    }


def test_what_is_mounted_and_named_exists(config: dict[str, Any]) -> None:
    for name, service in config["services"].items():
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                assert mount["read_only"], f"{name} may write to {mount['source']}"
                assert Path(mount["source"]).is_relative_to(ROOT / "deploy")
                assert Path(mount["source"]).exists()
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    hosts = {
        target.partition(":")[0] for job in scraped for group in job["static_configs"] for target in group["targets"]
    }
    assert hosts == _NODES | {"coordinator", "failure-detector"}
    grafana = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((grafana / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((grafana / "dashboards/gemini-ft.yml").read_text())["providers"]
    targets = {Path(mount["target"]).parent for mount in config["services"]["grafana"]["volumes"]}
    assert Path(provider["options"]["path"]) in targets


@pytest.mark.parametrize("name", _DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([program, "--no-color", ROOT / "deploy" / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", _DOCKERFILES)
def test_a_dockerfile_is_pinned_unprivileged_and_complete(name: str) -> None:
    dockerfile = Dockerfile.read(ROOT / "deploy" / name)
    for base in dockerfile.all("FROM"):
        assert _PINNED.fullmatch(base.split()[0])
    assert int(dockerfile.last_stage.all("USER")[-1].partition(":")[0]) > 0
    assert not dockerfile.all("ADD")
    let_through = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for source in dockerfile.copied:
        assert (ROOT / source).exists()
        assert source in let_through, f"{source} is kept out by .dockerignore"


@pytest.mark.parametrize(
    ("name", "extras"),
    [("services.Dockerfile", {"services", "dashboard", "planning"}), ("node.Dockerfile", {"worker", "client"})],
)
def test_an_image_installs_extras_of_this_project_at_tested_versions(name: str, extras: set[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = (rest for rest in Dockerfile.read(ROOT / "deploy" / name).all("RUN") if "pip install" in rest)
    (named,) = re.findall(r'"\.\[([\w,]+)\]"', install)
    assert set(named.split(",")) == extras
    assert extras <= project["optional-dependencies"].keys()
    assert "--constraint constraints.txt" in install


@pytest.mark.parametrize("name", ["coordinator", "failure-detector", "dashboard", *sorted(_NODES)])
def test_what_a_service_is_told_passes_the_checks_for_networks(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """The processes of test_compose_processes.py are on loopback, where these checks never refuse."""
    service = config["services"][name]
    write_secrets(tmp_path)
    command = [word.replace("/run/secrets", str(tmp_path)) for word in service["command"][3:]]
    environ = {key: value.replace("/run/secrets", str(tmp_path)) for key, value in service["environment"].items()}
    if name in _NODES:
        (host,) = (word.removeprefix("--host=") for word in command if word.startswith("--host="))
        access = AgentSettings.load(environ, {"host": host}).nats_access
        role = NatsRole.AGENT
    elif name == "dashboard":
        (listen,) = (word.removeprefix("--listen=") for word in command if word.startswith("--listen="))
        plaintext = "--insecure-plaintext" in command
        require_encryption(listen, listen, encrypted=False, insecure_plaintext=plaintext, remedy="")
        return
    else:
        parser = argparse.ArgumentParser()
        add_nats_options(parser)
        access = NatsAccess.of(parser.parse_known_args(command)[0])
        role = NatsRole(name)
    assert access.options(role)["user"] == role
