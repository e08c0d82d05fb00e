"""Everything but the kernels works without Triton, which has no wheel for macOS and Windows."""

from pathlib import Path

import pytest

from tests.environments import ROOT, environment, run

pytestmark = pytest.mark.process

USE = {
    "apply_rope": """
q, k = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 5, 2, 16)
cos, sin = ropelab.rotary_table(8, 16)
for layout in ("split_half", "interleaved"):
    y, _ = ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout, offsets=3)
    assert_rotated(y, q, cos, sin, layout=layout, offsets=3)
    g = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, q, g)
    assert_rotated(found, g, cos, sin, layout=layout, offsets=3, inverse=True)
""",
    "in place": """
x = torch.randn(2, 5, 4, 16)
cos, sin = ropelab.rotary_table(5, 16)
expected = ropelab.apply_rope(x, cos=cos, sin=sin)
assert ropelab.apply_rope(x, cos=cos, sin=sin, inplace=True) is x and torch.equal(x, expected)
""",
    "without tables": """
x, frequencies = torch.randn(1, 5, 4, 16), ropelab.rotary_frequencies(16)
cos, sin = ropelab.rotary_table(5, 16)
torch.testing.assert_close(ropelab.apply_rope(x, frequencies=frequencies), ropelab.apply_rope(x, cos=cos, sin=sin))
""",
    "QK norm": """
q, k, w = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 5, 2, 16), torch.rand(16)
cos, sin = ropelab.rotary_table(5, 16)
y, _ = ropelab.apply_qk_norm_rope(q, k, w, w, cos=cos, sin=sin)
norm = torch.nn.functional.rms_norm(q, (16,), w, 1e-6)
expected = ropelab.apply_rope(norm, cos=cos, sin=sin)
g = torch.randn_like(y)
(found,), (wanted,) = torch.autograd.grad(y, q, g), torch.autograd.grad(expected, q, g)
torch.testing.assert_close((y, found), (expected, wanted))
""",
    "packed sequences": """
packed = ropelab.PackedSequences(torch.tensor([0, 2, 2, 5]), total_tokens=6)
assert packed.positions.tolist() == [0, 1, 0, 1, 2, ropelab.NO_POSITION]
""",
    "the module": """
rotary = ropelab.RotaryEmbedding(ropelab.axial_rope((8, 8), base=100.0))
positions = ropelab.grid_positions(2, 3)
q = torch.randn(1, 6, 4, 16)
cos, sin = rotary.rope.tables(8, positions)
y = rotary(q, positions=positions[:, None], seq_len=8)
assert torch.equal(y, ropelab.apply_rope(q, cos=cos, sin=sin, layout="interleaved"))
""",
    "what cannot be served": """
try:
    ropelab.apply_rope(torch.randn(2, 5, 4, 16), cos=torch.ones(2, 8), sin=torch.ones(2, 8))
except ValueError as error:
    assert str(error).startswith("cos: expected "), error
else:
    raise AssertionError("rotated beyond the tables")
""",
    "a compiler": """
import torch._dynamo
x = torch.randn(2, 5, 4, 16)
cos, sin = ropelab.rotary_table(5, 16)
rotate = torch.compile(lambda x: ropelab.apply_rope(x, cos=cos, sin=sin), backend="aot_eager", fullgraph=True)
assert torch.equal(rotate(x), ropelab.apply_rope(x, cos=cos, sin=sin))
""",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of an environment without Triton."""
    python = environment(tmp_path_factory.mktemp("environment"), without=("triton*", "ropelab*", "__editable__*"))
    run(python, "-c", "import torch, importlib.util as u; assert u.find_spec('triton') is None")
    return python


def test_torch_does_it(python, tmp_path):
    """All checks run in one process, whose traceback names the check that failed."""
    pieces = [f"exec(compile({code!r}, {name!r}, 'exec'), dict(here))" for name, code in USE.items()]
    first = ["import torch, ropelab", "from tests.support import assert_rotated", "here = dict(globals())"]
    (tmp_path / "use.py").write_text("\n".join([*first, *pieces]))
    run(python, "use.py", cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_verify_runs(python, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ropelab.study.faults.correct import huggingface\n"
        "def wrong(q, k, cos, sin, unsqueeze_dim=1):\n    return huggingface(q, k, cos, -sin, unsqueeze_dim)\n"
    )
    command = ("-m", "ropelab", "verify", "--convention", "huggingface", "--law", "definition")
    run(python, *command, "mine:huggingface", cwd=tmp_path, PYTHONPATH=str(ROOT))
    said = run(python, *command, "mine:wrong", cwd=tmp_path, PYTHONPATH=str(ROOT), expect=1)
    assert "definition" in said and "Traceback" not in said
