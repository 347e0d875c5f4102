"""Presets loaded over several devices, which needs a process of its own; test_distribute.py starts it."""

import contextlib
import gc
import json
import shutil
import weakref

import h5py
import jax
import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.backend.common.keras_patches import patched
from keras_mp.parallel import _jax_placement as placement

DEVICES = 4
EMBEDDING = (3584, 160)  # larger than what is read and made whole, in bfloat16 too
SIZE = {
    "vocabulary_size": EMBEDDING[0],
    "hidden_dim": EMBEDDING[1],
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "intermediate_dim": 64,
}
READ = "keras.src.saving.saving_lib.H5IOStore.__getitem__"


def gemma():
    return pytest.importorskip("keras_hub").models.GemmaBackbone  # slow to import; the quick tests need it not


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("preset") / "gemma")
    gemma()(**SIZE).save_to_preset(folder)
    return folder


def load(folder, **options):
    return gemma().from_preset(folder, **options)


def saved(folder):
    """The arrays of the weights file, by what h5py calls them."""
    arrays = {}
    with h5py.File(f"{folder}/model.weights.h5") as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if hasattr(item, "shape") else None)
    return arrays


def sorted_bits(arrays):
    return sorted(array.tobytes() for array in arrays)


def values(backbone):
    return [np.asarray(variable.value) for variable in backbone.variables]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.rare), 4])
def test_loaded_values_are_those_saved_to_the_bit(devices, preset):
    with keras_mp.parallel.distribute("fully_sharded", devices):
        backbone = load(preset)
        embedding = backbone.token_embedding.embeddings.value
        output = np.asarray(backbone({"token_ids": np.ones((4, 8)), "padding_mask": np.ones((4, 8))}))
    assert sorted_bits(values(backbone)) == sorted_bits(saved(preset).values())
    shapes = [shard.data.shape for shard in embedding.addressable_shards]
    assert shapes == [(EMBEDDING[0] // devices, EMBEDDING[1])] * devices
    alone = load(preset)
    np.testing.assert_equal(values(backbone), values(alone))
    expected = np.asarray(alone({"token_ids": np.ones((4, 8)), "padding_mask": np.ones((4, 8))}))
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.rare
def test_a_preset_in_several_files_and_one_in_another_dtype(preset, tmp_path):
    load(preset).save_to_preset(str(tmp_path / "parts"), max_shard_size=2.5 / 2**10)
    assert len(list((tmp_path / "parts").glob("*.weights.h5"))) > 1
    whole = load(preset)
    half = load(preset, dtype="bfloat16")
    half.save_to_preset(str(tmp_path / "half"))
    with keras_mp.parallel.distribute("fully_sharded", DEVICES):
        parts = load(str(tmp_path / "parts"))
        rounded = load(preset, dtype="bfloat16")
        read_in_half = load(str(tmp_path / "half"), dtype="bfloat16")
        widened = load(str(tmp_path / "half"), dtype="float32")
    for expected, found in ((whole, parts), (half, rounded), (half, read_in_half)):
        for one, other in zip(values(expected), values(found), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    for one, other in zip(values(half), values(widened), strict=True):
        np.testing.assert_array_equal(one.astype("float32"), other)


@pytest.mark.slow
def test_nothing_of_the_size_of_the_embedding_is_read_or_kept(preset, monkeypatch):
    read, arrays = [], []

    class Noted(placement.SavedArray):
        def __getitem__(self, index):
            part = super().__getitem__(index)
            read.append(part.shape)
            arrays.append(weakref.ref(part))
            return part

        def __array__(self, *arguments, **options):
            raise AssertionError(f"an array of shape {self.shape} was read whole")

    def noted(original):
        def get(store, key):
            value = original(store, key)
            arrays.append(weakref.ref(value))
            return value

        return get

    monkeypatch.setattr(placement, "SavedArray", Noted)
    with keras_mp.parallel.distribute("fully_sharded", DEVICES), patched({READ: noted}):
        backbone = load(preset)
    assert read == [(EMBEDDING[0] // 4, EMBEDDING[1])] * 4
    gc.collect()
    size = np.prod(EMBEDDING) * 4
    # On a CPU JAX may keep an array of NumPy as the memory of its own; it is then a part.
    kept = [array().nbytes for array in arrays if isinstance(array(), np.ndarray)]
    assert len(arrays) > 10 and max(kept, default=0) <= size // 4
    assert not [array for array in gc.get_objects() if isinstance(array, np.ndarray) and array.nbytes >= size]
    on_one = [array.nbytes for array in jax.live_arrays() if array.sharding.is_fully_replicated]
    assert max(on_one) < size
    assert backbone.token_embedding.embeddings.value.nbytes == size


def test_an_assigned_array_is_copied_in_parts_and_let_go(monkeypatch):
    moved = []
    from keras.src.backend.jax import distribution_lib

    original = distribution_lib.distribute_tensor
    monkeypatch.setattr(
        distribution_lib, "distribute_tensor", lambda value, layout: moved.append(value) or original(value, layout)
    )
    array = np.random.default_rng().normal(size=EMBEDDING)
    expected, gone = array.astype("float32"), weakref.ref(array)
    with keras_mp.parallel.distribute("fully_sharded", DEVICES):
        variable = keras.Variable("zeros", EMBEDDING)
        moved.clear()
        variable.assign(array)
        assert [len(value.sharding.device_set) for value in moved] == [4]  # Keras alone has it whole, on one
        small = keras.Variable("zeros", (3,), dtype="float16")
        small.assign(np.array([1e6, 1.5, np.nan]))
        with pytest.raises(ValueError, match=r"must match.*variable.shape=\(3584, 160\), Received: value.shape=\(2,"):
            variable.assign(np.zeros((2, 160)))
    np.testing.assert_array_equal(np.asarray(variable.value), expected)
    np.testing.assert_array_equal(np.asarray(small.value), np.array([np.inf, 1.5, np.nan], "float16"))
    del array
    gc.collect()
    assert gone() is None


def test_keras_alone_moves_the_whole_to_one_device(monkeypatch):
    """Its patch is needless when this fails."""
    from keras.src.backend.jax import distribution_lib

    moved, original = [], distribution_lib.distribute_tensor
    monkeypatch.setattr(
        distribution_lib, "distribute_tensor", lambda value, layout: moved.append(value) or original(value, layout)
    )
    mesh = keras.distribution.DeviceMesh((4,), ["batch"], keras.distribution.list_devices()[:DEVICES])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*"] = ("batch", None)
    with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
        variable = keras.Variable("zeros", EMBEDDING)
        moved.clear()
        variable.assign(np.ones(EMBEDDING))
    assert [(value.shape, len(value.sharding.device_set)) for value in moved] == [(EMBEDDING, 1)]


INITIALIZERS = {
    "with a mean": lambda: keras.initializers.RandomNormal(0.3, 0.02, seed=5),
    "GlorotUniform": lambda: keras.initializers.GlorotUniform(seed=2**31 + 9),
    "from a generator": lambda: keras.initializers.TruncatedNormal(0.0, 0.5, seed=keras.random.SeedGenerator(3)),
    "of its own": lambda: lambda shape, dtype: keras.random.normal(shape, seed=4, dtype=dtype),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values_do_not_depend_on_the_devices(name):
    make = INITIALIZERS[name]
    alone = np.asarray(keras.Variable(make(), EMBEDDING).value)
    found = []
    for devices in (1, 4):
        with keras_mp.parallel.distribute("fully_sharded", devices):
            value = keras.Variable(make(), EMBEDDING).value
        assert len(value.sharding.device_set) == devices
        found.append(np.asarray(value))
    for array in found:
        np.testing.assert_array_equal(array, found[0])
        # Drawn and scaled in one program, whose factors XLA multiplies first: that rounds otherwise.
        np.testing.assert_array_max_ulp(array, alone, 2)


@pytest.mark.slow
@pytest.mark.rare
def test_a_wrong_preset_is_told(preset, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(preset, folder)
    config = json.loads((folder / "config.json").read_text())
    config["config"]["vocabulary_size"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    told = []
    for scope in (contextlib.nullcontext(), keras_mp.parallel.distribute("fully_sharded", DEVICES)):
        with scope, pytest.raises(ValueError, match="could not be loaded.*\n*.*token_embedding") as error:
            load(str(folder))
        told.append(str(error.value).partition("<")[0])
    assert told[0] == told[1]


def assert_laid_out(backbone, get_layout_map):
    """Its eight kernels of a block and of the embedding lie as Keras's own ModelParallel has them by the same map."""
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], keras.distribution.list_devices()[:DEVICES])
    layouts = get_layout_map(mesh)
    specs = {v.path: tuple(v.value.sharding.spec) for v in backbone.variables}
    assert sum("model" in spec for spec in specs.values()) == 8
    for path, spec in specs.items():
        assert spec == (tuple(layouts[path].axes) if layouts[path] else (None,) * len(spec))


@pytest.mark.slow
def test_a_backbones_own_layout_map(preset):
    get_layout_map = gemma().get_layout_map
    x = {"token_ids": np.ones((4, 8), "int32"), "padding_mask": np.ones((4, 8), "int32")}
    expected = np.asarray(load(preset)(x))
    with keras_mp.parallel.distribute("tensor", DEVICES, mesh=(2, 2), rules=get_layout_map):
        backbone = load(preset)
        found = np.asarray(backbone(x))
        assert_laid_out(backbone, get_layout_map)
        model = keras.Sequential([backbone, keras.layers.Dense(1, use_bias=False)])
        model.compile("adam", "mse")
        model.fit(x, np.ones((4, 8, 1)), batch_size=4, verbose=0)
        slots = [v for v in model.optimizer.variables if "token_embedding" in v.path]
    assert [tuple(slot.value.sharding.spec) for slot in slots] == [("model", "batch")] * 2
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert sorted_bits(values(load(preset))) == sorted_bits(saved(preset).values())
