"""An engine of vLLM that answers commands: a line of JSON on its input, and a line of JSON on its output.

    python -m ropelab.bench.server_engine '{"engine": "ropelab", "config": {"model_type": "qwen3", ...}, ...}'

`ropelab.bench.servers` starts the engines. All output of vLLM goes to the standard error.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from typing import Any

STOCK, FUSED, OURS = "stock", "fused", "ropelab"
"""vLLM as it is, vLLM with its own fusions of norm, rotation and cache write, and vLLM with ropelab's plugin."""
EXACT = "float32"
"""vLLM as it is, with the same weights in float32."""
BATCHES = 1, 16, 64
_NO_NETWORK = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": "ropelab",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # the process of each of several GPUs has the plugin and the weights
}  # fmt: skip


class Engine:
    """A model with random weights in vLLM's engine, in this process."""

    def __init__(self, engine: str, config: dict[str, Any], backend: str, cache_gib: float, gpus: int, folder: str):
        os.environ |= _NO_NETWORK | {"VLLM_CACHE_ROOT": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "ROPELAB_DISABLE": str(int(engine != OURS))}
        import torch
        import vllm

        from ropelab.interop import vllm_plugin

        vllm_plugin.register()  # where no wheel is installed, no entry point names the plugin
        _with_weights_of_a_model()
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        if engine == FUSED:  # the fusions replace operators, which Inductor's code would not have
            fusion = "fuse_rope_kvcache_cat_mla" if "kv_lora_rank" in config else "enable_qk_norm_rope_fusion"
            compilation |= {"custom_ops": ["+rms_norm", "+rotary_embedding"], "pass_config": {fusion: True}}
        model = tempfile.mkdtemp(dir=folder)
        with open(f"{model}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        self.llm = vllm.LLM(
            model=model, skip_tokenizer_init=True, load_format="dummy", attention_backend=backend,
            kv_cache_memory_bytes=int(cache_gib * 2**30), gpu_memory_utilization=0.02, max_model_len=10240,
            max_num_batched_tokens=8192, max_num_seqs=max(BATCHES), enable_prefix_caching=True, seed=0,
            dtype="float32" if engine == EXACT else "bfloat16", disable_log_stats=True,
            compilation_config=compilation, logprobs_mode="raw_logits", tensor_parallel_size=gpus,
        )  # fmt: skip
        self.vocabulary = config["vocab_size"]
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.ends: list[float] = []
        self._note_ends()

    def _note_ends(self) -> None:
        """Note when each step of the engine ends, and its tokens are on the host."""
        engine = self.llm.llm_engine
        step = engine.step

        def noted():
            found = step()
            self.ends.append(time.perf_counter())
            return found

        engine.step = noted

    def _generate(self, count: int, length: int, new: int, seed: int, **options: Any) -> list[Any]:
        """Greedy tokens for ``count`` random prompts of ``length`` tokens, ``new`` for each."""
        import torch
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, self.vocabulary, (count, length), generator=generator).tolist()
        parameters = SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False, **options
        )
        self.ends.clear()
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)

    def ready(self) -> dict[str, Any]:
        """The versions."""
        return self.versions

    def timed(self, **prompts: int) -> dict[str, float]:
        """Microseconds of a whole call, and of a step of decoding, the median of the steps of this call.

        A first step may end before its tokens are there, and the second is the prefill; neither counts.
        """
        begin = time.perf_counter()
        self._generate(**prompts)
        steps = sorted(1e6 * (b - a) for a, b in zip(self.ends[1:], self.ends[2:], strict=False))
        return {"call": 1e6 * (self.ends[-1] - begin), "step": steps[len(steps) // 2] if steps else 0.0}

    def tokens(self, **prompts: int) -> list[list[list[float]]]:
        """For each prompt and step: the token, and the two largest logits."""
        found = self._generate(**prompts, logprobs=2)
        return [
            [
                [token, *sorted((each.logprob for each in step.values()), reverse=True)[:2]]
                for token, step in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)
            ]
            for out in found
        ]

    def sequences(self, **prompts: int) -> list[list[int]]:
        """The prompts, each with its greedy tokens."""
        found = self._generate(**prompts)
        return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in found]

    def logits(self, sequences: list[list[int]], first: int) -> list[list[dict[int, float]]]:
        """For each sequence and each place from ``first`` on: some of the largest logits of the token at this place."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, detokenize=False)
        found = self.llm.generate([{"prompt_token_ids": each} for each in sequences], parameters, use_tqdm=False)
        return [
            [{token: each.logprob for token, each in place.items()} for place in out.prompt_logprobs[first:]]
            for out in found
        ]

    def kernels(self, **prompts: int) -> list[tuple[str, float]]:
        """The name and the microseconds of each kernel of a call, in their order on the GPU."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self._generate(**prompts)
        found = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found.sort(key=lambda e: e.time_range.start)
        return [(e.name[:200], e.time_range.elapsed_us()) for e in found if not e.name.startswith(("Memcpy", "Memset"))]

    def memory(self) -> dict[str, int]:
        """The bytes that torch has allocated now, at most, and has reserved at most."""
        import torch

        return {
            "allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }  # fmt: skip


def _with_weights_of_a_model() -> None:
    """Have vLLM draw weights as a model before its training has them.

    vLLM draws all weights below 1e-3. A norm then makes q and k so small that each token attends to all tokens alike,
    and no rotation could change a token. All weights are numbers of bfloat16, in float32 as well.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def draw(layer: torch.nn.Module, *_: Any) -> None:
        kind = type(layer).__name__
        mean, deviation = (0.0, 0.02) if "Norm" not in kind else (0.0 if "Gemma" in kind else 1.0, 0.1)
        for parameter in layer.parameters(recurse=False):
            if parameter.is_floating_point():
                generator = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(0))
                drawn = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
                parameter.copy_(drawn.normal_(mean, deviation, generator=generator).bfloat16())

    dummy_loader.initialize_dummy_weights = draw


def main(spec: dict[str, Any]) -> None:
    """Start the engine of a description, and answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    def failed(error: BaseException) -> None:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"[:500]})

    try:
        engine = Engine(**spec)
        answer(engine.ready())
    except BaseException as error:  # vLLM ends a process by SystemExit as well
        failed(error)
        return
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(engine, command.pop("do"))(**command))
        except Exception as error:
            failed(error)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
