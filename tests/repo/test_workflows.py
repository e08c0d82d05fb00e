"""The workflows of .github name what exists, and their steps run as far as one machine can tell."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import ropelab

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob(".github/workflows/*.yml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STEPS = [
    (file, job, step) for file, workflow in WORKFLOWS.items()
    for job, about in workflow["jobs"].items() for step in about["steps"]
]  # fmt: skip
RUNS = [pytest.param(step["run"], id=f"{file}-{job}-{step['name']}") for file, job, step in STEPS if "run" in step]
SLOW = ("make ", "python -m pip ", "python -m pytest ", ".ci/")
"""The beginnings of commands that take minutes or change the environment. Tests below check the arguments of each."""
TOOLS = {"zizmor", "git", "grep"}


def commands(run: str) -> list[list[str]]:
    """The words of each command of a step; the settings of shell variables are none."""
    lines = [part for line in run.splitlines() for part in line.split(" && ")]
    return [words for words in map(shlex.split, lines) if not re.match(r"\w+=", words[0])]


def bash(run: str, **variables: str) -> subprocess.CompletedProcess:
    """The result of a step in the shell of a runner."""
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": os.pathsep.join((folder, os.environ["PATH"])), "PYTHONPATH": str(ROOT)}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
    return subprocess.run(shell, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300)


def step(file: str, name: str) -> str:
    (found,) = (step["run"] for where, _, step in STEPS if where == file and step.get("name") == name)
    return found


def test_there_are_workflows_for_tests_checks_docs_and_release():
    assert WORKFLOWS.keys() == {"tests.yml", "checks.yml", "docs.yml", "release.yml"}


@pytest.mark.process
@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_bash_whose_commands_exist(run):
    assert subprocess.run(["bash", "-n", "-c", run], capture_output=True, text=True).stderr == ""
    for words in commands(run):
        program, rest = words[0], words[1:]
        if program == "make":
            check_make(rest)
        elif program == "python":
            assert rest[0] == "-m", words
            check_module(*rest[1:])
        elif "/" in program:
            assert os.access(ROOT / program, os.X_OK), program
        else:
            assert program in TOOLS, words


def check_make(words: list[str]) -> None:
    """Make says what it would do: the target exists, and each setting is one of the Makefile's."""
    settings = (ROOT / "Makefile").read_text().partition("SETTINGS := ")[2].partition("\n")[0].split()
    assert all(word.partition("=")[0] in settings for word in words[1:]), words
    quiet = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", *settings)}
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0 and not re.search(r"Nothing to be done", done.stdout), done


def check_module(module: str, *words: str) -> None:
    """The module exists; pip gets extras and groups of the project, and pytest files that exist."""
    assert module == "pip" or find_spec(module), module
    if module == "pip":
        groups = {group for flag, group in zip(words, words[1:], strict=False) if flag == "--group"}
        extras = {extra for word in words for extra in re.findall(r"^\.\[(\w+)\]$", word)}
        assert groups <= PROJECT["dependency-groups"].keys()
        assert extras <= PROJECT["project"]["optional-dependencies"].keys()
    if module == "pytest":
        places = [word for word in words if word.startswith("tests/")]
        assert places and all((ROOT / place).exists() for place in places)


@pytest.mark.process
def test_quick_steps_run():
    """The steps that are neither slow nor about the machine of a runner; they come with the tests of what they do."""
    quick = {
        name: bash(run) for name, run in ((step["name"], step["run"]) for *_, step in STEPS if "run" in step)
        if not any(words[0] in TOOLS or " ".join(words).startswith(SLOW) for words in commands(run))
    }  # fmt: skip
    assert quick.keys() == {"Versions", "Verify"}
    assert {name: done.stderr for name, done in quick.items() if done.returncode} == {}
    assert quick["Versions"].stdout.startswith(f"ropelab {ropelab.__version__} (torch ")
    assert "right: all 2 laws that apply hold" in " ".join(quick["Verify"].stdout.split())


@pytest.mark.process
@pytest.mark.parametrize("tag, code", [(f"v{ropelab.__version__}", 0), ("v9.9.9", 1), (ropelab.__version__ + "0", 1)])
def test_a_release_is_refused_unless_the_tag_is_the_version(tag, code):
    done = bash(step("release.yml", "The tag is the version, and the changelog has it"), GITHUB_REF_NAME=tag)
    assert done.returncode == code, done


@pytest.mark.process
def test_what_is_published_is_built_where_no_test_has_run():
    jobs = WORKFLOWS["release.yml"]["jobs"]
    uploading = [
        name for name, about in jobs.items() if any("upload-artifact" in x.get("uses", "") for x in about["steps"])
    ]
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"} and len(uploading) == 1
    ran = [words for step in jobs[uploading[0]]["steps"] for words in commands(step.get("run", ""))]
    assert ran and not any({"make", "pytest", "test"} & {*words} for words in ran)


@pytest.mark.skipif(shutil.which("zizmor") is None, reason="needs zizmor, of the dependency group release")
def test_the_audit_of_workflows_finds_nothing():
    done = bash(step("checks.yml", "Workflows"))
    assert done.returncode == 0, done.stdout


def test_every_action_is_a_commit():
    for file, job, step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), (file, job, step)
    text = "".join((ROOT / ".github" / "workflows" / name).read_text() for name in WORKFLOWS)
    pinned = re.findall(r"uses: (\S+)(?: # (v\d+\.\d+\.\d+))?\n", text)
    assert all(version for _, version in pinned) and len(set(pinned)) == len({name.split("@")[0] for name, _ in pinned})


def test_rights_are_the_least():
    """Only the jobs that deploy and publish have more than a view of the source."""
    more = {
        (file, job): about["permissions"] for file, workflow in WORKFLOWS.items()
        for job, about in workflow["jobs"].items() if "permissions" in about
    }  # fmt: skip
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert more == {
        ("docs.yml", "deploy"): {"pages": "write", "id-token": "write"},
        ("release.yml", "publish"): {"id-token": "write"},
    }


def test_the_matrix_is_what_the_package_says():
    jobs = WORKFLOWS["tests.yml"]["jobs"]
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
    linux = jobs["linux"]["strategy"]["matrix"]["include"]
    assert sorted({entry["python"] for entry in linux}) == jobs["newest"]["strategy"]["matrix"]["python"] == classifiers
    assert {entry["python"] for entry in linux if entry["lane"] == "stranger"} == {classifiers[0], classifiers[-1]}
    assert PROJECT["project"]["requires-python"] == f">={classifiers[0]}"
    assert jobs["newest"]["strategy"]["matrix"]["system"] == ["ubuntu-latest", "macos-latest", "windows-latest"]


def test_the_workflows_call_the_lanes_of_ci():
    text = (ROOT / ".ci" / "run").read_text()
    lanes, (required,) = set(re.findall(r"^ +(\w+)\) ", text, re.MULTILINE)), re.findall(r"set -- (.+)", text)
    runs = [words for *_, step in STEPS for words in commands(step.get("run", "")) if words[0] == ".ci/run"]
    called = {entry["lane"] for entry in WORKFLOWS["tests.yml"]["jobs"]["linux"]["strategy"]["matrix"]["include"]}
    called |= {lane for _, *names in runs for lane in names if lane != "$LANE"}
    assert set(required.split()) <= called <= lanes


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (date,) = re.findall(
        rf"^## \[{re.escape(ropelab.__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert (citation["version"], str(citation["date-released"])) == (ropelab.__version__, date)
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Repository"]


def test_issues_ask_for_what_the_command_prints():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")}
    assert forms.pop("config")["contact_links"][0]["url"].startswith(PROJECT["project"]["urls"]["Repository"])
    for form in forms.values():
        assert {"name", "description", "body"} == form.keys()
        fields = {field["id"]: field for field in form["body"]}
        assert len(fields) == len(form["body"]) and "`ropelab --version`" in str(fields["versions"])
