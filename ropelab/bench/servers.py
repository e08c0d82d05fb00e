"""Compare engines of vLLM that take turns: as it is, with its own fusions, and with ropelab's plugin.

Each engine has a process of its own with the same random weights, see `ropelab.bench.server_engine`. The engines of a
group start together, because a start takes a minute. Only one engine computes at a time from then on.
"""

import importlib.util
import json
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ropelab.bench import processes, timing
from ropelab.bench.server_engine import BATCHES, FUSED, OURS, STOCK
from ropelab.bench.unavailable import Unavailable

COLUMNS = ("model", "backend", "engine", "step", "quantity", "repeat", "value", "unit", "kernels", "status")
DECODE = {f"decode {batch}": {"count": batch, "length": 32, "new": 17} for batch in BATCHES}
PREFILL = {"prefill 8192": {"count": 1, "length": 8192, "new": 1}}
STEPS = DECODE | PREFILL
"""Step -> the prompts of a call: 16 steps of decoding, or one prefill."""
REPEATS = {"decode 1": 32, "decode 16": 32, "decode 64": 16, "prefill 8192": 6}
"""So many repeats show a difference of 3% in nine of ten runs: ``pi / 2 * ((1.96 + 1.28) * s / 0.03)^2`` for a median.

``s`` is the deviation of the logarithm of a ratio within a repeat: 0.041, 0.040, 0.027 and 0.016 for Qwen3 4B in the
record of 2026-11-25. That run had up to 141 repeats.
"""
FEW_LAYERS = {"prefill 8192": 16}
"""The repeats where a model has few layers: the host takes longer for a step of its decoding than the kernels do."""
TOKENS = {"count": 32, "length": 64, "new": 256, "seed": 7}
_START_SECONDS, _ANSWER_SECONDS = 300, 120


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        config: the entries of its config.json besides `_COMMON`.
        engines: the engines to compare.
        backend: vLLM's backend of attention.
        repeats: the steps that are timed, each with the number of its repeats.
        cache_gib: the GiB of its cache of keys and values; 8,192 tokens must fit.
        gpus: the GPUs that share its heads (tensor parallelism). With several, kernels and memory are not recorded.
    """

    name: str
    config: Mapping[str, Any]
    engines: tuple[str, ...] = (STOCK, OURS)
    backend: str = "TRITON_ATTN"
    repeats: Mapping[str, int] = field(default_factory=FEW_LAYERS.copy)
    cache_gib: float = 1
    gpus: int = 1

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]


_COMMON = {
    "torch_dtype": "bfloat16",
    "vocab_size": 32000, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_theta": 1e6,
}  # fmt: skip


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False,
    "head_dim": 64,
}  # fmt: skip
_WITH_NORM = STOCK, FUSED, OURS
GROUPS: tuple[tuple[Model, ...], ...] = (
    (
        Model("Qwen3 4B", _QWEN3 | _sizes(2560, 9728, 36, 32, 8, 128), _WITH_NORM, repeats=REPEATS, cache_gib=2),
    ),
    (
        Model("DeepSeek-V3, 16 of 128 heads, 4 dense layers", {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            **_sizes(7168, 2304, 4, 16, 16, 128), **_LATENT,
        }, _WITH_NORM, backend="TRITON_MLA"),
        Model("Llama 3 8B, 4 layers", {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **_sizes(4096, 14336, 4, 32, 8, 128),
        }),
        Model("Gemma 3 4B, 6 layers", {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_sizes(2560, 10240, 6, 8, 4, 256),
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "rope_local_base_freq": 1e4,
        }),
        Model("Qwen3 4B, 4 layers", _QWEN3 | _sizes(2560, 9728, 4, 32, 8, 128), backend="FLASH_ATTN"),
        Model("GLM-4 9B, 4 layers", {
            "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", **_sizes(4096, 13696, 4, 32, 2, 128),
            "partial_rotary_factor": 0.5, "attention_bias": True,
        }),
    ),
    (
        Model("Qwen3 4B, 4 layers, 2 GPUs", _QWEN3 | _sizes(2560, 9728, 4, 32, 8, 128), gpus=2),
    ),
)  # fmt: skip
"""The models whose engines start together, group by group."""
TINY = Model("tiny Qwen3", _QWEN3 | _sizes(512, 1024, 2, 8, 2, 64), _WITH_NORM, repeats=dict.fromkeys(STEPS, 2))


def servers(*, smoke: bool = False) -> Iterator[pd.DataFrame]:
    """Measure every model in every engine, and yield the table after each part of a model. Needs vLLM.

    A model for more GPUs than there are is left out.

    Columns: model, backend, engine, step, quantity, repeat, value, unit, kernels, status. Quantities:

    - time: of a step of decoding, the median of 16; or of a prefill. The engines take turns in a repeat.
    - launches, launch time: from the projection of q, k and v until the attention, for each layer. ``kernels`` has the
      names in the first layer. - all kernels: their time in a step.
    - equal prompts: of 32, those whose 256 greedy tokens are the same as in ``stock``. - gap: the largest distance of
      the two best logits of ``stock`` where the tokens of a prompt first differ, in units in the last place of bf16.
    - allocated, peak, reserved: bytes that torch has allocated, at most, and has reserved at most.
    """
    if timing.is_stopped():  # an engine compiles when it starts
        yield pd.DataFrame(columns=COLUMNS)
        return
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vllm is not installed")
    rows: list[dict[str, Any]] = []
    gpus, gpu_bytes = max(1, torch.cuda.device_count()), 0
    for models in ((TINY,),) if smoke else GROUPS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            fit = [model for model in models if model.gpus <= gpus]
            each = [(model, started.enter_context(running(model, Path(folder)))) for model in fit]
            reserved = 0
            for model, engines in each:
                for found in of_model(model, engines):
                    rows += found
                    reserved += sum(row["value"] for row in found if row["quantity"] == "reserved")
                    gpu_bytes = max(gpu_bytes, reserved)
                    table = pd.DataFrame(rows, columns=COLUMNS)
                    table.attrs["gpu_bytes"] = gpu_bytes
                    yield table
                end(engines)


class Engine:
    """A process with an engine; see `ropelab.bench.server_engine`.

    Args:
        command: the program and its arguments.
        log: the file of what the process prints.
    """

    def __init__(self, command: Sequence[str], log: Path):
        self.log = log
        with log.open("w") as printed:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True
            )

    def answer(self, seconds: float) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process could not do it, ended, or did not answer in time.
        """
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], seconds)[0]:
            raise RuntimeError(f"no answer within {seconds:g} s")
        line = stdout.readline()
        found = json.loads(line) if line else {"error": "the process ended"}
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        return found

    def said(self) -> str:
        """The lines of its log that speak of ropelab; the end of the log if the process has ended."""
        lines = self.log.read_text(errors="replace").splitlines()
        if self.process.poll() is None:
            lines = [line for line in lines if "ropelab:" in line]
        return "".join(f"\n      {line[:300]}" for line in lines[-25:])

    def do(self, what: str, **arguments: Any) -> Any:
        """The answer to a command; raises as `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return self.answer(_ANSWER_SECONDS)


Engines = Mapping[str, Engine]


@contextmanager
def running(model: Model, folder: Path) -> Iterator[dict[str, Engine]]:
    """The engines of a model, which start beside the block and end with it.

    ``folder`` gets the logs ``<model> <engine>.txt``.
    """
    engines: dict[str, Engine] = {}
    try:
        for engine in model.engines:
            own = folder / f"{model.name} {engine}"
            own.mkdir()
            spec = {
                "engine": engine, "config": {**_COMMON, **model.config},
                "backend": model.backend, "cache_gib": model.cache_gib, "gpus": model.gpus, "folder": str(own),
            }  # fmt: skip
            command = [sys.executable, "-m", "ropelab.bench.server_engine", json.dumps(spec)]
            engines[engine] = Engine(command, Path(f"{own}.txt"))
        yield engines
    finally:
        end(engines)


def end(engines: Engines) -> None:
    """End the processes."""
    for engine in engines.values():
        processes.kill(engine.process)


def of_model(model: Model, engines: Engines) -> Iterator[list[dict[str, Any]]]:
    """Wait for the engines of a model, and yield the rows of each part. A row without a value says what failed."""
    about = {"model": model.name, "backend": model.backend, "status": "ok"}
    ready, failed = {}, []
    for name, engine in engines.items():
        try:
            print(f"    {model.name}, {name}: {engine.answer(_START_SECONDS)}", flush=True)
            ready[name] = engine
        except RuntimeError as error:
            failed.append(about | {"engine": name, "quantity": "start", "status": timing.failure(error)})
    yield failed
    parts = (_launches, _tokens, _memory, _times) if model.gpus == 1 else (_tokens, _times)
    for part in parts if STOCK in ready else ():
        rows = []
        try:
            rows += (about | row for row in part(model, ready))
        except (RuntimeError, OSError) as error:
            rows.append(about | {"quantity": part.__name__.strip("_"), "status": timing.failure(error)})
        yield rows
    for name, engine in engines.items():
        print(f"    {model.name}, {name}:{engine.said()}", flush=True)


# ------------------------------------------------------------------------------------------------------- the kernels

_END = re.compile("nvjet|gemm|cublas|cutlass|xmma|attention|reduce_segments|_fwd_|FlashAttn|prepare_varlen", re.I)
"""The kernels of products and of attention."""


def around_cache_writes(kernels: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """For each write into a cache, the kernels between the product before it and the next product or attention.

    Args:
        kernels: (name, microseconds) in the order of their launches.
    """
    found = []
    for i, (name, _) in enumerate(kernels):
        if "cache" in name and not _END.search(name):
            first = next((j + 1 for j in range(i, -1, -1) if _END.search(kernels[j][0])), 0)
            last = next((j for j in range(i, len(kernels)) if _END.search(kernels[j][0])), len(kernels))
            found.append(list(kernels[first:last]))
    return found


def _launches(model: Model, engines: Engines) -> Iterator[dict[str, Any]]:
    for name, engine in engines.items():
        engine.do("kernels", count=1, length=32, new=2, seed=1)  # the start of the profiler
        for seed, (step, prompts) in enumerate({"decode 16": DECODE["decode 16"], **PREFILL}.items(), 2):
            kernels = engine.do("kernels", **prompts, seed=seed)
            writes, steps = around_cache_writes(kernels), prompts["new"]
            about = {"engine": name, "step": step}
            if len(writes) != model.layers * steps:
                status = f"failed: {len(writes)} cache writes, {model.layers} layers, {steps} steps"
                yield about | {"quantity": "launches", "status": status}
                continue
            if step in DECODE:  # the first step is the prefill, and the kernels of a step end where the next one begins
                writes = writes[model.layers :]
                begin, end = (
                    next(i for i, each in enumerate(kernels) if each is w[0])
                    for w in (writes[0], writes[-model.layers])
                )
                kernels, steps = kernels[begin:end], len(writes) // model.layers - 1
            total = sum(us for write in writes for _, us in write)
            launched = {"value": sum(map(len, writes)) / len(writes), "kernels": " + ".join(n for n, _ in writes[0])}
            yield about | {"quantity": "launches", **launched}
            yield about | {"quantity": "launch time", "value": total / len(writes), "unit": "us"}
            yield about | {"quantity": "all kernels", "value": sum(us for _, us in kernels) / steps, "unit": "us"}


# -------------------------------------------------------------------------------------------------------- the tokens


def _tokens(model: Model, engines: Engines) -> Iterator[dict[str, Any]]:
    found = {name: engine.do("tokens", **TOKENS) for name, engine in engines.items()}
    for name in found.keys() - {STOCK}:
        gaps = gaps_at_differences(found[STOCK], found[name])
        equal = {"quantity": "equal prompts", "value": len(found[name]) - len(gaps), "unit": f"of {TOKENS['count']}"}
        yield {"engine": name, **equal}
        if gaps:
            yield {"engine": name, "quantity": "gap", "value": max(gaps), "unit": "ulp of bf16"}


def gaps_at_differences(stock: Sequence[Any], other: Sequence[Any]) -> list[float]:
    """Where the tokens of a prompt first differ: the distance of the two best logits of ``stock``, in ulps of bf16.

    Args:
        stock, other: for each prompt and step, the token and the two largest logits.
    """
    gaps = []
    for ours, theirs in zip(other, stock, strict=True):
        first = next((b for a, b in zip(ours, theirs, strict=True) if a[0] != b[0]), None)
        if first is not None:
            _, best, second = first
            gaps.append((best - second) / 2.0 ** (np.floor(np.log2(max(abs(best), 1e-30))) - 7))
    return gaps


def _memory(model: Model, engines: Engines) -> Iterator[dict[str, Any]]:
    for name, engine in engines.items():
        for quantity, value in engine.do("memory").items():
            yield {"engine": name, "quantity": quantity, "value": value, "unit": "bytes"}


# --------------------------------------------------------------------------------------------------------- the times


def _times(model: Model, engines: Engines) -> Iterator[dict[str, Any]]:
    """The steps of a repeat are spread evenly over the run, and the first engine of a repeat changes."""
    order, most = list(engines), max(model.repeats.values())
    prompts = {step: STEPS[step] for step in model.repeats}
    for name in order:
        for seed, each in enumerate(prompts.values(), 10):
            engines[name].do("timed", **each, seed=seed)
    done = dict.fromkeys(prompts, 0)
    for turn in range(most):
        for number, (step, each) in enumerate(prompts.items()):
            if done[step] * most <= turn * model.repeats[step]:
                order.append(order.pop(0))
                for name in order:
                    answer = engines[name].do("timed", **each, seed=1000 + len(STEPS) * turn + number)
                    value = answer["step" if step in DECODE else "call"]
                    row = {"quantity": "time", "repeat": done[step], "value": value, "unit": "us"}
                    yield {"engine": name, "step": step, **row}
                done[step] += 1


def ratio(table: pd.DataFrame, model: str, step: str, engine: str) -> tuple[float, float, float]:
    """The time of an engine by the time of `OURS` in the same repeat: the median, and its interval of 95%.

    The interval comes from 4,000 samples of the repeats, drawn with the seed 0.
    """
    times = table.query("model == @model and step == @step and quantity == 'time'")
    by_engine = times.pivot(index="repeat", columns="engine", values="value")
    ratios = (by_engine[engine] / by_engine[OURS]).to_numpy()
    drawn = np.random.default_rng(0).integers(0, len(ratios), (4000, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)
