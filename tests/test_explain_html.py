"""The page of a report: complete, self-contained, and readable in a real browser."""

from __future__ import annotations

import html
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser

import pytest

import pagebinder
from pagebinder import CompileConfig
from pagebinder.explain_html import explain_html, formula, si, size, timed, total
from pagebinder.explain_html import seconds as seconds_text
from pagebinder.explain_rates import Rates, measured_rates
from pagebinder.report import CompileReport, VerifiedStep
from tests.helpers import tiny_gemma3, tiny_llama, tiny_qwen3_next

pytestmark = pytest.mark.usefixtures("captured_once")

RATES = Rates(1e12, 1e10, "rates of a test")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_END = {"meta", "br", "link", "img", "hr", "input"}
MODELS = {
    "llama": lambda: tiny_llama(num_hidden_layers=5),
    "qwen3-next": tiny_qwen3_next,
    "gemma3": tiny_gemma3,
}


@pytest.fixture(scope="module")
def reports():
    config = CompileConfig(executable="eager")
    return {name: pagebinder.compile_model(make(), config).report for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def pages(reports):
    return {name: explain_html(report, RATES) for name, report in reports.items()}


class Checker(HTMLParser):
    """Tags that open and close in order, ids, links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert not {"src", "srcset", "onclick", "onload"} & set(attrs), "the page loads and runs nothing"
        assert tag not in ("script", "link", "img", "iframe")
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        if tag not in NO_END:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", MODELS)
def test_the_page_is_well_formed_and_needs_no_network(pages, name):
    checked = Checker(pages[name])
    assert len(set(checked.ids)) == len(checked.ids)
    assert set(checked.links) == {f"#{i}" for i in checked.ids}
    assert "http" not in pages[name] and "@import" not in pages[name] and "url(" not in pages[name]
    assert 'lang="en"' in pages[name] and "prefers-color-scheme: dark" in pages[name]


def test_equal_layers_are_shown_once(reports, pages):
    blocks = [(b["title"], b["count"]) for b in reports["llama"].blocks()]
    assert blocks == [
        ("before the layers", 1), ("model.layers.0", 1), ("model.layers.[1-3]", 3),
        ("model.layers.4", 1),  # of which the rows of logits are all that is computed behind its attention
        ("after the layers", 1),
    ]  # fmt: skip
    assert (
        "\u00d7 3" in pages["llama"] and pages["llama"].count("model.layers.1.") == 1
    )  # the state's own path
    mixed = [b["title"] for b in reports["qwen3-next"].blocks()]
    assert mixed[1:-1] == ["model.layers.0", "model.layers.[1-2]", "model.layers.3"]


def test_every_level_of_a_module_is_in_one_row(reports):
    block = next(b for b in reports["llama"].blocks() if b["count"] == 3)
    row = next(r for r in block["rows"] if r["at"] == "input_layernorm")
    assert [c["op"] for c in row["captured"]][-3:] == ["mul", "to", "mul"]
    assert [[c["op"] for c in row[level]] for level in ("semantic", "paged", "fused")] == [
        ["rms_norm"], ["rms_norm"], ["add_rms_norm"],
    ]  # fmt: skip
    attention = next(r for r in block["rows"] if r["at"] == "self_attn")
    assert "paged_attention" in [c["op"] for c in attention["fused"]]
    shapes = [c["shape"] for level in ("captured", "fused") for c in row[level]]
    assert "[1, T, 64]" in shapes and not any(re.search(r"s\d", s) for s in shapes)


def test_all_ops_matches_and_refusals_of_the_report_are_in_its_blocks(reports):
    for report in reports.values():
        blocks = report.blocks()
        matches = sum(m["count"] for b in blocks for m in b["matches"])
        assert matches == sum(len(p.matches) for p in report.passes if p.name != "simplify")
        assert sum(r["count"] for b in blocks for r in b["refusals"]) == len(report.refusals)
        assert {s["layer"] for s in report.layers} >= {s["layer"] for b in blocks for s in b["states"]}


def test_refusals_states_groups_and_providers_are_on_the_page(reports, pages):
    for name, page in pages.items():
        page = html.unescape(page)
        for refusal in reports[name].refusals:
            assert refusal.reason in page and refusal.source_line in page
        for group in reports[name].kv["group_facts"]:
            assert group["kind"] in page
        assert all(choice.why in page for choice in reports[name].providers)
    assert "window 16" in pages["gemma3"] and "4 \u00d7 16 \u00d7 24" in pages["qwen3-next"]


def test_costs_are_formulas_and_numbers_with_what_binds(reports, pages):
    text = re.sub(r"\s+", " ", pages["llama"])
    assert "1 token at a context of 511" in text and "512 tokens of a prompt" in text
    assert "256·S·T" in text and "rates of a test" in text and "1 Tflop/s" in text
    facts = timed({"flops": 200.0, "weight_bytes": 1.0, "activation_bytes": 0.5, "cache_bytes": 0.25}, RATES)
    assert facts["bytes"] == 1.75 and facts["binds"] == "compute" and facts["seconds"] == pytest.approx(2e-10)
    memory = {"flops": 10.0, "weight_bytes": 100.0, "activation_bytes": 0.0, "cache_bytes": 0.0}
    both = total([(memory, 3), ({**memory, "flops": 1e6}, 1)], RATES)
    assert (
        both["seconds"] == pytest.approx(3e-8 + 1e-6) and both["binds"] == "compute" and both["bytes"] == 400
    )


def test_errors_of_a_verified_compilation_are_shown(reports):
    report = reports["llama"]
    step = VerifiedStep(
        chain="decoder", level="paged", name="page_attention", weights="model", dtype="float32", num_sequences=3,
        max_abs_error=1.25e-6, max_rel_error=3.5e-7, tolerance=1e-4, worst="77 tokens",
    )  # fmt: skip
    first = report.passes[0]
    report.verified.append(step)
    first.max_abs_error = 4.5e-6
    try:
        page = explain_html(report, RATES)
    finally:
        report.verified.clear()
        first.max_abs_error = None
    assert "1.25e-06" in page and "77 tokens" in page and "4.50e-06" in page


def test_a_report_without_graphs_still_makes_a_page():
    page = explain_html(CompileReport(model_class="<Evil>", node_counts={"captured": 1, "fused": 1}), RATES)
    Checker(page)
    assert "without graphs" in page and "&lt;Evil&gt;" in page and "<Evil>" not in page


def test_texts_of_numbers():
    assert [si(x) for x in (0, 12, 1234, 5.6e9, 3e13)] == ["0", "12", "1.23 k", "5.6 G", "30 T"]
    assert [size(x) for x in (0, 900, 1536, 3 << 20, 1010 << 30)] == [
        "0 B",
        "900 B",
        "1.5 KiB",
        "3 MiB",
        "1,010 GiB",
    ]
    assert [seconds_text(x) for x in (2, 0.0015, 2e-6, 5e-9)] == ["2 s", "1.5 ms", "2 us", "5 ns"]
    assert formula("16384*S*T + 8192*T**2 + 12*T") == "16.4k·S·T + 8.19k·T^2 + 12·T"


def test_this_machine_is_measured_once():
    rates = measured_rates("meta", "float32")
    assert rates.flops > 1e8 and rates.bytes > 1e7 and "CPU" in rates.what
    assert measured_rates("meta", "float32") is rates
    assert rates.binds(1.0, 1e9) == "memory" and rates.binds(1e15, 1.0) == "compute"


@pytest.fixture(scope="module")
def browser():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    return found


def in_browser(browser, tmp_path, *options) -> str:
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={tmp_path / 'profile'}", *options]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("width", [500, 1400])
def test_a_browser_shows_it_without_sideways_scrolling(browser, pages, tmp_path, width):
    """The page is asked for its own width by a script that only the test adds."""
    probe = (
        "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join()</script></body>"
    )
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(pages["qwen3-next"].replace("<details>", "<details open>").replace("</body>", probe))
    size_option = f"--window-size={width},2400"
    dom = in_browser(browser, tmp_path, size_option, "--dump-dom", page.as_uri())
    scroll_width, window_width = map(int, re.search(r"<title>(\d+),(\d+)</title>", dom).groups())
    assert scroll_width <= window_width
    in_browser(browser, tmp_path, size_option, f"--screenshot={shot}", page.as_uri())
    data = shot.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (width, 2400)
    assert len(data) > 50_000, "an almost empty picture"
