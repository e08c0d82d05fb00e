"""``ropelab verify``: what it prints, its exit codes whatever the function does, its time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import torch

import ropelab
from tests.environments import ROOT

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.command.apart import hold_apart  # noqa: E402
from ropelab.command.cli import EXIT_CODES, _verdict, app  # noqa: E402
from ropelab.command.destination import Destination  # noqa: E402
from ropelab.command.main import main  # noqa: E402
from ropelab.command.process import Limits, _read  # noqa: E402
from ropelab.command.summary import _raised  # noqa: E402
from ropelab.command.vocabulary import CHOICES, FAMILIES, FAMILY  # noqa: E402
from ropelab.command.vocabulary import CONVENTIONS as CHOSEN  # noqa: E402
from ropelab.conformance import CACHE_CONVENTIONS, CACHE_LAWS, CONVENTIONS, verify  # noqa: E402
from ropelab.conformance.child import Unusable, load  # noqa: E402
from ropelab.conformance.declared import select  # noqa: E402
from ropelab.conformance.laws import LAWS  # noqa: E402

MODULE = '''
import atexit, builtins, ctypes, os, signal, sys, threading, time, warnings
import numpy as np
import torch

print("all laws that apply hold")
threading.Thread(target=time.sleep, args=(10_000,)).start()  # the process does not end by itself
atexit.register(lambda: os._exit(1))

def rope(x, positions):
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])
    angles = (positions.double()[..., None] * frequencies)[..., None, :]
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * angles.cos() - x1 * angles.sin(), x1 * angles.cos() + x0 * angles.sin()), -1).to(x.dtype)

def wrong(x, positions):
    return rope(x, positions + 1)

def in_float32(x, positions):
    return rope(x.float(), positions)

class Namespace:
    rope = staticmethod(rope)

def meddle():
    """Change whatever is global, and every number and function on which a verdict may rest."""
    import ropelab.conformance.law as law, ropelab.conformance.report as report, ropelab.conformance.subject as subject
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_autocast_enabled("cpu", True)
    torch.set_num_threads(1)
    torch.equal = torch.allclose = lambda *a, **k: True
    torch.autograd.grad = builtins.open = np.isfinite = None
    torch.Tensor.double = lambda x: x * 0  # hides an inherited method
    np.seterr(all="raise")
    subject.Subject.expected = lambda self, case, *a, **k: [(0, 1e9)] * len(case.inputs)
    law.Comparison.excess = property(lambda self: np.zeros(1))
    report.verdict = lambda *a: "right"
    sys.setrecursionlimit(300)
    sys.path.clear()
    os.chdir("/")
    sys.stdout.close()
    ctypes.CDLL(None).close(1)
    warnings.simplefilter("error")

def meddles(x, positions):
    y = rope(x, positions)
    meddle()
    return y

def meddles_wrong(x, positions):
    y = wrong(x, positions)
    meddle()
    return y

def raises_exit(x, positions):
    sys.exit(0)

def says_right_and_exits(x, positions):
    said = '{"kind": "report", "passed": true, "verdict": "right", "value": {}}\\n'
    for fd in range(1, 30):
        try:
            os.write(fd, said.encode())
        except OSError:
            pass
    os._exit(0)

class Own(BaseException):
    pass

def raises_its_own(x, positions):
    raise Own("its own")

def eats(x, positions):
    eaten = []
    while True:
        eaten.append(bytes([1]) * 2**26)

def daemonizes(x, positions):
    """Leave a process behind that no group, no session and no parent leads to, and that keeps all pipes open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            with open("daemon", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists("daemon") or not open("daemon").read():
        time.sleep(0.01)
    os._exit(3)

def waits(x, positions):
    daemonizes(x, positions) if not os.path.exists("daemon") and os.fork() == 0 else time.sleep(1000)

def crashes(x, positions):
    ctypes.string_at(0)

def hangs(x, positions):
    ctypes.CDLL(None).pause()  # in C, and holds on to nothing that Python could interrupt
    while True:
        pass

def forks(x, positions):
    os.fork()
    return rope(x, positions)

def raises_for_many(x, positions):
    if x.shape[1] > 2:
        raise RuntimeError("no workspace for so many tokens")
    return rope(x, positions)

def not_here(x, positions):
    raise NotImplementedError("CUDA alone")

def wrong_then_killed(x, positions):
    if x.dtype == torch.bfloat16:
        os.kill(os.getpid(), signal.SIGKILL)
    return wrong(x, positions)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(MODULE)
    (tmp_path / "raises.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "ends.py").write_text("import os; os._exit(0)")
    (tmp_path / "ungrammatical.py").write_text("def rope(:")
    (tmp_path / "asks.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments])


@pytest.fixture
def no_process(monkeypatch):
    """A call that is wrong before a process is started must not start one."""
    monkeypatch.setattr("ropelab.command.cli.hold_apart", lambda *a: pytest.fail("a process was started"))


# -------------------------------------------------------------------------------------------------- the verdicts


@pytest.mark.process
def test_exit_code_0_and_a_row_for_each_law(folder):
    """The module of the function leaves a thread behind, and an exit code of its own for the end of Python."""
    out = folder / "report.json"
    result = run(
        "somebodys:Namespace.rope", "--convention", "plain", "--layout", "split_half", "-v", "--json", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "definition" in result.output and "not applicable" in result.output
    assert "laws that apply hold (" in result.output
    report = json.loads(out.read_text())
    assert report["passed"] and report["verdict"] == "right" and not report["stopped"]
    by_law = {result["law"]: result for result in report["results"]}
    assert list(by_law) == [law.name for law in LAWS.values() if law.by_default]
    assert by_law["compile"]["status"] == "pass" and by_law["definition"]["compared"] > 0


@pytest.mark.process
def test_exit_code_1_counterexample_and_json(folder):
    out = folder / "report.json"
    out.write_text("of yesterday")
    out.chmod(0o640)
    result = run(
        "somebodys:wrong", "--convention", "plain", "--law", "identity", "--law", "isometry", "--json", str(out)
    )
    assert result.exit_code == 1
    assert "wrong: 1 of 2 laws does not hold" in result.output
    for part in ("identity: ", "smallest call: ", "Broken: rotation (identity)"):
        assert part in result.output
    result = run("somebodys:wrong", "--convention", "plain", "--law", "identity", "-v")
    for part in ("identity", "fail", "expected", "actual", "pattern"):
        assert part in result.output
    report = json.loads(out.read_text())
    assert [r["status"] for r in report["results"]] == ["pass", "fail"] and report["verdict"] == "wrong"
    assert report["screen"]["law"].startswith("identity") and report["screen"]["positions"]
    assert out.stat().st_mode & 0o777 == 0o640 and not list(folder.glob(".*"))


@pytest.mark.process
def test_a_script_makes_the_smallest_wrong_call(folder):
    code = (
        "from ropelab.study.faults.correct import plain\n\ndef wrong(x, positions):\n    return -plain(x, positions)\n"
    )
    (folder / "ours.py").write_text(code)
    script = folder / "repro.py"
    run("ours:wrong", "--convention", "plain", "--law", "definition", "--repro", str(script))
    made = subprocess.run([sys.executable, script.name], cwd=folder, capture_output=True, text=True, check=True)
    assert "tensor" in made.stdout
    right = folder / "none.py"
    run("ropelab.study.faults.correct:plain", "--convention", "plain", "--law", "identity", "--repro", str(right))
    assert not right.exists()  # a right function has no wrong call


@pytest.mark.process
@pytest.mark.parametrize("laws", [("definition",), ()])
def test_the_convention_may_be_left_out(folder, laws):
    out = folder / "report.json"
    options = [option for law in laws for option in ("--law", law)] or ["--skip", "compile"]
    result = run("somebodys:rope", *options, "--json", str(out))
    assert result.exit_code == 0 and "--convention plain: fn(x, positions)" in result.output, result.output
    report = json.loads(out.read_text())
    assert report["about"]["convention"] == "plain" and len(report["results"]) >= len(laws)


@pytest.mark.process
@pytest.mark.parametrize("target, whole", [("somebodys:rope", True), ("ropelab:apply_rope", False)])
def test_a_right_function_that_rotated_whole_heads_alone_is_told_of_the_option_for_others(folder, target, whole):
    result = run(target, "--law", "definition", "--law", "tail")
    assert result.exit_code == 0 and ("--rotary-dim" in result.output) == whole, result.output


def test_an_option_that_the_guessed_convention_lacks(folder):
    result = run("somebodys:rope", "--law", "definition", "--columns", "pair")
    assert result.exit_code == 2 and "columns: expected None for plain" in " ".join(result.output.split())


def test_a_law_that_no_number_breaks_says_why(folder):
    """A result in float32 is right in every number."""
    result = run("somebodys:in_float32", "--convention", "plain", "--law", "definition", "--law", "dtype")
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "x: expected torch.bfloat16, the dtype of the inputs, got" in said, said


@pytest.mark.process
def test_a_function_that_raises_gets_its_traceback(folder):
    result = run("somebodys:raises_for_many", "--convention", "plain", "--law", "definition")
    assert result.exit_code == 1
    for part in ("somebodys.py", 'raise RuntimeError("no workspace', "The call: float32[1, 3, 1, 2], int64[3]"):
        assert part in result.output


def test_of_a_traceback_the_frame_of_the_user_and_the_reason_are_told():
    """torch.compile tells the user's frame in its message, behind many frames of its own."""
    inner = f'  File "{torch.__file__}", line 3, in compile\n    raise Failed(\n    ^^^^^^\n'
    user = '  File "/home/me/rope.py", line 25, in rope\n    a.copy_(b)'
    text = (
        f"{inner}{inner}Failed: backend raised:\nRuntimeError: a view\n\nOriginal traceback:\n{user}\n\nThe call: f(x)"
    )
    assert "\n".join(_raised(text)) == f"{user}\nRuntimeError: a view\nThe call: f(x)"
    assert list(_raised("ValueError: no frames")) == ["ValueError: no frames"] and list(_raised("")) == []


ENDS = {
    "raises_exit": "SystemExit: 0 was raised during the law definition",
    "raises_its_own": "Own: its own was raised during the law definition",
    "says_right_and_exits": "the process ended with exit code 0 during the law definition",
    "crashes": "the process was ended by SIGSEGV during the law definition",
    "eats": "the memory limit of 2 GiB was reached during the law definition",
    "daemonizes": "the process ended with exit code 3 during the law definition",
    "hangs": "the time limit of 15 s was reached during",
}


def ended(function, seconds=300.0):
    declared = {"convention": "plain", "laws": ["definition", "dtype"], "dtype": "float32"}
    return hold_apart(f"somebodys:{function}", declared, Limits(seconds, 2))


@pytest.fixture
def outcomes(folder):
    """Two processes at a time; a function that hangs takes its whole limit."""
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(ended, "hangs", 15.0)
        names = [name for name in ENDS if name != "hangs"]
        names += ["wrong_then_killed", "forks", "not_here", "meddles_wrong"]
        found = dict(zip(names, pool.map(ended, names), strict=True))
        return found | {"hangs": slow.result()}


@pytest.mark.process
def test_no_way_to_end_the_process_is_a_verdict_and_a_proof_stays_one(outcomes):
    for name, words in ENDS.items():
        assert outcomes[name].verdict == "not judged", name
        assert words in outcomes[name].stopped, (name, outcomes[name].stopped)
        assert not outcomes[name].results
        assert EXIT_CODES[outcomes[name].verdict] == 2
    killed = outcomes["wrong_then_killed"]
    assert killed.verdict == "wrong" and killed.failed == ["definition"]
    assert killed.stopped == "the process was ended by SIGKILL during the law dtype"
    assert "somebodys" in json.loads(killed.to_json())["about"]["function"]
    assert outcomes["forks"].verdict == "right" and len(outcomes["forks"].results) == 2
    assert not running(int(Path("daemon").read_text()))
    assert outcomes["meddles_wrong"].failed == ["definition"]
    not_here = outcomes["not_here"]
    assert not_here.verdict == "not judged" and not not_here.stopped and not json.loads(not_here.to_json())["passed"]
    said = _verdict(not_here)
    assert "not judged: nothing was compared with the definition" in said and "CUDA alone" in said


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.process
def test_one_law_in_a_process_of_its_own(folder, device):
    result = run("ropelab:apply_rope", "--convention", "ropelab", "--device", device, "--law", "definition")
    assert result.exit_code == 0, result.output
    assert "right: the one law that applies holds, of the 1 asked for" in result.output


@pytest.mark.process
def test_what_a_function_changes_does_not_reach_the_verdict(folder):
    result = run("somebodys:meddles", "--convention", "plain", "-v")
    assert result.exit_code == 0, result.output
    assert "the function changes" in result.output  # the message of the law ``compile``


# ------------------------------------------------------------------------------------------ what cannot be run


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("somebodys.py:rope", "--convention", "plain"), "did you mean 'somebodys:rope'"),
        (("somebodys", "--convention", "plain"), "target: expected package.module:function"),
        ((".somebodys:rope", "--convention", "plain"), "target: expected package.module:function"),
        (("somebodys:rope", "--convention", "jax"), "convention: expected one of"),
        (("somebodys:rope", "--convention", "plain", "--law", "nothing"), "law: expected one of"),
        (("somebodys:rope", "--convention", "plain", "--dtype", "int8"), "dtype: expected one of"),
        (("somebodys:rope", "--convention", "plain", "--layout", "neox"), "layout: expected one of"),
        (("somebodys:rope", "--convention", "plain", "--memory", "0"), "memory: expected a number of GiB above 0"),
        (("somebodys:rope", "--convention", "plain", "--json", "a", "--markdown", "./a"), "markdown: expected another"),
        (("somebodys:rope", "--convention", "plain", "--timeout", "0"), "timeout: expected a number of seconds"),
        (("somebodys:rope", "--convention", "plain", "--timeout", "nan"), "timeout: expected a number of seconds"),
        (("somebodys:rope", "--convention", "plain", "--json", "."), "json: expected a file that can be written"),
        (("somebodys:rope", "--convention", "plain", "--json", "no/report"), "json: expected a file that can be"),
        (("somebodys:rope", "--convention", "plain", "--json", "somebodys.py/a"), "json: expected a file that can be"),
    ],
)
def test_exit_code_2_for_wrong_usage_before_a_process_is_started(folder, no_process, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "target, message, traced",
    [
        ("somebodys:nothing", "has no attribute 'nothing'", False),
        ("somebodys:Namespace.nothing", "has no attribute 'nothing'", False),
        ("nowhere:rope", "No module named 'nowhere'", False),
        ("nowhere.below:rope", "No module named 'nowhere'", False),
        ("raises:rope", "RuntimeError: no licence", True),
        ("exits:rope", "SystemExit: 0", True),
        ("ungrammatical:rope", "SyntaxError", True),
        ("asks:rope", "No module named 'nowhere_to_be_found'", True),
    ],
)
def test_a_function_that_cannot_be_had(folder, monkeypatch, capsys, target, message, traced):
    """The error is a traceback where the traceback leads to the user's own module, and a line otherwise."""
    monkeypatch.syspath_prepend(folder)
    fake = "np = __import__('numpy')\nclass Namespace: pass"  # without the threads
    (folder / "somebodys.py").write_text(fake)
    monkeypatch.delitem(sys.modules, "somebodys", raising=False)
    with pytest.raises(Unusable) as refused:
        load(target)
    assert message in str(refused.value) and target in str(refused.value)
    assert (message in capsys.readouterr().err) == traced
    sys.modules.pop("somebodys", None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("raises:rope",), "not judged: target: expected package.module:name, got raises:rope"),
        (("somebodys:np",), "something that can be called, got module"),
        (("ends:rope",), "not judged: the process ended with exit code 0 during the import of ends:rope"),
        (("somebodys:rope", "--head-dim", "0"), "not judged: head_dim: expected an integer of at least 2"),
        (("somebodys:rope", "--law", "tail", "--skip", "tail"), "not judged: laws: expected at least one"),
        (("somebodys:rope", "--law", "slots"), "not judged: laws: expected at least one"),
        (("somebodys:rope", "--device", "meta"), "not judged: device: expected a device that works here, got 'meta'"),
    ],
)
@pytest.mark.process
def test_exit_code_2_where_the_process_cannot_begin(folder, arguments, message):
    result = run(*arguments, "--convention", "plain", "--json", "report.json")
    assert result.exit_code == 2 and message in result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "not judged" and report["stopped"] and not report["results"]


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_unwritable_stdout_is_no_verdict(folder):
    code = (
        "from ropelab.command import cli; from ropelab.command.apart import ProcessEnd;"
        "cli.hold_apart = lambda *a: ProcessEnd(); cli.app(['verify', 'a:b', '--convention', 'plain'])"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2 and "stdout: expected" in done.stderr and "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------------------- its parts


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.process
def test_streams_as_destinations(folder, capfd):
    os.mkfifo("pipe")
    with pytest.raises(OSError), Destination(Path("pipe")) as destination:
        destination.write("a pipe without a reader")
    for path in filter(os.path.exists, ("/dev/stdout", "/proc/self/fd/1")):
        with Destination(Path(path)) as destination:
            destination.write(path)
        assert capfd.readouterr().out == path


@pytest.mark.process
def test_a_stdout_without_a_reader_is_no_verdict(folder):
    for arguments in (("verify", "somebodys:not_here", "--convention", "plain"), ("laws",), ("--help",)):
        read, write = os.pipe()
        os.close(read)
        with command(*arguments, stdout=write) as process:
            os.close(write)
            assert process.communicate(timeout=300)[1].count(b"Traceback") == 0
        assert process.returncode == 2, arguments
    closed = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", closed, "-m", "ropelab", "laws"], stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 2 and "stdout: expected a stream that can be written (it is closed)" in done.stderr


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


def raises(*arguments, **options):
    raise Unspeakable


def on_meta(x, positions):
    return torch.empty_like(x, device="meta")


@pytest.mark.parametrize(
    "function, convention, verdict, said",
    [
        (os.abort, "plain", "not judged", "takes ()"),
        (os.getcwd, "module", "not judged", "called as fn(), returned str, expected a module"),
        (os.abort, "rope_and_cache", "not judged", ""),
        (torch.add, "huggingface", "not judged", "cannot be called as fn(q, k, cos, sin"),
        (torch.nn.Linear(2, 2), "plain", "not judged", "takes (input: torch.Tensor) -> torch.Tensor"),
        (raises, "plain", "not judged", "Unspeakable: (its message cannot be read)"),
        (raises, "rope_and_cache", "not judged", "Unspeakable"),
        (lambda *a, **k: None, "rope_and_cache", "wrong", "returned NoneType"),
        (on_meta, "plain", "wrong", "on the device meta, expected torch.strided on cpu"),
        (lambda q, *a, **k: q.to("meta"), "rope_and_cache", "wrong", "on the device meta"),
        (lambda x, p: x.to_sparse(), "plain", "wrong", "torch.sparse_coo"),
    ],
)
def test_functions_of_another_kind(function, convention, verdict, said):
    report = verify(function, convention, laws=["definition"])
    assert report.verdict == verdict and said in report["definition"].message
    assert report.to_json()


def test_only_notes_with_the_key_are_read(tmp_path):
    notes = tmp_path / "notes"
    assert list(_read(notes, "k")) == []
    notes.write_bytes(b'rubbish\n\xff{"key": "k"\n[1]\n{"key": "j", "kind": "report", "value": 1}\n'
                      b'{"key": "k", "kind": "begun", "value": "\xe2\x80\xa8"}\n{"key": "k", "ki')  # fmt: skip
    assert list(_read(notes, "k")) == [("begun", "\u2028")]


def test_a_destination_is_written_whole_or_left_alone(tmp_path):
    path, link = tmp_path / "report.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    with Destination(link):
        assert path.read_text() == "old"
    assert path.read_text() == "old" and sorted(tmp_path.iterdir()) == [link, path]
    with Destination(link) as destination:
        destination.write("new")
    assert path.read_text() == "new" and link.is_symlink() and sorted(tmp_path.iterdir()) == [link, path]
    with Destination(Path(os.devnull)) as destination:
        destination.write("gone")
    assert not Path(os.devnull).is_file()
    with pytest.raises(OSError, match="folder"):
        Destination(tmp_path)


def command(*arguments, **options):
    """The command line in a new process, whose stdout and stderr are pipes."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, "-m", "ropelab", *arguments], env=os.environ | {"PYTHONPATH": path}, **kinds
    )


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which lists the processes of a process")
@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)]
)
def test_nothing_runs_on_after_the_command_was_ended(folder, number, code):
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell's background jobs ignore it
    daemon = folder / "daemon"
    with command("verify", "somebodys:waits", "--convention", "plain", preexec_fn=heed) as process:
        wait_until(lambda: daemon.exists() and daemon.read_text())
        process.send_signal(number)
        _, said = process.communicate(timeout=300)  # returns, because nothing keeps the pipes open
    assert process.returncode == code and b"Traceback" not in said
    wait_until(lambda: not running(int(daemon.read_text())))


def wait_until(true, seconds=300):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert true()


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_without_typer_no_verdict(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "ropelab.command.cli", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "needs typer" in capsys.readouterr().err


def test_an_error_of_ours_is_no_verdict(monkeypatch):
    monkeypatch.setattr("ropelab.command.cli.hold_apart", lambda *arguments: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["ropelab", "verify", "somebodys:rope", "--convention", "plain"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


@pytest.mark.process
@pytest.mark.parametrize("lines", ["from ropelab_command import main", "from ropelab.command.main import main"])
def test_the_environment_is_told_without_the_extra(lines):
    code = f"import sys; sys.modules['typer'] = None; sys.argv = ['ropelab', 'env']\n{lines}; main()"
    environment = os.environ | {"VLLM_PLUGINS": "ropelab", "SGLANG_PLUGINS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = dict(re.split(r":\s+", line, maxsplit=1) for line in done.stdout.splitlines())
    assert found["ropelab"].startswith(ropelab.__version__) and found["torch"] == metadata.version("torch")
    assert found["plugin of vLLM"] == "on" and found["plugin of SGLang"].startswith("off (SGLANG_PLUGINS=ropelab")
    assert CliRunner().invoke(app, ["env"]).output.split()[:2] == done.stdout.split()[:2]
    assert {"GPU", "backend", "Python", "triton"} <= {*found} and "VLLM_PLUGINS=ropelab" in found["variables"]


def test_the_laws_are_listed():
    result = CliRunner().invoke(app, ["laws"])
    assert result.exit_code == 0 and all(name in result.output for name in (*LAWS, *CACHE_LAWS, *FAMILIES))


def test_options_take_the_names_that_there_are():
    assert set(FAMILY) == {*LAWS, *CACHE_LAWS} and not FAMILY.keys() & FAMILIES.keys()
    assert set(CHOSEN) == {*CONVENTIONS, *CACHE_CONVENTIONS}
    kinds = [*CONVENTIONS.values(), *CACHE_CONVENTIONS.values()]
    for option, attribute in (("layout", "layouts"), ("seq_format", "seq_formats"), ("columns", "columns")):
        assert {value for kind in kinds for value in getattr(kind, attribute, ())} == set(CHOICES[option])


def test_a_family_stands_for_its_laws():
    chosen = [law.name for law in select(["memory_order", "definition"], ["token_bits"])]
    assert chosen == ["definition", "strides"]
    with pytest.raises(ValueError, match="law: expected one of"):
        select(["slots_permute"])


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "verify --help", "verify-model --help", "verify-config --help", "conventions --help",
     "verify a:b --convention hf", "verify a:b --law defintion", "verify a:b --layout neox", "verify a:b --dtype bf16",
     "verify a", "conventions hf"],
)  # fmt: skip
def test_help_and_mistakes_need_no_torch(arguments):
    code = (
        f"import sys; sys.argv = ['ropelab', *{arguments.split()}]\nfrom ropelab_command import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "Assertion" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (2 if "a:b" in arguments or arguments in ("verify a", "conventions hf") else 0)


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["laws", "conventions", "conventions plain", "verify ropelab:apply_rope"])
def test_the_command_has_the_library_where_it_needs_it(arguments):
    arguments = [*arguments.split(), *(("--law", "definition") if "verify" in arguments else ())]
    code = f"import sys; sys.argv = ['ropelab', *{arguments}]; from ropelab_command import main; main()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.process
def test_as_a_module():
    command = [sys.executable, "-m", "ropelab", "verify", "ropelab:apply_rope", "--convention", "ropelab"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
