"""One kernel for norm, rotation and cache write in the layers of a running server.

Read the files in this order: `stand_ins` runs a layer's forward with other parts than its own, and finds out what the
layer computes. `vllm_layers` and `vllm_latent` choose the layers of a model in vLLM, `vllm_writes` does their work, and
`vllm_plugin`, beside this folder, is what vLLM calls.
"""
