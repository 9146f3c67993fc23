"""Files of machines: what is read, what is written, and every message about a wrong file."""

import json
from dataclasses import replace

import pytest

from fluidx import FluidxError
from fluidx.hardware import Figure, LinkFigures, SwitchFigures, as_json, figures, from_json, load, names, save


def form(**changes):
    """The JSON form of a small machine, with parts that `changes` replaces: keys are paths, written a__b."""

    def number(value, **more):
        return {"value": value, "source": "an example", **more}

    link = {"latency": number(2e-6), "bandwidth": number(10e9)}
    device = {"name": "toy", "kind": "gpu", "memory": number(1e9), "flops": {"float32": number(1e12)}, "share": number(0.5)}
    device |= {"bandwidth": number(1e11), "bandwidth_share": number(1), "call": number(1e-6), "slowdown": number(1)}
    device |= {"context": number(1e6)}
    found = {"name": "two", "about": "two toys", "devices_per_host": 2, "hosts": None, "device": device, "inside": link, "between": None}
    found["host_memory"] = number(4e9)
    for path, value in changes.items():
        *before, last = path.split("__")
        part = found
        for key in before:
            part = part[key]
        if value is LEFT_OUT:
            del part[last]
        else:
            part[last] = value
    return json.loads(json.dumps(found))


LEFT_OUT = object()
ZERO = {"value": 0, "source": "an example"}


def test_a_file_says_what_the_record_holds():
    found = from_json(form(hosts=3, inside__by_group={"2": {"value": 5e9, "source": "s", "spread": 0.1}}), "two.json")
    assert (found.name, found.hosts, found.devices_per_host, found.between, found.to_host) == ("two", 3, 2, None, None)
    assert found.device.flops == {"float32": Figure(1e12, "an example")} and found.device.cores == 0
    assert found.inside == LinkFigures(Figure(2e-6, "an example"), Figure(10e9, "an example"), by_group={2: Figure(5e9, "s", 0.1)})
    assert found.inside.eager == 65536 and found.inside.count == 1


def test_what_is_written_is_read_back(tmp_path):
    switch = SwitchFigures(Figure(1e-5, "a"), Figure(2e10, "b", 0.2))
    made = from_json(form(), "two.json")
    made = replace(made, inside=replace(made.inside, in_switch=switch, eager=0, collective_latency=Figure(1e-5, "c")))
    made = replace(made, inside=replace(made.inside, shared=Figure(1e9, "d"), call_bytes=600, message=Figure(1e-4, "m")))
    made = replace(made, measured={"on": 1})
    save(made, tmp_path / "two.json")
    assert load(tmp_path / "two.json") == made
    for name in names():
        assert from_json(as_json(load(name)), name) == load(name)


MESSAGES = [
    ({"inside__bandwidth": ZERO}, "inside.bandwidth.value must be a number above 0, got 0"),
    ({"inside__bandwidth": {**ZERO, "value": -1.5}}, "inside.bandwidth.value must be a number above 0, got -1.5"),
    ({"inside__bandwidth": {**ZERO, "value": float("inf")}}, "inside.bandwidth.value must be a number above 0, got inf"),
    ({"inside__latency": {**ZERO, "value": True}}, "inside.latency.value must be a number above 0, got True"),
    ({"device__slowdown": {**ZERO, "value": 0.9}}, "device.slowdown.value must be a number 1 or more, got 0.9"),
    ({"device__share": {**ZERO, "value": 1.2}}, "device.share.value must be a number above 0 and at most 1, got 1.2"),
    ({"host_memory": {"value": 1}}, "host_memory.source is missing; fluidx clusters dgx-a100 --json shows a whole file"),
    ({"host_memory": {"value": 1, "source": " "}}, "host_memory.source must be a text, got ' '"),
    (
        {"host_memory": {"value": 1, "source": "s", "spread": -1}},
        "host_memory.spread must be a number, 0 or more (0.1 is 10 %), got -1",
    ),
    (
        {"host_memory": 5},
        'host_memory must be a number with its source, {"value": 1.5e9, "source": "where it is published or how it was measured"}, got 5',
    ),
    ({"device__memory": LEFT_OUT}, "device.memory is missing; fluidx clusters dgx-a100 --json shows a whole file"),
    ({"device__memory": LEFT_OUT, "device__memry": ZERO}, "device.memory is missing; did you mean 'memry'?"),
    ({"between": LEFT_OUT}, "between is missing; fluidx clusters dgx-a100 --json shows a whole file"),
    ({"inside__bandwith": ZERO}, "inside has an unknown key 'bandwith'; did you mean 'bandwidth'?"),
    ({"device__flops": {"float31": {**ZERO, "value": 1}}}, "device.flops has an unknown key 'float31'; did you mean 'float32'?"),
    ({"device__kind": "tpu"}, "device.kind must be \"gpu\" or \"cpu\", got 'tpu'"),
    ({"devices_per_host": 0}, "devices_per_host must be an integer, 1 or more, got 0"),
    ({"hosts": 1.5}, "hosts must be an integer, 1 or more, got 1.5"),
    ({"inside__by_group": {"1": ZERO}}, "inside.by_group has keys that are numbers of devices, \"2\" or more, got '1'"),
    ({"inside": []}, "inside must be an object {...}, got []"),
    ({"nodes": 2}, "the file has an unknown key 'nodes'; it may have: about, between, device, devices_per_host, host_memory, hosts, "
     "inside, measured, name, to_host"),
]  # fmt: skip


@pytest.mark.parametrize("changes, said", MESSAGES, ids=[said[:50] for _, said in MESSAGES])
def test_what_is_wrong_in_a_file_is_named(changes, said):
    with pytest.raises(FluidxError) as caught:
        from_json(form(**changes), "two.json")
    assert str(caught.value) == f"cluster file two.json: {said}"


def message(given):
    with pytest.raises(FluidxError) as caught:
        load(given)
    return str(caught.value)


def test_a_name_that_is_not_known_brings_the_nearest():
    assert message("dgx-a10") == "unknown cluster 'dgx-a10'; did you mean 'dgx-a100'? (a file of your own ends with .json)"
    assert message("laptop") == f"unknown cluster 'laptop'; there are: {', '.join(names())} (a file of your own ends with .json)"


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path):
    there = tmp_path / "no.json"
    assert message(there) == f"cluster file {there} does not exist; names that need no file: {', '.join(names())}"
    there.write_text('{"name": "x",\n "about" 3}')
    assert message(there) == f"cluster file {there} is not JSON: line 2, column 10: Expecting ':' delimiter"
    there.write_text('{"name": "x", "name": "y"}')
    assert message(there) == f"cluster file {there}: key 'name' is given twice in one object"


# -- the sheets --------------------------------------------------------------------------------------------------------------------


def test_there_are_sheets_of_usual_machines():
    wanted = {"dgx-v100", "dgx-a100", "p4d", "dgx-h100", "dgx-h200", "dgx-b200", "p5", "v100-25gb"}
    assert set(names()) == wanted
    assert all(load(name).name == name and load(name).hosts is None and load(name).between for name in names())


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_sheet_has_a_source_and_is_in_reason(name):
    found = dict(figures(load(name)))
    assert all(len(figure.source) >= 10 and 0 <= figure.spread <= 0.5 for figure in found.values())
    numbers = [key for key in text_of(as_json(load(name))) if key.rpartition(".")[2] not in ("devices_per_host", "count", "eager")]
    assert {key.removesuffix(".value").removesuffix(".spread") for key in numbers} == set(found)
    assert found["inside.bandwidth"].value < 1e12 and found["between.bandwidth"].value < 50e9  # of one link, in one direction, in bytes
    assert 1e10 < found["device.memory"].value < 2e11 and 1e-7 < found["between.latency"].value < 1e-4


def text_of(value, path=""):
    """The paths of all numbers in a JSON form."""
    if isinstance(value, dict):
        return [found for key, v in value.items() for found in text_of(v, f"{path}.{key}".lstrip("."))]
    return [path] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def test_pairs_of_v100_share_one_link():
    inside = load("dgx-v100").inside
    assert [inside.ring_bandwidth(n) for n in (2, 4, 8)] == [22.5e9, 85e9, 134e9]


def test_between_two_sizes_of_groups_bandwidth_is_interpolated_on_a_log_scale():
    a100 = load("dgx-a100").inside
    assert a100.ring_bandwidth(4) == pytest.approx((189e9 * 229e9) ** 0.5)  # halfway from 2 to 8
    assert a100.ring_bandwidth(16) == 229e9
