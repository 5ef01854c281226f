import copy
from datetime import timedelta

import pytest

from gemini_ft.contracts import errors
from gemini_ft.contracts.errors import CapacityError, FencedError, GeminiError, WaitTimeoutError, from_wire


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Error")])
def test_every_error_survives_a_process_border(name):
    kind = getattr(errors, name)
    error = kind("the sentence", need_bytes=3, knob="--shm-size")
    again = from_wire(error.to_wire())
    assert type(again) is kind
    assert (str(again), again.facts) == ("the sentence", {"need_bytes": 3, "knob": "--shm-size"})


def test_codes_are_unique_and_the_drawn_tree_names_every_class():
    kinds = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind.__name__ in errors.__doc__


def test_facts_are_attributes_and_an_absent_one_is_an_attribute_error():
    error = CapacityError("too little", need_bytes=5)
    assert error.need_bytes == 5
    with pytest.raises(AttributeError, match="have_bytes"):
        _ = error.have_bytes
    assert copy.copy(error).facts == {"need_bytes": 5}


def test_sentences_name_both_generations_and_what_was_waited_for():
    assert "generation 3" in str(FencedError.of("rank 1", 3, 4))
    assert "generation 4" in str(FencedError.of("rank 1", 3, 4))
    error = WaitTimeoutError.of("slot 0 to open its store", timedelta(seconds=2))
    assert str(error) == "waited 2 s for slot 0 to open its store, which did not happen"


def test_a_subclass_without_a_code_arrives_as_its_parent():
    class LocalError(CapacityError):
        pass

    assert type(from_wire(LocalError("too little").to_wire())) is CapacityError
    assert type(from_wire(CapacityError("too little").to_wire())) is CapacityError


@pytest.mark.parametrize("wire", [{}, {"code": "no such code", "message": "m", "facts": 7}, {"code": None}])
def test_an_unknown_wire_form_is_still_an_error(wire):
    assert type(from_wire(wire)) is GeminiError
