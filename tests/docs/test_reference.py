"""Every public name stands in the reference of the site, once, and with an example."""

import importlib
import inspect
import re

import pages
import pytest

REFERENCE = sorted(
    path for api in ("api", "models/api") for path in (pages.PAGES / api).glob("*.md")
)
SECTIONS = [
    pytest.param(
        section, id=f"{page.stem}: {re.findall(r'^#+ (.*)$', section, re.MULTILINE)[0]}"
    )
    for page in REFERENCE
    for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
    if ":::" in section
]
MODULES = [
    "redco_eqx",
    *(f"redco_eqx.{module}" for module in ("errors", "layers", "types")),
    "redco_eqx_models",
]


def listed(text: str) -> list[str]:
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name_of_module", MODULES)
def test_each_name_of_a_module_is_listed_once(name_of_module):
    """Those in `__all__`, or what a module of imports alone gives names to."""
    modules = {name.rpartition(".")[2] for name in MODULES}
    module = importlib.import_module(name_of_module)
    imported = [
        name
        for name, x in vars(module).items()
        if name[0] != "_" and not inspect.ismodule(x)
    ]
    names = [
        f"{name_of_module}.{name}"
        for name in getattr(module, "__all__", imported)
        if name not in modules
    ]
    everywhere = [name for page in REFERENCE for name in listed(page.read_text())]
    assert sorted(names) == sorted(
        name for name in everywhere if name.rpartition(".")[0] == name_of_module
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_each_name_is_used_in_an_example_of_its_own_or_of_its_section(section):
    """All of them are run, by `test_pages.py`."""
    for name in listed(section):
        near = [
            b.code
            for b in pages.blocks(section)
            if b.language == "python" and b.name in (None, name)
        ]
        assert any(
            re.search(rf"\b{name.rpartition('.')[2]}\b", code) for code in near
        ), name
