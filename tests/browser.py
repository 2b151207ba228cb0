"""Drive Chromium through a pipe with its DevTools protocol: open pages, evaluate JavaScript, take screenshots.

    python tests/browser.py logs/grpo_arithmetic_smollm2/exp_001/report.html docs/images/report.png --height 428

This command takes a screenshot of a page. A report of a finished run is best."""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE = 60.0
READY = "document.body && document.body.dataset.ready === 'yes'"


class Browser:
    """A headless browser with one page.

    `errors` holds the errors and warnings of its console, `requests` the addresses that it requested."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._loaded, self._waiting = 0, 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        os.set_blocking(self._from, False)
        # DevTools reads from descriptor 3 and writes to 4; the shell redirects them to our pipes
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--mute-audio",
            f"--user-data-dir={self._profile.name}", "--force-device-scale-factor=1",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(CHROMIUM), *options], pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts have finished."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(READY)

    def ask(self, script: str) -> object:
        """Return the value of a JavaScript expression, which may be a promise. Raise AssertionError if it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Raise AssertionError after DEADLINE seconds."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            try:
                if self.ask(condition):
                    return
            except RuntimeError:  # the page is being replaced
                pass
            self._read(0.05)
        raise AssertionError(f"not within {DEADLINE} s: {condition}")

    def screenshot(self, path: Path) -> None:
        """Write a screenshot of the visible part of the page to `path`."""
        picture = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def send(self, method: str, **parameters: object) -> dict:
        """Send a DevTools command and return its result. Raise RuntimeError if the browser reports an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end, answer = time.monotonic() + DEADLINE, None
        while answer is None:
            if time.monotonic() > end or self._process.poll() is not None:
                raise AssertionError(f"the browser did not answer {method}")
            answer = self._read(0.5, self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self, seconds: float, number: int | None = None) -> dict | None:
        if b"\0" not in self._waiting and select.select([self._from], [], [], seconds)[0]:
            self._waiting += os.read(self._from, 1 << 20)
        while b"\0" in self._waiting:
            text, _, self._waiting = self._waiting.partition(b"\0")
            message = json.loads(text)
            self._note(message.get("method"), message.get("params", {}))
            if number is not None and message.get("id") == number:
                return message
        return None

    def _note(self, method: str | None, values: dict) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.errors.append(json.dumps(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(values["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.send("Browser.close")
        except AssertionError:  # the browser ended before it answered
            pass
        self._process.wait(timeout=DEADLINE)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path, help="a .png file")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=800)
    given = parser.parse_args()
    with Browser(given.width, given.height) as browser:
        browser.open(given.page)
        browser.screenshot(given.picture)
    print(f"{given.picture}: {given.picture.stat().st_size:,} bytes; errors in the console: {browser.errors or 'none'}")


if __name__ == "__main__":
    main()
