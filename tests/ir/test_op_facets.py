"""Facets of op declarations: what an op does not say has a default, subclasses inherit, a misspelt name is an error."""

import pytest

from fluidx.ir import OPS, Arithmetic, Comm, Native, OpDef, Storage
from fluidx.ir.op_facets import FACETS
from fluidx.ir.op_fields import OpFields


def test_an_op_has_twelve_fields_and_seven_facets():
    fields = {n for n in dir(OpFields) if not n.startswith("_")} | {"infer", "samples"}
    facets = {f.word for f in FACETS}
    assert fields - facets == set("name inputs outputs attrs effect infer pattern grad kernel samples expr decompose".split())
    assert facets == set("native storage rewrite autocast arithmetic comm control".split())


def test_what_is_not_said_has_a_default():
    class Plain(OpDef):
        storage = Storage(inplace=(("X", "Out"),))

    assert Plain.storage.inplace == (("X", "Out"),) and Plain.storage.view is None
    assert Plain.native.calls is None and Plain.native.any_size is False and not Plain.comm.algorithm_method


def test_a_subclass_keeps_what_it_does_not_say_again():
    class Base(OpDef):
        native = Native(calls=lambda ins, outs, attrs, dry=False: ["calls"], any_size=True)

    class Derived(Base):
        native = Native(any_size=False)
        arithmetic = Arithmetic(flops=3)

    assert (Derived.native.any_size, Base.native.any_size) == (False, True)
    assert Derived.native.calls([], [], {}) == ["calls"]
    assert (Derived.arithmetic.flops, Base.arithmetic.flops) == (3, None)


def test_a_classmethod_gets_the_op_class():
    class Base(OpDef):
        @classmethod
        def _flops(cls, ins, outs, attrs):
            return cls.__name__

        arithmetic = Arithmetic(flops=_flops)

    class Derived(Base):
        pass

    assert (Base.arithmetic.flops((), (), {}), Derived.arithmetic.flops((), (), {})) == ("Base", "Derived")


@pytest.mark.parametrize(
    "said, message",
    [
        ({"kernl": None}, "op 't_facet' has no field 'kernl'; did you mean 'kernel'?"),
        ({"inplac": ()}, "op 't_facet' has no field 'inplac'; did you mean 'inplace'?"),
        ({"flops": 0}, "op 't_facet': flops is a member of Arithmetic; write arithmetic = Arithmetic(flops=...)"),
        ({"comm": Comm(snet=1)}, "op 't_facet': Comm has no member 'snet'; did you mean 'sent'?"),
        ({"native": "c"}, "op 't_facet': native must be Native(...), found 'c'"),
    ],
)
def test_a_misspelt_name_is_an_error_that_names_the_op(said, message):
    with pytest.raises(TypeError) as e:
        type("TFacet", (OpDef,), {"name": "t_facet", **said})
    assert str(e.value) == message and "t_facet" not in OPS


def test_a_base_may_declare_members_for_its_subclasses_by_annotation():
    class Base(OpDef):
        function: str = ""

    class Derived(Base):
        function = "sum"

    assert Derived.function == "sum"
