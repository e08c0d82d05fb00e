"""This file measures whole models of Transformers with random weights, with and without ropelab.

The models have the sizes of published models, at a reduced depth and with a vocabulary of `VOCABULARY` tokens, so that
the layers take most of the time. Every model runs in several ways, one after another in one process:

- "Transformers": as it is
- "ropelab": after `ropelab.interop.huggingface.patch`
- "ropelab with norms": after ``patch(model, qk_norm=True)``, where the model normalizes q and k
- "no rotation": q and k pass unchanged, which no rotation can beat
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ropelab.bench import gpu_memory, timing, tuning, turns
from ropelab.bench.compare import progress
from ropelab.bench.launches import kernel_names
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB
from ropelab.interop import diffusers
from ropelab.interop.huggingface import patch
from ropelab.interop.huggingface.model import rotation_functions
from ropelab.interop.patch import Patch

PLAIN, OURS, NORMS, NONE = "Transformers", "ropelab", "ropelab with norms", "no rotation"
WAYS = (PLAIN, OURS, NORMS, NONE)
TRAINING, PREFILL, DECODE, DENOISING, LOSS = "training step", "prefill", "decode", "denoising step", "loss"
VOCABULARY = 1024
BATCH, TOKENS, DECODED, CONTEXT = 2, 4096, 8, 1000
"""Training and prefill take BATCH sequences of TOKENS tokens. Decoding adds a token to DECODED sequences of CONTEXT."""
ROUNDS, LOSSES, LEARNING_RATE = 10, 100, 1e-4


@dataclass(frozen=True)
class Architecture:
    """A model to measure.

    Attributes:
        name: the published model.
        model: the name of the class of Transformers.
        sizes: the fields of the configuration.
        compiled: whether the model is measured under ``torch.compile`` as well.
        losses: whether the losses of `LOSSES` training steps are recorded.
        package: the package with the class; a model of diffusers turns image tokens into image tokens.
        gib: the GiB of GPU memory that torch may reserve while the model is measured.
    """

    name: str
    model: str
    sizes: Mapping[str, Any]
    compiled: bool = False
    losses: bool = False
    package: str = "transformers"
    gib: float = 24

    def build(self, device: torch.device | str, smoke: bool) -> torch.nn.Module:
        """The model in bfloat16, with the same random weights each time.

        Raises:
            ImportError: the package is not installed.
        """
        kind = getattr(importlib.import_module(self.package), self.model)
        torch.manual_seed(0)
        with torch.device(device):
            if self.package == "diffusers":
                return kind(**self.sizes).to(torch.bfloat16)
            sizes = {**self.sizes, "vocab_size": VOCABULARY, "pad_token_id": 0, **(SMOKE if smoke else {})}
            return kind(kind.config_class(**sizes)).to(torch.bfloat16)


SMOKE = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
ARCHITECTURES = (
    Architecture("Llama 3 8B, 4 layers", "LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }, compiled=True),
    Architecture("Qwen3 8B, 4 layers", "Qwen3ForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    }, compiled=True, losses=True),
    Architecture("Gemma 3 4B, 6 layers", "Gemma3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 8192,
    }),
    Architecture("DeepSeek-V3, 2 dense layers", "DeepseekV3ForCausalLM", {
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 2, "first_k_dense_replace": 2,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 8192,
    }),
    Architecture("Flux, 2 blocks and 4 single blocks", "FluxTransformer2DModel", {
        "num_layers": 2, "num_single_layers": 4,
    }, package="diffusers"),
)  # fmt: skip


def whole_models(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Measure all architectures. Needs Transformers.

    On a GPU each architecture has a process of its own, because no kernel of a process runs after a fault. The
    processes build and compile side by side, and time one at a time (`ropelab.bench.turns`).

    Returns:
        A row for each value. Columns: model, mode (``"eager"`` or ``"compiled"``), way, step, quantity (``"time"``,
        ``"launches"``, ``"peak memory"`` or ``"loss"``), place (the number of the training step of a loss, else 0),
        value, unit, status (``"ok"``, or why there is no value).
    """
    columns = ["model", "mode", "way", "step", "quantity", "place", "value", "unit", "status"]
    if timing.is_stopped():  # there is nothing to compile ahead: every step is called before it is timed
        return pd.DataFrame(columns=columns)
    found = dict(_outcomes(smoke, device))
    frames = []
    for architecture in ARCHITECTURES:
        outcome = found.get(architecture.name, [])
        if isinstance(outcome, BaseException):
            row = {"mode": "eager", "way": OURS, "step": TRAINING, "quantity": "time", "place": 0, "unit": "ms"}
            outcome = [row | {"status": timing.failure(outcome)}]
        frames.append(pd.DataFrame(outcome).assign(model=architecture.name))
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _outcomes(smoke: bool, device: torch.device | str) -> Iterator[tuple[str, Any]]:
    """The name of each architecture, and its rows or its exception, in the order in which the architectures end."""
    if smoke or torch.device(device).type == "cpu":
        for number in progress((1,) if smoke else range(len(ARCHITECTURES)), lambda i: ARCHITECTURES[i].name):
            try:
                yield ARCHITECTURES[number].name, _rows(number, device, smoke)
            except (ImportError, RuntimeError) as error:  # the package is missing, or a step failed
                yield ARCHITECTURES[number].name, error
        return
    free, _ = torch.cuda.mem_get_info()
    alone = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(architecture.name, _rows_in_turn, (number, device, Path(folder)), round(architecture.gib * GIB))
            for number, architecture in enumerate(ARCHITECTURES)
        ]
        for job, outcome in side_by_side(jobs, free):
            if isinstance(outcome, BaseException) and gpu_memory.ran_out(outcome):
                alone.append(Job(job.name, _rows, (job.arguments[0], device, smoke)))
                continue
            print(f"    {job.name}", flush=True)
            yield job.name, outcome
    for job, outcome in side_by_side(alone, free, most=1):
        print(f"    {job.name}, again and alone, because memory ran out", flush=True)
        yield job.name, outcome


def _rows_in_turn(number: int, device: torch.device | str, folder: Path) -> list[dict[str, Any]]:
    """The rows of one of `ARCHITECTURES`, beside the processes that name the same folder.

    Raises:
        ImportError: the package of the model is not installed.
        torch.OutOfMemoryError: the memory does not hold the models of all processes.
    """
    with gpu_memory.shared(), turns.taking_part(folder), tuning.in_turns():
        return _rows(number, device, smoke=False)


def _rows(number: int, device: torch.device | str, smoke: bool) -> list[dict[str, Any]]:
    """The rows of one of `ARCHITECTURES`, without the column model.

    Raises:
        ImportError: the package of the model is not installed.
    """
    architecture = ARCHITECTURES[number]
    with turns.off_the_gpu():
        importlib.import_module(architecture.package)
    model = architecture.build(device, smoke)
    # cuDNN's attention faults in the backward of Flux without ropelab (torch 2.11, H100), so no model may choose it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows = list(_measured(architecture, model, "eager", smoke))
    if architecture.compiled and not smoke:
        rows += _measured(architecture, model, "compiled", smoke)
    if architecture.losses:
        rows += _losses(architecture, model, smoke)
    return rows


def in_way(way: str, model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """The context in which a model runs in a way.

    Raises:
        ValueError: the model cannot run in this way.
    """
    if way == PLAIN:
        return contextlib.nullcontext()
    if type(model).__module__.startswith("diffusers."):
        if way == NORMS:
            raise ValueError("the patch for diffusers rotates, and does not normalize")
        functions = dict(diffusers.rotation_functions(model))
        return diffusers.patch(model) if way == OURS else Patch(dict.fromkeys(functions, _one_unrotated))
    if way == NONE:
        return Patch(dict.fromkeys(dict(rotation_functions(model)), _unrotated))
    return patch(model, qk_norm=way == NORMS)


def _unrotated(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _one_unrotated(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _measured(architecture: Architecture, model: torch.nn.Module, mode: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Time, launches and peak memory of each step, in each way."""
    rounds = 2 if smoke else ROUNDS
    for way in WAYS if mode == "eager" else _ways_compiled(model):
        row = {"mode": mode, "way": way, "place": 0, "status": "ok"}
        try:
            context = in_way(way, model)
        except ValueError as reason:
            yield row | {"step": TRAINING, "quantity": "time", "unit": "ms", "status": f"not offered: {reason}"}
            continue
        with context:
            run: Callable[..., Any] = model
            if mode == "compiled":
                torch._dynamo.reset()
                run = torch.compile(model, dynamic=False)
            for step, call in _steps(model, run, smoke, decode=mode == "eager").items():
                of_step = row | {"step": step}
                try:
                    yield of_step | {"quantity": "time", "value": _milliseconds(call, rounds), "unit": "ms"}
                    if model.device.type == "cuda":
                        gpu_memory.forget_peak()
                        call()
                        peak = torch.cuda.max_memory_allocated() / 2**30
                        yield of_step | {"quantity": "peak memory", "value": peak, "unit": "GiB"}
                        launches = len(kernel_names(call))
                        yield of_step | {"quantity": "launches", "value": launches, "unit": "kernels"}
                except Exception as error:
                    yield of_step | {"quantity": "time", "unit": "ms", "status": timing.failure(error)}
        model.zero_grad(set_to_none=True)


def _ways_compiled(model: torch.nn.Module) -> tuple[str, ...]:
    """Three ways, as compiling takes half a minute for each: of the two ways with ropelab, the one that fuses more."""
    try:
        with in_way(NORMS, model):
            return PLAIN, NORMS, NONE
    except ValueError:
        return PLAIN, OURS, NONE


def _steps(model: torch.nn.Module, run: Callable[..., Any], smoke: bool, decode: bool) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by the name of the step."""
    if type(model).__module__.startswith("diffusers."):
        return _denoising(model, run)
    batch, tokens, decoded, context = (1, 8, 2, 8) if smoke else (BATCH, TOKENS, DECODED, CONTEXT)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, tokens), generator=generator, device=device)
    prompt = torch.randint(1, VOCABULARY, (decoded, context), generator=generator, device=device)

    def training() -> None:
        model.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def prefill() -> object:
        return run(input_ids=ids, use_cache=False, logits_to_keep=1)

    steps: dict[str, Callable[[], Any]] = {TRAINING: training, PREFILL: prefill}
    if decode:
        with torch.no_grad():
            cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values

        @torch.no_grad()
        def decode_one() -> None:
            run(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

        steps[DECODE] = decode_one
    return steps


def _denoising(model: torch.nn.Module, run: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """A training step and a denoising step of Flux: an image of 1,024 x 1,024 pixels and 512 tokens of text."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    places = torch.cartesian_prod(torch.zeros(1), torch.arange(64.0), torch.arange(64.0)).to(device)
    inputs = {
        "hidden_states": draw(1, 4096, 64), "encoder_hidden_states": draw(1, 512, 4096),
        "pooled_projections": draw(1, 768), "timestep": torch.tensor([0.5], device=device, dtype=torch.bfloat16),
        "img_ids": places, "txt_ids": torch.zeros(512, 3, device=device), "return_dict": False,
    }  # fmt: skip

    def training() -> None:
        model.zero_grad(set_to_none=True)
        run(**inputs)[0].square().mean().backward()

    @torch.no_grad()
    def denoise() -> object:
        return run(**inputs)

    return {TRAINING: training, DENOISING: denoise}


def _milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, after two calls that are not counted."""
    turns.give_way()
    call()
    with turns.alone():
        call()
        return statistics.median(_events_ms(call, rounds) if torch.cuda.is_available() else _clock_ms(call, rounds))


def _events_ms(call: Callable[[], Any], rounds: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _clock_ms(call: Callable[[], Any], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begin))
    return times


def _losses(architecture: Architecture, model: torch.nn.Module, smoke: bool) -> Iterator[dict[str, Any]]:
    """The losses of training steps on the same random tokens, from the same weights, in each way that rotates."""
    begin = {name: x.detach().clone() for name, x in model.state_dict().items()}
    device = next(model.parameters()).device
    count, tokens = (3, 16) if smoke else (LOSSES, 512)
    for way in (PLAIN, OURS, NORMS):
        model.load_state_dict(begin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator(device).manual_seed(2)
        ids = torch.randint(1, VOCABULARY, (4, tokens), generator=generator, device=device)
        row = {"mode": "eager", "way": way, "step": TRAINING, "quantity": LOSS, "unit": "nats", "status": "ok"}
        try:
            context = in_way(way, model)
        except ValueError:
            continue
        with context:
            found = []
            for _ in range(count):
                turns.give_way()
                optimizer.zero_grad(set_to_none=True)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        yield from (row | {"place": place, "value": float(loss)} for place, loss in enumerate(found))
    model.load_state_dict(begin)
