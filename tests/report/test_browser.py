"""The page in a real browser: narrow and wide, dark and light. It must ask for nothing from elsewhere and fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands.report import main
from embodied_rl.evaluation.video import write_h264
from embodied_rl.report.facts import note_end, note_start
from tests.commands.evaluations import episodes, write
from tests.report.runs import META, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as api:
        running = api.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with videos, long names and a long command."""
    tmp_path = tmp_path_factory.mktemp("page")
    folder = tmp_path / "videos"
    long = f"{'a_very_long_name_without_a_place_to_break' * 3}"
    run = make_run(
        tmp_path / "run",
        changes={"runner.experiment_name": long, "env.eval.video_cfg.video_base_dir": str(folder), "model.path": long},
    )
    for step, outcomes in ((0, [[0, 0, 0, 0]] * 2), (4, [[1, 1, 0, 1], [1, 1, 1, 1]])):
        entries = episodes(outcomes)
        for entry in entries:
            entry["video"] = {"file": f"{step}/task {entry['task_id']} #1.mp4", "tile": entry["reset_state_id"] % 100}
        for task in (0, 1):
            film = folder / f"{long}_run" / str(step) / f"task {task} #1.mp4"
            film.parent.mkdir(parents=True, exist_ok=True)
            frames = (np.full((64, 96, 3), 40 * frame, np.uint8) for frame in range(5))
            write_h264(film, frames, 5, {"preset": "ultrafast"}, threads=1)
        write(run / f"eval_step_{step:06d}" / "eval.json", entries, META)
    note_start(run, ["task=embodied", "env=dummy", "model=mlp", f"model.path={long}"])
    note_end(run, "finished")
    main([str(run)])
    return run / "report.html"


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_asks_for_nothing(browser: Any, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == [] and asked == [report.as_uri()]
    assert page.locator("svg").count() >= 8 and page.locator("video").count() == 4
    widths = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)")
    assert all(280 <= each <= width for each in widths)
    assert contrast(page) >= 4.5
    context.close()


def contrast(page: Any) -> float:
    """The least contrast of a text with the page behind it, as WCAG reckons it."""
    return page.evaluate(
        """() => {
          const canvas = document.createElement('canvas').getContext('2d');
          const light = (colour) => {
            canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
              .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = light(getComputedStyle(document.body).backgroundColor);
          const texts = document.querySelectorAll('h1, h2, p, th, td, figcaption, svg text, .yes, .no, .up b');
          return Math.min(...[...texts].map(text => {
            const style = getComputedStyle(text);
            const front = light(text instanceof SVGElement ? style.fill : style.color);
            return (Math.max(front, behind) + 0.05) / (Math.min(front, behind) + 0.05);
          }));
        }"""
    )


def test_a_video_plays(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    assert page.locator("figcaption", has_text="after: step 4 · 3 of 4 succeeded").count() == 1
    assert page.locator("video").first.get_attribute("poster").startswith("data:image/jpeg;base64,")
    ready = """video => new Promise((yes, no) => {
        video.onloadeddata = () => yes(video.videoWidth);
        video.onerror = no;
        video.load();
    })"""
    sources = page.evaluate("[...document.querySelectorAll('video')].map(video => decodeURI(video.src))")
    assert all(Path(source.removeprefix("file://").replace("%23", "#")).is_file() for source in sources)
    page.evaluate("document.querySelectorAll('video').forEach(video => video.preload = 'auto')")
    assert page.locator("video").first.evaluate(ready) == 96
    page.close()
