"""A hook of MkDocs: links between notebooks and pages, which mkdocs-jupyter leaves.

A notebook links to `../tune.md`, so that it also works where the notebook is read
beside its sources. On the site that is another address.
"""

import logging
import posixpath
import re
from typing import Any

LOG = logging.getLogger("mkdocs.plugins.notebook_links")


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Give each link to a source the address of its page."""
    source = page.file.src_uri
    if not source.endswith(".ipynb"):
        return output
    folder = posixpath.dirname(source)

    def address(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        target = _FILES.get(posixpath.normpath(posixpath.join(folder, path)))
        if target is None:
            LOG.warning("%s links to %s, which is no page", source, path)
            return found[0]
        return f'href="{target.url_relative_to(page.file)}{anchor}"'

    pattern = r'href="(?P<path>[^":#]+\.(?:md|ipynb))(?P<anchor>#[^"]*)?"'
    return re.sub(pattern, address, output)


def on_files(files: Any, *, config: Any) -> None:
    """Remember the pages."""
    _FILES.update({file.src_uri: file for file in files.documentation_pages()})


_FILES: dict[str, Any] = {}
