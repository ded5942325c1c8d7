"""A headless Chromium for the tests of pages; a test without one is skipped, and says why."""

import json
import shutil

import pytest

# Nothing in the background may ask for anything: a test counts the requests of the page.
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1400,1000",
)  # fmt: skip


def start_browser(folder):
    """A Selenium driver with a fresh profile in `folder`; skips the test if there is none."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs pip install -e '.[browser]'")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for switch in (*SWITCHES, f"--user-data-dir={folder}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return selenium.Chrome(options=options, service=selenium.ChromeService(driver))


def requested_addresses(browser):
    """The addresses that pages have asked for since the last call, the browser's own left out."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    # The browser's new tab loads parts of the browser itself, for a document chrome://new-tab-page.
    return [
        request["request"]["url"]
        for request in requests
        if not request["documentURL"].startswith("chrome")
    ]
