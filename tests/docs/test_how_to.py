"""The files that how-to pages show, for deployments, are complete and correct."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, read
from tests.docs.test_commands import complaint_about, complaint_about_requirement
from tests.docs.test_facts import PROJECT

pytestmark = pytest.mark.slow

HOW_TO = ROOT / "docs" / "how-to"


def file(page: str, name: str) -> str:
    """Return a file that a page shows: the block whose first line is a comment with its name."""
    blocks = [block.code for block in read(HOW_TO / f"{page}.md").blocks]
    (found,) = [code for code in blocks if re.match(rf"[#;] (/\S+/)?{re.escape(name)}\n", code)]
    return found


def variables(page: str, name: str) -> set[str]:
    """Return the names of the environment variables in a file that a page shows."""
    return set(re.findall(r"^(\w+)=", file(page, name), re.MULTILINE))


def check(command: list[str]) -> None:
    assert complaint_about(shlex.join(command)) is None, command


def environment_of_settings(page: str) -> set[str]:
    """Return the names of the environment variables that the settings of a page read."""
    code = "".join(block.code for block in read(HOW_TO / f"{page}.md").blocks if block.file == "settings.py")
    return set(re.findall(r'environ\.get\("(\w+)"', code))


def test_the_helpdesk_takes_forty_lines() -> None:
    """`test_python` runs it."""
    files = {"shop/models.py", "shop/timeouts.py"}
    shown = [block.code for block in read(HOW_TO / "stop-the-clock.md").blocks if block.file in files]
    lines = [line for code in shown for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(shown) == 2
    assert len(lines) <= 40


def test_the_unit_does_not_restart_a_worker_of_another_installation() -> None:
    from django_delayq.worker import REFUSED

    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file("systemd", "shop-timeouts.service"))
    assert unit["Service"]["RestartPreventExitStatus"] == str(REFUSED)
    check(shlex.split(unit["Service"]["ExecStart"]))


@pytest.mark.parametrize(("page", "name"), [("systemd", "environment"), ("kubernetes", "shop.env")])
def test_the_settings_read_the_variables_that_the_pages_without_settings_show(page: str, name: str) -> None:
    assert variables(page, name) <= environment_of_settings("compose")


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(file("compose", "compose.yaml"))


def test_the_services_of_compose_run_commands_that_exist_and_wait_for_what_the_others_report(compose: Any) -> None:
    services = compose["services"]
    own = {name: service for name, service in services.items() if "build" in service}
    assert own.keys() == {"migrate", "web", "timeouts"}
    for command in (own["timeouts"]["healthcheck"]["test"][1:], *(service["command"] for service in own.values())):
        check(command)
    for service in services.values():
        for name, wanted in service.get("depends_on", {}).items():
            assert "healthcheck" in services[name] or wanted["condition"] == "service_completed_successfully"


def test_the_settings_of_compose_read_the_variables_that_its_services_get(compose: Any) -> None:
    environment = compose["x-shop"]["environment"]
    assert environment.keys() - {"DJANGO_SETTINGS_MODULE"} == environment_of_settings("compose")
    used = set(re.findall(r"\$\{(\w+)\}", file("compose", "compose.yaml")))
    assert used == variables("compose", ".env")
    assert ".env" in file("compose", ".dockerignore").splitlines(), "the image does not contain it"


def test_the_image_has_what_its_services_run_a_supported_python_and_a_command_that_receives_signals(
    compose: Any,
) -> None:
    own, server = file("compose", "requirements.txt").splitlines()[1:]
    assert (complaint_about_requirement(own), server) == (None, compose["services"]["web"]["command"][0])
    image = file("compose", "Dockerfile")
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-slim$", image, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]
    (command,) = re.findall(r"^CMD (.*)$", image, re.MULTILINE)
    check(json.loads(command))


VISIT = """
import django
django.setup()
from django.test import Client
client = Client(SERVER_NAME="shop.example.com")
for path in ("/static/admin/css/base.css", "/static/django_delayq/countdown.js", "/static/missing.js"):
    print(client.get(path).status_code)
print(client.get("/missing/").status_code, client.get("/missing/", SERVER_NAME="other.example").status_code)
"""


def test_files_that_were_collected_are_served_without_the_development_server(tmp_path: Path) -> None:
    pytest.importorskip("whitenoise")
    (shown,) = [block.code for block in read(HOW_TO / "deploy.md").blocks if block.file and "STATIC_ROOT" in block.code]
    shown = shown.replace("/srv/shop/static", str(tmp_path / "static")).replace("# ... and yours", "*MIDDLEWARE,")
    (tmp_path / "deployed.py").write_text(f"from config.settings import *\n{shown}")
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "deployed",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "example_project"), *sys.path]),
    }

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "django", "collectstatic", "--noinput")
    assert run("-c", VISIT).split() == ["200", "200", "404", "404", "400"]


def test_the_containers_of_kubernetes_run_commands_that_exist_and_have_time_to_write_a_heartbeat(compose: Any) -> None:
    """What the probe answers: tests/integration/management/test_doctor_servers.py."""
    from django_delayq.monitoring.doctor import STUCK_SECONDS
    from django_delayq.monitoring.snapshot import ALIVE

    files = (yaml.safe_load(file("kubernetes", name)) for name in ("timeouts.yaml", "migrate.yaml"))
    worker, migrating = (each["spec"]["template"]["spec"]["containers"][0] for each in files)
    for container in (worker, migrating):
        check(container["command"])
    healthcheck = compose["services"]["timeouts"]["healthcheck"]["test"][1:]
    assert [worker[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe")] == [healthcheck] * 2
    probe = worker["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > ALIVE.total_seconds() + STUCK_SECONDS


def test_the_lines_of_a_procfile_and_of_cron_are_commands_that_exist() -> None:
    processes = dict(line.split(": ", 1) for line in file("platforms", "Procfile").splitlines()[1:])
    assert processes.keys() == {"release", "web", "timeouts"}
    for command in processes.values():
        check(shlex.split(command))
    (block,) = [block for block in read(HOW_TO / "from-cron.md").blocks if block.language == "none"]
    for line in block.code.splitlines():
        words = shlex.split(line.split(" ", 5)[5])
        check(words[3:] if words[:2] == ["flock", "--nonblock"] else words)
