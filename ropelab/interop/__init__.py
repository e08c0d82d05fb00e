"""Give code that calls another library's rotation ropelab's kernel without a change.

Each adapter has the name and the arguments of the other library's function, and calls ropelab's functions. Read the
files in this order:

1. `broadcast` rotates by tables that broadcast against the tensors.
2. `patch` replaces functions in the modules of other packages, and puts the originals back.
3. `calls` finds out what a function of another package computes, and replaces it. In this way `deepspeed`,
   `huggingface` and `diffusers` make DeepSpeed, or a whole model, use the kernel. `probe` runs a layer with other parts
   than its own, to find out what it computes.
4. `transformer_engine` holds the functions of TransformerEngine, with angles, packed sequences and context parallelism.
5. `sglang` holds the in-place operators of SGLang, vLLM and FlashInfer, and the function of SGLang's diffusion models.
6. `fairseq2` holds the rotary encoders of fairseq2.
7. `vllm` and `flashinfer` hold the functions of vLLM and FlashInfer that rotate and write into a paged cache.
8. `megatron` holds Megatron-LM's functions, also for multi-head latent attention, with a patch.
9. `dtensor` rotates DTensors, for tensor and context parallelism.
10. `torchtitan`, `torchtitan_mla` and `sglang_plugin` put the kernel in the place of the classes of these packages.
11. `vllm_plugin` gives the attention layers of vLLM one kernel for norm, rotation and cache write: `vllm_layers`
    chooses the layers of a model, `vllm_writes` does their work. `log` is the log of both plugins.
"""
