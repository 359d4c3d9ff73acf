"""The tutorial, typed word for word in an empty folder: commands, files, the shell, the admin, and its tests.

Only the commands in `ENVIRONMENT` are left out: this interpreter and the checkout take the place of what they install.
The web server gets a free port. The worker and the web server run until the end.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, Page, pages, read
from tests.support.waiting import wait_until
from tools import processes
from tools.servers import free_port

pytestmark = pytest.mark.slow

TUTORIAL = read(ROOT / "docs" / "tutorial.md")
ENVIRONMENT = {"python3 -m venv .venv", "source .venv/bin/activate", "pip install django-delayq"}
SHELL, WORKER, SERVER = (f"python manage.py {name}" for name in ("shell", "delayq_worker", "runserver"))
SITE = "http://127.0.0.1:8000"
SECONDS = 60.0
_VARIES = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\d*(\.\d+)+(\.dev\d+)?(\+[\w.]+)?( s\b)?|\d+ m?s\b")
_PROMPT = re.compile(rb"(>>>|\.\.\.) \Z")


class Shell:
    """`manage.py shell` in a terminal of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._terminal, its_side = pty.openpty()
        termios.tcsetwinsize(its_side, (50, 200))  # a narrower one would scroll long lines
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), its_side)
        self.process = processes.start(SHELL.split(), cwd=folder, env=environment, **streams)
        os.close(its_side)
        self._read()

    def type(self, session: str) -> None:
        """Type the lines behind `>>> ` and compare the lines below them with what is printed."""
        for part in session.split(">>> ")[1:]:
            line, *shown = part.splitlines()
            self._expect(line, shown)

    def _expect(self, line: str, shown: list[str]) -> None:
        """Type again what is not printed as shown, because the reader waits for the worker, too."""
        deadline = time.monotonic() + SECONDS
        while alike(printed := self._answer(line)) != alike(shown):
            assert time.monotonic() < deadline, f"{line}\n" + "\n".join(printed)
            time.sleep(0.2)

    def _answer(self, line: str) -> list[str]:
        os.write(self._terminal, f"{line}\n".encode())
        _, *printed = self._read().splitlines()  # the first line is the echo
        return printed[:-1]  # the last one is the prompt

    def _read(self) -> str:
        """Return everything up to the next prompt, or to the end of the shell."""
        read = b""
        while not _PROMPT.search(read):
            ready, _, _ = select.select([self._terminal], [], [], SECONDS)
            assert ready, f"no prompt after {read.decode()!r}"
            try:
                read += os.read(self._terminal, 4096)
            except OSError:  # how Linux reports that the other side is closed
                break
        return read.decode()

    def close(self) -> None:
        processes.stop(self.process)
        os.close(self._terminal)


class Reader:
    """Follows the page: types its commands, writes its files, and compares what it shows."""

    def __init__(self, home: Path) -> None:
        self.folder = home
        self.site = f"http://127.0.0.1:{free_port()}"
        self.shell: Shell | None = None
        self.running: list[subprocess.Popen[bytes]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "DELAYQ_"))}
        programs = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
        self.environment = {**kept, "PATH": programs, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def close(self) -> None:
        if self.shell:
            self.shell.close()
        for process in self.running:
            assert processes.stop(process, first=signal.SIGINT) == 0

    def follow(self, block: Block) -> None:
        if block.file:
            path = self.folder / block.file
            path.write_text((path.read_text() if block.is_appended else "") + block.code)
        elif block.language == "pycon":
            assert self.shell, "the page has not started a shell"
            self.shell.type(block.code)
        elif block.language == "text":
            self.wait_for(block.code)
        else:
            printed = "".join([self.run(command) for _, command in block.commands()])
            shown = re.sub(r"^\$ .*\n", "", block.code, flags=re.MULTILINE)
            if WORKER in block.code:
                self.wait_for(shown)
            else:
                assert missing(shown, printed) == [], printed

    def wait_for(self, shown: str) -> None:
        """Wait until the worker has printed these lines."""
        log = self.folder.parent / "delayq_worker.log"
        wait_until(lambda: not missing(shown, log.read_text()), f"the worker prints\n{shown}", SECONDS)

    def run(self, command: str) -> str:
        if command in ENVIRONMENT:
            return ""
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
        elif command == SHELL:
            self.shell = Shell(self.folder, self.environment)
        elif command in (WORKER, SERVER):
            self.start(command)
        else:
            done = subprocess.run(
                command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            return done.stdout + done.stderr
        return ""

    def start(self, command: str) -> None:
        words = command.split() + ([self.site.removeprefix("http://"), "--noreload"] if command == SERVER else [])
        with (self.folder.parent / f"{words[2]}.log").open("wb") as log:
            self.running.append(processes.start(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log))

    def visit(self, prose: str) -> None:
        """Open the address in a line of prose, and find there what is bold in this line."""
        for address in re.findall(rf"<({SITE}[^>]*)>", prose):
            if address == f"{SITE}/admin/":
                self.log_in()
            page = self.open(address.replace(SITE, self.site))
            absent = [words for words in re.findall(r"\*\*(.+?)\*\*", prose) if words.lower() not in page.lower()]
            assert absent == [], address

    def open(self, address: str, **fields: str) -> str:
        with self.browser.open(address, urllib.parse.urlencode(fields).encode() or None) as response:
            return str(response.read().decode())

    def log_in(self) -> None:
        address = f"{self.site}/admin/login/?next=/admin/"
        wait_until(lambda: self.answers(address), "the web server answers", SECONDS)
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.open(address))
        assert found
        page = self.open(address, csrfmiddlewaretoken=found[1], username="admin", password="secret")
        assert "Site administration" in page

    def answers(self, address: str) -> bool:
        try:
            return bool(self.open(address))
        except OSError:
            return False


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines of `shown` that are not in `printed`; three dots stand for anything."""
    lines = alike(printed.splitlines())
    wanted = {line: re.escape(line).replace(r"\.\.\.", ".*") for line in alike(shown.splitlines())}
    return [line for line, pattern in wanted.items() if not any(re.fullmatch(pattern, other) for other in lines)]


def alike(lines: list[str]) -> list[str]:
    """Return the lines without what differs from run to run: dates, times and seconds."""
    return [_VARIES.sub("0", line.strip()) for line in lines if line.strip()]


def steps(page: Page) -> Iterator[Block | str]:
    """Yield the blocks and the paragraphs of a page in their order; an item of a list is a paragraph."""
    numbered: list[tuple[int, Block | str]] = [(block.line, block) for block in page.blocks]
    for number, line in page.prose:
        if line.startswith("  ") and numbered and isinstance(before := numbered[-1][1], str):
            numbered[-1] = (numbered[-1][0], f"{before} {line.strip()}")
        else:
            numbered.append((number, line))
    for _, step in sorted(numbered, key=lambda item: item[0]):
        yield step


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.slow
def test_the_tutorial_works_word_for_word_in_an_empty_folder(reader: Reader) -> None:
    for step in steps(TUTORIAL):
        if isinstance(step, str):
            reader.visit(step)
        else:
            reader.follow(step)
    assert len(reader.running) == 2


@pytest.mark.parametrize("page", [page for page in pages() if page.is_translation], ids=str)
def test_a_translation_has_the_code_of_its_original(page: Page) -> None:
    original = ROOT / re.sub(r"[./]zh-Hans", "", page.name)
    assert shown(page) == shown(read(original))


def shown(page: Page) -> list[tuple[str, str]]:
    return [(block.language, block.code) for block in page.blocks if not block.hidden]


def test_readme_and_tutorial_are_translated() -> None:
    assert [page.name for page in pages() if page.is_translation] == ["README.zh-Hans.md", "docs/zh-Hans/tutorial.md"]
