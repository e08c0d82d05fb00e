"""The commands of ``python -m ropelab.study`` write where nobody's files lie, and say what is wrong with a word."""

import pytest
import torch
from typer.testing import CliRunner

from ropelab.bench.records import ROOT
from ropelab.study import __main__ as commands


def said(*words: str) -> str:
    done = CliRunner().invoke(commands.app, words)
    assert done.exit_code != 0 and not isinstance(done.exception, OSError)
    return " ".join(done.output.replace("│", " ").split())


PLACES = ". .. / data data/new new/../data ropelab/kernels ropelab .venv .venv/figures .git .git/new Makefile".split()


@pytest.mark.parametrize("folder", PLACES)
def test_nothing_is_generated_where_sources_lie(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "--build" in said("--build", folder, "hub")


def test_nothing_is_generated_among_the_files_of_another_project(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    assert "expected a folder for generated files" in said("--build", str(tmp_path), "hub")


@pytest.mark.parametrize("folder", ["a;b$c", "my build", "deep/er"])
def test_a_folder_is_taken_as_it_is(folder, tmp_path):
    assert CliRunner().invoke(commands.app, ["--build", str(tmp_path / folder), "hub"]).exit_code == 0
    assert (tmp_path / folder / "hub" / "build.toml").is_file()


def test_an_unknown_study_is_named_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "got no_study" in said("measure", "dense", "no_study")
    assert "needs a CUDA GPU" in said("measure", "dense")
