"""verify() proves the program for all ranks where they run alike, and what is made of it later is compared with it."""

import pytest

import fluidx as fx

L = fx.layers


def transpiled(strategy="data_parallel", ranks=1000):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = L.fc(fx.data("x", [-1, 4], "float32"), 4, act="relu")
        fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.fc(h, 1)))
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)


def without_communication(program):
    block = program.global_block()
    block.oplist = [op for op in block.oplist if op.type not in ("all_reduce", "reduce_scatter")]


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2", "zero3", "fsdp"])
def test_a_thousand_ranks_that_run_alike_are_proved_by_the_program_for_all(strategy):
    t = transpiled(strategy)
    report = t.verify()
    assert not t._ranks  # no rank program was made for it
    few = transpiled(strategy, 4)
    assert few.verify().values == few.verify(every_rank=True).values == report.values


def test_every_rank_proves_the_programs_of_all_ranks():
    t = transpiled(ranks=6)
    assert str(t.verify(every_rank=True)) == str(transpiled(ranks=6).verify())
    assert len(t._ranks) == 6


def test_a_rank_program_that_is_made_behind_the_proof_needs_no_other():
    t = transpiled()
    report = t.verify()
    assert t.get_trainer_program(7).ops and t.verify() is report


@pytest.mark.parametrize("proved", [True, False], ids=["behind the proof", "before it"])
@pytest.mark.parametrize("rank", [0, 19])
def test_a_rank_program_that_was_changed_is_proved_itself(proved, rank):
    t = transpiled(ranks=20)
    if proved:
        t.verify()
    without_communication(t.get_trainer_program(rank))
    with pytest.raises(fx.VerifyError):
        t.verify()


def test_a_program_for_all_ranks_that_was_changed_behind_the_proof_is_proved_anew():
    t = transpiled(ranks=20)
    t.verify()
    without_communication(t.main)
    with pytest.raises(fx.VerifyError):
        t.verify()
    without_communication(t.get_trainer_program(3))  # a copy of what is wrong is not taken for what was proved
    with pytest.raises(fx.VerifyError):
        t.verify()
