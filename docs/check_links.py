"""Check that the documentation names only what exists: relative links, anchors, paths in backticks."""

import re
import sys
from pathlib import Path

_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _missing_link(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.exists():
        return True
    return bool(anchor) and anchor not in {_anchor(h) for h in _HEADING.findall(linked.read_text())}


def problems(root: Path, pages: list[Path]) -> list[str]:
    """Every link and backticked repository path of `pages` that leads nowhere, as `page: what` lines."""
    top_level = {entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    found = []
    for page in pages:
        text = _FENCE.sub("", page.read_text())
        for target in (a or b for a, b in _LINK.findall(text)):
            if "://" not in target and not target.startswith("mailto:") and _missing_link(page, target):
                found.append(f"{page.relative_to(root)}: link to {target}")
        for code in _CODE.findall(text):
            looks_like_path = re.fullmatch(r"[\w.\-/]+", code) and code.split("/")[0] in top_level and "/" in code
            if looks_like_path and not (root / code).exists():
                found.append(f"{page.relative_to(root)}: path `{code}`")
    return found


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    folders = [entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    pages = [*root.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    found = problems(root, pages)
    for line in found:
        print(f"does not exist: {line}", file=sys.stderr)
    print(f"docs: {len(pages)} pages, {len(found)} dead links or paths")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
