"""Add a note to the top of a page that continues the code of another page (`after:` in
its front matter)."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs with each page."""
    before = page.meta.get("after")
    if before is None:
        return markdown
    (title,) = re.findall(
        r"^# (.*)$", files.get_file_from_path(before).content_string, re.MULTILINE
    )[:1]
    link = posixpath.relpath(before, posixpath.dirname(page.file.src_uri))
    note = f"*The code on this page continues from [{title}]({link}).*"
    return re.sub(
        r"^(# .*\n)",
        lambda found: f"{found[0]}\n{note}\n",
        markdown,
        count=1,
        flags=re.MULTILINE,
    )
