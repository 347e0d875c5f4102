"""Every notebook runs with what Colab's image has."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "colab"))
from test_notebooks import build, printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", build.NAMES)
def test_a_notebook_runs(name):
    if not build.image(name).is_dir():
        pytest.skip(f"{build.image(name).name} is missing: `make {build.image(name).name}/ready`")
    notebook = build.run(build.read(name), build.image(name))
    text = printed(notebook)
    if name == "train_on_tpu":
        assert "0 of them in low precision" in text
        differences = {
            words: float(value) for words, value in re.findall(r"from the model in (\w+) on .*: (\S+)", text)
        }
        assert differences["float32"] <= 1e-5 < differences["bfloat16"] < 0.2
    if name == "train_on_gpu":
        assert "compute in 16 bits or fewer" in text
        scales = [float(scale) for scale in re.findall(r"after step +\d+: loss scale (\S+)", text)]
        assert scales[0] > scales[-1] >= 1
    if name == "see_what_the_compiler_did":
        counts = re.findall(r"(\d+) of (\d+) products that ask for FP8 run in FP8", text)
        assert len(counts) == 2 and counts[0][0] == "0" and counts[1][0] == counts[1][1] != "0"
    if name == "lora_on_kerashub":
        before, after = map(float, re.search(r"loss (\S+) before, (\S+) after", text).groups())
        assert "a tiny GPT-2 with random weights takes its place" in text and after < before
        assert "compute in 16 bits or fewer" in text
    if name == "newcomer":
        assert text.count("compute in 16 bits or fewer") == 2 and "error:" not in text
        assert float(re.search(r"float32 outputs, (\S+) right", text)[1]) > 0.9
