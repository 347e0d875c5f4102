"""Tasks on images: classifiers, segmenters, detectors, depth."""

from collections.abc import Callable
from typing import Any

import keras_hub.layers as hub_layers
import keras_hub.models as hub
import numpy as np
from keras_hub.src.models.retinanet.retinanet_label_encoder import RetinaNetLabelEncoder  # not a public name

from benchmarks.kerashub_tasks.task import BATCH, CLASSES, Task, classes, inputs_of, like_outputs, one_hot

SIDE = 32
_IMAGE = (SIDE, SIDE, 3)
_VIT = dict(image_shape=_IMAGE, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16)
_STAGES = dict(
    stackwise_stage_filters=[[8, 8, 16, 1, 1, 3], [16, 8, 32, 1, 1, 3]],
    apply_downsample=[False, True],
    use_lightweight_conv_block=[False, False],
    depths=[1, 1],
    hidden_sizes=[16, 32],
    embedding_size=8,
    stem_channels=[3, 8, 8],
    hidden_act="relu",
)


def _resnet(blocks: int, stages: int, block_type: str = "basic_block", **settings: Any) -> Any:
    return hub.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[7], stackwise_num_filters=[64] * stages,
        stackwise_num_blocks=[blocks] * stages, stackwise_num_strides=[1] + [2] * (stages - 1), block_type=block_type,
        **settings,
    )  # fmt: skip


def _efficientnet() -> Any:
    return hub.EfficientNetBackbone(
        width_coefficient=1.0, depth_coefficient=1.0, stackwise_kernel_sizes=[3, 5], stackwise_num_repeats=[1, 2],
        stackwise_input_filters=[8, 16], stackwise_output_filters=[16, 24], stackwise_expansion_ratios=[1, 6],
        stackwise_strides=[1, 2], stackwise_block_types=["v1"] * 2, stackwise_squeeze_and_excite_ratios=[0.25] * 2,
        image_shape=_IMAGE, min_depth=None, include_stem_padding=True, use_depth_divisor_as_min_depth=True,
        cap_round_filter_decrease=True, stem_conv_padding="valid", batch_norm_momentum=0.9, batch_norm_epsilon=1e-5,
        dropout=0, projection_activation=None,
    )  # fmt: skip


def _mobilenet() -> Any:
    return hub.MobileNetBackbone(
        stackwise_expansion=[[16, 24], [24]], stackwise_num_blocks=[2, 1], stackwise_num_filters=[[16, 16], [24]],
        stackwise_kernel_size=[[3, 3], [5], [1]], stackwise_num_strides=[[2, 1], [1], [1]],
        stackwise_se_ratio=[[None, None], [0.25]], stackwise_activation=[["relu", "relu"], ["hard_swish"]],
        stackwise_padding=[[1, 1], [2], [1]], output_num_filters=64, input_activation="hard_swish",
        output_activation="hard_swish", input_num_filters=16, image_shape=_IMAGE, depthwise_filters=8,
        depthwise_stride=2, depthwise_residual=False, squeeze_and_excite=0.5, last_layer_filter=48,
    )  # fmt: skip


def _mobilenetv5() -> Any:
    off, on = [[0], [0]], [[False], [False]]
    return hub.MobileNetV5Backbone(
        stackwise_block_types=[["er"], ["uir"]], stackwise_num_blocks=[1, 1], stackwise_num_filters=[[16], [24]],
        stackwise_strides=[[2], [2]], stackwise_act_layers=[["relu"], ["relu"]], stackwise_exp_ratios=[[4.0], [6.0]],
        stackwise_se_ratios=[[0.0], [0.0]], stackwise_dw_kernel_sizes=[[0], [5]], stackwise_dw_start_kernel_sizes=off,
        stackwise_dw_end_kernel_sizes=off, stackwise_exp_kernel_sizes=[[3], [0]],
        stackwise_pw_kernel_sizes=[[1], [0]], stackwise_num_heads=off, stackwise_key_dims=off,
        stackwise_value_dims=off, stackwise_kv_strides=off, stackwise_use_cpe=on, image_shape=_IMAGE, stem_size=16,
        use_msfa=False,
    )  # fmt: skip


def _mit() -> Any:
    return hub.MiTBackbone(
        layerwise_depths=[1, 1], image_shape=_IMAGE, hidden_dims=[8, 16], num_layers=2, layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1], max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3], layerwise_strides=[4, 2],
    )  # fmt: skip


def _cspnet() -> Any:
    return hub.CSPNetBackbone(
        stem_filters=16, stem_kernel_size=3, stem_strides=1, stackwise_strides=2, stackwise_depth=[1, 2],
        stackwise_num_filters=[16, 24], image_shape=_IMAGE, down_growth=True, bottle_ratio=(0.5, 1.0),
        block_ratio=(1.0, 0.5), expand_ratio=(2.0, 1.0), block_type="dark_block", stage_type="csp",
    )  # fmt: skip


BACKBONES: dict[str, Callable[[], Any]] = {
    "CSPNet": _cspnet,
    "DeiT": lambda: hub.DeiTBackbone(**_VIT, intermediate_dim=32),
    "DenseNet": lambda: hub.DenseNetBackbone(
        stackwise_num_repeats=[2, 2], compression_ratio=0.5, growth_rate=4, image_shape=_IMAGE
    ),
    "EfficientNet": _efficientnet,
    "HGNetV2": lambda: hub.HGNetV2Backbone(**_STAGES, use_learnable_affine_block=False, image_shape=_IMAGE),
    "MiT": _mit,
    "MobileNet": _mobilenet,
    "MobileNetV5": _mobilenetv5,
    "ResNet": lambda: _resnet(1, 2, image_shape=_IMAGE),
    "SwinTransformer": lambda: hub.SwinTransformerBackbone(
        image_shape=_IMAGE, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=4
    ),
    "VGG": lambda: hub.VGGBackbone(stackwise_num_repeats=[1, 2], stackwise_num_filters=[8, 16], image_shape=_IMAGE),
    "ViT": lambda: hub.ViTBackbone(**_VIT, mlp_dim=32),
    "Xception": lambda: hub.XceptionBackbone(
        stackwise_conv_filters=[[8, 16], [24, 24]], stackwise_pooling=[False, True], image_shape=_IMAGE
    ),
}


def _classifier(name: str, backbone: Callable[[], Any], **settings: Any) -> Task:
    def build() -> Any:
        return getattr(hub, name)(backbone=backbone(), num_classes=CLASSES, preprocessor=None, **settings)

    return Task("image classifier", build, classes, inputs_of())


def _deeplab() -> Any:
    backbone = hub.DeepLabV3Backbone(
        image_encoder=_resnet(1, 3, use_pre_activation=False), low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4", dilation_rates=[2, 4], upsampling_size=4, projection_filters=16,
    )  # fmt: skip
    return hub.DeepLabV3ImageSegmenter(backbone=backbone, num_classes=CLASSES)


def _segformer() -> Any:
    backbone = hub.SegFormerBackbone(image_encoder=_mit(), projection_filters=16)
    return hub.SegFormerImageSegmenter(backbone=backbone, num_classes=CLASSES)


def _sam() -> Any:
    encoder = hub.ViTDetBackbone(
        hidden_size=16, num_layers=2, intermediate_dim=32, num_heads=2, global_attention_layer_indices=[1],
        patch_size=16, num_output_channels=16, window_size=2, image_shape=(64, 64, 3),
    )  # fmt: skip
    prompts = hub_layers.SAMPromptEncoder(
        hidden_size=16, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_channels=16
    )
    decoder = hub_layers.SAMMaskDecoder(
        num_layers=1, hidden_size=16, intermediate_dim=32, num_heads=2, embedding_dim=16, num_multimask_outputs=3,
        iou_head_depth=2, iou_head_hidden_dim=8,
    )  # fmt: skip
    return hub.SAMImageSegmenter(hub.SAMBackbone(image_encoder=encoder, prompt_encoder=prompts, mask_decoder=decoder))


def _sam3() -> Any:
    shape = (28, 28, 3)
    sizes = dict(num_layers=1, hidden_dim=16, intermediate_dim=32, num_heads=2)
    return hub.SAM3PromptableConceptImageSegmenter(
        hub.SAM3PromptableConceptBackbone(
            vision_encoder=hub_layers.SAM3VisionEncoder(
                image_shape=shape, patch_size=14, fpn_hidden_dim=16, fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
                pretrain_image_shape=(42, 42, 3), window_size=2, global_attn_indexes=[0], **sizes,
            ),
            text_encoder=hub_layers.SAM3TextEncoder(vocabulary_size=40, embedding_dim=16, **sizes),
            geometry_encoder=hub_layers.SAM3GeometryEncoder(roi_size=7, **sizes),
            detr_encoder=hub_layers.SAM3DetrEncoder(**sizes),
            detr_decoder=hub_layers.SAM3DetrDecoder(image_shape=shape, patch_size=14, num_queries=8, **sizes),
            mask_decoder=hub_layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=16, num_heads=2),
        )
    )  # fmt: skip


def _retinanet() -> Any:
    backbone = hub.RetinaNetBackbone(
        image_encoder=_resnet(1, 3, "bottleneck_block", use_pre_activation=False, image_shape=(None, None, 3)),
        min_level=3, max_level=4, use_p5=False,
    )  # fmt: skip
    anchors = hub_layers.AnchorGenerator(
        bounding_box_format="yxyx", min_level=3, max_level=4, num_scales=3, aspect_ratios=[0.5, 1.0, 2.0],
        anchor_size=4,
    )  # fmt: skip
    return hub.RetinaNetObjectDetector(
        backbone=backbone, anchor_generator=anchors, num_classes=CLASSES, bounding_box_format="yxyx",
        pre_logits_num_conv_layers=1, 
        label_encoder=RetinaNetLabelEncoder(bounding_box_format="yxyx", anchor_generator=anchors),
    )  # fmt: skip


def _d_fine() -> Any:
    backbone = hub.DFineBackbone(
        backbone=hub.HGNetV2Backbone(
            **_STAGES, use_learnable_affine_block=True, image_shape=(None, None, 3),
            out_features=["stage1", "stage2"],
        ),
        decoder_in_channels=[16, 16], encoder_hidden_dim=16, num_denoising=10, num_labels=CLASSES, hidden_dim=16,
        learn_initial_query=False, num_queries=10, anchor_image_size=(SIDE, SIDE), feat_strides=[4, 8],
        num_feature_levels=2, encoder_in_channels=[16, 32], encode_proj_layers=[1], num_attention_heads=2,
        encoder_ffn_dim=32, num_encoder_layers=1, hidden_expansion=0.5, depth_multiplier=0.5, eval_idx=-1,
        num_decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, decoder_method="default",
        decoder_n_points=[2, 2], lqe_hidden_dim=16, num_lqe_layers=1, out_features=["stage1", "stage2"],
        image_shape=(None, None, 3), data_format="channels_last", seed=0,
    )  # fmt: skip
    return hub.DFineObjectDetector(backbone=backbone, num_classes=CLASSES, bounding_box_format="yxyx")


def _depth_anything() -> Any:
    encoder = hub.DINOV2Backbone(
        patch_size=14, num_layers=4, hidden_dim=16, num_heads=2, intermediate_dim=32, layer_scale_init_value=1.0,
        num_register_tokens=0, image_shape=(84, 84, 3), apply_layernorm=True,
    )  # fmt: skip
    backbone = hub.DepthAnythingBackbone(
        image_encoder=encoder, reassemble_factors=[4, 2, 1, 0.5], neck_hidden_dims=[8, 8, 16, 16],
        fusion_hidden_dim=16, head_hidden_dim=8, head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return hub.DepthAnythingDepthEstimator(backbone=backbone, depth_estimation_type="metric", max_depth=10.0)


def _boxes(rng: np.random.Generator, task: Any) -> dict[str, np.ndarray]:
    """Two boxes an image, as rows of top, left, bottom, right in pixels, as large as RetinaNet's anchors."""
    corners = rng.uniform((0, 0, SIDE - 4, SIDE - 4), (4, 4, SIDE, SIDE), (BATCH, 2, 4))
    return {"boxes": corners.astype("float32"), "labels": rng.integers(0, CLASSES, (BATCH, 2)).astype("int32")}


def _photographs(rng: np.random.Generator, task: Any) -> np.ndarray:
    return rng.uniform(0, 1, (BATCH, *_IMAGE)).astype("float32")


def _one_hot_mask(rng: np.random.Generator, task: Any) -> np.ndarray:
    return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, (BATCH, SIDE, SIDE))]


def _ones_and_zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, (shape[0], 1)).astype("float32")


_SAM_PROMPTS = inputs_of(
    points=lambda rng, shape: rng.uniform(0, 64, (BATCH, 1, 2)).astype("float32"),
    labels=_ones_and_zeros,
    boxes=lambda rng, shape: rng.uniform(0, 64, (BATCH, 1, 2, 2)).astype("float32"),
    masks=lambda rng, shape: rng.uniform(0, 1, (BATCH, 1, 16, 16, 1)).astype("float32"),
)
_SAM3_PROMPTS = inputs_of(
    boxes=lambda rng, shape: rng.uniform(0.3, 0.6, (BATCH, 1, 5)).astype("float32"),
    box_labels=lambda rng, shape: _ones_and_zeros(rng, shape).astype("int32"),
)

TASKS = {
    **{
        f"{family}ImageClassifier": _classifier(
            f"{family}ImageClassifier", make, **({"pooling_hidden_dim": 16} if family == "VGG" else {})
        )
        for family, make in BACKBONES.items()
    },
    "DeepLabV3ImageSegmenter": Task("image segmenter", _deeplab, _one_hot_mask, _photographs),
    "SAMImageSegmenter": Task("image segmenter", _sam, like_outputs, _SAM_PROMPTS, {"loss": "mse"}),
    "SAM3PromptableConceptImageSegmenter": Task("image segmenter", _sam3, like_outputs, _SAM3_PROMPTS, {"loss": "mse"}),
    "SegFormerImageSegmenter": Task("image segmenter", _segformer, one_hot, _photographs),
    "DFineObjectDetector": Task("object detector", _d_fine, _boxes, _photographs),
    "RetinaNetObjectDetector": Task("object detector", _retinanet, _boxes, _photographs),
    "DepthAnythingDepthEstimator": Task("depth estimator", _depth_anything, like_outputs, inputs_of()),
}
