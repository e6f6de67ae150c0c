"""The page in a browser, as somebody who works with it: what is read and pressed. Needs playwright and Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_WAIT_MS = 15_000


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; CHROMIUM says where it is if it is not on the path."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium has no sandbox for root, which containers often are.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else [])
        try:
            yield started
        finally:
            started.close()


class DashboardPage:
    """One tab. `problems` are errors of scripts and what the content security policy has stopped."""

    def __init__(self, browser: Any, url: str, *, language: str = "en-US", theme: str = "light", width: int = 1440) -> None:
        self.problems: list[str] = []
        self.url = url
        self._context = browser.new_context(locale=language, color_scheme=theme, viewport={"width": width, "height": 900})
        self.tab = self._context.new_page()
        self.tab.set_default_timeout(_WAIT_MS)
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", self._heard)

    def close(self) -> None:
        self._context.close()

    def open(self, key: str | None = None) -> DashboardPage:
        """Loads the page; with a key, gives it and waits for the first figures."""
        self.tab.goto(f"{self.url}/dashboard")
        if key is not None:
            self.wait_for_phase("locked")
            self.give_key(key)
            self.wait_for_phase("live")
            self.tab.locator("#panels").wait_for()
        return self

    def give_key(self, key: str) -> None:
        if not self.tab.locator("#key-dialog").is_visible():
            self.tab.locator("#notice-button").click()
        self.tab.locator("#key-input").fill(key)
        self.tab.keyboard.press("Enter")

    def wait_for_phase(self, phase: str) -> None:
        """loading, locked, shut, refused, unreached or live."""
        self.tab.locator(f"body[data-phase={phase}]").wait_for()

    def text(self, selector: str) -> str:
        """What is visible of an element."""
        found: str = self.tab.locator(selector).inner_text()
        return found

    def wait_for_text(self, selector: str, text: str) -> None:
        """Until the element shows it as part of its text."""
        self.tab.locator(selector).filter(has_text=text).wait_for()

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table's body."""
        read = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        found: list[list[str]] = self.tab.locator(f"{table} tbody tr").evaluate_all(read)
        return found

    def press(self, button: str, *, author: str, reason: str, wait: bool = True) -> None:
        """A button that changes something, with author and reason, confirmed; `wait` until the service has done it."""
        self.tab.locator(button).click()
        self.tab.locator("#confirm-author").fill(author)
        self.tab.locator("#confirm-reason").fill(reason)
        self.tab.locator("#confirm-submit").click()
        if wait:
            self.tab.locator("#confirm-dialog").wait_for(state="hidden")

    def degrade(self, *, author: str, reason: str) -> None:
        self.press("#degrade", author=author, reason=reason)

    @property
    def serving(self) -> str:
        """closed (adaptive), half-open, open (degraded), or native where there is no switch."""
        found: str = self.tab.locator("#serving").get_attribute("data-state")
        return found

    def wait_for_serving(self, state: str) -> None:
        self.tab.locator(f"#serving[data-state={state}]").wait_for()

    def rollout(self) -> dict[str, Any]:
        """Its state in words, the weights of the plan, and the class of each: passed, current, ahead or ended."""
        steps = self.tab.locator("#rollout-steps li")
        return {
            "state": self.text("#rollout-state"),
            "weights": steps.all_inner_texts(),
            "steps": steps.evaluate_all("steps => steps.map(step => step.className)"),
            "verdict": self.text("#rollout-verdict"),
        }

    def pixels(self, canvas: str) -> int:
        """How many points of a canvas are drawn: 0 means that it is empty."""
        read = """canvas => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return data.filter((value, index) => index % 4 === 3 && value > 0).length;
        }"""
        found: int = self.tab.locator(canvas).evaluate(read)
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        self.tab.evaluate("scrollTo(0, 0)")
        self.tab.screenshot(path=path, full_page=whole)

    def _heard(self, message: Any) -> None:
        # A browser reports refused requests as errors of its console; the page shows what they mean.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.problems.append(message.text)
