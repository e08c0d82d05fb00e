"""The workflows of .github name what exists, and their steps run as far as one machine can tell."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
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
RUNS = "\n".join(step["run"] for *_, step in STEPS if "run" in step)


def bash(run: str, **variables: str) -> subprocess.CompletedProcess:
    """The result of a step in the shell of a runner."""
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": os.pathsep.join((folder, os.environ["PATH"])), "PYTHONPATH": str(ROOT)}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
    return subprocess.run(shell, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300)


def step(file: str, name: str) -> str:
    (found,) = (step["run"] for where, _, step in STEPS if where == file and step.get("name") == name)
    return found


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
    ran = " ".join(step.get("run", "") for step in jobs[uploading[0]]["steps"])
    assert ran and not re.search(r"\b(make|pytest|test)\b", ran)


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
    called = {entry["lane"] for entry in WORKFLOWS["tests.yml"]["jobs"]["linux"]["strategy"]["matrix"]["include"]}
    called |= {lane for names in re.findall(r"\.ci/run ([\w ]+)", RUNS) for lane in names.split()}
    assert set(required.split()) <= called <= lanes


def test_steps_name_files_targets_and_groups_that_exist():
    makefile, declared = (ROOT / "Makefile").read_text(), PROJECT["dependency-groups"].keys()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"\bmake ([a-z-]+)", RUNS))
    assert set(re.findall(r"--group (\w+)", RUNS)) <= declared
    files = re.findall(r"(?:^|\s)((?:tests|\.ci)/[\w/.]+)", RUNS)
    assert files and all((ROOT / file).exists() for file in files)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (date,) = re.findall(
        rf"^## \[{re.escape(ropelab.__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert (citation["version"], str(citation["date-released"])) == (ropelab.__version__, date)
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Repository"]
