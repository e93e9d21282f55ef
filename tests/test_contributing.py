"""CONTRIBUTING.md: its worked examples are made in a copy of the package, and do there what the page promises."""

import re
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest
from documents import ROOT, apply_diff, blocks_of

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SETUP = "import jax\njax.config.update('jax_platforms', 'cpu')\n"
FACTS = "import test_primitives\ntest_primitives.test_every_primitive_with_a_rule_has_a_row_and_no_other()\n"


def section(title: str, page: str = PAGE) -> str:
    """The text of one section, its heading left out."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with a copy of the package, its compiled files included."""
    folder = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "autoshard", folder / "autoshard")
    return folder


def follow(text: str, folder: Path, also: str = "") -> CompletedProcess:
    """Makes the changes of a section, runs its code in a process of its own, and undoes the changes."""
    blocks = blocks_of(text)
    titles = {block.title for block in blocks if block.language == "diff"}
    changed = {title: (folder / title).read_text() if (folder / title).exists() else None for title in titles}
    assert 1 <= len(changed) <= 2, f"it changes {len(changed)} files"
    try:
        for block in blocks:
            if block.language == "diff":
                apply_diff(block.text, folder, block.title)
        code = SETUP + "".join(block.text for block in blocks if block.language == "python") + also
        return forked.run(code, [folder, ROOT / "tests"])
    finally:
        for title, before in changed.items():
            if before is None:
                (folder / title).unlink(missing_ok=True)
            else:
                (folder / title).write_text(before)


EXAMPLES = [
    ("Add a sharding rule", FACTS),
    ("Add a chip", ""),
    ("Add a search algorithm", ""),
    ("Add a term of memory", ""),
    ("Add a section of the report", ""),
]


@pytest.mark.parametrize("title, also", EXAMPLES)
def test_the_example_does_what_it_promises(package, title, also):
    result = follow(section(title), package, also)
    assert result.returncode == 0, result.stderr


PLANTED = [  # section, what it says, what is planted, the error
    ("Add a sharding rule", "results, (1,), 1)", "results, (), 1)", "RuleError|ValueError|IndexError"),
    ("Add a sharding rule", '("reduce reduce_xor sum_of_squares"', '("reduce reduce_xor"', "AssertionError"),
    ("Add a search algorithm", "+    Annealing(),\n", "", "AssertionError"),
    ("Add a search algorithm", "+                    incumbent.offer(choice)\n", "", "AssertionError"),
    ("Add a chip", '("example-1",), _H100, 48,', '("example-1",), _H100, 47,', "AssertionError"),
    ("Add a chip", '("example-1",), _H100, 48,', '("example-1",), _V5P, 48,', "AssertionError"),
    ("Add a term of memory", '== "cumsum":', '== "cumprod":', "AssertionError"),
    ("Add a section of the report", "+        traffic(plan),\n", "", "ValueError"),
    ("Add a section of the report", "+= collective.bytes", "+= 1", "AssertionError"),
]


@pytest.mark.parametrize("title, right, wrong, error", PLANTED)
def test_a_planted_mistake_fails(package, title, right, wrong, error):
    text = section(title)
    assert text.count(right) == 1
    result = follow(text.replace(right, wrong), package)
    assert result.returncode and re.search(error, result.stderr.splitlines()[-1]), result.stderr


def test_a_change_whose_place_is_gone_fails(package):
    text = section("Add a chip").replace('     "b200"', '     "b201"')
    with pytest.raises(AssertionError, match="0 times, not once"):
        follow(text, package)


def test_files_and_names_that_the_page_speaks_of_exist():
    named = set(re.findall(r"`([\w./]+\.py|[\w.]+(?:/[\w.]+)*/)`", PAGE))
    assert len(named) > 30
    homes = [ROOT, ROOT / "tests", ROOT / "autoshard", ROOT / "autoshard" / "propagation"]
    assert {name for name in named if not any((home / name).exists() for home in homes)} == set()


def test_the_test_commands_are_those_of_the_readme():
    assert 'pip install -e ".[test]"' in section("Set up")
    assert 'pip install -e ".[test]" && pytest' in (ROOT / "README.md").read_text()
