"""The tiles that a compiler chooses beside other processes are not kept."""

import pickle

from ropelab.bench import tuning


def test_a_choice_beside_other_processes_is_not_kept(tmp_path):
    """A choice that is saved within the context leaves no file; outside it does."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from triton import Config

    def saved(name):
        cache = AutotuneCache.create({"autotune_local_cache": True}, str(tmp_path / name / "kernel.py"), "hash")
        cache.save(Config({"XBLOCK": 1}), 1)
        return list((tmp_path / name).glob("*.best_config"))

    with tuning.not_kept():
        assert saved("within") == []
    assert len(saved("outside")) == 1


def test_what_is_kept_within_the_context_is_read_outside(tmp_path):
    """The code that torch.compile keeps holds the bound method ``save``."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    with tuning.not_kept():
        kept = pickle.dumps(AutotuneCache("hash").save)
    assert pickle.loads(kept).__func__ is AutotuneCache.save
