"""The study of whole models: times, losses, memory and the part of the rotation."""

import pytest
import torch

pytest.importorskip("transformers")

from ropelab.bench import model_steps, whole_models  # noqa: E402
from ropelab.bench.records import Record  # noqa: E402
from ropelab.study.topics.models import training  # noqa: E402
from tests.site.cells import run  # noqa: E402


def test_the_study_of_whole_models(torch_backend):
    frame = whole_models.whole_models(smoke=True, device="cpu")
    offered = frame[~frame.status.str.startswith("not offered")]
    assert set(offered.status) == {"ok"} and (offered.value > 0).all()
    assert set(frame.way) - set(offered.way) == {model_steps.PROJECTION}  # Qwen3 has norms between both
    assert set(offered.way) == set(model_steps.WAYS) - {model_steps.PROJECTION} and offered.step.nunique() == 3
    rounds = offered[offered.quantity == "time"].groupby(["way", "step"]).place.apply(list)
    assert all(places == [0, 1] for places in rounds)


def test_the_short_part_is_one_model_in_every_way_that_it_offers(torch_backend, monkeypatch):
    frame = whole_models.whole_models(smoke=True, short=True, device="cpu")
    assert frame.model.unique().tolist() == [model_steps.ARCHITECTURES[0].name]
    found = frame[frame.status == "ok"]
    assert set(found.way) == set(model_steps.WAYS) - {model_steps.NORMS}  # Llama has no norms of q and k
    assert set(found.quantity) == {"time"}
    record = Record("whole_models", frame, {})
    names = run(monkeypatch, "10", "picture", "share-code", "times", "compiled-code", instead={"record": record})
    assert len(names.ms) == found.step.nunique() and not any("nan" in said for said in names.findings_shown)


def test_models_learn_with_the_kernel_and_not_with_a_wrong_backward(monkeypatch):
    curves = run(monkeypatch, "10", "picture", "learning-figure", seeds=1, steps=60).curves
    last = curves.groupby("backward").loss.last()
    assert last[training.OURS] == pytest.approx(last[training.PLAIN], rel=1e-3) and last[training.PLAIN] < 0.6
    assert last[training.WRONG] > 2


def test_the_kernel_itself_takes_the_first_steps():
    losses = training.with_the_kernel(steps=2)
    assert list(losses) == [training.PLAIN, training.OURS] and len(losses) == 2
    assert losses[training.OURS].to_numpy() == pytest.approx(losses[training.PLAIN].to_numpy(), rel=1e-5)


@pytest.mark.process
@pytest.mark.gpu
def test_a_step_of_each_model():
    """Each published size in each way, once; a model of a package that is missing is left out."""
    for architecture in model_steps.ARCHITECTURES:
        try:
            model = architecture.build("cuda", smoke=False)
        except ImportError:
            continue
        for way in model_steps.WAYS:
            try:
                context = model_steps.in_way(way, model)
            except ValueError:
                assert way in (model_steps.NORMS, model_steps.PROJECTION)
                continue
            with context:
                for step, call in model_steps.steps(model, model, smoke=True, decode=True).items():
                    call()
                    assert step
        del model
        torch.cuda.empty_cache()
