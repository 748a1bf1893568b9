"""The pages in a real browser: no error, the controls act, and hostile text stays text."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sat.analyze.compare_report import compare
from agent_sat.analyze.measures import MEASURES, finish
from agent_sat.analyze.report import write_report
from agent_sat.analyze.runs import open_run
from agent_sat.analyze.sums import add, read_sums
from agent_sat.analyze.viewer import make_server
from tests.analyze.planted_runs import HOSTILE, Plan, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
TABS = ["overview", "mismatch", "tails", "KL groups", "SAT", "staleness", "reward", "episodes", "about"]
MARKS = [mark for mark in HOSTILE[2] if not mark.isprintable()]

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install agent-sat[test]"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs Chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A planted run and a hostile one, each with its report."""
    folder = tmp_path_factory.mktemp("pages")
    write(folder / "plain", Plan(steps=12, groups=4, members=8))
    write(folder / "hostile", Plan(steps=2, groups=5, members=4, hostile=True, name=HOSTILE[0]))
    for name in ("plain", "hostile"):
        write_report(folder / name, folder / f"{name}.html")
    return folder


@contextmanager
def opened(browser, address: str) -> Iterator:
    """A page that must not complain in any way, nor ask for anything but its own address."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    yield page
    base = address.split("#", maxsplit=1)[0]
    strange = [url for url in requests if not url.startswith((base, "data:", "blob:"))]
    page.close()
    assert complaints == [] and strange == []


def tab(page, name: str) -> None:
    page.locator("nav button", has_text=name).click()


def test_every_tab_opens_from_disk_and_draws(browser, folder):
    least = {"overview": 2, "mismatch": 4, "tails": 6, "KL groups": 1, "SAT": 7, "staleness": 5, "reward": 4}
    with opened(browser, f"file://{folder}/plain.html") as page:
        assert page.locator("nav button").all_inner_texts() == TABS
        for name in TABS:
            tab(page, name)
            assert page.locator("figure > svg").count() >= least.get(name, 0), name
            assert page.locator("main").inner_text().count("NaN") == 0


def test_a_run_without_token_records_still_shows_its_rewards(browser, folder):
    path = write(folder / "bare", Plan(steps=6))
    shutil.rmtree(path / "tokens")
    write_report(path, folder / "bare.html")
    with opened(browser, f"file://{folder}/bare.html") as page:
        for name in TABS:
            tab(page, name)
        tab(page, "reward")
        assert page.locator("figure > svg").count() == 4
        tab(page, "tails")
        assert page.locator("figure > svg").count() == 0 and page.locator(".empty").count() == 6


def test_a_tab_in_the_address_is_opened(browser, folder):
    with opened(browser, f"file://{folder}/plain.html#KL-groups") as page:
        assert page.locator("nav button[aria-selected=true]").inner_text() == "KL groups"


def test_the_page_computes_what_python_computes(browser, folder):
    """rules.js against measures.py, on the sums of every turn."""
    sums = add(read_sums(open_run(folder / "plain")).cube, ["turn"])
    want = finish(sums).to_dicts()
    with opened(browser, f"file://{folder}/plain.html") as page:
        values = "Object.fromEntries(Object.keys(M).map(name => [name, evaluate(M[name], sums)]))"
        got = dict(page.evaluate(f"[...byTurn()].map(([turn, sums]) => [turn, {values}])"))
    assert sorted(got) == [0, 1, 2, 3]
    for row in want:
        for name in MEASURES:
            assert got[row["turn"]][name] == pytest.approx(row[name], rel=1e-5, abs=1e-8), (row["turn"], name)


def test_steps_and_turns_can_be_chosen(browser, folder):
    """Eight members of 1, 2, 3, 4, 1, 2, 3, 4 turns in 4 groups: 320 tokens of turn 0 a step."""
    with opened(browser, f"file://{folder}/plain.html") as page:
        tokens = page.locator(".card", has_text="sampled tokens").locator("b")
        assert tokens.inner_text() == str(12 * 800)
        for turn in (1, 2, 3):
            page.locator(f"input[name=turn-{turn}]").uncheck()
        assert tokens.inner_text() == str(12 * 320)
        assert page.locator("tbody tr").count() == 2  # one in each table
        page.locator("input[name=from]").fill("8")
        assert tokens.inner_text() == str(4 * 320)
        assert page.locator("output").inner_text() == "9 to 12"


def test_a_measure_is_chosen_hovered_and_saved(browser, folder):
    with opened(browser, f"file://{folder}/plain.html#mismatch") as page:
        page.locator("select[name=measure]").select_option("k3")
        figure = page.locator("figure").first
        assert "k3 over training" in figure.inner_text()
        figure.locator("svg").last.hover(position={"x": 300, "y": 120})
        assert (
            "turn 3: " in figure.locator(".tip").inner_text()
            and "n 80" in figure.locator(".tip").inner_text()
        )
        with page.expect_download() as download:
            figure.locator("button.save").click()
        path = download.value.path()
        assert download.value.suggested_filename == "k3-over-training.png"
        assert Path(path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and Path(path).stat().st_size > 5000


def rows(page) -> list[str]:
    return [row.get_attribute("data-key") for row in page.locator(".list tr[data-key]").all()]


def test_filters_of_the_embedded_episodes_work(browser, folder):
    with opened(browser, f"file://{folder}/plain.html#episodes") as page:
        page.wait_for_selector(".list .tail")
        everything = rows(page)
        page.locator("select[name=ending]").select_option("turn_limit")
        page.wait_for_function(
            "n => document.querySelectorAll('.list tr[data-key]').length < n", arg=len(everything)
        )
        assert all(int(key.split("/")[2]) % 2 for key in rows(page))
        page.locator("input[name=least]").fill("1000")
        page.locator("input[name=least]").press("Enter")
        page.wait_for_selector("text=no episode matches")


def hostile_text_stays_text(page) -> None:
    shown = page.locator(".detail").inner_text()
    assert "<script>document.title='owned'</script>" in shown
    assert not any(mark in shown for mark in MARKS) and "\u27e8U+202E\u27e9" in shown
    assert page.title() != "owned"
    assert page.locator("main script, main img").count() == 0


def test_hostile_text_in_a_report_does_no_harm(browser, folder):
    with opened(browser, f"file://{folder}/hostile.html") as page:
        assert page.locator("h1").inner_text() == HOSTILE[0]
        for name in TABS:
            tab(page, name)
        tab(page, "episodes")
        page.wait_for_selector(".list .tail")
        page.locator(".list tr[data-key$='/3']").first.click()
        page.wait_for_selector(".episode")
        for mode in ("log pi", "gate", "version", "|d|"):
            page.locator("select[name=colour]").select_option(mode)
        hostile_text_stays_text(page)
        page.locator("nav button", has_text="about").click()


def test_the_viewer_lists_filters_and_opens_any_episode(browser, folder):
    with make_server(folder / "hostile") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with opened(browser, f"http://127.0.0.1:{server.server_address[1]}/") as page:
                page.wait_for_selector(".list .tail")
                assert len(rows(page)) == 2 * 5 * 4
                page.locator("input[name=from]").fill("2")
                page.locator("input[name=from]").press("Enter")
                page.wait_for_selector("text=20 episodes")
                page.locator(".list tr[data-key='2/200/3']").click()  # its tool printed over a megabyte
                page.wait_for_selector(".episode")
                hostile_text_stays_text(page)
                more = page.locator("button", has_text="show all").first
                assert int(more.inner_text().split()[2]) > 900_000
                more.click()
                page.locator("select[name=changed]").select_option("1")
                page.wait_for_function("document.querySelectorAll('.list tr[data-key]').length < 20")
        finally:
            server.shutdown()
            thread.join()


def test_a_comparison_opens_with_its_verdicts_and_curves(browser, folder):
    plans = [Plan(method=m, seed=s, steps=8, groups=1) for m in ("grpo", "sat-grpo") for s in (0, 1, 2)]
    runs = [write(folder / f"{plan.method}-{plan.seed}", plan) for plan in plans]
    compare(runs, folder / "out")
    with opened(browser, f"file://{folder}/out/comparison.html") as page:
        assert page.locator(".verdict", has_text="last reward").count() == 1
        tab(page, "learning curves")
        assert page.locator("figure > svg polygon").count() == 2
        tab(page, "by turn")
        assert page.locator("figure > svg").count() == 3
        tab(page, "runs")
        assert page.locator("tbody tr").count() == 6
