"""The study of whole models: times, losses, memory and the part of the rotation."""

import pandas as pd
import pytest
import torch

pytest.importorskip("transformers")

from ropelab.bench import model_steps, whole_models  # noqa: E402
from ropelab.bench.projection import KERNEL  # noqa: E402
from ropelab.bench.projection import OURS as PASS  # noqa: E402
from ropelab.bench.projection_law import Machine  # noqa: E402
from ropelab.study.topics.models import evidence, share, training  # noqa: E402
from ropelab.study.topics.projection import findings as projections  # noqa: E402
from tests.study.sentences import states  # noqa: E402


def test_the_study_of_whole_models(torch_backend):
    frame = whole_models.whole_models(smoke=True, device="cpu")
    offered = frame[~frame.status.str.startswith("not offered")]
    assert set(offered.status) == {"ok"} and (offered.value > 0).all()
    assert set(frame.way) - set(offered.way) == {model_steps.PROJECTION}  # Qwen3 has norms between both
    times = evidence.values(frame)
    assert list(times) == [way for way in model_steps.WAYS if way != model_steps.PROJECTION] and len(times) == 3
    rounds = offered[offered.quantity == "time"].groupby(["way", "step"]).place.apply(list)
    assert all(places == [0, 1] for places in rounds)
    assert evidence.norm_bar(frame) and evidence.sentences(frame)


def test_the_short_part_is_one_model_in_every_way_that_it_offers(torch_backend):
    frame = whole_models.whole_models(smoke=True, short=True, device="cpu")
    assert frame.model.unique().tolist() == [model_steps.ARCHITECTURES[0].name]
    found = frame[frame.status == "ok"]
    assert set(found.way) == set(model_steps.WAYS) - {model_steps.NORMS}  # Llama has no norms of q and k
    assert set(found.quantity) == {"time"} and evidence.sentences(frame) and not evidence.norm_bar(frame)


def times_of(**milliseconds):
    """A record with one model: way -> the times of an eager training step, an eager decode and a compiled prefill."""
    steps = (("eager", "training step"), ("eager", "decode"), ("compiled", "prefill"))
    rows = [
        {"mode": mode, "step": step, "way": way.replace("_", " "), "value": value}
        for way, values in milliseconds.items()
        for (mode, step), value in zip(steps, values, strict=True)
    ]
    return pd.DataFrame(rows).assign(model="M", quantity="time", status="ok")


def test_models_learn_with_the_kernel_and_not_with_a_wrong_backward():
    last = training.compare(seeds=1, steps=60).groupby("backward").loss.last()
    assert last[training.OURS] == pytest.approx(last[training.PLAIN], rel=1e-3) and last[training.PLAIN] < 0.6
    assert last[training.WRONG] > 2


def test_the_kernel_itself_takes_the_first_steps():
    losses = training.with_the_kernel(steps=2)
    assert list(losses) == [training.PLAIN, training.OURS] and len(losses) == 2
    assert losses[training.OURS].to_numpy() == pytest.approx(losses[training.PLAIN].to_numpy(), rel=1e-5)


def test_the_recorded_losses_are_compared_step_by_step():
    losses = {"Transformers": (7.0, 0.5), "ropelab": (7.0, 0.25), "ropelab with norms": (7.5, 0.5)}
    rows = [{"model": "M", "way": way, "place": place, "value": value, "quantity": "loss", "status": "ok"}
            for way, values in losses.items() for place, value in enumerate(values)]  # fmt: skip
    assert states(evidence.loss_sentence(pd.DataFrame(rows)), 2, 0.25, 0.5, 7, 0.5)
    assert evidence.loss_sentence(pd.DataFrame(rows[:2])) == ""


def test_the_part_of_the_rotation_follows_from_bytes_and_operations():
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 512}
    weights = 256 * (2 * 256 + 2 * 128 + 3 * 512)  # head_dim 128: q and output, k and v, MLP
    products, attention = 2 * 100 * weights, 2 * 2 * 100**2 / 2 * 256
    moved = 3 * 100 * (256 + 128) * 2 * 2  # three times: read and write, two bytes each
    machine = Machine(flops=8e14, bandwidth=3e12)
    rotation = moved / machine.bandwidth
    whole = (products + attention) / machine.flops + rotation
    assert share.part(machine, 100, 3, sizes) == pytest.approx(rotation / whole)
    parts = share.parts(machine, [64, 4096])
    assert (parts.loc[64] > parts.loc[4096]).all() and (parts.iloc[:, 1] > parts.iloc[:, 0]).all()


def test_steps_in_which_a_model_without_a_rotation_is_slower_are_left_out():
    frame = times_of(Transformers=(10, 8, 10), ropelab=(9, 4, 10.01), no_rotation=(8, 5, 9.8))
    assert evidence.doubtful(frame).longer.to_dict() == {("M", "eager", "decode"): 0.25}
    eager, compiled, _, noise = evidence.sentences(frame)
    assert states(eager, 10.0) and states(compiled, -0.1) and states(noise, 25)
    clear = times_of(Transformers=(10, 8, 10), ropelab=(9, 4, 9), no_rotation=(8, 4.03, 8))
    assert evidence.doubtful(clear).empty and states(evidence.sentences(clear)[0], 1, 3)


def test_a_time_is_the_median_of_its_rounds_and_the_projection_is_named():
    ways = {"Transformers": 10, "ropelab": 9, "ropelab_with_projection": 8}
    rounds = [times_of(**{way: (ms + late,) * 3 for way, ms in ways.items()}) for late in (0, 0, 30)]
    assert evidence.savings(pd.concat(rounds)).loc[("M", "eager", "decode")].tolist() == pytest.approx([0.1, 0.2])


def test_the_projection_stands_beside_the_pass_with_the_gain_of_its_kernel():
    ways = {"Transformers": 10, "ropelab": 9, "ropelab_with_projection": 9.5}
    steps = pd.concat([times_of(**{way: (ms + late,) * 3 for way, ms in ways.items()}) for late in (0, 0.1, 0.2)])
    case = {**projections.MODEL, "inputs": projections.INPUTS, "tokens": 8192, "status": "ok"}
    product = pd.DataFrame([{**case, "contender": name, "median_us": us} for name, us in ((PASS, 600), (KERNEL, 550))])
    said = evidence.projection_sentence(steps, product)
    assert states(said, 9.60, 9.10, 5.5, 0.20, 4) and "slower" in said
    faster = steps.assign(value=steps.value.where(steps.way != "ropelab with projection", steps.value - 1))
    said = evidence.projection_sentence(faster, product)
    assert states(said, 8.60, 9.10, 5.5) and "faster" in said
    assert evidence.projection_sentence(steps[steps.way != "ropelab with projection"], product) == ""
    alone = steps.assign(quantity="kernel time", value=steps.value - 2)
    assert states(evidence.projection_sentence(pd.concat([steps, alone]), product), 7.60, 7.10, 2.00, 2.00)


def test_kernels_alone_tell_the_gpu_from_the_host():
    """The GPU waits for 60 % of a decoding step, so its time measures the host; compiled kernels take longer."""
    times = times_of(Transformers=(10, 10, 12), ropelab=(9, 11, 11), no_rotation=(9, 10, 11))
    both = pd.concat([times, times.assign(mode="eager", step="prefill").tail(3).assign(value=[10, 10, 10])])
    alone = both.assign(quantity="kernel time", value=[9, 4, 11, 8.5, 3.9, 10, 8.4, 3.8, 10, 8, 8, 8])
    ways = both.way.to_numpy().copy()
    ways[-3:] = ["Transformers", "ropelab", "no rotation"]
    frame = pd.concat([both.assign(way=ways), alone.assign(way=ways)])
    assert evidence.doubtful(frame).waits.to_dict() == {("M", "eager", "decode"): pytest.approx(0.6)}
    sentences = evidence.sentences(frame)
    assert all(any(states(each, *found) for each in sentences) for found in ([60], [5.6, 6.7], [1.38]))


def test_the_memory_that_a_step_needs_more():
    frame = times_of(Transformers=(10, 8, 10), ropelab=(10.5, 8, 10)).assign(quantity="peak memory")
    assert states(evidence.memory_sentence(frame), 0.50)


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
