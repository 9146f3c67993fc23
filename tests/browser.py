"""A browser without a window for the tests of pages: Chromium, driven over its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It asks nothing of other hosts, needs no rights of its own (containers deny them), and draws alike on every machine.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio",
    "--force-device-scale-factor=1",
)  # fmt: skip
SECONDS = 60  # for one answer: machines that run other tests are slow


def find() -> str | None:
    """The program to run, or None where no browser is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `open` shows a page, `run` evaluates JavaScript in it, `picture` draws it into a file.

    `errors` lists what scripts of the page raised and what the browser could not load, `requests` all addresses that were asked for,
    both since the last `open`.
    """

    def __init__(self, program: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="fluidx_browser", ignore_cleanup_errors=True)
        self._received, self._last, self._loaded = b"", 0, set[str]()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
            preexec_fn=lambda: _hand_over(theirs_in, theirs_out),
        )  # fmt: skip
        os.close(theirs_in), os.close(theirs_out)
        self._session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        # A page remembers nothing of the one before, such as its colours.
        self.ask("Page.addScriptToEvaluateOnNewDocument", source="try { localStorage.clear() } catch {}")

    def open(self, page: str | Path, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Show a file or an address in a window of this size, and wait until everything in it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.resize(width, height)
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._go("about:blank")  # from the page that is open to a place in it nothing would be loaded
        self.errors, self.requests = [], []
        self._go(page.resolve().as_uri() if isinstance(page, Path) else page)

    def _go(self, address: str) -> None:
        answer = self.ask("Page.navigate", url=address)
        if failed := answer.get("errorText"):
            raise AssertionError(f"{address}: {failed}")
        end = time.monotonic() + SECONDS
        while answer["loaderId"] not in self._loaded:
            self._take(end)

    def resize(self, width: int, height: int = 900) -> None:
        """The page that is open, in a window of another size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(_told(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, path: Path, whole: bool = False) -> Path:
        """The page as a PNG: what the window shows, or the whole page."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while (answer := self._take(end)).get("id") != self._last:
            pass
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in), os.close(self._out)
        self._profile.cleanup()

    def _take(self, end: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser has not answered within {SECONDS} s")
            if not (data := os.read(self._in, 1 << 20)):
                raise AssertionError(f"the browser is gone, status {self._process.wait()}")
            self._received += data
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(_told(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def _hand_over(theirs_in: int, theirs_out: int) -> None:
    """The protocol's two pipes are descriptors 3 and 4 of the browser."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
    for fd, number in zip(above, (3, 4), strict=True):
        os.dup2(fd, number)


def _told(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description", details["text"])
