"""The page in a real browser: pointers and keys change what is shown, to the right numbers.

Needs Chromium, its driver and Selenium, or the tests are skipped; tests/README.md has the commands.
"""

import shutil

import matplotlib
import numpy as np
import pytest

from attention_jax.analysis import AttentionView, view

N, T, S = 3, 5, 7
LAYERS = ("encoder_0/self_attention", "decoder_0/cross_attention")
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
SOURCE = ["a", EVIL, " ", "d", "e", "f", "▁g"]
TARGET = ["v", "w", "x", "y", "z"]
SHAPES = {LAYERS[0]: (N, S, S), LAYERS[1]: (N, T, S)}
TOKENS = {LAYERS[0]: (SOURCE, SOURCE), LAYERS[1]: (TARGET, SOURCE)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        mask = np.ones(shape, bool)
        mask[:, 0, 3:] = False
        logits = np.where(mask, 3 * rng.normal(size=shape), -np.inf)
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        dlogits = np.where(mask, rng.normal(size=shape) * 1e-3, 0)
        found[name] = {"weights": weights, "logits": logits, "dlogits": dlogits, "mask": mask}
    return found


# By panel and step.
ARRAYS = {("dot", "0"): arrays(0), ("dot", "7"): arrays(1), ("additive", "7"): arrays(2)}


def whole_page(precision="float32"):
    views = {key: view(a, TOKENS, example=(), precision=precision) for key, a in ARRAYS.items()}
    dot = AttentionView.step_by_step({step: views["dot", step] for step in ("0", "7")})
    additive = AttentionView.step_by_step({"7": views["additive", "7"]})
    both = AttentionView.side_by_side({"dot": dot, "additive": additive})
    return AttentionView({**both.data, "title": EVIL})


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Selenium driver with a fresh profile; skips the tests if there is none."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs pip install -e '.[browser]'")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = program
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    for switch in ("--headless", "--no-sandbox", "--window-size=1400,1000", profile):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """The page, newly opened; afterwards: no error in the console.

    The browser would write there what the page's security policy keeps it from loading.
    """
    yield Opened(browser, whole_page().save(tmp_path / "page.html"))
    assert browser.get_log("browser") == []


LONG = [f"{word}{n}" for n in range(256) for word in (" a", "b", "<i>", " d")]


@pytest.fixture
def long(browser, tmp_path):
    """The page of 1,024 tokens, whose numbers it decompresses."""
    weights = np.random.default_rng(3).dirichlet(np.ones(len(LONG)), (1, len(LONG)))
    page = view({"a": {"weights": weights}}, LONG, example=()).save(tmp_path / "long.html")
    opened = Opened(browser, page)
    opened.weights = weights[0]
    yield opened
    assert browser.get_log("browser") == []


class Opened:
    """What a reader does to the page, and what they see."""

    def __init__(self, browser, page=None):
        from selenium.webdriver import ActionChains, Keys
        from selenium.webdriver.common.by import By

        self.browser, self.by, self.keys = browser, By.CSS_SELECTOR, Keys
        self.actions = lambda: ActionChains(browser, duration=0)
        if page:
            browser.get_log("browser")
            browser.get(page.as_uri())
            self.wait()

    def wait(self):
        """Until the page has decompressed its numbers."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 60).until(lambda _: self.all(".bar-row"))

    def all(self, selector, inside=None):
        return (inside or self.browser).find_elements(self.by, selector)

    def panel(self, index):
        return self.all(".panel")[index]

    def click(self, selector, panel=0):
        self.all(selector, self.panel(panel))[0].click()

    def choose(self, quantity):
        self.all(f"input[value={quantity}]")[0].click()

    def check(self, text):
        (label,) = [each for each in self.all(".controls label") if each.text == text]
        label.click()

    def token(self, side, index, panel=0):
        selector = f".lines .{side} .token[data-index='{index}']"
        return self.all(selector, self.panel(panel))[0]

    def hover(self, element):
        self.actions().move_to_element(element).perform()

    def hover_pair(self, i, j, shape, panel=0):
        canvas = self.all(".matrix canvas", self.panel(panel))[0]
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        width, height = canvas.size["width"], canvas.size["height"]
        x, y = (j + 0.5) / shape[1] * width - width / 2, (i + 0.5) / shape[0] * height - height / 2
        self.actions().move_to_element_with_offset(canvas, round(x), round(y)).perform()

    def press(self, *keys):
        self.actions().send_keys(*keys).perform()

    def focus(self, selector):
        focus = "document.querySelector(arguments[0]).focus({preventScroll: true})"
        self.browser.execute_script(focus, selector)

    def found(self):
        return self.all(".controls fieldset output")[0].text

    def readout(self, panel=0):
        return self.all(".readout", self.panel(panel))[0].text

    def bars(self, panel=0):
        """(position, token, number) of each row that is shown."""
        script = """
            return [...arguments[0].querySelectorAll(".bar-row:not([hidden])")].map((row) =>
              ["position", "token", "number"].map((part) =>
                row.querySelector(`.bar-${part}`).textContent));
        """
        return self.browser.execute_script(script, self.panel(panel))

    def numbers(self, panel=0):
        """The numbers of the bars, NaN where it says masked."""
        return [parsed(number) for _, _, number in self.bars(panel)]

    def shows(self, numbers, panel=0):
        np.testing.assert_allclose(self.numbers(panel), numbers, rtol=1e-3)


def parsed(text):
    return np.nan if text == "masked" else float(text.replace("−", "-").replace("∞", "inf"))


def expected(panel, step, quantity, layer=LAYERS[1]):
    found = ARRAYS[panel, step][layer]
    return np.where(found["mask"], found[quantity], np.nan)


def test_a_token_under_the_pointer_shows_its_row_in_both_panels(opened):
    opened.hover(opened.token("queries", 3))
    for panel, name in enumerate(("dot", "additive")):
        opened.shows(expected(name, "7", "weights")[0, 3], panel)
        assert opened.readout(panel) == "What y (query 3) attends to"
        assert "focus" in opened.token("queries", 3, panel).get_attribute("class")
    opened.hover(opened.token("keys", 6, panel=1))
    opened.shows(expected("dot", "7", "weights")[0, :, 6])
    assert opened.readout() == "What attends to _g (key 6)"
    assert [token for _, token, _ in opened.bars()] == TARGET


def test_a_pair_of_the_enlarged_head(opened):
    opened.click("button[data-place='1,2']")
    for quantity in ("weights", "logits", "dlogits"):
        opened.choose(quantity)
        opened.hover_pair(4, 5, (T, S))
        for panel, name in enumerate(("dot", "additive")):
            row = expected(name, "7", quantity)[2, 4]
            text = opened.readout(panel)
            assert text.startswith("z (query 4) → f (key 5): ")
            np.testing.assert_allclose(parsed(text.split()[-1]), row[5], rtol=1e-3)
            opened.shows(row, panel)
        opened.hover_pair(0, 4, (T, S))
        assert opened.readout() == "v (query 0) → e (key 4): masked"
        assert [number for _, _, number in opened.bars()][3:] == ["masked"] * 4


def test_entropy_and_rollout(opened):
    opened.choose("entropy")
    weights = np.nan_to_num(expected("dot", "7", "weights")[0])
    opened.shows(-(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1))
    opened.choose("rollout")
    opened.hover_pair(2, 4, (T, S))
    encoder = np.nan_to_num(expected("dot", "7", "weights", LAYERS[0])).mean(0) + np.eye(S)
    mixture = encoder / encoder.sum(-1, keepdims=True)
    cross = np.nan_to_num(expected("dot", "7", "weights")).mean(0)
    opened.shows((cross @ mixture)[2])


def test_the_slider_goes_through_the_steps(opened):
    opened.all("input[type=range]")[0].send_keys(opened.keys.ARROW_LEFT)
    opened.hover_pair(1, 2, (T, S))
    opened.shows(expected("dot", "0", "weights")[0, 1])
    assert "not captured" in opened.all(".absent", opened.panel(1))[0].text
    assert not opened.all(".readout", opened.panel(1))[0].is_displayed()


def test_a_click_pins_and_escape_lets_go(opened):
    opened.token("queries", 2).click()
    opened.hover(opened.token("queries", 4))
    opened.shows(expected("dot", "7", "weights")[0, 2])
    assert opened.readout().endswith("pinned")
    opened.press(opened.keys.ESCAPE)
    opened.hover(opened.token("queries", 4))
    opened.shows(expected("dot", "7", "weights")[0, 4])


def test_keys_alone(opened):
    keys = opened.keys
    opened.focus(".lines")
    opened.press(keys.ARROW_DOWN, keys.ARROW_DOWN, keys.ARROW_DOWN)
    assert opened.readout() == "What x (query 2) attends to"
    opened.press(keys.ARROW_RIGHT, keys.ARROW_UP)
    assert opened.readout().endswith("(key 1)")
    opened.focus(".matrix")
    opened.press(keys.ESCAPE, keys.ARROW_DOWN, keys.ARROW_DOWN, keys.ARROW_RIGHT, keys.ENTER)
    number, *pinned = opened.readout().split("weight ")[1].split(" · ")
    assert parsed(number) == pytest.approx(expected("dot", "7", "weights")[0, 1, 1], rel=1e-3)
    assert pinned == ["pinned"]
    opened.focus("button[data-place='0,0']")
    opened.press(keys.ARROW_DOWN, keys.ARROW_RIGHT, keys.ENTER)
    assert "head 1" in opened.all("button[aria-pressed=true]")[0].get_attribute("aria-label")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("DEF", list("def")), (" g", ["▁g"]), ("</script>", [EVIL]), ("x", ["x", EVIL]), ("Q", [])],
)
def test_search_marks_the_tokens_that_have_a_text(opened, text, tokens):
    opened.press("/", text)
    labels = opened.all(".lines .token.match", opened.panel(0))
    assert [label.get_attribute("title") for label in labels] == tokens
    assert len(opened.all(".matrix .tick", opened.panel(0))) == len(tokens)
    counts = {"x": "2 matches", "Q": "no match"}
    assert opened.found() == counts.get(text, "1 match")
    opened.press(opened.keys.ESCAPE)
    assert opened.all(".match, .tick") == []


def test_search_goes_from_match_to_match(opened):
    keys = opened.keys
    opened.press("/", "x", keys.ENTER)
    query = ("1 of 2", "What x (query 2) attends to · pinned")
    key = ("2 of 2", f"What attends to {EVIL} (key 1) · pinned")
    assert (opened.found(), opened.readout()) == query
    opened.press(keys.ENTER)
    assert (opened.found(), opened.readout(panel=1)) == key
    opened.press(keys.ENTER)
    assert (opened.found(), opened.readout()) == query
    opened.press(keys.SHIFT, keys.ENTER)
    assert (opened.found(), opened.readout()) == key
    opened.shows(expected("dot", "7", "weights")[0, :, 1])


def test_the_list_by_weight_with_1024_tokens(long):
    keys = long.keys
    long.focus(".lines")
    long.press(keys.ARROW_DOWN, keys.PAGE_DOWN, keys.ARROW_DOWN)
    row = long.weights[17]
    long.check("largest first")
    long.shows(np.sort(row)[: -1 - len(long.bars()) : -1])
    long.focus(".rows")
    long.press(keys.ARROW_DOWN, keys.ARROW_DOWN)
    for place, key in ((-2, keys.END), (0, keys.HOME), (-1, keys.ENTER)):
        index = np.argsort(row)[place]
        (selected,) = long.all(".bar-row[aria-selected=true]")
        assert selected.get_attribute("data-index") == str(index)
        assert f"(key {index}): weight" in long.readout()
        long.press(key)
    long.check("largest first")
    positions = [int(position) for position, _, _ in long.bars()]
    assert positions == list(range(positions[0], positions[-1] + 1))
    assert index in positions


def test_1024_large_tokens_scroll_to_a_match(long):
    long.check("large")
    long.press("/", "175<I>175 D", long.keys.ENTER)
    inside = """
        const [label, view] = [arguments[0], arguments[0].closest(".scroller")]
          .map((each) => each.getBoundingClientRect());
        return label.top >= view.top && label.bottom <= view.bottom;
    """
    for view_ in (".lines", ".matrix"):
        (label,) = long.all(f"{view_} .token.focus")
        assert label.text == "b175"
        assert long.browser.execute_script(inside, label)
    assert long.readout() == "What b175 (query 701) attends to · pinned"


def test_bright_colours_follow_the_square_root_of_weights(long):
    i, j = np.unravel_index(long.weights.argmax(), long.weights.shape)
    long.check("large")
    for root in (1, 0.5):
        expected = 255 * np.array(matplotlib.colormaps["viridis"](long.weights[i, j] ** root)[:3])
        assert np.abs(pixel(long, i, j, long.weights.shape) - expected).max() < 12
        long.check("bright")


def test_markup_in_tokens_is_text(opened):
    assert opened.token("keys", 1).text.startswith("<img src=x")
    assert [token for _, token, _ in opened.bars()][1] == EVIL
    assert [token for _, token, _ in opened.bars()][2] == "␣"
    assert opened.all("img, .panels script") == []
    assert opened.browser.title == EVIL


def pixel(opened, i, j, shape):
    """The colour in the middle of a pair in the matrix."""
    script = """
        const canvas = arguments[0], copy = document.createElement("canvas");
        const context = copy.getContext("2d", {willReadFrequently: true});
        const [x, y] = [arguments[1] * canvas.width, arguments[2] * canvas.height];
        context.drawImage(canvas, -Math.floor(x), -Math.floor(y));
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    """
    canvas = opened.all(".matrix canvas", opened.panel(0))[0]
    return opened.browser.execute_script(script, canvas, (j + 0.5) / shape[1], (i + 0.5) / shape[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_masked_pairs_differ_from_weight_0_in_light_and_dark(opened, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    shape = SHAPES[LAYERS[1]][1:]
    red, green, blue = pixel(opened, 0, 5, shape)
    assert red == green == blue  # grey
    weights = expected("dot", "7", "weights")[0]
    i, j = np.unravel_index(np.nanargmin(weights), weights.shape)
    dark_violet = np.array([0x44, 0x01, 0x54])
    assert np.abs(np.array(pixel(opened, i, j, shape)) - dark_violet).max() < 12
    background = opened.all("body")[0].value_of_css_property("background-color")
    assert ("255" in background) == (scheme == "light")


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_notebooks_frame_runs_alone_in_a_collapsed_cell_too(browser, tmp_path, precision):
    page = tmp_path / "notebook.html"
    frame = whole_page(precision)._repr_html_()
    page.write_text(f"<!doctype html><title>x</title><div hidden>{frame}</div>", "utf-8")
    browser.get_log("browser")
    browser.get(page.as_uri())
    browser.execute_script("document.querySelector('div').hidden = false")
    browser.switch_to.frame(0)
    opened = Opened(browser)
    opened.wait()
    assert opened.readout().startswith(f"{LAYERS[1]}, head 0: weights")
    assert browser.get_log("browser") == []
