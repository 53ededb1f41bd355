"""Prepare a release: write the address of the repository and the date into the metadata
of both packages, check a tag, and make the links of the README absolute for PyPI.

    python docs/release.py prepare https://github.com/OWNER/redco_eqx 2030-01-31
    python docs/release.py check v0.2.0
    python docs/release.py links https://github.com/OWNER/redco_eqx v0.2.0

The address is written nowhere else: the owner of the repository gives it once."""

import argparse
import datetime
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("pyproject.toml", "models/pyproject.toml")


def site_of(repository: str) -> str:
    """The address at which GitHub Pages serves the site of a repository."""
    match = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", repository)
    if not match:
        raise SystemExit(
            f"expected https://github.com/OWNER/NAME as the repository, got "
            f"{repository!r}"
        )
    return f"https://{match[1].lower()}.github.io/{match[2]}/"


def with_urls(pyproject: str, repository: str) -> str:
    """The text of a pyproject.toml with the addresses that PyPI shows."""
    urls = f"""[project.urls]
Documentation = "{site_of(repository)}"
Source = "{repository}"
Changelog = "{repository}/blob/main/CHANGELOG.md"
Issues = "{repository}/issues"

"""
    before, title, after = pyproject.partition("[project.urls]\n")
    if title:
        return before + urls + after[after.index("\n[") + 1 :]
    return pyproject.replace(
        "[project.optional-dependencies]\n",
        urls + "[project.optional-dependencies]\n",
        1,
    )


def with_release(citation: str, repository: str, date: str) -> str:
    """The text of a CITATION.cff with the address and the date of a release."""
    ours = ("repository-code:", "url:", "date-released:")
    lines = [line for line in citation.splitlines() if not line.startswith(ours)]
    at = next(i for i, line in enumerate(lines) if line.startswith("version:"))
    lines[at + 1 : at + 1] = [
        f"date-released: {date}",
        f'repository-code: "{repository}"',
        f'url: "{site_of(repository)}"',
    ]
    return "\n".join(lines) + "\n"


def version(root: pathlib.Path = ROOT) -> str:
    """The version of both packages; an error if the files do not agree."""
    core, models = (
        tomllib.loads((root / path).read_text("utf-8")) for path in PACKAGES
    )
    number = core["project"]["version"]
    found = {
        "models/pyproject.toml": models["project"]["version"],
        "the requirement of redco_eqx there": models["project"]["dependencies"][
            0
        ].removeprefix("redco_eqx=="),
        "CITATION.cff": of_citation(root, "version"),
    }
    for place, other in found.items():
        if other != number:
            raise SystemExit(
                f"pyproject.toml has version {number}, and {place} has {other}"
            )
    return number


def of_citation(root: pathlib.Path, field: str) -> str | None:
    """A field of CITATION.cff, or None."""
    text = (root / "CITATION.cff").read_text("utf-8")
    match = re.search(rf"^{field}: (.+)$", text, re.MULTILINE)
    return match[1] if match else None


def prepare(repository: str, date: str, root: pathlib.Path = ROOT) -> None:
    """Write the address and the date into the metadata and the changelog."""
    datetime.date.fromisoformat(date)
    number = version(root)
    for path in PACKAGES:
        text = (root / path).read_text("utf-8")
        (root / path).write_text(with_urls(text, repository), "utf-8")
    citation = root / "CITATION.cff"
    text = with_release(citation.read_text("utf-8"), repository, date)
    citation.write_text(text, "utf-8")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    heading = re.compile(rf"^## {re.escape(number)} \(.*\)$", re.MULTILINE)
    changelog.write_text(heading.sub(f"## {number} ({date})", text, count=1), "utf-8")


def check(tag: str, root: pathlib.Path = ROOT) -> None:
    """End with an error unless the files are those of the release of this tag."""
    number = version(root)
    if tag != f"v{number}":
        raise SystemExit(f"the tag is {tag}, and the packages have version {number}")
    date = of_citation(root, "date-released")
    heading = f"## {number} ({date})"
    is_dated = heading in (root / "CHANGELOG.md").read_text("utf-8").splitlines()
    has_urls = all(
        "urls" in tomllib.loads((root / path).read_text("utf-8"))["project"]
        for path in PACKAGES
    )
    if not (date and is_dated and has_urls):
        raise SystemExit(
            f"{tag} is not prepared: run `python docs/release.py prepare REPOSITORY "
            "DATE`, commit, and move the tag"
        )


def with_absolute_links(readme: str, folder: str, repository: str, tag: str) -> str:
    """The text of a README whose links and pictures open from PyPI, too."""

    def absolute(match: re.Match[str]) -> str:
        bang, label, target = match.groups()
        kind = "raw" if bang else "blob"
        return f"{bang}[{label}]({repository}/{kind}/{tag}/{folder}{target})"

    relative = r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)"
    return re.sub(relative, absolute, readme)


def links(repository: str, tag: str, root: pathlib.Path = ROOT) -> None:
    """Make the links of both READMEs absolute, before the packages are built."""
    site_of(repository)
    for folder in ("", "models/"):
        path = root / f"{folder}README.md"
        text = with_absolute_links(path.read_text("utf-8"), folder, repository, tag)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for function, names in (
        (prepare, ["repository", "date"]),
        (check, ["tag"]),
        (links, ["repository", "tag"]),
    ):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        for name in names:
            command.add_argument(name)
        command.set_defaults(run=function)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)
