"""A mistake of the user costs a few lines that name the argument or the file, whichever command it is."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.command.cli import app  # noqa: E402
from ropelab.conformance.configuration import verify_config  # noqa: E402
from ropelab.conformance.configuration.measured import NotMeasured, load  # noqa: E402
from ropelab.study.__main__ import app as study  # noqa: E402

pytest_plugins = ["pytester"]
RIGHT = {"head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 64}
MODULE = """
import torch

theta = 10000.0 ** -(torch.arange(8) / 8)

def model():
    return 3

def outer(base):
    def inner(x, positions):
        return x * base

    return inner

def of_rows(x, cos, sin):
    return x

def raises(positions):
    raise RuntimeError("no licence")

class Sized:
    def __init__(self, head_dim, base):
        pass

class Rotary(torch.nn.Module):
    def forward(self, x, position_ids):
        angles = position_ids[..., None] * theta
        return angles.cos(), angles.sin()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(MODULE)
    (tmp_path / "right.json").write_text(json.dumps(RIGHT))
    (tmp_path / "other.json").write_text(json.dumps(RIGHT | {"rope_parameters": {"rope_type": "lama3"}}))
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04half")
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04half")
    torch.save({"cos": torch.ones(4, 8)}, tmp_path / "half_a_pair.pt")
    torch.save(Malicious(), tmp_path / "code.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


MISTAKES = [
    ("verify somebodys:outer", "convention: expected --convention, because the parameters fit none"),
    ("verify somebodys:of_rows", "the parameters fit huggingface and flash_attn"),
    ("verify somebodys:Rotary.forward", "a method without an object"),
    ("verify somebodys:model --law defintion", "did you mean 'definition'?"),
    ("verify somebodys:model --convention huggingfaces", "did you mean 'huggingface'?"),
    ("verify somebodys:model --convention hf", "did you mean 'huggingface'?"),
    ("verify somebodys:model --convention plain --layout neox", "did you mean 'split_half'?"),
    ("verify somebodys:model --convention plain --dtype bf16", "did you mean 'bfloat16'?"),
    ("verify here/somebodys.py:model --convention plain", "did you mean 'here.somebodys:model'?"),
    ("verify somebodys:modle --convention plain", "did you mean 'model'?"),
    ("verify somebodys:inner --convention plain", "return outer(...)(*arguments, **options)"),
    ("verify somebodys:model --convention plain --skip nothing", "law: expected one of those"),
    ("verify somebodys:model --convention plain --dtype int8", "dtype: expected one of"),
    ("verify somebodys:model --convention plain --sizes=-1", "sizes: expected integers from 1"),
    ("verify somebodys:model --convention plain --sizes=1099511627776", "sizes: expected integers from 1"),
    ("verify somebodys:model --convention plain --sizes 64,", "sizes: expected integers from 1"),
    ("verify somebodys.py --convention plain", "target: expected package.module:function"),
    ("verify somebody:rope --convention plain", "No module named 'somebody'"),
    ("verify somebodys:Rotary --convention plain", "got Rotary, a class"),
    ("verify-model no_such_architecture", "no_such_architecture"),
    ("verify-model somebodys:nothing", "has no attribute 'nothing'"),
    ("verify-model somebodys:model", "returns one, got somebodys:model (int 3)"),
    ("verify-model llama --timeout 0", "timeout: expected a number of seconds"),
    ("verify-config config.json --against somebodys:theta", "config: no such file: 'config.json'"),
    ("verify-config lama --against somebodys:theta", "config: expected a file, a folder"),
    ("verify-config other.json --against somebodys:theta", "other.json: rope_type: expected one of"),
    ("verify-config right.json --against right.pt", "against: no such file: 'right.pt'"),
    ("verify-config right.json --against half.pt", "against: expected a file of tensors, got half.pt"),
    ("verify-config right.json --against somebodys", "against: expected package.module:name, got somebodys"),
    ("verify-config right.json --against somebodys:raises", "RuntimeError: no licence"),
    ("verify-config right.json --against somebodys:Sized", "a class that takes the configuration alone"),
    ("verify-config right.json --against somebodys:Rotary.forward", "a method without an object"),
    ("conventions hugging_face", "did you mean 'huggingface'?"),
    ("study reproduce --gpu nothing", "gpu: expected one of"),
    ("study measure --all dense", "--all: expected no names beside it"),
]  # fmt: skip


@pytest.mark.parametrize("command, said", MISTAKES)
def test_a_mistake_is_told_in_a_few_lines(folder, capfd, command, said):
    arguments = command.split()
    of_study = arguments[0] == "study"
    done = CliRunner().invoke(study if of_study else app, arguments[1:] if of_study else arguments)
    captured = capfd.readouterr()
    told = [line for line in (done.output + captured.out + captured.err).splitlines() if line.strip()]
    assert done.exit_code == 2, told
    assert said in " ".join(" ".join(told).replace("│", " ").split()), told
    assert len(told) <= 10 and not any(re.search(r"File .*/ropelab/\w+/", line) for line in told), "\n".join(told)


FILES = {
    "broken": (b'{\n  "head_dim": 16,,\n}', "line 2 column 18"),
    "empty": (b"", "line 1 column 1"),
    "null": (b"null", "it has None"),
    "a list": (b"[1, 2]", "it has list"),
    "UTF-16": (json.dumps(RIGHT).encode("utf-16"), "codec can't decode byte"),
    "nested": (b'{"a":' * 100_000, "recursion"),
    "huge": (b'{"rope_theta": ' + b"1" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_broken_file_is_named(tmp_path, kind):
    text, said = FILES[kind]
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"config: expected an object in JSON, got .*config\.json") as refused:
        verify_config(file, torch.ones(8))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["half.pt", "half.npz", "code.pt", "none.npy", "somebodys.py"])
def test_a_file_that_has_no_tensors(folder, name):
    with pytest.raises(NotMeasured, match=f"against: .*{name}") as refused:
        load(Path(name))
    assert "\n" not in str(refused.value) and not Path("touched").exists()


def test_a_class_and_a_number_that_is_none(folder, capfd):
    """README's own line: a class by its name. JSON of Python may have NaN, as a key that no rotation reads."""
    (folder / "config.json").write_text(json.dumps(RIGHT | {"time_step_limit": [0.0, float("inf")]}))
    assert CliRunner().invoke(app, ["verify-config", "config.json", "--against", "somebodys:Rotary"]).exit_code == 0
    (folder / "config.json").write_text(json.dumps(RIGHT | {"rope_theta": float("nan")}))
    done = CliRunner().invoke(app, ["verify-config", "config.json", "--against", "somebodys:Rotary"])
    assert done.exit_code == 2 and "config.json: rope_theta: expected a finite number" in done.output


SETTINGS = {
    "a target alone": "somebodys:rotate",
    "a claim without =": "somebodys:rotate plain layout",
    "an open quote": "somebodys:rotate plain 'layout=split_half",
    "a typo in the convention": "somebodys:rotate plian",
    "a typo in a claim": "somebodys:rotate plain layuot=split_half",
    "a value that no claim has": "somebodys:rotate plain layout=neox",
    "a word for a flag": "somebodys:rotate plain inplace=no",
    "a number for a flag": "somebodys:rotate plain once_differentiable=0",
    "a typo in the module": "somebody:rotate plain",
    "a typo in the function": "somebodys:rotat plain",
}


@pytest.fixture
def project(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed ropelab would load the plugin once more
    pytester.makepyfile(somebodys="def rotate(x, positions): return x", test_own="def test_own(): pass")

    def run(setting, *arguments):
        pytester.makeini(f"[pytest]\npythonpath = .\nropelab =\n    {setting}\n")
        return pytester.runpytest_inprocess("-p", "pytest_ropelab", *arguments)

    return run


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_wrong_setting_of_pytest_is_one_usage_error(project, kind):
    result = project(SETTINGS[kind])
    told = result.stdout.str() + result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR and "INTERNALERROR" not in told, told
    assert "ropelab: " in told and len(told.splitlines()) <= 10, told


def test_a_run_that_names_files_says_that_it_leaves_the_laws_out(project):
    result = project("somebodys:rotate plain", ".")
    result.stdout.fnmatch_lines(["ropelab: no laws*"])
    result.assert_outcomes(passed=1)


def test_false_in_a_setting_of_pytest_is_false(project):
    """The convention knows no rotation in place, and refuses a flag that counts as true."""
    assert project("somebodys:rotate huggingface inplace=False", "--collect-only").ret == pytest.ExitCode.OK
    assert project("somebodys:rotate huggingface inplace=True", "--collect-only").ret == pytest.ExitCode.USAGE_ERROR
