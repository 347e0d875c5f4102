import pytest


@pytest.fixture(autouse=True)
def vocabulary_in_chunks(monkeypatch):
    """The models of these tests are so small that whole logits take less memory: their heads would not be tested."""
    monkeypatch.setattr("keras_mp.lean.chunked_head.chunks_save_memory", lambda *sizes: True)
