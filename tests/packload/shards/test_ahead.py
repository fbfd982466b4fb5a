import time

import packload
from packload.shards import ShardDataset, shard_sampler
from packload.shards.ahead import AheadSampler

from .tars import make_shards
from .web import Web


def test_the_next_shards_are_fetched_while_these_are_served(tmp_path, monkeypatch):
    monkeypatch.setattr("packload.plan.policy.STEPS", 5)
    (tmp_path / "www").mkdir()
    paths = make_shards(tmp_path / "www", 6, 10)
    with Web(tmp_path / "www") as web:
        urls = [web.url(path.name) for path in paths]
        data = ShardDataset(urls, cache=tmp_path / "cache")
        sampler = shard_sampler(data, batch_size=4, mixed=2, rank=0, world_size=1)
        windows = list(sampler.windows())
        assert [window.end for window in windows] == [20, 40, 60]
        shards = [set(data.shard_of(window.indices).tolist()) for window in windows]
        assert [len(found) for found in shards] == [2, 2, 2]
        run = iter(AheadSampler(sampler, data))

        def fetched():
            return {urls.index(web.url(path.lstrip("/"))) for path, r in web.requests if r}

        for step, expected in ((1, shards[1]), (3, shards[1]), (7, shards[1] | shards[2])):
            for _ in range(step):
                next(run)
            for _ in range(500):
                if fetched() == expected:
                    break
                time.sleep(0.01)
            assert fetched() == expected
            run = iter(AheadSampler(sampler, data)) if step == 3 else run
        assert len(list(run)) == 8


def test_it_is_the_sampler_in_all_else(tmp_path):
    data = ShardDataset(make_shards(tmp_path, 2, 10))
    plain = shard_sampler(data, batch_size=3, rank=0, world_size=1)
    ahead = AheadSampler(shard_sampler(data, batch_size=3, rank=0, world_size=1), data)
    assert list(ahead) == list(plain) and ahead.batch_size is None
    ahead.set_epoch(4)
    plain.set_epoch(4)
    run, other = iter(ahead), iter(plain)
    assert [next(run) for _ in range(3)] == [next(other) for _ in range(3)]
    assert run.state_dict() == other.state_dict()
    again = iter(AheadSampler(shard_sampler(data, batch_size=3, rank=0, world_size=1), data))
    again.load_state_dict(run.state_dict())
    assert list(again) == list(other)


def test_a_run_over_http_goes_on_where_it_stood(tmp_path):
    (tmp_path / "www").mkdir()
    paths = make_shards(tmp_path / "www", 4, 10)
    local = packload.shards(paths, batch_size=3, rank=0, world_size=1, workers=0, mixed=2)
    expected = [batch["__key__"] for batch in local]
    with Web(tmp_path / "www") as web:
        urls = [web.url(path.name) for path in paths]

        def remote(workers):
            return packload.shards(
                urls, batch_size=3, rank=0, world_size=1, workers=workers, mixed=2, cache=tmp_path / "cache"
            )

        begun = remote(2)
        run = iter(begun)
        done = [next(run)["__key__"] for _ in range(5)]
        again = remote(3)
        again.load_state_dict(begun.state_dict())
        assert [sorted(b) for b in done + [batch["__key__"] for batch in again]] == [
            sorted(b) for b in expected
        ]
