"""The text the tiny model learns: two manuals, taken from Debian documentation packages and cleaned.

Packages are fetched with `apt-get download` and unpacked with `dpkg -x` into a cache directory; nothing is
installed. Each HTML page becomes one document of light Markdown.
"""

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path


@dataclass(frozen=True)
class Manual:
    """One package: where its pages lie, which to leave out, and under which licence it comes."""

    package: str
    title: str
    licence: str
    pages: str
    skip: str


MANUALS = (
    Manual(
        package="python3.11-doc",
        title="Python 3.11 documentation, (c) Python Software Foundation",
        licence="PSF-2.0 (its example code also 0BSD)",
        pages="usr/share/doc/python3.11/html",
        skip=r"genindex|modindex|search|license|copyright|contents|whatsnew/changelog|download|bugs\.html",
    ),
    Manual(
        package="postgresql-doc-15",
        title="PostgreSQL 15 documentation, (c) PostgreSQL Global Development Group",
        licence="PostgreSQL",
        pages="usr/share/doc/postgresql-doc-15/html",
        skip=r"bookindex|biblio|legalnotice|^release|acronyms|^features|errcodes-app|sql-keywords|^index\.html",
    ),
)

_BLOCKS = {"p", "div", "section", "ul", "ol", "dl", "dd", "dt", "li", "table", "blockquote", "tr", "pre"}
_DROPPED_TAGS = {"script", "style", "table", "nav", "head", "footer", "svg", "form"}
_DROPPED_CLASSES = {
    "headerlink",
    "navheader",
    "navfooter",
    "toc",
    "toctree-wrapper",
    "sphinxsidebar",
    "related",
}
_DROPPED_CLASSES |= {
    "footer",
    "indexterm",
    "contents",
    "topic",
    "footnotes",
    "mobile-nav",
    "linenos",
    "id_link",
}
_PLAIN = {0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0xA0: " ", 0xB6: ""}
_VOID = {"br", "hr", "img", "meta", "link", "input", "col", "source", "wbr"}


class _Page(HTMLParser):
    """Collects the text of the page's body as light Markdown."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.stack: list[tuple[str, bool]] = []
        self.num_dropping = 0
        self.in_pre = False

    def handle_starttag(self, tag, attrs):
        if tag in _VOID:
            self.out.append("\n" if tag == "br" and not self.num_dropping else "")
            return
        classes = set((dict(attrs).get("class") or "").split())
        drops = tag in _DROPPED_TAGS or bool(classes & _DROPPED_CLASSES)
        self.stack.append((tag, drops))
        self.num_dropping += drops
        if self.num_dropping:
            return
        if tag in _BLOCKS:
            self.out.append("\n\n")
        if tag == "pre":
            self.in_pre = True
            self.out.append("```\n")
        elif tag == "li":
            self.out.append("- ")
        elif re.fullmatch(r"h[1-6]", tag):
            self.out.append("\n\n" + "#" * min(int(tag[1]), 3) + " ")
        elif tag == "code" and not self.in_pre:
            self.out.append("`")

    def handle_endtag(self, tag):
        if not any(open_tag == tag for open_tag, _ in self.stack):
            return
        open_tag = None
        while open_tag != tag:
            open_tag, dropped = self.stack.pop()
            self.num_dropping -= dropped
        if self.num_dropping or (tag in _DROPPED_TAGS):
            return
        if tag == "pre":
            self.in_pre = False
            self.out.append("\n```")
        elif tag == "code" and not self.in_pre:
            self.out.append("`")
        if tag in _BLOCKS or re.fullmatch(r"h[1-6]", tag):
            self.out.append("\n\n")

    def handle_data(self, data):
        if not self.num_dropping:
            self.out.append(data if self.in_pre else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Light Markdown of a page: headings, paragraphs on one line each, lists, fenced code; no tables."""
    page = _Page()
    page.feed(html)
    text = "".join(page.out).translate(
        {0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0xA0: " ", 0xB6: ""}
    )
    parts = re.split(r"(```\n.*?\n```)", text, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        prose = re.sub(r"(?<!\n) +", " ", parts[i])
        prose = re.sub(r"\n[ \t]+", "\n", prose)
        prose = re.sub(r"^-\s+(?=\S)", "- ", prose, flags=re.MULTILINE)
        parts[i] = re.sub(r" +\n", "\n", prose)
    for i in range(1, len(parts), 2):
        parts[i] = re.sub(r"\n\s*\n", "\n\n", re.sub(r"```\n\s*\n", "```\n", parts[i])).replace(
            "\n\n```", "\n```"
        )
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip() + "\n"


def _body(html: str) -> str:
    start = html.find('role="main"')
    start = html.rfind("<", 0, start) if start >= 0 else max(html.find("<body"), 0)
    end = html.find('class="sphinxsidebar"', start)
    return html[start : html.rfind("<", 0, end) if end >= 0 else len(html)]


def unpack(manual: Manual, cache: Path) -> Path:
    """Fetch and unpack the package once; returns the folder of its pages. `RuntimeError` without apt."""
    target = cache / manual.package
    pages = target / manual.pages
    if not pages.is_dir():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise RuntimeError(
                "the corpus comes from Debian packages: apt-get and dpkg are needed to fetch it."
            )
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", manual.package], cwd=target, check=True, capture_output=True)
        archive = next(target.glob("*.deb"))
        subprocess.run(["dpkg", "-x", archive.name, "."], cwd=target, check=True)
    return pages


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def load_documents(cache: Path, min_bytes: int = 600) -> list[Document]:
    """All pages of `MANUALS` in a fixed order, but those under `min_bytes`: they are mostly links."""
    documents = []
    for manual in MANUALS:
        root = unpack(manual, cache)
        for path in sorted(root.rglob("*.html")):
            name = f"{manual.package}/{path.relative_to(root)}"
            if re.search(manual.skip, name.split("/", 1)[1]):
                continue
            text = html_to_text(_body(path.read_text(encoding="utf-8", errors="replace")))
            if len(text.encode()) >= min_bytes:
                documents.append(Document(name, text))
    return documents


def split(documents: list[Document], held_out_percent: int = 2) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents. A document's name decides, so the split survives changes elsewhere."""

    def is_held_out(document: Document) -> bool:
        return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:4]) % 100 < held_out_percent

    return [d for d in documents if not is_held_out(d)], [d for d in documents if is_held_out(d)]
