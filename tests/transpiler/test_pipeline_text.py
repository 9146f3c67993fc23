"""Strategies and rewrites as text: what `strategies.get` and `--strategy` take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluidx as fx
from fluidx.transpiler.strategies.pipeline_text import Stage, parse_pipeline, show_stage

get, rewrite = fx.strategies.get, fx.rewrite
words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.booleans() | st.none() | numbers | st.text("aZ_1 ,{}=:'", max_size=8)


@given(st.lists(st.builds(Stage, words, st.dictionaries(words, values, max_size=3)), min_size=1, max_size=4))
def test_what_is_shown_parses_back(stages):
    again = parse_pipeline(" , ".join(show_stage(s.name, s.options) for s in stages))
    assert again == stages
    assert [[type(v) for v in s.options.values()] for s in again] == [[type(v) for v in s.options.values()] for s in stages]


@pytest.mark.parametrize("name", fx.strategies.CATALOGUE)
def test_a_strategy_is_its_text(name):
    strategy = get(name)
    assert get(str(strategy)) == strategy


common = {
    "algorithm": st.sampled_from(["", "ring", "tree", "auto"]),
    "hierarchical": st.sampled_from([True, False, "auto"]),
    "wire": st.sampled_from(["", "float16", "bfloat16"]),
    "strict": st.booleans(),
    "loss": st.sampled_from(["", "loss", "mean_0.tmp_0"]),
}
mib = st.integers(0, 64) | st.floats(0.001, 100.0)
of_name = {
    "data_parallel": {"bucket_mb": mib, "overlap": st.booleans()},
    "zero1": {"bucket_mb": mib},
    "zero2": {"bucket_mb": mib},
    "fsdp": {"units": mib.filter(bool) | st.sampled_from(["scope", "parameter"]), "reshard_after_forward": st.booleans()},
    "ring_optimizer": {"chunk_mb": mib.filter(bool), "roots": st.sampled_from(["greedy", "hash"])},
}
passes = st.one_of(
    st.builds(rewrite.FoldConstants, kb=st.integers(1, 1000)),
    st.builds(rewrite.ChannelsLast, always=st.booleans()),
    st.sampled_from([rewrite.DropDead(), rewrite.JoinAttention(), rewrite.JoinLayerNorm(), rewrite.MergeEqual()]),
)


@st.composite
def pipelines(draw):
    name = draw(st.sampled_from(sorted(of_name)))
    options = draw(st.fixed_dictionaries({}, optional={**of_name[name], **common}))
    return get(name, **options).with_rewrites(*draw(st.lists(passes, max_size=3)))


@given(pipelines())
def test_a_pipeline_is_its_text(strategy):
    assert get(str(strategy)) == strategy
    assert str(get(str(strategy))) == str(strategy)


@given(pipelines(), st.data())
def test_a_strategy_with_changed_steps_is_its_text_or_its_calls(strategy, data):
    for k in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["before", "after", "replace", "with_rewrites"]))
        one, step = data.draw(passes), data.draw(st.sampled_from(strategy.steps_named()))
        if how == "with_rewrites":
            strategy = strategy.with_rewrites(one)
        elif how == "replace":
            strategy = strategy.replace(step, one)
        else:
            strategy = getattr(strategy, how)(step, one, name=f"added_{k}")
    if str(strategy) != repr(strategy):
        assert get(str(strategy)) == strategy
    assert eval(repr(strategy), {**vars(fx.strategies), **vars(rewrite)}).steps == strategy.steps


def test_changed_steps_are_shown():
    made, join = fx.strategies.zero1(bucket_mb=4), rewrite.JoinAttention()
    assert str(made.before("groups", join)) == "zero1{bucket_mb=4},join_attention"
    for changed, said in (
        (made.after("lower", join), "zero1(bucket_mb=4).after('lower', JoinAttention())"),
        (made.replace("lower", join), "zero1(bucket_mb=4).replace('lower', JoinAttention())"),
        (made.before("groups", join, name="a"), "zero1(bucket_mb=4).before('groups', JoinAttention(), name='a')"),
        (made.with_rewrites(join).after("lower", join, "a").with_rewrites(rewrite.DropDead()),
         "zero1(bucket_mb=4).with_rewrites(JoinAttention()).after('lower', JoinAttention(), name='a').with_rewrites(DropDead())"),
    ):  # fmt: skip
        assert str(changed) == repr(changed) == said


def test_options_and_rewrites():
    made = get("zero1{bucket_mb=4, algorithm=ring},join_attention,channels_last{always=true}")
    zero1 = fx.strategies.zero1(bucket_mb=4, algorithm="ring")
    assert made == zero1.with_rewrites(rewrite.JoinAttention(), rewrite.ChannelsLast(always=True))
    assert str(made) == "zero1{bucket_mb=4,algorithm=ring},join_attention,channels_last{always=true}"


@pytest.mark.parametrize(
    "text, said",
    [
        ("zero1{bucket_mb=4", "expected"),
        ("zero1{bucket_mb}", "option=value"),
        ("zero1,,fsdp", "the name of a strategy or a pass at character 7"),
        ("zero1{bucket_mb=4}fsdp", '"," or the end at character 19'),
        ("zero1{bucket_mb=4,bucket_mb=5}", "bucket_mb, which is given twice"),
        ("zero1{buckets=4}", "zero1 has no option 'buckets'"),
        ("zero1,fsdp", "must have one strategy, found zero1 and fsdp"),
        ("join_attention,drop_dead", "must have one strategy, found none"),
        ("zero1,join_atention", "did you mean 'join_attention'?"),
        ("zero1,channels_last{alway=true}", "channels_last has no option 'alway'; did you mean 'always'?"),
        ("zero1,join_attention{x=1}", "it has none"),
    ],
)
def test_wrong_texts_are_refused_by_name_and_place(text, said):
    with pytest.raises(fx.TranspileError) as e:
        get(text)
    assert said in str(e.value)


def attention():
    """A head written with small layers, trained."""
    L = fx.layers
    main, startup = fx.Program("head"), fx.Program("head_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4, 8], "float64")
        q, k, v = (L.fc(x, 8, num_flatten_dims=2, bias_attr=False) for _ in range(3))
        loss = L.mean(L.matmul(L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.5)), v))
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def test_rewrites_come_first_are_proved_with_the_strategy_and_stand_in_the_diff():
    main, startup = attention()
    before = str(main)
    t = fx.DistributeTranspiler("zero1,join_attention").transpile(program=main, startup_program=startup, trainers=2)
    assert str(main) == before
    types = [op.type for op in t.get_trainer_program(0).ops]
    assert "scaled_dot_product_attention" in types and "softmax" not in types
    t.verify()
    assert "softmax" in str(t.diff())


def test_endpoints_of_servers_keep_the_passes_in_front():
    main, startup = attention()
    t = fx.DistributeTranspiler("parameter_server,join_attention")
    t.transpile(program=main, startup_program=startup, trainers=2, pservers="a:1,b:1")
    assert t.strategy == fx.strategies.parameter_server(2).with_rewrites(rewrite.JoinAttention())
    assert "scaled_dot_product_attention" in [op.type for op in t.main.ops]


def test_what_a_rewrite_left_alone_is_explained():
    main, startup = fx.Program("plain"), fx.Program("plain_startup")
    with fx.program_guard(main, startup):
        fx.layers.softmax(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 4))
    t = fx.DistributeTranspiler("data_parallel,join_attention").transpile(program=main, startup_program=startup, trainers=2)
    assert [op.type for op in t.main.ops].count("softmax") == 1
