"""The report: one file without outside parts, which marks suspicious values, whatever the keys are called."""

import html.parser
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from matplotlib import image

from support import kinds
from support.command_line import call
from torch_xla_ckpt.inspecting.treemaps import treemap

pytestmark = pytest.mark.filterwarnings("ignore")

VOID = {"meta"}


class Page(html.parser.HTMLParser):
    """Checks that every element is closed, and collects the text and the attributes."""

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.attributes = [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def page_of(path, tmp_path, *options):
    answer = call("report", path, "-o", tmp_path / "report.html", *options)
    assert answer.status == 0, answer.err
    return Page(tmp_path / "report.html")


@pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
def test_a_page_about_every_kind(tmp_path, kind):
    kinds.CHECKPOINTS[kind](tmp_path / "c")
    page = page_of(tmp_path / "c", tmp_path)
    assert any("layers.{0..2}.weight" in text for text in page.text)
    assert "No tensor has suspicious values." in page.text


def test_a_page_needs_nothing_from_outside(tmp_path):
    kinds.save_ours(tmp_path / "c")
    page = page_of(tmp_path / "c", tmp_path)
    assert not {"src", "href", "srcset", "onload"} & {name for name, _ in page.attributes}
    assert "default-src 'none'" in page.source and "<script" not in page.source
    assert not re.search(r"url\(|@import|https?://", page.source)
    assert "prefers-color-scheme: dark" in page.source and "width=device-width" in page.source


def test_suspicious_values_are_marked(tmp_path):
    torch.manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(16, 8) for n in range(5)}
    state["layers.1.w"] = state["layers.1.w"] * 100
    state["layers.2.w"][3] = 0
    state["layers.3.w"][0, 0] = math.nan
    state["layers.4.w"][0, 0] = math.inf
    state["zeros"] = torch.zeros(4, 4)
    state["huge"] = torch.tensor([1e6])
    state["counts"] = torch.zeros(4, 4, dtype=torch.int64)
    kinds.save_ours(tmp_path / "c", state)
    found = call("report", tmp_path / "c", "-o", tmp_path / "r.html", "--json").json
    suspicions = {one["key"]: one["suspicions"] for one in found["tensors"]}
    assert suspicions["layers.0.w"] == [] and suspicions["counts"] == []
    assert "times that of tensors like it" in suspicions["layers.1.w"][0]
    assert suspicions["layers.2.w"] == ["1 dead of 16 rows"]
    assert suspicions["layers.3.w"] == ["1 NaN"] and suspicions["layers.4.w"] == ["1 Inf"]
    assert suspicions["zeros"] == ["all zeros"] and "huge values" in suspicions["huge"][0]
    assert "1 dead of 16 rows" in Page(tmp_path / "r.html").text


def test_rows_that_lie_in_several_chunks_are_dead_only_as_a_whole(tmp_path):
    state = kinds.sharded_state()
    kinds.save_ours(tmp_path / "c", state)
    found = call("report", tmp_path / "c", "-o", tmp_path / "r.html", "--json").json
    assert {one["dead_rows"] for one in found["tensors"] if len(one["shape"]) == 2} == {0}


def test_a_run_shows_metrics_over_steps(tmp_path):
    kinds.save_run(tmp_path / "run")
    page = page_of(tmp_path / "run", tmp_path)
    assert {"loss", "accuracy", "MiB of each step"} <= set(page.text)
    assert any("Newest whole step" in text and "30" in text for text in page.text)
    for step in ("10", "20", "30"):
        shutil.rmtree(tmp_path / "run" / step)
    (tmp_path / "run" / "40").mkdir()
    assert "unfinished" in " ".join(page_of(tmp_path / "run", tmp_path).text)


def test_hostile_keys_are_text(tmp_path):
    key = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\x1b\n"
    kinds.save_ours(tmp_path / "c", {key: torch.ones(8, 8), "b": torch.ones(2)}, user_metadata={"<b>": "</dl>"})
    page = page_of(tmp_path / "c", tmp_path)
    assert "<script" not in page.source and "<img" not in page.source and "\x1b" not in page.source
    assert any("<script>alert(1)</script>" in text for text in page.text)


@pytest.mark.parametrize("state", [{}, {"empty": torch.empty(0, 3)}, {"n": 1}, {"s": torch.tensor(math.nan)}])
def test_odd_checkpoints(tmp_path, state):
    kinds.save_ours(tmp_path / "c", state)
    page_of(tmp_path / "c", tmp_path)
    page_of(tmp_path / "c", tmp_path, "--no-statistics")


def test_tiles_have_the_areas_of_their_sizes():
    sizes = [(f"model.layers.{n}.{name}", (n + 1) * size) for n in range(9) for name, size in (("a", 700), ("b", 90))]
    tiles = treemap([*sizes, ("nothing", 0)], 900, 400)
    total = sum(size for _, size in sizes)
    assert sum(tile.nbytes for tile in tiles) == total and {tile.name for tile in tiles} == {key for key, _ in sizes}
    for tile in tiles:
        assert math.isclose(tile.width * tile.height, 900 * 400 * tile.nbytes / total)
        assert tile.left >= -1e-6 and tile.left + tile.width <= 900 + 1e-6 and tile.top + tile.height <= 400 + 1e-6


def test_a_treemap_of_many_keys_stays_small():
    tiles = treemap([(f"m.{n % 50}.{n}", 1 + n) for n in range(20_000)], 900, 400)
    assert len(tiles) <= 600 and sum(tile.nbytes for tile in tiles) == sum(range(1, 20_001))


BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome", "chrome"))), None
)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1200, "light")])  # colours do not depend on the width
def test_a_browser_draws_the_page_in_both_schemes_and_on_a_phone(tmp_path, width, scheme):
    kinds.save_ours(tmp_path / "c")
    page_of(tmp_path / "c", tmp_path)
    picture = tmp_path / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    options = [f"--user-data-dir={tmp_path}/profile", f"--window-size={width},1500", f"--screenshot={picture}", *dark]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
    subprocess.run([*command, (tmp_path / "report.html").as_uri()], check=True, capture_output=True, timeout=60)
    pixels = image.imread(picture)[..., :3]
    corner = pixels[0, 0].mean()
    assert corner > 0.9 if scheme == "light" else corner < 0.2
    assert pixels.shape[1] == width
    assert len(np.unique((pixels * 15).astype(int).reshape(-1, 3), axis=0)) > 20  # tiles, boxes and text
