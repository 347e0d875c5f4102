"""Every task of KerasHub that can be built at a tiny size, without pretrained weights."""

from benchmarks.kerashub_tasks import images, language, several, text
from benchmarks.kerashub_tasks.task import Task

TASKS: dict[str, Task] = {**text.TASKS, **language.TASKS, **images.TASKS, **several.TASKS}

# What stays outside, and why.
OUTSIDE = {
    **dict.fromkeys(
        (
            "CausalLM", "DepthEstimator", "ImageClassifier", "ImageSegmenter", "ImageToImage", "Inpaint",
            "MaskedLM", "ObjectDetector", "Seq2SeqLM", "Task", "TextClassifier", "TextEmbedder", "TextToImage",
        ),
        "abstract: it has no backbone",
    ),
    "BASNetImageSegmenter": "not tiny: its decoder has 50 million weights whatever the arguments",
    "Gemma4AssistantCausalLM": "a draft model, which its target model calls: its call() raises NotImplementedError",
}  # fmt: skip
