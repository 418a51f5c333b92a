"""A browser without a window: Chromium, driven by its DevTools protocol over two pipes, so by no further package.

The browser reads commands from descriptor 3 and writes answers and events to descriptor 4, each as JSON that ends with a
zero byte. `Browser` sends a command and waits for its answer. Events that come in between are kept for `Page`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30.0
"""Seconds to wait for an answer, an event or a condition."""

_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
)


class BrowserError(AssertionError):
    """The browser refused a command, did not answer in time, or a script in a page failed."""


def program() -> str | None:
    """Return the path of an installed browser, None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """A running browser. It has a profile of its own and ends with the block."""

    def __init__(self, path: str, profile: Path) -> None:
        self._answers, to_us = os.pipe()
        from_us, self._commands = os.pipe()
        options = [*_OPTIONS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        # bash puts the pipes on the descriptors that the browser expects; it starts no further process.
        script = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us} 2>/dev/null'
        self._process = subprocess.Popen(["bash", "-c", script, path, *options], pass_fds=(from_us, to_us))
        os.close(from_us)
        os.close(to_us)
        self._received = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.command("Browser.close")
        except (BrowserError, OSError):
            self._process.kill()
        os.close(self._commands)
        os.close(self._answers)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def page(self) -> Page:
        """Open a new tab."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        return Page(self, self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def command(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        unsent = json.dumps(message).encode() + b"\0"
        while unsent:
            unsent = unsent[os.write(self._commands, unsent) :]
        while True:
            answer = self.receive(time.monotonic() + PATIENCE)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            found = os.read(self._answers, 1 << 20) if ready else b""
            if not found:
                raise BrowserError("the browser has ended" if ready else "the browser does not answer")
            self._received += found
        message, _, self._received = self._received.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requested: list[str] = []
        """URLs that the page has requested since `open`."""
        self.width, self._scheme = 0, ""
        for domain in ("Page", "Network", "Runtime"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this tab and return its result."""
        return self._browser.command(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded, with all that it needs."""
        self._take_events()
        self.requested.clear()
        result = self.command("Page.navigate", url=url)
        if "errorText" in result:
            raise BrowserError(f"{url}: {result['errorText']}")
        if "loaderId" in result:  # else another place of the same page
            self._wait_until_loaded()

    def follow(self, link: str) -> None:
        """Click the first element that a selector finds, and wait until the page that it opens is loaded."""
        self._take_events()
        self.requested.clear()
        self.evaluate(f"document.querySelector({link!r}).click()")
        self._wait_until_loaded()

    def _wait_until_loaded(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self._take_events():
            self._browser.events.append(self._browser.receive(deadline))

    def _take_events(self) -> list[str]:
        """Return the names of the events of this tab since the last call; note what was requested."""
        kept, names = [], []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                kept.append(event)
                continue
            names.append(event["method"])
            if event["method"] == "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
        self._browser.events[:] = kept
        return names

    def requests(self) -> list[str]:
        """Return the URLs that were requested since `open`, until now."""
        self.evaluate("0")
        self._take_events()
        return self.requested

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, as JSON."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"].get("exception", answer["exceptionDetails"])))
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true in the page, looking once a frame; return its value."""
        script = (
            "new Promise((done, failed) => { const end = performance.now() + %d; const look = () => {"
            " const value = (%s); if (value) done(value);"
            " else if (performance.now() > end) failed(new Error('waited too long'));"
            " else setTimeout(look, 10); }; look(); })"
        )
        return self.evaluate(script % (PATIENCE * 1000, expression))

    def resize(self, width: int) -> None:
        """Give the page a width in CSS pixels."""
        if width != self.width:
            self.width = width
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            self.command("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Let the page know that its reader prefers `light` or `dark`."""
        if scheme == self._scheme:
            return
        self._scheme = scheme
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.command("Emulation.setEmulatedMedia", features=features)

    def type(self, text: str) -> None:
        """Press the keys of a text, for the field that has the focus."""
        for character in text:
            self.command("Input.dispatchKeyEvent", type="keyDown", text=character)
            self.command("Input.dispatchKeyEvent", type="keyUp")
