"""Check every link of the built site that stays inside of it, anchors included.

    python docs/check_site.py build/site

MkDocs checks the links of Markdown. This sees what is in the HTML: links of notebooks
and docstrings, pictures, and files from other hosts, of which a page may load none.
"""

import html.parser
import pathlib
import sys
import urllib.parse

LOADS = {"img": "src", "script": "src", "link": "href"}


class Page(html.parser.HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        # A canonical address is named, not loaded.
        named = given.get("rel") in ("canonical", "prev", "next", "edit")
        if tag in LOADS and LOADS[tag] in given and not named:
            self.loads.append(given[LOADS[tag]])


def problems(site: pathlib.Path) -> list[str]:
    """One sentence for each link that leads nowhere."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # its links are from the root of the host
            continue
        for link in [*page.links, *page.loads]:
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc:
                if link in page.loads and address.scheme != "data":
                    found.append(f"{name} loads {link} from another host")
                continue
            target = (path.parent / urllib.parse.unquote(address.path)).resolve()
            if not address.path:
                target = path.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{name} links to {link}, which does not exist")
                continue
            anchor = urllib.parse.unquote(address.fragment)
            other = pages.get(site / target.relative_to(site.resolve()))
            if other is not None and anchor not in other.anchors:
                found.append(f"{name} links to {link}, and there is no such anchor")
    return found


if __name__ == "__main__":
    wrong = problems(pathlib.Path(sys.argv[1]))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
