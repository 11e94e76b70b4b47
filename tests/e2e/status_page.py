"""The status page in a real browser: what an operator sees, and what the actions do.

Environment: GOODPUT_URL (for clients), GOODPUT_ADMIN (its admin port), GOODPUT_TOKEN, GOODPUT_BROWSER (a Chromium),
GOODPUT_AXE (axe-core's script), GOODPUT_SHOTS (a folder for pictures).
"""

import contextlib
import json
import os
import re
import urllib.request

from playwright.sync_api import expect, sync_playwright

from steps import URL, run_all, step

ADMIN = os.environ["GOODPUT_ADMIN"].rstrip("/")
TOKEN = os.environ["GOODPUT_TOKEN"]
SHOTS = os.environ["GOODPUT_SHOTS"]
with open(os.environ["GOODPUT_AXE"], encoding="utf-8") as file:
    AXE = file.read()

playwright = sync_playwright().start()
# A gate runs as root, and its /dev/shm may be small.
browser = playwright.chromium.launch(
    executable_path=os.environ["GOODPUT_BROWSER"], args=["--no-sandbox", "--disable-dev-shm-usage"]
)
expect.set_options(timeout=60_000)


def ask(slo_class):
    """One request of a client; its class is missed if it is the strict one."""
    body = {"model": "sim", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json", "x-slo-class": slo_class}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert b"[DONE]" in response.read()


@contextlib.contextmanager
def opened(path="/", live=True, **options):
    """The page in a window of its own, once it is live. What the console says is collected on it."""
    options = {"viewport": {"width": 1280, "height": 900}, **options}
    context = browser.new_context(http_credentials={"username": "me", "password": TOKEN}, **options)
    page = context.new_page()
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    if not live:
        page.route("**/events*", lambda route: route.abort())
    page.goto(ADMIN + path)
    if live:
        expect(page.locator("#live")).to_have_text("live")
    try:
        yield page
    finally:
        context.close()


def rows(page):
    """The ids of the misses that are shown."""
    return page.locator("#misses tbody tr").evaluate_all("rows => rows.map(row => row.id)")


@step
def it_loads_without_a_word_in_the_console():
    """No error, no warning, and nothing is asked of anybody else."""
    with opened() as page:
        assert page.title() == "goodput: status"
        for heading in ["Classes", "Budget left over time", "Pools and engines", "Tenants", "Recent misses", "Actions"]:
            expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        expect(page.locator("#class-chat")).to_contain_text("TTFT ≤ ")
        expect(page.locator("#misses tbody tr").first).to_contain_text("ttft")
        assert page.said == [], page.said
        assert all(url.startswith(ADMIN) for url in page.asked), page.asked
        page.screenshot(path=f"{SHOTS}/status-light.png", full_page=True)


@step
def it_is_live():
    """What changes shows without a reload."""
    with opened() as page:
        page.evaluate("window.sameDocument = true")
        before = page.locator("#class-strict [data-label=Kept]").inner_text()
        ask("strict")
        expect(page.locator("#class-strict [data-label=Kept]")).not_to_have_text(before, use_inner_text=True)
        assert page.evaluate("window.sameDocument"), "it was loaded again"
        assert page.said == [], page.said


@step
def what_was_unfolded_and_focused_stays_so_when_more_comes():
    """An update touches only what changed."""
    with opened() as page:
        row = page.locator("#misses tbody tr").first
        key = row.get_attribute("id")
        row.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{key} details ol")).to_be_visible()
        ask("strict")
        expect(page.locator("#misses tbody tr").first).not_to_have_id(key)
        expect(page.locator(f"#{key} details ol")).to_be_visible()
        assert page.evaluate("document.activeElement.closest('tr').id") == key, "the focus moved"
        assert len(set(rows(page))) == len(rows(page)), "no row stands there twice"


@step
def a_pause_holds_it_still():
    """WCAG 2.2.2: whoever reads can stop it."""
    with opened() as page:
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#live")).to_have_text("paused")
        before = rows(page)
        ask("strict")
        with opened() as other:
            expect(other.locator("#misses tbody tr").first).not_to_have_id(before[0])
        assert rows(page) == before
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#misses tbody tr").first).not_to_have_id(before[0])


@step
def a_phone_scrolls_in_one_direction():
    """Nothing is wider than a narrow window."""
    for width in [320, 390, 768]:
        with opened(viewport={"width": width, "height": 800}) as page:
            widest = page.evaluate("document.scrollingElement.scrollWidth")
            assert widest <= width, f"{widest} of {width}"
            page.screenshot(path=f"{SHOTS}/status-{width}.png", full_page=True)


@step
def it_is_dark_where_that_is_preferred():
    """Both schemes are its own."""
    brightness = "(() => { const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g); return (+r + +g + +b) / 765; })()"
    with opened(color_scheme="dark") as page:
        assert page.evaluate(brightness) < 0.2
        page.screenshot(path=f"{SHOTS}/status-dark.png", full_page=True)
    with opened(color_scheme="light") as page:
        assert page.evaluate(brightness) > 0.8


@step
def axe_finds_nothing_wrong():
    """Names, roles, landmarks, contrast: in both schemes and on a phone."""
    for options in [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}]:
        with opened(**options) as page:
            page.locator("#misses summary").first.click()
            page.evaluate(AXE)
            found = page.evaluate("axe.run(document)")
            wrong = [(one["id"], one["help"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found["violations"]]
            assert wrong == [], wrong
            assert len(found["passes"]) > 20, "it looked"


@step
def tables_and_pictures_have_names():
    """What a screen reader tells of them."""
    with opened() as page:
        classes = page.get_by_role("region", name="Classes").get_by_role("table")
        expect(classes.get_by_role("columnheader", name="Budget left")).to_be_visible()
        expect(classes.get_by_role("rowheader").filter(has_text="chat")).to_be_visible()
        expect(page.get_by_role("img", name="Budget left of chat over")).to_be_visible()
        timeline = page.locator("#misses").get_by_role("img").first
        expect(timeline).to_have_attribute("aria-label", re.compile("attempt 1 at .*, to the first token: "))


def engine_row(page):
    """The first engine, and its choice in the form."""
    return page.locator("#pools tbody tr").first


def told(page, state):
    """What the last action came to."""
    answer = page.locator(f"#told[data-state={state}]")
    expect(answer).to_be_visible()
    return answer.inner_text()


@step
def actions_are_refused_without_the_token():
    """What the browser knows as a password is not enough."""
    with opened() as page:
        for token, status in [("", 401), ("wrong", 401)]:
            page.get_by_label("Admin token").fill(token)
            page.get_by_role("button", name="Drain", exact=True).click()
            assert str(status) in told(page, "refused"), page.locator("#told").inner_text()
            page.evaluate("document.getElementById('told').removeAttribute('data-state')")
        expect(engine_row(page)).not_to_contain_text("drained")


@step
def an_engine_is_drained_and_put_back():
    """The page shows it, and requests go elsewhere."""
    with opened() as page:
        page.get_by_label("Admin token").fill(TOKEN)
        page.get_by_label("For", exact=True).first.select_option("900")
        page.get_by_role("button", name="Drain", exact=True).click()
        assert "is drained" in told(page, "done")
        expect(engine_row(page)).to_contain_text("drained for")
        assert page.get_by_label("Admin token").input_value() == TOKEN, "an update takes nothing that was typed"
        before = engine_row(page).locator("[data-label^=Kept]").inner_text()
        for _ in range(3):
            ask("chat")
        page.get_by_label("Engine", exact=True).select_option(index=1)
        page.get_by_role("button", name="Drain", exact=True).click()
        assert "may_empty_pool" in told(page, "refused"), "the last one stays"
        assert engine_row(page).locator("[data-label^=Kept]").inner_text() == before
        page.get_by_label("Engine", exact=True).select_option(index=0)
        page.get_by_role("button", name="Put back").click()
        assert "is put back" in told(page, "done")
        expect(engine_row(page)).not_to_contain_text("drained")


@step
def a_level_is_set_and_settings_are_read_again():
    """The other actions."""
    with opened() as page:
        page.get_by_label("Admin token").fill(TOKEN)
        page.get_by_label("Level", exact=True).select_option("1")
        page.get_by_role("button", name="Set", exact=True).click()
        assert told(page, "done") == "Level 1 of 1, by hand."
        expect(page.locator("#class-chat [data-label='Overload level']")).to_contain_text("1 of 1, by hand")
        page.get_by_label("Level", exact=True).select_option("auto")
        page.get_by_role("button", name="Set", exact=True).click()
        expect(page.locator("#class-chat [data-label='Overload level']")).not_to_contain_text("by hand")
        page.get_by_role("button", name="Reload", exact=True).click()
        expect(page.locator("#told")).to_have_text("reloaded")


@step
def other_spans_have_their_own_page():
    """A link, so that it can be sent to somebody."""
    with opened() as page:
        page.get_by_role("link", name="last day").click()
        expect(page.locator("#live")).to_have_text("live")
        expect(page.get_by_role("link", name="last day")).to_have_attribute("aria-current", "true")
        assert page.url.endswith("/?span=day") and page.said == [], (page.url, page.said)


@step
def without_script_it_is_the_same_page():
    """Whole, and loaded again now and then."""
    with opened(live=False, java_script_enabled=False) as page:
        expect(page.locator("#class-chat")).to_contain_text("target 95 %")
        expect(page.locator("#misses tbody tr").first).to_contain_text("ttft")
        expect(page.locator("noscript p")).to_contain_text("POST /-/drain")
        expect(page.locator("#actions form").first).to_be_hidden()
        assert page.locator("meta[http-equiv=refresh]").count() == 1
        page.locator("#misses summary").first.click()
        expect(page.locator("#misses details ol").first).to_be_visible()


@step
def a_lost_connection_is_told():
    """Nobody takes old figures for new ones."""
    with opened(live=False) as page:
        expect(page.locator("#live")).to_contain_text("connection lost")
        page.unroute("**/events*")
        expect(page.locator("#live")).to_have_text("live")


try:
    run_all()
finally:
    browser.close()
    playwright.stop()
