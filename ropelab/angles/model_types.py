"""The features that rotate together, and their positions, for each ``model_type`` of transformers 5.23.

A configuration does not state these facts: they are in the code of the models, and a test compares them with that
code. Names are without ``_text``. The facts hold for the attention; the indexer of sparse attention may pair other
features (halves in DeepSeek-V3.2).
"""

from collections.abc import Callable, Mapping

from ropelab.positions import axes

SPLIT_HALF_MODELS = frozenset(
    "afmoe apertus arcee aria bamba beam bitnet chameleon cohere_compass cosmos3_edge csm csm_depth_decoder_model cwm "
    "dbrx deepseek_ocr2 deepseek_ocr2_encoder dia_decoder dia_encoder diffllama diffusion_gemma doge dots1 "
    "dots3_note_audio_encoder embedding_gemma2 emu3_text_model esm esmc eurobert evolla exaone4 exaone_moe falcon "
    "falcon_h1 flex_olmo flint gemma gemma2 gemma3 gemma3n gemma4 gemma4_unified glm4_moe glm4v_moe glm_image "
    "glmasr_encoder gpt_neox gpt_neox_japanese gpt_oss gradium_phonon_tts granite granite4_vision granite_docling "
    "granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hy_v4 hyperclovax idefics internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 "
    "kyutai_speech_to laguna lasr_encoder lfm2 lfm2_moe lfm3 llama mellum mimi mimi_decoder mimi_encoder "
    "mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl ministral ministral3 mistral mixtral mllama_text_model "
    "modernbert modernbert-decoder molmo2 moshi muse_glimmer muse_glimmer_assistant muse_spark nemotron "
    "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio neomme "
    "neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe paddleocr_vl persimmon phi phi3 phi4_multimodal phimoe "
    "pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder "
    "qwen2 qwen2_5_omni qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe "
    "qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_talker qwen3_omni_moe_talker_code_predictor qwen3_vl "
    "qwen3_vl_moe qwen4_exp recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2 step3p5 t5_gemma_module "
    "t5gemma2 t5gemma2_decoder timesfm2_5 ultrabert unlimited_ocr vaultgemma voxtral_realtime "
    "voxtral_realtime_encoder xcodec2 zamba2 zaya".split()
)
"""The models that pair feature i of the rotated part with feature i + R/2."""

INTERLEAVED_MODELS = frozenset(
    "blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher codegen cohere cohere2 cohere2_moe "
    "deepseek_v2 deepseek_v4 edgetam_video ernie4_5 ernie4_5_moe ernie4_5_vl_moe glm glm4 glm4v glm_ocr gptj helium "
    "inkling2_vision llama4 moonshine moonshine_streaming openai_privacy_filter pe_audio_encoder "
    "pe_audio_video_encoder pe_video_encoder sam2_video sam3_tracker_video sam3_vit_model".split()
)
"""The models that pair adjacent features."""

DEINTERLEAVING_MODELS = frozenset(
    "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa longcat_flash mistral4 "
    "youtu".split()
)
"""The models that read adjacent pairs and write halves, unless ``rope_interleave`` is false."""

REVERSED_MODELS = frozenset({"nanochat"})
"""The models that turn pairs the other way: the frequencies are negative."""

LAST_FEATURES_MODELS = frozenset({"deepseek_v4"})
"""The models that rotate the last features of a head. All others rotate the first."""

LAYERED_MODELS = frozenset(
    "beam cohere_compass deepseek_v4 diffusion_gemma dots3_note embedding_gemma2 gemma3 gemma3n gemma4 gemma4_unified "
    "laguna lfm3 mellum mimo_v2_flash modernbert modernbert-decoder neomme olmo3 step3p5 t5gemma2 t5gemma2_decoder "
    "ultrabert zaya".split()
)
"""The models whose layers differ, so that flat parameters say nothing of a layer."""

NO_ATTENTION = frozenset("linear_attention conv mamba recurrent moe mlp".split())
"""The types of layers that have no attention, and so no rotation, in any model."""

UNROTATED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        "afmoe beam cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1".split(), frozenset({"full_attention"})
    ),
    **dict.fromkeys(
        "bailing_hybrid bamba granitemoehybrid minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next qwen4_exp "
        "recurrent_gemma zamba2".split(),
        frozenset({"linear_attention"}),
    ),
    **dict.fromkeys("lfm2 lfm2_moe lfm3".split(), frozenset({"conv"})),
}
"""The models with types of layers that do not rotate -> these types. A layer's type decides, so a configuration must
state ``layer_types``."""

WITHOUT_WINDOW_ALL_ROTATE = frozenset("exaone4 exaone_moe kolibri1".split())
"""The models of `UNROTATED` in which all layers rotate if ``sliding_window`` is None."""

INTERVAL_MODELS = frozenset("llama4 smollm3".split())
"""The models that leave every fourth layer without rotation, or every ``no_rope_layer_interval``-th, unless
``no_rope_layers`` lists the layers: 0 for a layer without."""

LAYER_BASES = frozenset("granite_swa granitemoe_swa".split())
"""The models whose layers have the bases of ``layer_rope_theta``. In others a 0 says that a layer does not rotate."""

LAYER_KINDS: Mapping[str, Mapping[str, str]] = {
    "deepseek_v4": {
        "sliding_attention": "main", "compressed_sparse_attention": "compress",
        "heavily_compressed_attention": "compress",
    },
}  # fmt: skip
"""The models whose parameters have other names than their types of layers -> type -> name."""

STATED: Mapping[str, frozenset[str]] = {
    "rope_parameters": frozenset(
        "apertus cosmos3_edge cwm gpt_oss higgs_audio_v2 ministral3 mistral4 muse_spark openai_privacy_filter".split()
    ),
    "head_dim": frozenset(
        "afmoe beam cohere2_moe cosmos3_edge cwm deepseek_v4 dia_decoder dia_encoder diffusion_gemma dots3_note "
        "embedding_gemma2 ernie4_5 flint gemma gemma2 gemma3 gemma3n gemma4 gemma4_unified glm glm4 gpt_oss helium "
        "higgs_audio_v2 hrm hy_v3 internlm3 iquestcoder jetmoe kolibri1 laguna lfm3 llama4 mellum mimo_v2_flash "
        "minimax_m2 minimax_m3_vl ministral3 mistral4 molmo2 muse_glimmer muse_glimmer_assistant muse_spark neomme "
        "neucodec openai_privacy_filter paddleocr_vl pe_audio_encoder pe_audio_video_encoder pe_video_encoder "
        "qwen2_5_omni_dit qwen2_5_omni_talker qwen3 qwen3_5 qwen3_5_moe qwen3_next "
        "qwen3_omni_moe_talker_code_predictor qwen3_vl qwen4_exp seed_oss solar_open step3p5 t5_gemma_module t5gemma2 "
        "t5gemma2_decoder timesfm2_5 vaultgemma voxtral_realtime_encoder xcodec2 zamba2 zaya".split()
    ),
    "partial_rotary_factor": frozenset(
        "bamba deepseek_v4 dots3_note dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe glmasr_encoder gpt_neox "
        "laguna mimo_v2_flash minimax_m3_vl mistral4 moonshine moonshine_streaming nemotron "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp neomme persimmon phi qwen3_5 "
        "qwen3_5_moe qwen3_next recurrent_gemma stablelm zaya".split()
    ),
}
"""Key of a configuration -> the models that have a default of their own for it. A configuration must state the key."""


def _time_last(widths: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Rows and columns, axes 1 and 2, take turns; the last planes read axis 0, time (Ernie 4.5 VL)."""
    rows_and_columns = axes.interleaved_sections(widths[:2], name)
    return tuple(axis + 1 for axis in rows_and_columns) + (0,) * sum(widths[2:])


_BANDS, _TURNS = axes.sections, axes.interleaved_sections
SECTIONS: Mapping[str, tuple[Callable[[tuple[int, ...], str], tuple[int, ...]], tuple[int, ...] | None]] = {
    **dict.fromkeys("qwen2_vl qwen2_5_vl qwen2_5_omni qwen2_5_omni_talker".split(), (_BANDS, (16, 24, 24))),
    **dict.fromkeys("paddleocr_vl".split(), (_BANDS, (16, 24, 24))),
    **dict.fromkeys("glm4v glm4v_moe glm_image glm_ocr".split(), (_BANDS, (8, 12, 12))),
    **dict.fromkeys("qwen3_vl qwen3_vl_moe qwen3_omni_moe qwen3_omni_moe_talker".split(), (_TURNS, (24, 20, 20))),
    **dict.fromkeys("cosmos3_edge cohere_compass".split(), (_TURNS, (24, 20, 20))),
    **dict.fromkeys("qwen3_5 qwen3_5_moe qwen4_exp".split(), (_TURNS, (11, 11, 10))),
    "ernie4_5_vl_moe": (_time_last, (22, 22, 20)),
    "neomme": (_TURNS, None),
}
"""The models whose positions have several axes -> the order of the axes, and the number of planes of each axis where
the configuration has no ``mrope_section``; None for two equal axes."""

AXIAL_MODELS: Mapping[str, tuple[tuple[int, ...], str]] = {
    **dict.fromkeys(
        "cohere_compass_vision dots3_note_vision_encoder edgetam_video ernie4_5_vl_moe_vision exaone4_5_vision "
        "glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision lfm3_vl_vision mlcd_vision_model "
        "muse_glimmer_vision muse_spark_vision paddleocr_vl_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision "
        "qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision "
        "qwen3_vl_vision qwen4_exp_vision sam2_video sam3_tracker_video sam3_vit_model video_llama_3_vision".split(),
        ((0, 1), "bands"),
    ),
    **dict.fromkeys("inkling2_vision step3p5_vision".split(), ((1, 0), "bands")),
    "kimi_k25_vision": ((1, 0), "turns"),
    "minimax_m3_vl_vision": ((0, 1, 2), "bands"),
    "pixtral": ((0, 1), "dealt"),
}
"""The models of images and video -> the axes, columns of the model's ``position_ids``, in the order of the planes, and

- ``bands``: the planes of an axis are adjacent, and each axis has all frequencies of its own width
- ``turns``: the axes take turns from plane to plane, and share each frequency
- ``dealt``: the axes have adjacent planes, and the frequencies of the whole head are dealt out to them in turns
"""

_TABLES = "pass cos and sin of the model's own rotary class to apply_rope"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys("dinov3_vit eomt_dinov3 sapiens2".split(), f"positions are fractions of the image; {_TABLES}"),
    "efficientloftr": f"features rotate before they are split into heads; {_TABLES}",
    "gemma4_vision": "each half of a head has halves of its own; call apply_rope twice, with the rotary_slice of a "
    "half and the positions of an axis",
    "hunyuan_vl": f"the two features of a pair read positions along different axes, so no rotation; {_TABLES}",
    "llama4_vision_model": "positions count patches from 1; use axial_rope((D/2, D/2), rope_theta) with column + 1 and "
    "row + 1",
    "mistral_large4": "a buffer of the checkpoint, alpha, scales the frequencies; pass a Rope of frequencies times "
    "exp(alpha)",
    "musicflamingo": f"angles are times in seconds, and hidden states rotate; {_TABLES}",
}
"""The models that no `Rope` describes -> the reason, and the way to go."""

KNOWN_MODELS = SPLIT_HALF_MODELS | INTERLEAVED_MODELS | DEINTERLEAVING_MODELS | REVERSED_MODELS | AXIAL_MODELS.keys()
