"""Someone with a browser's habits and no browser: cookies, forms, redirects."""

from __future__ import annotations

import html
import http.cookiejar
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """An answer of the shop."""

    url: str
    status: int
    text: str

    @property
    def notes(self) -> list[str]:
        """The messages at the top of the page."""
        return [html.unescape(note) for note in re.findall(r'<li class="note [^"]*">(.*?)</li>', self.text)]

    @property
    def status_badge(self) -> str:
        """Return the status of the order in the heading of the page."""
        found = re.search(r'<h1[^>]*>.*?<span class="badge (\w+)"', self.text, re.DOTALL)
        assert found, self.text[:2000]
        return found[1]


class Visitor:
    """Visits one shop; forms are sent with the token of the page that was seen last."""

    def __init__(self, url: str) -> None:
        self.url = url
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(cookies)
        self._token = ""

    def get(self, path: str) -> Page:
        return self._open(path, None)

    def post(self, path: str, **fields: str) -> Page:
        data = urllib.parse.urlencode({"csrfmiddlewaretoken": self._token, **fields}).encode()
        return self._open(path, data)

    def place_order(self) -> str:
        """Order something on the front page; gives the path of the order's page."""
        self.get("/")
        page = self.post("/plays/pay-late/")
        found = re.search(r'<a href="(/orders/[^/]+/)">', page.text)
        assert found, page.text[:2000]
        return found[1]

    def _open(self, path: str, data: bytes | None) -> Page:
        request = urllib.request.Request(urllib.parse.urljoin(self.url, path), data)
        try:
            with self._opener.open(request, timeout=30) as answer:
                page = Page(answer.url, answer.status, answer.read().decode())
        except urllib.error.HTTPError as refusal:
            page = Page(refusal.url, refusal.code, refusal.read().decode())
        if token := re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text):
            self._token = token[1]
        return page


def wait_until_served(url: str, seconds: float = 60) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=30).close()
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, f"{url} did not answer"
            time.sleep(0.1)
        else:
            return
