"""What is sent: waves gather what can travel together, small messages are packed, hosts are crossed by send and recv."""

from fluidx.testing import check_pass
from fluidx.transpiler.passes.bucket import Bucket
from fluidx.transpiler.passes.carry import Carry
from fluidx.transpiler.passes.gather_waves import GatherWaves
from fluidx.transpiler.passes.hosts import OverHosts
from fluidx.transpiler.passes.pack import PackSmall

GIVEN = """
  group dp = [0, 1]
  var %a: f32[4] partial(sum) over dp
  var %b: f32[4] partial(sum) over dp
  var %c: f32[4] partial(sum) over dp
  var %v: f32[4] persistable
"""
A = '%a.sum: f32[4] at(0) over dp = reduce(%a) {algorithm="ring", group="dp", op="sum", root=0, wave=WAVE}'
B = '%b.sum: f32[4] at(1) over dp = reduce(%b) {algorithm="ring", group="dp", op="sum", root=1, wave=WAVE}'
C = '%c.sum: f32[4] at(0) over dp = reduce(%c) {algorithm="ring", group="dp", op="sum", root=0, wave=WAVE}'


def lines(*texts, wave=0):
    return "\n".join(["dist:", *(t.replace("WAVE", str(wave)) for t in texts)]) + "\n"


OTHER = "forward:\n%y: f32[4] = relu(%v)\n"


def test_what_can_travel_together_does():
    check_pass(GatherWaves(), given=GIVEN, before=lines(A) + OTHER + lines(B, C), after=OTHER + lines(A, B, C))


def test_a_reader_ends_a_wave():
    read = "forward:\n%z: f32[4] at(0) over dp = scale(%a.sum) {scale=2.0}\n"
    after = lines(A, B) + read + lines(C, wave=1)
    check_pass(GatherWaves(), given=GIVEN, before=lines(A, B) + read + lines(C), after=after)


def test_a_writer_of_what_a_wave_reads_ends_it():
    write = "forward:\n%a = scale(%a) {scale=2.0}\n"
    check_pass(GatherWaves(), given=GIVEN, before=lines(A) + write + lines(B), after=lines(A) + write + lines(B, wave=1))


def test_a_full_wave_leaves():
    eight_bytes_a_rank = GatherWaves(8 / 2**20)
    check_pass(eight_bytes_a_rank, given=GIVEN, before=lines(A) + OTHER + lines(B), after=lines(A) + OTHER + lines(B, wave=1))


def test_reduce_scatters_wait_too_when_they_are_asked_to():
    a = '%a.sum: f32[4] shard(0) over dp = reduce_scatter(%a) {group="dp", op="sum"}'
    b = '%b.sum: f32[4] shard(0) over dp = reduce_scatter(%b) {group="dp", op="sum"}'
    late = Bucket(mb=0, late=("reduce_scatter",))
    check_pass(late, given=GIVEN, before=lines(a) + OTHER + lines(b), after=OTHER + lines(a, b))


def test_small_messages_to_one_root_are_packed():
    check_pass(PackSmall(), given=GIVEN, before=lines(A, B, C), after="""
dist:
  %a.packed: f32[8] partial(sum) over dp = pack([%a, %c])
  %a.sum.packed: f32[8] at(0) over dp = reduce(%a.packed) {algorithm="ring", group="dp", op="sum", root=0}
  %b.sum: f32[4] at(1) over dp = reduce(%b) {algorithm="ring", group="dp", op="sum", root=1}
  [%a.sum: f32[4] at(0) over dp, %c.sum: f32[4] at(0) over dp] = unpack(%a.sum.packed) {shapes=[[4], [4]]}
""")  # fmt: skip


def test_large_messages_and_other_waves_are_left_alone():
    before = lines(A) + lines(C, wave=1)
    check_pass(PackSmall(), given=GIVEN, before=before, after=before)
    check_pass(PackSmall(small_kb=16 / 1024), given=GIVEN, before=lines(A, C), after=lines(A, C))


def test_terms_over_another_group_are_not_packed_with_whole_values():
    given = "  group tp = [0] [1]\n" + GIVEN.replace("var %c: f32[4]", "var %c: f32[4] partial(sum) over tp")
    same = lines(A, C.replace("at(0) over dp =", "partial(sum) over tp at(0) over dp ="))
    check_pass(PackSmall(), given=given, before=same, after=same)


def test_pieces_are_not_packed():
    p = '%a.sum: f32[4] pieces(0, 1, 4) over dp = reduce_scatter(%a) {algorithm="ring", bounds=[0, 1, 4], group="dp", op="sum"}'
    q = '%c.sum: f32[4] pieces(0, 1, 4) over dp = reduce_scatter(%c) {algorithm="ring", bounds=[0, 1, 4], group="dp", op="sum"}'
    check_pass(PackSmall(), given=GIVEN, before=lines(p, q), after=lines(p, q))


# -- several hosts ------------------------------------------------------------------------------------------------------------------------

HOSTS = """
  group dp = [0, 1, 2, 3]
  group node = [0, 1] [2, 3]
  group rail = [0, 2] [1, 3]
  var %g: f32[4] partial(sum) over dp
  var %m: f32[4] partial(max) over dp
  var %w: f32[4] at(3) over dp
"""


def test_each_rank_of_a_host_carries_its_part_of_an_all_reduce():
    check_pass(OverHosts(), given=HOSTS, before='dist:\n%s: f32[4] = all_reduce(%g) {group="dp", op="sum"}', after="""
dist:
  %s.node: f32[4] partial(sum) over rail shard(0) over node = reduce_scatter(%g) {group="node", op="sum"}
  %s.hosts: f32[4] shard(0) over node = all_reduce(%s.node) {algorithm="ring", group="rail", op="sum"}
  %s: f32[4] = all_gather(%s.hosts) {group="node"}
""")  # fmt: skip


def test_what_is_too_short_to_cut_goes_through_the_first_rank_of_each_host():
    given = HOSTS.replace("f32[4] partial(sum)", "f32[1] partial(sum)")
    check_pass(OverHosts(), given=given, before='dist:\n%s: f32[1] = all_reduce(%g) {group="dp", op="sum"}', after="""
dist:
  %s.node: f32[1] partial(sum) over rail at(0) over node = reduce(%g) {group="node", op="sum", root=0}
  %s.hosts: f32[1] at(0) over node = all_reduce(%s.node) {algorithm="ring", group="rail", op="sum"}
  %s: f32[1] = broadcast(%s.hosts) {group="node", root=0}
""")  # fmt: skip


def test_a_reduce_and_a_broadcast_take_the_rail_of_their_root():
    check_pass(OverHosts(), given=HOSTS, before="""
dist:
  %s: f32[4] at(3) over dp = reduce(%g) {group="dp", op="sum", root=3}
  %v: f32[4] = broadcast(%w) {group="dp", root=3}
""", after="""
dist:
  %s.node: f32[4] partial(sum) over rail at(1) over node = reduce(%g) {group="node", op="sum", root=1}
  %s: f32[4] at(3) over dp = reduce(%s.node) {algorithm="ring", group="rail", op="sum", root=1}
  %v.hosts: f32[4] at(1) over node = broadcast(%w) {algorithm="ring", group="rail", root=1}
  %v: f32[4] = broadcast(%v.hosts) {group="node", root=1}
""")  # fmt: skip


def test_parts_of_all_ranks_go_by_two_levels():
    check_pass(OverHosts(algorithm="tree"), given=HOSTS, before="""
dist:
  %s: f32[4] shard(0) over dp = reduce_scatter(%g) {group="dp", op="sum"}
  %v: f32[4] = all_gather(%s) {group="dp"}
""", after="""
dist:
  %s: f32[4] shard(0) over dp = reduce_scatter(%g) {algorithm="direct/tree", group="dp", op="sum"}
  %v: f32[4] = all_gather(%s) {algorithm="direct/tree", group="dp"}
""")  # fmt: skip


def test_a_maximum_and_what_stays_in_a_host_are_left_alone():
    before = """
dist:
  %s: f32[4] = all_reduce(%m) {group="dp", op="max"}
  %t: f32[4] at(0) over rail = broadcast(%w) {group="node", root=1}
"""
    check_pass(OverHosts(), given=HOSTS, before=before, after=before)
    for name in ("auto", "tree"):
        check_pass(Carry(name), given=HOSTS, before=before, after=before)


def test_between_hosts_a_value_goes_by_send_and_recv():
    given = (
        HOSTS.replace("[0, 1, 2, 3]", "[0, 1]")
        .replace("[0, 1] [2, 3]", "[0] [1]")
        .replace("[0, 2] [1, 3]", "[0, 1]")
        .replace("at(3)", "at(1)")
    )
    before = """
dist:
  %s: f32[4] = all_reduce(%g) {group="dp", op="sum"}
  %r: f32[4] at(1) over dp = reduce(%g) {group="dp", op="sum", root=1}
  %v: f32[4] = broadcast(%w) {group="dp", root=1}
"""
    check_pass(OverHosts(), given=given, before=before, after=before)
    check_pass(Carry(), given=given, before=before, after=before.replace('{group="dp"', '{algorithm="ring", group="dp"'))
    check_pass(Carry("tree", ("reduce",)), given=given, before=before, after="""
dist:
  %s: f32[4] = all_reduce(%g) {algorithm="ring", group="dp", op="sum"}
  %r: f32[4] at(1) over dp = reduce(%g) {algorithm="tree", group="dp", op="sum", root=1}
  %v: f32[4] = broadcast(%w) {algorithm="ring", group="dp", root=1}
""")  # fmt: skip
