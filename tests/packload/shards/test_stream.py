import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packload
from packload.shards import ShardDataset, ShardError, shard_sampler
from packload.shards.columns import choose_lengths

from .tars import make_shards


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Case 17's shards: 3 of 10 samples; sample i of each has i + 1 words."""
    return make_shards(tmp_path_factory.mktemp("three"), 3, 10)


def keys(s, k):
    return f"s{s}-{k:03d}"


ALL = sorted(keys(s, k) for s in range(3) for k in range(10))


def loader(three, **arguments):
    arguments = {"lengths": "txt.words", "budget": 16, "workers": 0, "rank": 0, "world_size": 1, **arguments}
    return packload.shards(three, **arguments)


def served(batches):
    return [batch["__key__"] for batch in batches]


def test_an_epoch_serves_every_sample_once_in_batches_within_the_budget(three):
    batches = list(loader(three))
    assert sorted(key for batch in served(batches) for key in batch) == ALL
    for batch in batches:
        assert sum(len(text.split()) for text in batch.txt) <= 16


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_case_16_a_seed_and_an_epoch_give_one_order_for_any_number_of_workers(three, mode):
    orders = []
    for workers in (0, 1, 3):
        epochs = loader(three, workers=workers, mode=mode)
        orders.append([served(epochs) for _ in range(2)])
        assert orders[-1] == orders[0] and orders[0][0] != orders[0][1]
        again = loader(three, workers=workers, mode=mode)
        again.batch_sampler.set_epoch(1)
        assert served(again) == orders[0][1]
    assert served(loader(three, seed=1)) != orders[0][0]


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 9),
    budget=st.integers(10, 60),
    mixed=st.integers(1, 4),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_case_17_steps_are_equal_and_the_union_is_all_but_what_is_said_dropped(
    three, world, budget, mixed, epoch, drop_last
):
    data = ShardDataset(three)
    samplers = [
        shard_sampler(
            data,
            budget=budget,
            lengths="txt.words",
            mixed=mixed,
            rank=rank,
            world_size=world,
            drop_last=drop_last,
        )
        for rank in range(world)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths = data.lengths("txt.words")
    plans = [list(sampler) for sampler in samplers]
    assert len({len(plan) for plan in plans}) == 1
    assert all(lengths[cell].sum() <= budget and len(cell) for plan in plans for cell in plan)
    flat = sorted(i for plan in plans for cell in plan for i in cell)
    counts = samplers[0].counts
    assert len(flat) == 30 - counts["dropped"] + counts["repeated"]
    assert len(set(flat)) == 30 - counts["dropped"] and (drop_last or not counts["dropped"])


def test_samples_are_mixed_over_as_many_shards_as_asked_for(three):
    data = ShardDataset(three)
    for mixed in (1, 2, 3):
        sampler = shard_sampler(data, batch_size=1, mixed=mixed, rank=0, world_size=1)
        order = sampler.plan.order(0)
        shards = data.shard_of(order).tolist()
        assert set(shards[: 10 * mixed]) == set(shards[:1]) if mixed == 1 else len(set(shards[:20])) == mixed


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cut", [0, 1, 4, "last", "end"])
def test_a_run_goes_on_where_it_stood_with_any_number_of_workers(three, cut, mode):
    whole = loader(three)
    epochs = [served(whole), served(whole)]
    stop = {"last": len(epochs[0]) - 1, "end": len(epochs[0])}.get(cut, cut)
    for first, second in ((2, 0), (0, 3)):
        begun = loader(three, workers=first, mode=mode)
        run = iter(begun)
        done = [next(run)["__key__"] for _ in range(stop)]
        state = begun.state_dict()
        del run
        again = loader(three, workers=second, mode=mode)
        again.load_state_dict(state)
        rest = served(again)
        if rest == epochs[1]:
            assert stop == len(epochs[0])
        else:
            assert done + rest == epochs[0]
            assert served(again) == epochs[1]


def test_a_state_of_other_shards_or_another_mix_is_refused(three):
    begun = loader(three)
    run = iter(begun)
    next(run)
    state = begun.state_dict()
    for other in (
        loader(three[:2]),
        loader(three[::-1]),
        loader(three, mixed=2),
        loader(three, seed=3),
        loader(three, budget=17),
    ):
        with pytest.raises(ValueError):
            other.load_state_dict(state)
    loader(three).load_state_dict(state)


def test_policies_and_their_arguments(three):
    sizes = [len(batch) for batch in served(loader(three, budget=None, batch_size=7))]
    assert sorted(sizes) == [2, 7, 7, 7, 7]
    fixed = loader(three, budget=None, batch_size=10, policy="fixed")
    assert [key for batch in served(fixed) for key in batch] == ALL
    bucket = loader(three, budget=None, batch_size=5, policy="bucket", plan={"buckets": 3})
    assert sorted(key for batch in served(bucket) for key in batch) == ALL
    assert len(list(loader(three, budget=5, plan={"oversize": "skip"}))) == 9
    for wrong, text in [
        ({"policy": "best"}, "none of"),
        ({"policy": "random"}, "needs batch_size"),
        ({"batch_size": 4}, "no batch_size"),
        ({"budget": None}, "needs batch_size"),
        ({"mixed": 0}, "at least one shard"),
        ({"budget": 5}, "sample 5"),
    ]:
        with pytest.raises(ValueError, match=text):
            loader(three, **wrong)


def test_samples_above_the_budget_are_cut_in_the_field_that_was_planned_by(three):
    arguments = {"decode": {"txt": lambda content: np.frombuffer(content, np.uint8)}, "lengths": "txt.bytes"}
    whole = loader(three, plan={"oversize": "split"}, schema={"txt": "n"}, budget=20, **arguments)
    found = [(key, n) for b in whole for key, n in zip(b["__key__"], b.txt.grid.axes[0].lengths.tolist())]
    sizes = {keys(s, k): 5 * (k + 1) - 1 for s in range(3) for k in range(10)}
    assert {key: sum(n for k, n in found if k == key) for key in ALL} == sizes
    assert max(n for _, n in found) <= 20 and len(found) > 30
    with pytest.raises(ValueError, match="it must name one"):
        loader(three, plan={"oversize": "split"}, budget=20, **arguments)


def test_schema_decode_and_map_reach_the_batch(three):
    batch = next(
        iter(
            loader(
                three,
                decode={"txt": lambda content: np.frombuffer(content, np.uint8)},
                map=lambda sample: {"bytes": sample["txt"], "label": sample["cls"]},
                schema={"bytes": "n"},
                lengths="txt.bytes",
                budget=100,
            )
        )
    )
    assert batch.bytes.grid.cells <= 100 and batch.bytes.values[:4].tolist() == list(b"word")
    assert len(batch.label) == batch.bytes.batch_size


class Columns:
    """Stands in for a data set with some columns."""

    def __init__(self, columns, fields, own=None):
        self.columns, self.fields = tuple(columns), own
        self.indexes = [type("Index", (), {"fields": tuple(fields)})]

    def __len__(self):
        return 2

    def lengths(self, name):
        return np.array([len(name), 7]) if name in self.columns else {}[name]


@pytest.mark.parametrize(
    "columns, fields, schema, expected, cost",
    [
        (["npy.0"], ["npy", "cls"], None, "npy.0", "tokens"),
        (["npy.0", "npy.1"], ["npy"], {"npy": "n _"}, "npy.0", "tokens"),
        (["npy.0", "npy.1"], ["npy"], {"npy": "n n"}, "npy.0", "pair_cells"),
        (["npy.0", "npy.1"], ["npy"], {"npy": "n m"}, ("npy.0", "npy.1"), "area"),
        (["npy.0", "npy.1", "npy.2"], ["npy"], None, ("npy.1", "npy.2"), "area"),
        (["jpg.h", "jpg.w"], ["jpg", "cls"], None, ("jpg.h", "jpg.w"), "area"),
        (["jpg.h", "jpg.w", "npy.0"], ["jpg", "npy"], {"npy": "3"}, ("jpg.h", "jpg.w"), "area"),
        (["json.tokens", "json.title"], ["json"], {"json.tokens": "n"}, "json.tokens", "tokens"),
        (["tokens", "txt.words"], ["txt"], {"tokens": "n"}, "tokens", "tokens"),
    ],
)
def test_lengths_to_plan_by_follow_from_the_ragged_field(columns, fields, schema, expected, cost):
    values, charge = choose_lengths(Columns(columns, fields), schema, None, None)
    names = [expected] if isinstance(expected, str) else list(expected)
    stacked = np.stack([[len(name), 7] for name in names], axis=1)
    assert (values == (stacked[:, 0] if isinstance(expected, str) else stacked)).all() and charge == cost


@pytest.mark.parametrize(
    "columns, fields, schema, text",
    [
        (["txt.words", "txt.chars"], ["txt"], None, "no ragged field has lengths in the index.*'txt.words'"),
        (["txt.words"], ["txt"], {"txt": "n"}, r"the index has no lengths of \['txt'\].*'txt.bytes'"),
        (["jpg.h", "jpg.w", "npy.0"], ["jpg", "npy"], None, "several fields are ragged"),
    ],
)
def test_lengths_that_are_not_clear_are_asked_for(columns, fields, schema, text):
    with pytest.raises(ValueError, match=text):
        choose_lengths(Columns(columns, fields), schema, None, None)


def test_lengths_as_given():
    data = Columns(["a", "bb"], ["x"])
    assert choose_lengths(data, None, "bb", None)[0].tolist() == [2, 7]
    values, cost = choose_lengths(data, None, ("a", "bb"), None)
    assert values.tolist() == [[1, 2], [7, 7]] and cost == "area"
    values, cost = choose_lengths(data, None, {"tokens": "a", "more": [3, 4]}, "tokens")
    assert values["more"].tolist() == [3, 4] and cost == "tokens"
    with pytest.raises(ValueError, match="lengths of 3 samples were given, and the shards have 2"):
        choose_lengths(data, None, [1, 2, 3], None)


def test_processes_that_see_other_shards_do_not_start(three, monkeypatch):
    def gather(digests, own):
        digests[:] = [own, ("other", own[1])]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(ShardError, match=r"ranks \[1\] see other samples than rank 0"):
        loader(three)


def test_processes_that_plan_by_other_lengths_do_not_start(three, monkeypatch):
    def gather(told, own):
        told[:] = [own, (own[0], "other")]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(ShardError, match=r"ranks \[1\] plan otherwise than rank 0"):
        loader(three)
