"""This room answers: how does code that calls another library's rotation get ropelab's kernel without a change?

Each adapter has the name and the arguments of the other library's function, and calls ropelab's functions. Read the
files in this order:

1. `refusals` puts the error messages of ropelab's functions into the words of an adapter.
2. `broadcast` rotates by tables that broadcast against the tensors.
3. `deepspeed` and `huggingface` hold the functions of DeepSpeed and of Transformers, over `broadcast`. `huggingface`
   also makes a whole model use the kernel.
4. `transformer_engine` holds the functions of TransformerEngine, with angles, packed sequences and context parallelism.
5. `sglang` holds the in-place operators of SGLang, vLLM and FlashInfer.
6. `fairseq2` holds the rotary encoders of fairseq2.
7. `vllm` holds vLLM's operators that rotate and write into a paged cache.
"""
