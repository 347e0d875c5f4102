"""Tasks on images or sound and text, and from text to images."""

from collections.abc import Callable
from typing import Any

import keras_hub.layers as hub_layers
import keras_hub.models as hub
import numpy as np
from keras_hub.src.models.parseq.parseq_tokenizer import PARSeqTokenizer  # nor
from keras_hub.src.models.vae.vae_backbone import VAEBackbone  # not among KerasHub's public names

from benchmarks.kerashub_tasks.task import BATCH, LENGTH, VOCABULARY, Task, classes, inputs_of, like_outputs

SAMPLES = 2048  # of sound
_TEXT = dict(vocabulary_size=VOCABULARY, num_layers=1, hidden_dim=16, intermediate_dim=32)
_ENCODER = dict(num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32)


def _blip2(language_model: Any) -> Any:
    return hub.BLIP2Backbone(
        vision_encoder=hub.BLIP2VisionEncoder(
            image_size=32, patch_size=8, use_patch_bias=True, use_class_token=True, use_mha_bias=True,
            use_mlp_bias=True, dropout_rate=0.0, layer_norm_epsilon=1e-5, initializer_range=0.02, **_ENCODER,
        ),
        qformer=hub.BLIP2QFormer(
            num_query_tokens=4, vision_dim=16, cross_attention_frequency=1, dropout=0.0, layer_norm_epsilon=1e-5,
            **_ENCODER,
        ),
        language_model=language_model,
    )  # fmt: skip


def _blip2_causal() -> Any:
    opt = hub.BLIP2CustomOPT(
        **_TEXT, num_heads=2, num_query_tokens=4, qformer_hidden_dim=16, max_sequence_length=LENGTH + 4, dropout=0.0,
        language_projection=None,
    )  # fmt: skip
    return hub.BLIP2CausalLM(preprocessor=None, backbone=_blip2(opt))


def _blip2_sequences() -> Any:
    t5 = hub.BLIP2FlanT5(**_TEXT, num_heads=2, key_value_dim=8, num_query_tokens=4, qformer_hidden_dim=16, dropout=0.0)
    return hub.BLIP2Seq2SeqLM(preprocessor=None, backbone=_blip2(t5))


def _pali_gemma() -> Any:
    backbone = hub.PaliGemmaBackbone(
        **_TEXT, image_size=16, num_query_heads=2, num_key_value_heads=1, head_dim=8, vit_patch_size=4,
        vit_num_layers=1, vit_num_heads=2, vit_hidden_dim=16, vit_intermediate_dim=32,
    )  # fmt: skip
    return hub.PaliGemmaCausalLM(preprocessor=None, backbone=backbone)


def _parseq() -> Any:
    encoder = hub.ViTBackbone(
        image_shape=(16, 32, 3), patch_size=(4, 8), num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32,
        use_class_token=False, name="image_encoder",
    )  # fmt: skip
    backbone = hub.PARSeqBackbone(
        image_encoder=encoder, vocabulary_size=97, max_label_length=LENGTH, num_decoder_heads=2,
        num_decoder_layers=1, decoder_hidden_dim=16, decoder_mlp_dim=32,
    )  # fmt: skip
    # Its compile() reads the tokenizer.
    preprocessor = hub.PARSeqCausalLMPreprocessor(
        image_converter=hub_layers.PARSeqImageConverter(image_size=[16, 32]), tokenizer=PARSeqTokenizer(),
        sequence_length=LENGTH,
    )  # fmt: skip
    return hub.PARSeqCausalLM(preprocessor=preprocessor, backbone=backbone)


def _moonshine() -> Any:
    backbone = hub.MoonshineBackbone(
        vocabulary_size=VOCABULARY, hidden_dim=32, filter_dim=32, encoder_num_layers=1, decoder_num_layers=1,
        encoder_num_heads=4, decoder_num_heads=4, intermediate_dim=64, feedforward_expansion_factor=2,
        partial_rotary_factor=0.62, dropout=0.0,
    )  # fmt: skip
    return hub.MoonshineAudioToText(backbone=backbone)


def _flux() -> Any:
    backbone = hub.FluxBackbone(
        input_channels=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=1, depth_single_blocks=1,
        axes_dim=[4, 6, 6], theta=10_000, use_bias=True, guidance_embed=True, image_shape=(16, 16),
        text_shape=(16, 16), image_ids_shape=(16, 3), text_ids_shape=(16, 3), y_shape=(16,),
    )  # fmt: skip
    return hub.FluxTextToImage(backbone=backbone, preprocessor=None)


def _clip(name: str, width: int, activation: str) -> Any:
    return hub.CLIPTextEncoder(
        vocabulary_size=VOCABULARY, embedding_dim=width, hidden_dim=width, num_layers=2, num_heads=2,
        intermediate_dim=2 * width, intermediate_activation=activation, intermediate_output_index=-2,
        max_sequence_length=LENGTH, name=name,
    )  # fmt: skip


def _stable_diffusion(name: str) -> Callable[[], Any]:
    def build() -> Any:
        vae = VAEBackbone([32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode", name="vae")
        backbone = hub.StableDiffusion3Backbone(
            mmdit_patch_size=2, mmdit_hidden_dim=32, mmdit_num_layers=1, mmdit_num_heads=2, mmdit_position_size=192,
            mmdit_qk_norm=None, mmdit_dual_attention_indices=None, vae=vae, clip_l=_clip("clip_l", 16, "quick_gelu"),
            clip_g=_clip("clip_g", 32, "gelu"), image_shape=(64, 64, 3),
        )  # fmt: skip
        return getattr(hub, name)(backbone=backbone, preprocessor=None)

    return build


def _steps(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 2, "int32")


def _words(rng: np.random.Generator, task: Any) -> dict[str, Any]:
    """Images and what is written on them, for the task's own preprocessor."""
    images = rng.uniform(0, 255, (BATCH, 16, 32, 3)).astype("float32")
    return {"images": images, "responses": ["".join(rng.choice(list("abcxyz"), 4)) for _ in range(BATCH)]}


def _sound(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=(BATCH, SAMPLES, 1)).astype("float32")


_IMAGES = {"loss": "mse"}
_SOUND = inputs_of(
    encoder_input_values=_sound, encoder_padding_mask=lambda rng, shape: np.ones((BATCH, SAMPLES), "bool")
)
_PIXELS = inputs_of(num_steps=_steps)

TASKS = {
    "BLIP2CausalLM": Task("image and text", _blip2_causal, classes, inputs_of()),
    "BLIP2Seq2SeqLM": Task("image and text", _blip2_sequences, classes, inputs_of()),
    "PaliGemmaCausalLM": Task("image and text", _pali_gemma, classes, inputs_of()),
    "PARSeqCausalLM": Task("image and text", _parseq, None, _words),
    "MoonshineAudioToText": Task("speech", _moonshine, classes, _SOUND),
    "FluxTextToImage": Task("text to image", _flux, like_outputs, inputs_of(), _IMAGES),
    "StableDiffusion3TextToImage": Task(
        "text to image", _stable_diffusion("StableDiffusion3TextToImage"), like_outputs, _PIXELS, _IMAGES
    ),
    "StableDiffusion3ImageToImage": Task(
        "text to image", _stable_diffusion("StableDiffusion3ImageToImage"), like_outputs, _PIXELS, _IMAGES
    ),
    "StableDiffusion3Inpaint": Task(
        "text to image", _stable_diffusion("StableDiffusion3Inpaint"), like_outputs, _PIXELS, _IMAGES
    ),
}
