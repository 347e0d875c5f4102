import keras

from keras_mp.system.versions import installed


def test_only_what_is_installed_is_there():
    assert installed(["keras", "no-such-package"]) == {"keras": keras.__version__}
