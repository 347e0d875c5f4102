from keras_mp.backend.common.device import DeviceInfo, best_first


def test_best_first_sorts_by_kind_and_keeps_the_order_within():
    cpu, small, big, tpu = (
        DeviceInfo(kind, name, "") for kind, name in zip(("cpu", "gpu", "gpu", "tpu"), "csbt", strict=True)
    )
    assert best_first(iter([cpu, small, tpu, big])) == [tpu, small, big, cpu]
